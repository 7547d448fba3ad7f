"""The clipped ratio against a loop written out, and its gradient against finite differences."""

import math

import pytest
import torch

from flowgrpo.objectives import OBJECTIVES, check_objective
from flowgrpo.objectives.clipped_ratio import ClippedRatio
from flowgrpo.transitions import Gaussian, Prediction


def slow(new, old, advantage, clip_range):
    """One sample, in plain Python."""
    ratio = math.exp(new - old)
    clipped = min(max(ratio, 1 - clip_range), 1 + clip_range)
    return -min(ratio * advantage, clipped * advantage)


def test_the_loss_is_the_formula_sample_by_sample():
    generator = torch.Generator().manual_seed(0)
    new, old, advantage = (torch.randn(50, generator=generator) * s for s in (0.3, 0.3, 1.0))
    loss, stats = ClippedRatio(clip_range=0.2)(new, old, advantage)
    expected = [slow(*row, 0.2) for row in zip(new.tolist(), old.tolist(), advantage.tolist(), strict=True)]
    torch.testing.assert_close(loss, torch.tensor(expected))
    high = [math.exp(n - o) > 1.2 and a > 0 for n, o, a in zip(new, old, advantage, strict=True)]
    assert stats["clip_fraction/high"].tolist() == [float(h) for h in high]


def test_at_ratio_one_the_gradient_is_that_of_the_policy_gradient():
    new = torch.zeros(5, requires_grad=True)
    advantage = torch.tensor([1.0, -2.0, 0.0, 3.0, -0.5])
    loss, _ = ClippedRatio()(new, torch.zeros(5), advantage)
    loss.sum().backward()
    torch.testing.assert_close(new.grad, -advantage)


@pytest.mark.parametrize(
    ("difference", "advantage", "moves"), [(0.1, 1, False), (-0.1, 1, True), (0.1, -1, True), (-0.1, -1, False)]
)
def test_beyond_the_band_only_the_way_back_has_a_gradient(difference, advantage, moves):
    new = torch.tensor([difference], requires_grad=True)
    loss, _ = ClippedRatio(clip_range=0.05)(new, torch.zeros(1), torch.tensor([float(advantage)]))
    loss.sum().backward()
    assert bool(new.grad.abs() > 0) is moves


def test_a_summed_density_cannot_overflow():
    loss, _ = ClippedRatio(clip_range=0.2, reduce="sum")(torch.tensor([163.8]), torch.zeros(1), torch.tensor([-1.0]))
    assert torch.isfinite(loss).all()


def test_a_mean_density_has_the_same_ratio_at_both_sizes():
    """A shift of 0.01 a coordinate on 4x64x64 and on 4x32x32 (a mean ratio of exp(0.01) in both)."""
    for side in (64, 32):
        old = Gaussian(torch.zeros(1, 4, side, side), 1.0)
        x = torch.full((1, 4, side, side), 0.5)
        new = Gaussian(torch.full((1, 4, side, side), 0.5 - math.sqrt(0.25 - 0.02)), 1.0)
        difference = new.log_density(x) - old.log_density(x)
        torch.testing.assert_close(difference, torch.tensor([0.01]), rtol=1e-4, atol=0)
        assert (new.log_density(x, "sum") - old.log_density(x, "sum")).item() == pytest.approx(0.04 * side * side, rel=1e-3)


@pytest.mark.parametrize("form", ["latent", "velocity"])
def test_the_kl_is_zero_at_the_reference_and_points_back_to_it(form):
    x, v = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    objective = ClippedRatio(kl=0.5, kl_form=form)
    moved = (v + 0.1).requires_grad_()

    def divergence(velocity):
        return objective.divergence(Gaussian(x - 0.3 * velocity, 0.4), Prediction(x, velocity, 0.7),
                                    Gaussian(x - 0.3 * v, 0.4), Prediction(x, v, 0.7))  # fmt: skip

    assert (divergence(v) == 0).all()
    expected = 0.01 if form == "velocity" else (0.3 * 0.1) ** 2 / (2 * 0.16)
    torch.testing.assert_close(divergence(moved), torch.full((2,), expected))
    divergence(moved).sum().backward()
    assert (moved.grad > 0).all()
    loss, stats = objective(torch.zeros(2), torch.zeros(2), torch.zeros(2), divergence(moved).detach())
    torch.testing.assert_close(loss, torch.full((2,), 0.5 * expected))
    assert "kl" in stats


@pytest.mark.parametrize(
    ("density", "reduce", "usual"), [("exact", "mean", 1e-4), ("exact", "sum", 0.2), ("unit", "mean", 1e-5)]
)
def test_a_clip_range_that_is_not_given_is_the_usual_one_of_its_density(density, reduce, usual):
    objective = ClippedRatio(density=density, reduce=reduce)
    assert objective.clip_range == usual
    new = torch.tensor([2 * usual, 0.5 * usual, -2 * usual, -0.5 * usual])
    _, stats = objective(new, torch.zeros(4), torch.tensor([1.0, 1.0, -1.0, -1.0]))
    assert stats["clip_fraction/high"].tolist() == [1, 0, 0, 0]
    assert stats["clip_fraction/low"].tolist() == [0, 0, 1, 0]
    assert ClippedRatio(density=density, reduce=reduce, clip_range=3e-3).clip_range == 3e-3


def test_a_summed_unit_density_wants_its_clip_range_told():
    with pytest.raises(ValueError, match=r"objective\.clip_range must be given with density=unit and reduce=sum"):
        ClippedRatio(density="unit", reduce="sum")
    assert ClippedRatio(density="unit", reduce="sum", clip_range=0.1).clip_range == 0.1


def test_an_objective_that_keeps_its_density_to_itself_is_refused():
    class Silent:
        reduce, clip_range, needs_reference = "mean", 0.1, False

    with pytest.raises(ValueError, match="it lacks density"):
        check_objective(Silent())


@pytest.mark.parametrize("bad", [{"clip_range": 0.0}, {"clip_range": 1.5}, {"kl": -1.0}])
def test_settings_out_of_range_are_refused(bad):
    for objective in OBJECTIVES.values():
        with pytest.raises(ValueError, match="objective"):
            objective(**bad)
