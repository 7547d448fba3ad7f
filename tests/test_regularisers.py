"""What the pull to the reference counts from and for whom; which samples are learnt from."""

from itertools import combinations

import pytest
import torch

from flowgrpo.build import build
from flowgrpo.choices import choose
from flowgrpo.credit import credit, learnt_rows
from flowgrpo.losses import Losses
from flowgrpo.metrics import Metrics
from flowgrpo.objectives import OBJECTIVES
from flowgrpo.references import Average, Reset, Start
from flowgrpo.selection import All, Extremes
from flowgrpo.trainer import Trainer
from flowgrpo.uncertainty import doubt, most_doubted, wins
from tests.toys import config

NAN = float("nan")
TREE = {"use": "tree", "splits": [0, 1]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("regularisers")


def trainer_of(folder, **changes):
    return Trainer(build(config(folder, **changes)), Metrics(folder / "metrics.jsonl"))


def test_references_stay_move_or_jump():
    assert [Start().stays(k, 9.0) for k in range(3)] == [1, 1, 1]
    assert [Average(0.3).stays(k, 0.0) for k in range(2)] == [0.3, 0.3]
    assert [Reset(every=3).stays(k, 9.0) for k in range(6)] == [1, 1, 0, 1, 1, 0]
    assert [Reset(above=0.5).stays(0, kl) for kl in (0.4, 0.6, NAN)] == [1, 0, 1]
    assert Reset(every=2, above=0.5).stays(1, 0.0) == 0


@pytest.mark.parametrize("train", ["lora", "full"])
@pytest.mark.parametrize(
    ("rule", "shares"), [({"use": "average", "decay": 0.3}, (0.3, 0.3, 0.3)), ({"use": "reset", "every": 2}, (1, 0, 1))]
)
def test_the_reference_holds_the_mixture_of_policies_that_its_rule_makes(folder, train, rule, shares):
    model = {**config(folder).model.model_dump(exclude={"lora"}), "train": train}
    objective = {"use": "clipped_ratio", "clip_range": 0.01, "kl": 0.1}
    trainer = trainer_of(folder, model=model, objective=objective, reference=rule)
    expected = {n: p.detach().clone() for n, p in trainer.parts.trained.items()}
    for k, stays in enumerate(shares):
        trainer.iteration(k)
        expected = {n: stays * e + (1 - stays) * trainer.parts.trained[n].detach() for n, e in expected.items()}
        for n, held in trainer.parts.reference.held.items():
            torch.testing.assert_close(held, expected[n])
    with trainer.parts.reference.active():
        for n, parameter in trainer.parts.trained.items():
            torch.testing.assert_close(parameter.detach(), expected[n])
    assert any((p.detach() != expected[n]).any() for n, p in trainer.parts.trained.items())


def test_kl_that_counts_at_early_steps_only_leaves_the_late_steps_alone(folder):
    plain, early = (
        trainer_of(folder, objective={"use": "clipped_ratio", "kl": 2.0, "kl_from": least}, sampler__window="all")
        for least in (0.0, 0.9)
    )
    pulls = []
    for trainer in (plain, early):
        losses = Losses(trainer.parts, trainer.rollout(0), torch.ones(8, 3), trainer.metrics)
        pulls.append([losses.step_batch([0, 1], step, first=False).pull for step in range(3)])
    sigmas = plain.parts.grid.sigmas
    assert pulls[0] == [None, None, None]
    for sigma, pull in zip(sigmas, pulls[1], strict=False):
        assert (pull is None) if sigma >= 0.9 else pull.tolist() == [0, 0]
    assert sigmas[0] >= 0.9 > sigmas[2]


def slow_wins(values, ids):
    found = []
    for i, mine in enumerate(values):
        rivals = [v for j, v in enumerate(values) if j != i and ids[j] == ids[i] and v == v]
        usable = mine == mine and rivals
        found.append(sum(mine > v or 0.5 * (mine == v) for v in rivals) / len(rivals) if usable else NAN)
    return found


def test_win_rates_are_those_of_all_pairs():
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 4, (24,), generator=generator).float()
    values[[2, 9]] = NAN
    ids = torch.arange(24) % 5
    ids[23] = 9  # a group of one
    torch.testing.assert_close(wins(values, ids), torch.tensor(slow_wins(values.tolist(), ids.tolist())), equal_nan=True)


def test_a_sample_that_only_the_trained_reward_likes_is_doubted_most():
    signal = torch.tensor([3.0, 2.0, 1.0, 0.0])
    others = torch.tensor([[0.0, 0.0], [2.0, 2.0], [1.0, NAN], [3.0, 3.0]])
    found = doubt(signal, others, torch.zeros(4, dtype=torch.long))
    torch.testing.assert_close(found, torch.tensor([1.0, 2 / 3 - (2 / 3 + 1 / 2) / 2, 1 / 3 - 1 / 3, -1.0]))
    assert most_doubted(found, 0.25).tolist() == [True, False, False, False]
    assert most_doubted(found, 0.01).sum() == 1
    assert most_doubted(torch.zeros(4), 0.5).tolist() == [True, True, False, False]


def test_the_gate_lets_the_pull_count_for_the_doubted_share_only(folder):
    objective = {"use": "awm", "kl": 0.1, "kl_gate": 0.25}
    trainer = trainer_of(folder, objective=objective, signal="weighted_sum", advantage="group")
    trajectory = trainer.rollout(0)
    scores = trainer.parts.scorer(trajectory.media, trajectory.prompts)
    scores.values[:, 1] *= -1  # a monitor that contradicts
    earned = credit(trainer.parts, scores, trajectory, trainer.metrics)
    red, bright = (torch.tensor(slow_wins(c.tolist(), trajectory.group_ids.tolist())) for c in scores.values.T)
    worst = (red - bright).sort(descending=True, stable=True).indices[:2]
    assert sorted(earned.gate.nonzero().flatten().tolist()) == sorted(worst.tolist())
    losses = Losses(trainer.parts, trajectory, earned.advantages, trainer.metrics, earned.gate)
    assert torch.equal(losses.forward_batch((2, 5, 7), 0).pull, earned.gate[[2, 5, 7]])


def test_extremes_are_the_ends_of_the_order_and_first_among_equals():
    assert Extremes(2, 1)([0.0, 3.0, -1.0, 2.0, 1.0]) == [1, 2, 3]
    assert Extremes(1, 0)([0.0, 3.0]) == [1]
    assert Extremes(1, 1)([0.0, 0.0, 0.0]) == [0, 2]
    assert All()([1.0, 2.0]) == [0, 1]
    for chosen in combinations(range(4), 2):
        values = [1.0 if i == chosen[0] else -1.0 if i == chosen[1] else 0.0 for i in range(4)]
        assert Extremes()(values) == sorted(chosen)


def test_only_the_chosen_samples_are_replayed(folder):
    changes = {"samples": {"use": "extremes"}, "optimizer__micro_batch_size": 2, "sampler__group_noise": "distinct"}
    trainer = trainer_of(folder, **changes)
    advantages = torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0, -3.0, 0.0, 1.0])[:, None].expand(8, 2)
    assert learnt_rows(trainer.parts, advantages) == [1, 2, 4, 5]
    seen = []
    losses = Losses(trainer.parts, trainer.rollout(0), advantages, trainer.metrics)
    own = losses.step_batch
    object.__setattr__(losses, "step_batch", lambda rows, step, first: seen.append(list(rows)) or own(rows, step, first))
    trainer.learn(losses)
    assert seen == [[1, 2], [1, 2], [4, 5], [4, 5]]  # two updates, two window steps each


REFUSED = [
    ({"reference": "average"}, "reference has no effect on ClippedRatio without KL"),
    ({"reference": {"use": "reset"}}, "reference.every or reference.above must be given"),
    ({"reference": {"use": "average", "decay": 1.0}}, "reference.decay must be from 0 to below 1"),
    ({"samples": {"use": "extremes", "best": 0}}, "samples.best must be at least 1"),
    *(
        (
            {"objective": {"use": "guard", **one}, "sampler__group_noise": TREE, "sampler__window": "all"},
            "a tree's steps are those",
        )
        for one in ({"stop_negatives": 0.1}, {"kl": 0.1, "kl_gate": 0.5})
    ),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=str)
def test_what_has_no_effect_is_refused_when_the_config_is_read(folder, changes, words):
    with pytest.raises(ValueError, match=words):
        choose(config(folder, **changes))


GEOMETRY = [
    (
        {"samples": {"use": "extremes", "best": 3, "worst": 2}},
        "samples.worst = 5 must be at most group_size=4",
    ),
    ({"samples": {"use": "extremes", "best": 2}, "optimizer__updates_per_iteration": 4}, "their 6 samples must split into"),
    *(
        ({"objective": name}, f"{OBJECTIVES[name].__name__} compares the samples of a group.*of 4, got 3")
        for name in OBJECTIVES
        if getattr(OBJECTIVES[name], "needs_groups", False)
    ),
    ({"objective": "dpo", "optimizer__micro_batch_size": 4, "optimizer__updates_per_iteration": 4}, "compares the samples"),
    *(
        ({"objective": name, "samples": {"use": "extremes", "best": best, "worst": 0}}, "leaves none; set samples.worst")
        for name in ("sft", "dpo", "crd", "dgpo")
        for best in (1, 2)
    ),
    ({"objective": {"use": "awm", "kl": 0.1, "kl_gate": 0.5}, "rewards": "one"}, "kl_gate needs a second opinion"),
]


@pytest.mark.parametrize(("changes", "words"), GEOMETRY, ids=str)
def test_what_does_not_fit_the_groups_is_refused_before_anything_is_loaded(folder, changes, words):
    if changes.get("rewards") == "one":
        changes = {**changes, "rewards": [config(folder).rewards[0].model_dump()]}
    with pytest.raises(ValueError, match=words):
        build(config(folder, model__pipeline="./nowhere", **changes))
