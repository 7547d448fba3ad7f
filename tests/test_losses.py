"""What the loop tells an objective: old means, stds, levels, old predictions; and the gradient that it makes of the answer."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from flowgrpo.adapters import swapped
from flowgrpo.build import build
from flowgrpo.choices import choose
from flowgrpo.losses import Losses, cleaned, micro_batches
from flowgrpo.metrics import Metrics
from flowgrpo.objectives import OBJECTIVES
from flowgrpo.rollout import replay
from flowgrpo.selfcheck import selfcheck
from flowgrpo.trainer import Trainer
from flowgrpo.transitions import TRANSITIONS
from tests.toys import config

ODE = {"use": "none"}
FORWARD = [name for name, factory in OBJECTIVES.items() if factory.family == "forward"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("losses")


def trainer_of(folder, **changes):
    return Trainer(build(config(folder, **{"sampler__num_steps": 5, **changes})), Metrics(folder / "metrics.jsonl"))


def forward_trainer(folder, objective, **changes):
    settings = {"sampler__window": ODE, "sampler__group_noise": "distinct", "objective": objective, **changes}
    return trainer_of(folder, **settings)


@dataclass
class Spy:
    """Passes everything on to an objective and keeps what it was given."""

    objective: Any
    seen: list[Any] = field(default_factory=list)

    def __getattr__(self, name):
        return getattr(self.objective, name)

    def __call__(self, batch):
        self.seen.append(batch)
        return self.objective(batch)


def spied(trainer):
    spy = Spy(trainer.parts.choices.objective)
    trainer.parts = replace(trainer.parts, choices=replace(trainer.parts.choices, objective=spy))
    return spy


def test_micro_batches_cover_the_rows_once():
    assert list(micro_batches(range(4, 11), 3)) == [(4, 5, 6), (7, 8, 9), (10,)]


@pytest.mark.parametrize("transition", TRANSITIONS)
@pytest.mark.parametrize("objective", ["dppo", "guard"])
def test_divergences_from_the_old_means_are_taken_at_each_transitions_own_std(folder, transition, objective):
    trainer = trainer_of(folder, objective=objective, sampler__transition=transition, sampler__window="all")
    trajectory = trainer.rollout(0)
    losses = Losses(trainer.parts, trajectory, torch.ones(8, 4), trainer.metrics)
    trainer.update(losses, range(8), number=0)
    for step in trajectory.dynamics.window:
        batch = losses.step_batch([0, 5], step, first=False)
        c = trajectory.dynamics.transition.coefficients(trajectory.dynamics.grid.sigmas, step)
        torch.testing.assert_close(batch.std, torch.full((2,), c.std))
        x_next, rows = trajectory.latents[[0, 5], step + 1], [trajectory.rows[i] for i in (0, 5)]
        noise = trajectory.noise.step(rows, step, trajectory.dynamics.window, tuple(x_next.shape))
        old_mean = x_next - c.std * noise  # as the noise that the rollout drew tells it
        torch.testing.assert_close(batch.old_mean, old_mean, rtol=1e-4, atol=1e-5)
        if objective == "dppo":
            _, stats = trainer.parts.choices.objective(batch)
            expected = ((batch.mean - old_mean) ** 2).flatten(1).mean(1) / (2 * c.std**2)
            torch.testing.assert_close(stats["kl_old"], expected.detach(), rtol=1e-2, atol=1e-8)
            assert (expected > 0).all()


def test_old_means_are_kept_only_where_they_are_needed(folder):
    assert trainer_of(folder).rollout(0).means is None
    trajectory = trainer_of(folder, objective="dppo").rollout(0)
    assert trajectory.means.shape == (8, 2, *trajectory.x0.shape[1:])


@pytest.mark.parametrize(("objective", "share"), [("trajectory_ratio", 1), ("sequence_mean", 3)])
def test_the_gradient_of_an_objective_of_trajectories_is_that_of_its_samples_one_by_one(folder, objective, share):
    window = {"use": "frozen", "size": 3}
    trainer = trainer_of(folder, objective=objective, sampler__window=window, optimizer__max_grad_norm=1e9)
    parts, trajectory = trainer.parts, trainer.rollout(0)
    advantages = torch.randn(8, generator=torch.Generator().manual_seed(0))
    loss = torch.zeros(())
    for row in range(8):
        new = sum(replay(parts.policy, trajectory, [row], step).log_prob for step in range(3))
        loss = loss - (((new - trajectory.log_probs[row].sum()) / share).exp() * advantages[row]).sum() / 8
    expected = torch.autograd.grad(loss, list(parts.trained.values()))
    parts.optimizer.step = lambda: None
    parts.optimizer.zero_grad = lambda **_: None
    losses = Losses(parts, trajectory, advantages[:, None].expand(8, 3), trainer.metrics)
    trainer.update(losses, range(8), number=0)
    for parameter, gradient in zip(parts.trained.values(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("micro", [1, 4, 8])
def test_the_gradient_of_a_forward_objective_is_the_mean_over_samples_and_levels(folder, name, micro):
    """However the samples are split into micro-batches, which for what compares samples hold whole groups."""
    factory = OBJECTIVES[name]
    micro = max(micro, 4) if factory.needs_groups else micro
    changes = {"levels": {"use": "uniform", "count": 2}, "optimizer__max_grad_norm": 1e9}
    trainer = forward_trainer(folder, name, optimizer__micro_batch_size=micro, **changes)
    parts, trajectory = trainer.parts, trainer.rollout(0)
    advantages = torch.randn(8, 1, generator=torch.Generator().manual_seed(0))
    losses = Losses(parts, trajectory, advantages, trainer.metrics)
    size = 4 if factory.needs_groups else 1
    parted = [[losses.forward_batch(tuple(range(row, row + size)), j) for j in (0, 1)] for row in range(0, 8, size)]
    if factory.scope == "sample":
        loss = sum(parts.choices.objective(levels)[0].sum() for levels in parted) / 8
    else:
        loss = sum(parts.choices.objective(batch)[0].sum() for levels in parted for batch in levels) / 16
    expected = torch.autograd.grad(loss, list(parts.trained.values()))
    parts.optimizer.step = lambda: None
    parts.optimizer.zero_grad = lambda **_: None
    trainer.update(losses, range(8), number=0)
    for parameter, gradient in zip(parts.trained.values(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-6 * max(1.0, float(gradient.abs().max())))


@pytest.mark.parametrize("name", ["clipped_ratio", "awm"])
def test_the_gradients_of_steps_and_levels_are_measured_apart_and_add_up(folder, name):
    changes = {} if name == "clipped_ratio" else {"sampler__window": ODE, "sampler__group_noise": "distinct"}
    grads = []
    for every in (0, 1):
        trainer = trainer_of(folder, objective=name, logging__watch_every=every, optimizer__max_grad_norm=1e9, **changes)
        parts, trajectory = trainer.parts, trainer.rollout(0)
        parts.optimizer.step = lambda: None
        parts.optimizer.zero_grad = lambda **_: None
        advantages = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
        losses = Losses(parts, trajectory, advantages, trainer.metrics)
        trainer.update(losses, range(8), number=0)
        grads.append([p.grad.clone() for p in parts.trained.values()])
    for plain, apart in zip(*grads, strict=True):
        torch.testing.assert_close(apart, plain, rtol=1e-4, atol=1e-8)
    values = trainer.metrics.reduce()
    places = range(4) if name == "awm" else trajectory.dynamics.window
    for parameter in parts.trained.values():
        parameter.grad = None
    first = {piece.place: piece.loss / 8 for piece in losses.of((0, 1, 2), first=True)}
    norms = {}
    for place, loss in first.items():
        of_place = torch.autograd.grad(loss, list(parts.trained.values()), retain_graph=True)
        norms[place] = torch.stack([g.norm() for g in of_place]).norm().item()
    assert sorted(norms) == list(places)
    for place, norm in norms.items():
        assert values[f"grad_norm/{place}"] == pytest.approx(norm, rel=1e-3)
        assert values[f"grad_share/{place}"] == pytest.approx(norm / sum(norms.values()), rel=1e-3)


def broken(trajectory, row):
    """The trajectory whose sample of this row came out as NaN."""
    parts = {
        n: getattr(trajectory, n).clone() for n in ("latents", "log_probs", "x0", "means") if getattr(trajectory, n) is not None
    }
    for part in parts.values():
        part[row] = torch.nan
    return replace(trajectory, **parts)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_sample_that_does_not_train_leaves_no_trace_in_the_gradient_whatever_it_is(folder, name):
    trainer = trainer_of(
        folder, objective={"use": name, "kl": 0.1}, optimizer__micro_batch_size=8, optimizer__max_grad_norm=1e9
    )
    parts, trajectory = trainer.parts, trainer.rollout(0)
    parts.optimizer.step = lambda: None
    parts.optimizer.zero_grad = lambda **_: None
    with torch.no_grad():  # off policy, so that nothing is 0 by being at rest
        for parameter in parts.trained.values():
            parameter += 0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    advantages = torch.tensor([1.0, 0.0, -1.0, 0.5, -0.5, 2.0, -1.0, -1.0])[:, None].expand(8, 2)
    valid, gradients = torch.ones(8, dtype=torch.bool), []
    valid[1] = False
    alive = cleaned(broken(trajectory, 1))
    strange = replace(alive, x0=alive.x0.clone(), latents=alive.latents.clone())
    strange.x0[1], strange.latents[1] = 3.0, -2.0
    for one in (alive, strange):
        losses = Losses(parts, one, advantages, trainer.metrics, valid=valid)
        trainer.update(losses, range(8), number=1)
        gradients.append([parameter.grad.clone() for parameter in parts.trained.values()])
        for parameter in parts.trained.values():
            parameter.grad = None
    for first, second in zip(*gradients, strict=True):
        assert first.isfinite().all()
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-7)
    assert any(gradient.abs().max() > 0 for gradient in gradients[0])


@pytest.mark.parametrize("name", FORWARD)
def test_how_far_the_policy_goes_in_an_iteration_is_watched_for_every_objective(folder, name):
    trainer = forward_trainer(folder, name, optimizer__micro_batch_size=4, logging__watch_every=2)
    spy = spied(trainer)
    watched, unwatched = [], not OBJECTIVES[name]().needs_old
    for k in range(3):
        before = {n: p.detach().clone() for n, p in trainer.parts.trained.items()}
        spy.seen.clear()
        values = trainer.iteration(k)
        trainer.next_iteration += 1
        assert ("moved" in values) is not (unwatched and k == 1)
        watched.append((before, values))
    before, values = watched[-1]
    last = spy.seen[4] if OBJECTIVES[name]().scope == "level" else spy.seen[1][0]  # the second update's first level
    with swapped(trainer.parts.trained, before):
        level = trainer.parts.policy.level(trainer.parts.grid, last.new.sigma)
        prompts = [trainer.parts.prompts[i] for i in last.groups.tolist()]
        old = trainer.parts.policy.predict(prompts, last.new.x, level).v
    moved = ((last.new.v.detach() - old) ** 2).mean().item() / 2  # nothing in the first update
    if unwatched:
        assert values["moved"] == pytest.approx(moved, rel=1e-3)
    assert moved > 0


@pytest.mark.parametrize("name", FORWARD)
def test_the_samples_of_a_group_are_noised_alike_where_the_objective_asks_for_it(folder, name):
    trainer = forward_trainer(folder, name, optimizer__micro_batch_size=8)
    losses = Losses(trainer.parts, trainer.rollout(0), torch.ones(8, 1), trainer.metrics)
    eps = [losses.forward_batch(tuple(range(8)), j).eps.flatten(1) for j in (0, 1)]
    assert len(torch.cat(eps).unique(dim=0)) == (4 if OBJECTIVES[name]().shared_noise else 16)
    assert torch.equal(eps[0][0], eps[0][1]) is OBJECTIVES[name]().shared_noise
    assert not torch.equal(eps[0][0], eps[0][4])


@pytest.mark.parametrize("train", ["lora", "full"])
def test_the_old_policy_samples_and_follows_by_its_decay(folder, train):
    model = {**config(folder).model.model_dump(exclude={"lora"}), "train": train}
    objective = {"use": "nft", "old_decay": 0.5, "old_ramp": 0.3}
    trainer = forward_trainer(folder, objective, model=model, optimizer__micro_batch_size=8)
    trained, spy, sampled = trainer.parts.trained, spied(trainer), []
    trainer.on_samples = lambda k, trajectory, scores: sampled.append(trajectory)
    expected = {n: p.detach().clone() for n, p in trained.items()}
    for k, decay in enumerate((0.0, 0.3, 0.5)):
        values = trainer.iteration(k)
        after, alone = {n: p.detach().clone() for n, p in trained.items()}, replace(trainer.parts, old=None)
        with swapped(trained, expected):  # the weights that should have sampled
            again = Trainer(alone, trainer.metrics).rollout(k)
            old = Losses(alone, sampled[-1], torch.ones(8, 1), trainer.metrics).forward_batch((4, 5, 6, 7), 3).new.v
        torch.testing.assert_close(sampled[-1].x0, again.x0, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(spy.seen[-1].old.v, old.detach(), rtol=1e-5, atol=1e-6)
        expected = {n: decay * before + (1 - decay) * after[n] for n, before in expected.items()}
        assert values["moved"] > 0
    for n, average in trainer.parts.old.shadow.items():
        torch.testing.assert_close(average, expected[n])


def test_all_samples_of_an_iteration_are_seen_at_its_levels_under_noise_of_their_own(folder):
    trainer = forward_trainer(folder, "rwr", optimizer__micro_batch_size=2)
    spy = spied(trainer)
    trainer.iteration(3)
    assert len(spy.seen) == 4 * 4  # micro-batches x levels
    for number in range(4):
        seen = spy.seen[number::4]
        assert len({batch.new.sigma for batch in seen}) == 1
        noises = torch.cat([batch.eps for batch in seen])
        assert len(noises.flatten(1).unique(dim=0)) == 8
        for batch in seen:
            sigma = batch.new.sigma
            torch.testing.assert_close(batch.new.x, (1 - sigma) * batch.x0 + sigma * batch.eps)
    assert len({batch.new.sigma for batch in spy.seen}) == 4


@pytest.mark.parametrize("name", ["awm", "nft"])
def test_old_predictions_are_those_before_the_first_update_in_every_update(folder, name):
    trainer = forward_trainer(folder, name, optimizer__updates_per_iteration=4, optimizer__micro_batch_size=2)
    spy, trained = spied(trainer), trainer.parts.trained
    trajectory = trainer.rollout(0)
    before = {n: p.detach().clone() for n, p in trained.items()}
    losses = Losses(trainer.parts, trajectory, torch.randn(8, 1), trainer.metrics)
    trainer.learn(losses)
    seen, after = list(spy.seen), {n: p.detach().clone() for n, p in trained.items()}
    for n, p in trained.items():
        p.data = before[n]
    fresh = [losses.forward_batch(batch, j).new.v for batch in micro_batches(range(8), 2) for j in range(4)]
    for one, v in zip(seen, fresh, strict=True):
        torch.testing.assert_close(one.old.v, v.detach(), rtol=0, atol=1e-6)
    assert all((one.new.v - one.old.v).abs().max() == 0 for one in seen[:4])
    assert all((one.new.v - one.old.v).abs().max() > 0 for one in seen[4:])
    assert any((after[n] != before[n]).any() for n in before)


@pytest.mark.parametrize("train", ["lora", "full"])
def test_the_reference_predicts_what_the_start_of_the_run_did(folder, train):
    model = {**config(folder).model.model_dump(exclude={"lora"}), "train": train}
    trainer = forward_trainer(folder, {"use": "awm", "kl": 0.1, "clip_range": 0.5}, model=model)
    spy = spied(trainer)
    first = trainer.iteration(0)
    assert spy.seen[0].reference is not None
    torch.testing.assert_close(spy.seen[0].reference.v, spy.seen[0].new.v.detach(), rtol=1e-5, atol=1e-6)
    assert first["kl"] > 0  # from the second update on
    assert (spy.seen[-1].reference.v - spy.seen[-1].new.v).abs().max() > 0


def test_the_start_check_of_a_forward_objective_finds_a_network_told_of_another_level(folder, monkeypatch):
    parts = forward_trainer(folder, "awm").parts
    checks = list(selfcheck(parts))
    assert [check.name for check in checks] == ["noise off", "levels", "members differ"]
    assert all(check.passed for check in checks)
    own = parts.policy.level
    monkeypatch.setattr(parts.policy, "level", lambda grid, sigma: own(grid, 0.5 * sigma))
    assert [check.name for check in selfcheck(parts) if not check.passed] == ["levels"]


TREE = {"use": "tree", "splits": [0, 1]}
REFUSED = [
    ({"sampler__window": "none", "sampler__group_noise": "distinct"}, "ClippedRatio needs stochastic steps"),
    ({"sampler__window": "none", "objective": "awm"}, "must be distinct without a window"),
    ({"sampler__window": "none", "sampler__group_noise": TREE, "objective": "awm"}, "must be distinct without a window"),
    ({"sampler__window": "all", "sampler__group_noise": TREE, "objective": "sequence_mean"}, "one ratio for the whole window"),
    ({"objective": "sequence_mean", "step_weights": "equal"}, "step_weights has no effect on SequenceMean"),
    ({"objective": "nft", "step_weights": "noise"}, "step_weights has no effect on Nft"),
    ({"levels": "uniform"}, "levels has no effect on ClippedRatio"),
    ({"objective": "awm", "levels": {"use": "grid", "count": 9}}, "levels.count=9 must be at most the 5 levels"),
    ({"objective": {"use": "trajectory_ratio", "clip": "none", "reduce": "sum"}}, "clip must be upper with reduce=sum"),
    ({"objective": {"use": "guard", "density": "unit"}}, "objective.density"),
    *(
        ({"sampler__window": "none", "sampler__group_noise": "distinct", "objective": "awm", f"sampler__{name}": value},
         f"sampler.{name} has no effect without a window")
        for name, value in (("transition", "cps"), ("tail", {"solver": "heun"}))
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=str)
def test_what_cannot_be_is_refused_when_the_config_is_read(folder, changes, words):
    with pytest.raises(ValueError, match=words):
        choose(config(folder, **{"sampler__num_steps": 5, **changes}))
