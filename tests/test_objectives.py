"""Objectives of the ratio family: values and gradients against the formulas written out, sample by sample."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch.distributions import Normal

from flowgrpo.objectives import OBJECTIVES, StepBatch, check_objective
from flowgrpo.objectives.clipped_ratio import ClippedRatio
from flowgrpo.objectives.dppo import Dppo
from flowgrpo.objectives.guard import Guard
from flowgrpo.objectives.sequence_mean import SequenceMean
from flowgrpo.objectives.trajectory_ratio import TrajectoryRatio
from flowgrpo.transitions import Gaussian, Prediction, reduce_coordinates

RATIO = {name: factory for name, factory in OBJECTIVES.items() if factory.family == "ratio"}


def bare(new, old, advantage, std=1.0, **kwargs):
    """A step of which only densities matter."""
    return StepBatch(new, old, advantage, new.detach()[:, None], torch.full_like(new, std), **kwargs)


@dataclass
class Toy:
    """Window steps of a policy of 5 coordinates, each row at a std of its own; `means` is what trains."""

    means: torch.Tensor  # (w, b, 5)
    old_means: torch.Tensor
    x: torch.Tensor
    stds: torch.Tensor  # (w, b)
    advantage: torch.Tensor  # (b,)

    def steps(self, reduce="mean"):
        stds = self.stds[:, :, None].expand_as(self.means)
        new, old = (Normal(m, stds).log_prob(self.x) for m in (self.means, self.old_means))
        return [
            StepBatch(reduce_coordinates(n, reduce), reduce_coordinates(o, reduce), self.advantage, m, s, before)
            for n, o, m, s, before in zip(new, old, self.means, self.stds, self.old_means, strict=True)
        ]


def toy(w=3, b=40, moved=0.5, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    old, stds = normal(w, b, 5), 0.3 + torch.rand(w, b, generator=generator, dtype=torch.float64)
    x = old + stds[:, :, None] * normal(w, b, 5)
    return Toy((old + moved * stds[:, :, None] * normal(w, b, 5)).requires_grad_(), old, x, stds, normal(b))


def log_rho(t, step, row, reduce="mean"):
    """log pi - log pi_old of one row: the difference of squares."""
    s = t.stds[step, row]
    terms = ((t.x[step, row] - t.old_means[step, row]) ** 2 - (t.x[step, row] - t.means[step, row]) ** 2) / (2 * s * s)
    return terms.mean() if reduce == "mean" else terms.sum()


def distance(t, step, row):
    """Mean over coordinates of (mean - old mean)^2 / (2 std^2)."""
    return ((t.means[step, row] - t.old_means[step, row]) ** 2).mean() / (2 * t.stds[step, row] ** 2)


def held(rho, a, low, high):
    """PPO's clip, said otherwise: a constant where it is clipped."""
    if a > 0 and rho > 1 + high:
        return 0 * rho - (1 + high) * a
    if a < 0 and rho < 1 - low:
        return 0 * rho - (1 - low) * a
    return -rho * a


def capped(rho, a, high):
    return 0 * rho - (1 + high) * a if rho > 1 + high else -rho * a


def by_step(t, one):
    return torch.stack([torch.stack([one(t, s, i, t.advantage[i]) for i in range(t.x.shape[1])]) for s in range(t.x.shape[0])])


def by_row(t, one):
    steps = range(t.x.shape[0])
    return torch.stack([one(torch.stack([log_rho(t, s, i) for s in steps]), t.advantage[i]) for i in range(t.x.shape[1])])


def slow_guard(t, s, i, a):
    return held((t.stds[s, i] * (log_rho(t, s, i) + distance(t, s, i))).exp(), a, 0.1, 0.1)


def slow_dppo(t, s, i, a):
    rho = log_rho(t, s, i).exp()
    away = (rho > 1 and a > 0) or (rho < 1 and a < 0)
    return 0 * rho if distance(t, s, i) >= 0.1 and away else -rho * a


def soft(a, most):
    return most * (1 - 2 / (1 + torch.exp(2 * a / most)))


FORMULAS = {
    "symmetric": (ClippedRatio(clip_range=0.1), lambda t: by_step(t, lambda *p: held(log_rho(*p[:3]).exp(), p[3], 0.1, 0.1))),
    "asymmetric": (
        ClippedRatio(clip_low=0.05, clip_high=0.3),
        lambda t: by_step(t, lambda *p: held(log_rho(*p[:3]).exp(), p[3], 0.05, 0.3)),
    ),
    "upper": (
        ClippedRatio(clip="upper", clip_range=0.1),
        lambda t: by_step(t, lambda *p: capped(log_rho(*p[:3]).exp(), p[3], 0.1)),
    ),
    "soft": (
        ClippedRatio(clip="none", soft=0.7),
        lambda t: by_step(t, lambda *p: -log_rho(*p[:3]).exp() * soft(p[3], 0.7)),
    ),
    "sum": (
        ClippedRatio(clip_range=0.3, reduce="sum"),
        lambda t: by_step(t, lambda *p: held(log_rho(*p[:3], "sum").exp(), p[3], 0.3, 0.3)),
    ),
    "trajectory_ratio": (TrajectoryRatio(clip_range=0.1), lambda t: by_row(t, lambda r, a: capped(r.sum().exp(), a, 0.1))),
    "sequence_mean": (
        SequenceMean(clip_range=0.1),
        lambda t: by_row(t, lambda r, a: held((sum(r) / len(r)).exp(), a, 0.1, 0.1)),
    ),
    "guard": (Guard(clip_range=0.1), lambda t: by_step(t, slow_guard)),
    "dppo": (Dppo(threshold=0.1), lambda t: by_step(t, slow_dppo)),
}


def losses(objective, steps):
    """(w, b) of an objective of steps, (b,) of one of trajectories; and the stats of the last call."""
    if objective.scope == "trajectory":
        return objective(steps)
    found = [objective(step) for step in steps]
    return torch.stack([loss for loss, _ in found]), found[-1][1]


@pytest.mark.parametrize("name", FORMULAS)
def test_values_and_gradients_are_those_of_the_formula_sample_by_sample(name):
    objective, formula = FORMULAS[name]
    t = toy()
    ours, stats = losses(objective, t.steps(objective.reduce))
    expected = formula(t)
    torch.testing.assert_close(ours, expected)
    (gradient,), (wanted,) = (torch.autograd.grad(loss.sum(), t.means, retain_graph=True) for loss in (ours, expected))
    torch.testing.assert_close(gradient, wanted)
    untouched = (wanted.abs().amax(-1) == 0).double().mean()
    assert 0 < untouched < 1 or name == "soft"  # the case has both what is held back and what is not
    assert all(not value.requires_grad for value in stats.values())


@pytest.mark.parametrize("name", RATIO)
def test_two_samples_move_towards_the_better_one(name):
    objective = RATIO[name]()
    mean = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    x, advantage = torch.tensor([[-1.0], [1.5]], dtype=torch.float64), torch.tensor([-1.0, 1.0], dtype=torch.float64)
    t = Toy(mean.expand(2, 2, 1), mean.detach().expand(2, 2, 1), x.expand(2, 2, 1), torch.full((2, 2), 0.7).double(), advantage)
    loss, _ = losses(objective, t.steps())
    loss.sum().backward()
    assert mean.grad < 0  # descent goes up, to the better sample


def on_policy(t):
    """The policy has not moved, and every std is 1."""
    return Toy(t.old_means.clone().requires_grad_(), t.old_means, t.x, torch.ones_like(t.stds), t.advantage)


NEUTRAL = {  # settings, the plain ratio that they are then, and the toy on which
    "clipped_ratio": ({"clip_low": 0.1, "clip_high": 0.1}, {"clip_range": 0.1}, lambda: toy(w=1)),
    "trajectory_ratio": ({"clip_range": 0.1}, {"clip_range": 0.1, "clip": "upper"}, lambda: toy(w=1)),
    "sequence_mean": ({"clip_range": 0.1}, {"clip_range": 0.1}, lambda: toy(w=1)),
    "guard": ({"clip_range": 0.1}, {"clip_range": 0.1}, lambda: on_policy(toy(w=1))),
    "dppo": ({"threshold": math.inf}, {"clip": "none"}, lambda: toy(w=1)),
}


@pytest.mark.parametrize("name", RATIO)
def test_at_its_neutral_setting_every_objective_is_the_plain_ratio_exactly(name):
    settings, plain, make = NEUTRAL[name]
    t = make()
    ours, _ = losses(RATIO[name](**settings), t.steps())
    expected, _ = ClippedRatio(**plain)(t.steps()[0])
    assert torch.equal(ours.reshape(-1), expected)
    gradients = [torch.autograd.grad(loss.sum(), t.means, retain_graph=True)[0] for loss in (ours, expected)]
    assert torch.equal(*gradients)


def test_at_ratio_one_the_gradient_of_the_sequence_mean_is_that_of_the_averaged_steps():
    t = on_policy(toy())
    (ours,) = torch.autograd.grad(losses(SequenceMean(), t.steps())[0].sum(), t.means)
    (steps,) = torch.autograd.grad(losses(ClippedRatio(), t.steps())[0].sum() / 3, t.means)
    torch.testing.assert_close(ours, steps)


def test_the_bias_that_guard_takes_out_is_each_samples_own():
    """Rows at different steps of a sampler, in one batch: the same as one by one, and what is left is z . (mean - old mean)."""
    t = toy(w=1)
    step = t.steps()[0]
    _, together = Guard()(step)
    names = ("log_prob", "old_log_prob", "advantage", "mean", "std", "old_mean")
    alone = [Guard()(StepBatch(*(getattr(step, name)[i : i + 1] for name in names))) for i in range(40)]
    torch.testing.assert_close(together["ratio/mean"], torch.cat([stats["ratio/mean"] for _, stats in alone]))
    z = (t.x[0] - t.old_means[0]) / t.stds[0][:, None]
    torch.testing.assert_close(together["ratio/mean"].log(), (z * (t.means[0] - t.old_means[0])).mean(1).detach())


def test_guard_ratios_lie_around_one_where_plain_ones_lie_below():
    t = toy(w=1, b=20_000)
    plain, guarded = (objective(t.steps()[0])[1]["ratio/mean"].log().mean() for objective in (ClippedRatio(), Guard()))
    assert plain < -0.1
    assert guarded.abs() < 0.005


def test_at_ratio_one_the_gradient_is_that_of_the_policy_gradient():
    new = torch.zeros(5, requires_grad=True)
    advantage = torch.tensor([1.0, -2.0, 0.0, 3.0, -0.5])
    loss, _ = ClippedRatio()(bare(new, torch.zeros(5), advantage))
    loss.sum().backward()
    torch.testing.assert_close(new.grad, -advantage)


@pytest.mark.parametrize(
    ("difference", "advantage", "moves"), [(0.1, 1, False), (-0.1, 1, True), (0.1, -1, True), (-0.1, -1, False)]
)
def test_beyond_the_band_only_the_way_back_has_a_gradient(difference, advantage, moves):
    new = torch.tensor([difference], requires_grad=True)
    loss, _ = ClippedRatio(clip_range=0.05)(bare(new, torch.zeros(1), torch.tensor([float(advantage)])))
    loss.sum().backward()
    assert bool(new.grad.abs() > 0) is moves


@pytest.mark.parametrize("name", ["clipped_ratio", "trajectory_ratio", "sequence_mean", "guard"])
def test_a_summed_density_cannot_overflow(name):
    objective = RATIO[name](clip_range=0.2, reduce="sum")
    step = bare(torch.tensor([163.8]), torch.zeros(1), torch.tensor([-1.0]), old_mean=torch.tensor([[160.0]]))
    assert torch.isfinite(losses(objective, [step, step])[0]).all()


def test_a_mean_density_has_the_same_ratio_at_both_sizes():
    """A shift of 0.01 a coordinate on 4x64x64 and on 4x32x32 (a mean ratio of exp(0.01) in both)."""
    for side in (64, 32):
        old = Gaussian(torch.zeros(1, 4, side, side), 1.0)
        x = torch.full((1, 4, side, side), 0.5)
        new = Gaussian(torch.full((1, 4, side, side), 0.5 - math.sqrt(0.25 - 0.02)), 1.0)
        difference = new.log_density(x) - old.log_density(x)
        torch.testing.assert_close(difference, torch.tensor([0.01]), rtol=1e-4, atol=0)
        assert (new.log_density(x, "sum") - old.log_density(x, "sum")).item() == pytest.approx(0.04 * side * side, rel=1e-3)


@pytest.mark.parametrize("name", RATIO)
@pytest.mark.parametrize("form", ["latent", "mean", "velocity"])
def test_the_kl_is_zero_at_the_reference_and_points_back_to_it(name, form):
    x, v = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    objective = RATIO[name](kl=0.5, kl_form=form)
    moved = (v + 0.1).requires_grad_()

    def divergence(velocity):
        return objective.divergence(Gaussian(x - 0.3 * velocity, 0.4), Prediction(x, velocity, 0.7),
                                    Gaussian(x - 0.3 * v, 0.4), Prediction(x, v, 0.7))  # fmt: skip

    assert objective.needs_reference
    assert (divergence(v) == 0).all()
    expected = {"velocity": 0.01, "mean": (0.3 * 0.1) ** 2, "latent": (0.3 * 0.1) ** 2 / (2 * 0.16)}[form]
    torch.testing.assert_close(divergence(moved), torch.full((2,), expected))
    divergence(moved).sum().backward()
    assert (moved.grad > 0).all()
    zeros = torch.zeros(2)
    step = bare(zeros, zeros, zeros, kl=divergence(moved).detach(), old_mean=zeros[:, None])
    loss, stats = objective([step, replace(step, kl=0 * step.kl)]) if objective.scope == "trajectory" else objective(step)
    share = 0.5 if objective.scope == "trajectory" else 1.0  # the mean over two steps, one of them at the reference
    torch.testing.assert_close(loss, torch.full((2,), 0.5 * share * expected))
    torch.testing.assert_close(stats["kl"], torch.full((2,), share * expected))
    gated = replace(step, pull=torch.tensor([0.0, 1.0]))  # of the first row nothing counts
    loss, stats = objective([gated, gated]) if objective.scope == "trajectory" else objective(gated)
    torch.testing.assert_close(loss, torch.tensor([0.0, 0.5 * expected]))
    torch.testing.assert_close(stats["kl"], torch.full((2,), expected))


@pytest.mark.parametrize("name", [name for name, factory in RATIO.items() if factory.scope == "step"])
def test_a_negative_advantage_ends_where_the_sample_is_decided(name):
    step = toy(w=1, b=4).steps()[0]
    step = replace(step, advantage=torch.tensor([-1.0, -1.0, 1.0, 1.0]).double())
    step = replace(step, ahead=torch.tensor([0.1, 0.5, 0.1, 0.5]).double())
    plain, stopped = (RATIO[name](stop_negatives=s)(step)[0] for s in (None, 0.3))
    assert stopped.tolist() == [0.0, *plain[1:].tolist()]


def test_the_share_of_effective_samples_is_that_of_importance_weights():
    new = torch.tensor([0.1, -0.2, 0.3, 0.0])
    _, stats = ClippedRatio(clip="none")(bare(new, torch.zeros(4), torch.ones(4)))
    ratios = [math.exp(x) for x in (0.1, -0.2, 0.3, 0.0)]
    assert stats["ratio/effective"].item() == pytest.approx(sum(ratios) ** 2 / (4 * sum(r * r for r in ratios)))
    torch.testing.assert_close(stats["ratio/spread"], new.abs())


@pytest.mark.parametrize(
    ("density", "reduce", "usual"), [("exact", "mean", 1e-4), ("exact", "sum", 0.2), ("unit", "mean", 1e-5)]
)
def test_a_clip_range_that_is_not_given_is_the_usual_one_of_its_density(density, reduce, usual):
    objective = ClippedRatio(density=density, reduce=reduce)
    assert objective.clip_range == usual
    new = torch.tensor([2 * usual, 0.5 * usual, -2 * usual, -0.5 * usual])
    _, stats = objective(bare(new, torch.zeros(4), torch.tensor([1.0, 1.0, -1.0, -1.0])))
    assert stats["clip_fraction/high"].tolist() == [1, 0, 0, 0]
    assert stats["clip_fraction/low"].tolist() == [0, 0, 1, 0]
    assert ClippedRatio(density=density, reduce=reduce, clip_range=3e-3).clip_range == 3e-3


def test_a_summed_unit_density_wants_its_clip_range_told():
    with pytest.raises(ValueError, match=r"objective\.clip_range must be given with density=unit and reduce=sum"):
        ClippedRatio(density="unit", reduce="sum")
    assert ClippedRatio(density="unit", reduce="sum", clip_range=0.1).clip_range == 0.1


def test_an_objective_that_keeps_its_density_to_itself_is_refused():
    class Silent:
        family, scope, reduce, clip_range, needs_reference, needs_old_means = "ratio", "step", "mean", 0.1, False, False

    with pytest.raises(ValueError, match="it lacks density"):
        check_objective(Silent())
    for objective in OBJECTIVES.values():
        check_objective(objective())
    with pytest.raises(ValueError, match="must have the attribute family, 'ratio' or 'forward', got None"):
        check_objective(object())


@pytest.mark.parametrize(
    ("factory", "bad", "words"),
    [
        (ClippedRatio, {"clip_range": 0.0}, "clip_range must be between 0 and 1"),
        (ClippedRatio, {"clip_high": 1.5}, "clip_high must be between 0 and 1"),
        (ClippedRatio, {"clip_low": 0.1, "clip_high": 0.2, "clip_range": 0.3}, "clip_range has no effect"),
        (ClippedRatio, {"clip": "upper", "clip_low": 0.1}, "clip_low has no effect"),
        (ClippedRatio, {"clip": "none", "clip_range": 0.1}, "clip_range has no effect"),
        (ClippedRatio, {"soft": 0.0}, "soft must be above 0"),
        (TrajectoryRatio, {"clip": "none", "reduce": "sum"}, "clip must be upper with reduce=sum"),
        (Dppo, {"threshold": 0.0}, "threshold must be above 0"),
        (Dppo, {"stop_negatives": -1.0}, "stop_negatives must be a distance above 0"),
        (SequenceMean, {"stop_negatives": 0.1}, "stop_negatives needs a ratio for each step"),
        (Dppo, {"reduce": "sum"}, "threshold must be given with reduce=sum"),
        *((factory, {"kl": kl}, "kl must be at least 0") for factory in OBJECTIVES.values() for kl in (-1.0, float("nan"))),
    ],
)  # fmt: skip
def test_settings_out_of_range_or_without_effect_are_refused(factory, bad, words):
    with pytest.raises(ValueError, match=f"objective.{words}"):
        factory(**bad)


def test_the_example_in_the_docs_is_an_objective():
    page = (Path(__file__).parent.parent / "docs" / "add-an-algorithm.md").read_text(encoding="utf-8")
    (code,) = [block.split("```")[0] for block in page.split("```python\n") if "class RootAdvantage" in block.split("```")[0]]
    space = {"__name__": __name__}
    exec(code, space)
    objective = space["RootAdvantage"](least=0.1)
    check_objective(objective)
    loss, _ = objective(bare(torch.zeros(3), torch.zeros(3), torch.tensor([4.0, -9.0, 0.01])))
    assert loss.tolist() == [-2.0, 3.0, 0.0]
