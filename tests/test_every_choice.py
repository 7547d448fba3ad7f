"""Every choice of sampler and objective trains; what a group shares is computed once and counts as often as it should."""

import pytest
import torch

from flowgrpo.build import build
from flowgrpo.credit import credit
from flowgrpo.group_noise import Tree
from flowgrpo.losses import Losses
from flowgrpo.metrics import Metrics
from flowgrpo.objectives import OBJECTIVES
from flowgrpo.rollout import Noise, Row, replay, rollout
from flowgrpo.step_weights import STEP_WEIGHTS
from flowgrpo.trainer import Trainer
from tests.toys import config

TREE = {"use": "tree", "splits": [0, 1]}
ODE = {"sampler__window": "none", "sampler__group_noise": "distinct"}
ONE_A_SCOPE = ("guard", "sequence_mean", "awm", "vgrpo")
CLIPS = ({"clip_low": 1e-2}, {"clip": "upper"}, {"clip": "none", "soft": 1.0})
GROUPS = {"optimizer__micro_batch_size": 4}  # for what compares the samples of a group
FORWARD = [name for name, factory in OBJECTIVES.items() if factory.family == "forward"]
CHOICES = [  # beside those of test_pairs.py
    *({"step_weights": {"use": name, "budget_neutral": True}} for name in STEP_WEIGHTS),
    {"sampler__transition": "cps", "objective": {"use": "clipped_ratio", "density": "unit"}},
    *({"objective": {"use": "clipped_ratio", **clip}} for clip in CLIPS),
    *({"objective": {"use": name, "kl": 0.1}, "reference": "average", **GROUPS} for name in OBJECTIVES),
    *({"objective": {"use": name, "kl": 0.1, "kl_gate": 0.25, "kl_from": 0.5}, **GROUPS} for name in ONE_A_SCOPE),
    *({"objective": {"use": name, "old_decay": 0.5}, **ODE, **GROUPS} for name in FORWARD if OBJECTIVES[name].needs_old),
    *({"objective": {"use": name, "stop_negatives": 0.5}} for name in ("clipped_ratio", "dppo")),
    {"objective": {"use": "nft", "adaptive": False, "kl": 0.1}, "sampler__group_noise": TREE, "sampler__window": "all"},
]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_every_choice_trains_with_ratio_one_and_finite_numbers(tmp_path, choice):
    changes = {"sampler__num_steps": 5, "iterations": 2, **choice}
    trainer = Trainer(build(config(tmp_path, **changes)), Metrics(tmp_path / "metrics.jsonl"))
    for k in range(2):
        values = trainer.iteration(k)
        assert all(value == value and abs(value) < float("inf") for value in values.values())
        assert values.get("ratio/max_gap", 0.0) < 1e-6 or k > 0
        assert values["grad_norm"] > 0


@pytest.mark.parametrize("name", OBJECTIVES)
def test_in_the_only_update_of_an_iteration_every_ratio_is_one_and_nothing_is_held_back(tmp_path, name):
    changes = {"optimizer__updates_per_iteration": 1, "sampler__group_noise": "distinct", **GROUPS}
    settings = config(tmp_path, objective=name, **changes)
    trainer = Trainer(build(settings), Metrics(tmp_path / "metrics.jsonl"))
    for k in range(2):
        values = trainer.iteration(k)
        assert values.get("ratio/mean", 1.0) == pytest.approx(1, abs=2e-6)
        held = [values[part] for part in ("clip_fraction/low", "clip_fraction/high", "dropped") if part in values]
        assert held == [0.0] * len(held)
        assert values["grad_norm"] > 0


def test_the_gradient_of_a_tree_is_that_of_its_leaves_one_by_one(tmp_path):
    changes = {"sampler__num_steps": 5, "sampler__window": "all", "sampler__group_noise": TREE, "optimizer__max_grad_norm": 1e9}
    parts = build(config(tmp_path, **changes, optimizer__micro_batch_size=4))
    trainer = Trainer(parts, Metrics(tmp_path / "metrics.jsonl"))
    rows = [Row(parts.prompts[i], sample) for i in range(2) for sample in range(4)]
    trajectory = rollout(parts.policy, rows, parts.dynamics(range(4)), Noise(0, 0, Tree([0, 1])), 8)
    signal = torch.randn(8, generator=torch.Generator().manual_seed(0))
    advantages = torch.stack([signal.view(2, 2, 2).mean(2, keepdim=True).expand(2, 2, 2).reshape(8), *[signal] * 3], 1)
    loss = torch.zeros(())
    for row in range(8):
        for step in range(4):
            new = replay(parts.policy, trajectory, [row], step).log_prob
            ratio = (new - trajectory.log_probs[row, step]).exp()
            loss = loss - (ratio * advantages[row, step]).sum() / (8 * 4)
    names = list(parts.trained)
    expected = dict(zip(names, torch.autograd.grad(loss, list(parts.trained.values())), strict=True))
    parts.optimizer.step = lambda: None
    parts.optimizer.zero_grad = lambda **_: None
    trainer.update(Losses(parts, trajectory, advantages, trainer.metrics), range(8), number=0)
    for name in names:
        torch.testing.assert_close(parts.trained[name].grad, expected[name], rtol=1e-4, atol=1e-7)


def test_advantages_of_a_tree_are_those_of_its_nodes_at_each_step(tmp_path):
    changes = {"sampler__num_steps": 5, "sampler__window": "all", "sampler__group_noise": TREE}
    changes |= {"signal": "weighted_sum", "advantage": "group"}
    parts = build(config(tmp_path, **changes))
    trainer = Trainer(parts, Metrics(tmp_path / "metrics.jsonl"))
    trajectory = trainer.rollout(0)
    scores = parts.scorer(trajectory.media, trajectory.prompts)
    ours = credit(parts, scores, trajectory, trainer.metrics).advantages
    red = scores.values[:, 0].view(2, 4)
    nodes = red.view(2, 2, 2).mean(2)
    z = (nodes - nodes.mean(1, keepdim=True)) / (nodes - nodes.mean(1, keepdim=True)).abs()  # two nodes: one up, one down
    assert ours.shape == (8, 4)
    assert torch.equal(ours[:, 0].sign().view(2, 2, 2)[:, :, 0], z.sign())
    assert torch.equal(ours[0::2, 0], ours[1::2, 0])
    torch.testing.assert_close(ours[:, 1:], ours[:, 1:2].expand(8, 3))
