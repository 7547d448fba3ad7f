"""Objectives of the forward family: against the formulas written out, and where the best mean of a Gaussian lies."""

import math

import pytest
import torch

from flowgrpo.objectives import OBJECTIVES, ForwardBatch
from flowgrpo.objectives.awm import Awm
from flowgrpo.objectives.clipped_ratio import ClippedRatio
from flowgrpo.objectives.contract import StepBatch
from flowgrpo.objectives.nft import Nft
from flowgrpo.objectives.rwr import Rwr
from flowgrpo.transitions import FlowSde, Gaussian, Prediction, law
from tests.gaussian_flow import GaussianFlow

FORWARD = {name: factory for name, factory in OBJECTIVES.items() if factory.family == "forward"}
SIGMA = 0.6


def noised(x0, eps, sigma, v, advantage, old=None, reference=None):
    """A batch with x where it belongs."""
    x = (1 - sigma) * x0 + sigma * eps
    held = [None if value is None else Prediction(x, value, sigma) for value in (old, reference)]
    return ForwardBatch(x0, eps, advantage, Prediction(x, v, sigma), *held)


def random_batch(rows=30, seed=0):
    """Predictions that have moved a little, and a reference."""
    generator = torch.Generator().manual_seed(seed)
    x0, eps, old, step, reference = (torch.randn(rows, 2, 3, generator=generator, dtype=torch.float64) for _ in range(5))
    v = (old + 0.2 * step).requires_grad_()
    return v, noised(x0, eps, SIGMA, v, torch.randn(rows, generator=generator, dtype=torch.float64), old, reference)


def square(a, b):
    return ((a - b) ** 2).sum() / a.numel()


def slow_awm(weight):
    def one(x0, eps, v, old, a):
        rho = torch.exp(-weight * square(v, eps - x0) + weight * square(old, eps - x0))
        if (a > 0 and rho > 1.1) or (a < 0 and rho < 0.9):
            return 0 * rho - (1.1 if a > 0 else 0.9) * a
        return -rho * a

    return one


def slow_nft(beta, most, adaptive):
    def one(x0, eps, v, old, a):
        r = 0.5 + 0.5 * min(max(float(a) / most, -1), 1)
        loss = torch.zeros((), dtype=torch.float64)
        for share, policy in ((r, (1 - beta) * old + beta * v), (1 - r, (1 + beta) * old - beta * v)):
            if adaptive:
                x = (1 - SIGMA) * x0 + SIGMA * eps
                guess = x - SIGMA * policy
                loss = loss + share * square(guess, x0) / float((guess - x0).detach().abs().mean())
            else:
                loss = loss + share * square(policy, eps - x0)
        return loss

    return one


def slow_rwr(temperature, least):
    def one(x0, eps, v, old, a):
        return math.exp(a / temperature) * square(v, eps - x0) * (1 if a >= least else 0)

    return one


FORMULAS = {
    "awm": (Awm(clip_range=0.1), slow_awm(1)),
    "awm t": (Awm(clip_range=0.1, weighting="t"), slow_awm(SIGMA)),
    "awm t2": (Awm(clip_range=0.1, weighting="t2"), slow_awm(SIGMA**2)),
    "nft": (Nft(beta=0.4, most=1.5, adaptive=False), slow_nft(0.4, 1.5, False)),
    "nft adaptive": (Nft(beta=0.4), slow_nft(0.4, 1.0, True)),
    "rwr": (Rwr(temperature=0.7), slow_rwr(0.7, -math.inf)),
    "best": (Rwr(temperature=math.inf, least=0.5), slow_rwr(math.inf, 0.5)),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_values_and_gradients_are_those_of_the_formula_sample_by_sample(name):
    objective, formula = FORMULAS[name]
    v, batch = random_batch()
    ours, stats = objective(ForwardBatch(batch.x0, batch.eps, batch.advantage, batch.new, batch.old))
    rows = zip(batch.x0, batch.eps, v, batch.old.v, batch.advantage, strict=True)
    expected = torch.stack([formula(*row) for row in rows])
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(torch.autograd.grad(ours.sum(), v)[0], torch.autograd.grad(expected.sum(), v)[0])
    assert not any(value.requires_grad for value in stats.values())


@pytest.mark.parametrize("name", FORWARD)
def test_the_pull_to_the_reference_is_the_squared_difference_of_velocities(name):
    v, batch = random_batch()
    (plain, _), (pulled, stats) = FORWARD[name]()(batch), FORWARD[name](kl=0.3)(batch)
    distances = torch.stack([square(a, b) for a, b in zip(v, batch.reference.v, strict=True)])
    torch.testing.assert_close(pulled - plain, 0.3 * distances)
    torch.testing.assert_close(stats["kl"], distances.detach())
    assert FORWARD[name](kl=0.3).needs_reference
    assert not FORWARD[name]().needs_reference


@pytest.mark.parametrize("name", FORWARD)
def test_two_samples_move_towards_the_better_one(name):
    """One velocity for both, at rest: descent lowers it, and x0 = x - sigma v goes up to the better sample."""
    v = torch.zeros((), dtype=torch.float64, requires_grad=True)
    x0, advantage = torch.tensor([[-1.0], [1.5]], dtype=torch.float64), torch.tensor([-1.0, 1.0], dtype=torch.float64)
    both = v.expand(2, 1)
    loss, _ = FORWARD[name]()(noised(x0, torch.zeros_like(x0), SIGMA, both, advantage, both.detach()))
    loss.sum().backward()
    assert v.grad > 0


class Shifted:
    """Gaussian data seen at a level by the exact velocity plus a constant, d: what trains. Better samples are larger."""

    def __init__(self, rows=400_000):
        self.flow, generator = GaussianFlow(0.4, 0.6), torch.Generator().manual_seed(1)
        z, self.eps = (torch.randn(rows, 1, generator=generator, dtype=torch.float64) for _ in range(2))
        self.x0, self.z = 0.4 + 0.6 * z, z[:, 0]
        x = (1 - SIGMA) * self.x0 + SIGMA * self.eps
        self.v = self.flow.predict(x, SIGMA).v

    def gradient(self, objective, d, advantage):
        shift = torch.tensor(d, dtype=torch.float64, requires_grad=True)
        loss, _ = objective(noised(self.x0, self.eps, SIGMA, self.v + shift, advantage, self.v))
        return torch.autograd.grad(loss.mean(), shift)[0].item()

    def optimum(self, objective, advantage):
        """Of a loss that is quadratic in d."""
        at_0, at_1 = (self.gradient(objective, d, advantage) for d in (0.0, 1.0))
        return -at_0 / (at_1 - at_0)

    @property
    def covariance(self):
        """Of z and what the exact velocity cannot know of eps - x0, by regression on x."""
        s = 0.6
        _, total = self.flow.marginal(SIGMA)
        return -s - (SIGMA - (1 - SIGMA) * s**2) * (1 - SIGMA) * s / total


@pytest.fixture(scope="module")
def gaussian():
    return Shifted()


@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_the_optimum_of_nft_lies_two_over_beta_covariances_from_the_old_policy(gaussian, beta):
    """cov(r, eps - x0 | x) with r = 1[z > 0] is E|z| / 2 times the covariance with z, E|z| = sqrt(2 / pi)."""
    found = gaussian.optimum(Nft(beta=beta, adaptive=False), gaussian.z.sign())
    assert found == pytest.approx(2 / beta * math.sqrt(2 / math.pi) / 2 * gaussian.covariance, abs=0.01)
    assert found < -0.1


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_optimum_of_weighted_regression_is_that_of_the_tilted_data(gaussian, temperature):
    """Weights exp(z / T) move the mean of a Gaussian by 1 / T of its covariance with z."""
    found = gaussian.optimum(Rwr(temperature=temperature), gaussian.z)
    assert found == pytest.approx(gaussian.covariance / temperature, abs=0.02)


@pytest.mark.parametrize(("weighting", "power"), [("uniform", 0), ("t", 1), ("t2", 2)])
def test_the_first_step_of_awm_is_the_covariance_of_advantage_and_velocity(gaussian, weighting, power):
    """d/dd of -A exp(l - l_old) at d = 0 is 2 w A (v - (eps - x0)): on average -2 w cov(A, eps - x0 | x)."""
    found = gaussian.gradient(Awm(weighting=weighting), 0.0, gaussian.z)
    assert found == pytest.approx(-2 * SIGMA**power * gaussian.covariance, abs=0.01)


def test_both_families_agree_in_direction_with_the_policy_gradient(gaussian):
    """For larger is better, the velocity falls: by descent on the ratio of one SDE step, and on each forward loss."""
    generator = torch.Generator().manual_seed(2)
    noise = torch.randn(10_000, 1, generator=generator, dtype=torch.float64)
    x, shift = torch.zeros_like(noise), torch.zeros((), dtype=torch.float64, requires_grad=True)
    sigmas = (1.0, SIGMA, 0.3, 0.0)
    new = law(FlowSde(), Prediction(x, gaussian.flow.predict(x, SIGMA).v + shift, SIGMA), sigmas, 1)
    old = Gaussian(new.mean.detach(), new.std)
    x_next, std = old.sample(noise), torch.full((10_000,), new.std, dtype=torch.float64)
    step = StepBatch(new.log_density(x_next), old.log_density(x_next), noise[:, 0], new.mean, std, old.mean)
    loss, _ = ClippedRatio()(step)
    assert torch.autograd.grad(loss.mean(), shift)[0] > 0
    for objective in (Awm(), Nft(), Rwr()):
        assert gaussian.gradient(objective, 0.0, gaussian.z) > 0


@pytest.mark.parametrize(
    ("factory", "bad", "words"),
    [
        (Nft, {"beta": 0.0}, "beta must be above 0"),
        (Nft, {"most": -1.0}, "most must be above 0"),
        (Rwr, {"temperature": 0.0}, "temperature must be above 0"),
        (Awm, {"clip_range": 2.0}, "clip_range must be between 0 and 1"),
    ],
)
def test_settings_out_of_range_are_refused(factory, bad, words):
    with pytest.raises(ValueError, match=f"objective.{words}"):
        factory(**bad)
