"""Objectives of the forward family: against the formulas written out, and where the best mean of a Gaussian lies."""

import math
from dataclasses import replace

import pytest
import torch

from flowgrpo.objectives import OBJECTIVES, ForwardBatch
from flowgrpo.objectives.awm import Awm
from flowgrpo.objectives.clipped_ratio import ClippedRatio
from flowgrpo.objectives.contract import StepBatch
from flowgrpo.objectives.crd import Crd
from flowgrpo.objectives.dgpo import Dgpo
from flowgrpo.objectives.dpo import Dpo
from flowgrpo.objectives.nft import Nft
from flowgrpo.objectives.rwr import Rwr
from flowgrpo.objectives.sft import Sft
from flowgrpo.objectives.vgrpo import VGrpo
from flowgrpo.transitions import FlowSde, Gaussian, Prediction, law
from tests.gaussian_flow import GaussianFlow

FORWARD = {name: factory for name, factory in OBJECTIVES.items() if factory.family == "forward"}
SIGMA = 0.6


def noised(x0, eps, sigma, v, advantage, old=None, reference=None, groups=None):
    """A batch with x where it belongs."""
    x = (1 - sigma) * x0 + sigma * eps
    held = [None if value is None else Prediction(x, value, sigma) for value in (old, reference)]
    groups = torch.arange(len(x0)) // 5 if groups is None else groups
    return ForwardBatch(x0, eps, advantage, Prediction(x, v, sigma), *held, groups)


def told(objective, batch):
    """An objective's answer to a batch, the only level of its samples."""
    return objective([batch] if objective.scope == "sample" else batch)


def random_batch(rows=30, seed=0):
    """Predictions that have moved a little, and a reference; groups of 5, in two of which several are best or worst alike."""
    generator = torch.Generator().manual_seed(seed)
    x0, eps, old, step, reference = (torch.randn(rows, 2, 3, generator=generator, dtype=torch.float64) for _ in range(5))
    v, advantage = (old + 0.2 * step).requires_grad_(), torch.randn(rows, generator=generator, dtype=torch.float64)
    advantage[:5] = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0])
    advantage[5:10] = 0.0
    return v, noised(x0, eps, SIGMA, v, advantage, old, reference)


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


def slow_huber(power, offset):
    def one(x0, eps, v, old, a):
        e, e_old = square(v, eps - x0), square(old, eps - x0)
        rho = torch.exp(-(SIGMA / power) * ((e + offset) ** power - (e_old + offset) ** power))
        if (a > 0 and rho > 1.1) or (a < 0 and rho < 0.9):
            return 0 * rho - (1.1 if a > 0 else 0.9) * a
        return -rho * a

    return one


def slow_rwr(temperature):
    def one(x0, eps, v, old, a):
        return math.exp(a / temperature) * square(v, eps - x0)

    return one


FORMULAS = {
    "awm": (Awm(clip_range=0.1), slow_awm(1)),
    "awm t": (Awm(clip_range=0.1, weighting="t"), slow_awm(SIGMA)),
    "awm t2": (Awm(clip_range=0.1, weighting="t2"), slow_awm(SIGMA**2)),
    "awm huber": (Awm(clip_range=0.1, weighting="huber", offset=0.01), slow_huber(0.5, 0.01)),
    "awm generalised huber": (Awm(clip_range=0.1, weighting="huber", power=0.25, offset=0.3), slow_huber(0.25, 0.3)),
    "nft": (Nft(beta=0.4, most=1.5, adaptive=False), slow_nft(0.4, 1.5, False)),
    "nft adaptive": (Nft(beta=0.4), slow_nft(0.4, 1.0, True)),
    "rwr": (Rwr(temperature=0.7), slow_rwr(0.7)),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_values_and_gradients_are_those_of_the_formula_sample_by_sample(name):
    objective, formula = FORMULAS[name]
    v, batch = random_batch()
    ours, stats = objective(replace(batch, reference=None))
    rows = zip(batch.x0, batch.eps, v, batch.old.v, batch.advantage, strict=True)
    expected = torch.stack([formula(*row) for row in rows])
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(torch.autograd.grad(ours.sum(), v)[0], torch.autograd.grad(expected.sum(), v)[0])
    assert not any(value.requires_grad for value in stats.values())


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def slow_dgpo(a, e, e_old, e_ref):
    return -torch.log(sigmoid(sum(a[i] * 3 * (e_ref[i] - e[i]) for i in range(5)) / 5))


def slow_dpo(a, e, e_old, e_ref):
    if max(a) == min(a):
        return 0 * e.sum()
    best, worst = ([i for i in range(5) if a[i] == end] for end in (max(a), min(a)))
    u = 3 * (e_ref - e)
    return -torch.log(sigmoid(sum(u[i] for i in best) / len(best) - sum(u[i] for i in worst) / len(worst)))


def slow_crd(form):
    def one(a, e, e_old, e_ref):
        u = [3 * (e_old[i] - e[i]) for i in range(5)]
        total = 0.0
        for i in range(5):
            mine, wanted = u[i] - sum(u) / 5, a[i] - sum(a) / 5
            if form == "mse":
                total = total + (mine - wanted) ** 2
            else:
                total = total - sigmoid(wanted) * torch.log(sigmoid(mine)) - (1 - sigmoid(wanted)) * torch.log(sigmoid(-mine))
        return total / 5

    return one


def slow_sft(a, e, e_old, e_ref):
    best = [i for i in range(5) if a[i] == max(a)]
    return 0 * e.sum() if max(a) == min(a) else sum(e[i] for i in best) / len(best)


GROUPWISE = {
    "dgpo": (Dgpo(beta=3.0), slow_dgpo),
    "dpo": (Dpo(beta=3.0), slow_dpo),
    "crd mse": (Crd(beta=3.0), slow_crd("mse")),
    "crd bce": (Crd(beta=3.0, form="bce"), slow_crd("bce")),
    "sft": (Sft(), slow_sft),
}


@pytest.mark.parametrize("name", GROUPWISE)
@pytest.mark.parametrize("mixed", [False, True])
def test_the_mean_over_a_group_is_the_formula_of_the_group_wherever_its_rows_lie(name, mixed):
    objective, formula = GROUPWISE[name]
    v, batch = random_batch()
    if mixed:
        batch = replace(batch, groups=torch.arange(30) % 6)
    ours, stats = objective(batch)
    predictions = (v, batch.old.v, batch.reference.v)
    errors = [torch.stack([square(one, y) for one, y in zip(p, batch.eps - batch.x0, strict=True)]) for p in predictions]
    of_groups = [[values[batch.groups == g] for values in (batch.advantage, *errors)] for g in range(6)]
    expected = torch.stack([formula(*one) for one in of_groups])
    torch.testing.assert_close(torch.stack([ours[batch.groups == g].mean() for g in range(6)]), expected)
    gradients = [torch.autograd.grad(loss.sum(), v, retain_graph=True)[0] for loss in (ours / 5, expected)]
    torch.testing.assert_close(*gradients)
    assert not any(value.requires_grad for value in stats.values())


@pytest.mark.parametrize("levels", [1, 3])
def test_vgrpo_has_one_ratio_from_the_mean_error_over_levels(levels):
    batches = [random_batch(seed=seed) for seed in range(levels)]
    advantage, velocities = batches[0][1].advantage, [v for v, _ in batches]
    objective = VGrpo(clip_range=0.01, soft=0.7)
    ours, stats = objective([replace(batch, advantage=advantage, reference=None) for _, batch in batches])

    def error(x0, eps, v):
        missed = ((1 - SIGMA) * x0 + SIGMA * eps - SIGMA * v) - x0
        return (missed**2).mean() / float(missed.detach().abs().mean())

    expected = []
    for i, a in enumerate(0.7 * torch.tanh(advantage / 0.7)):
        likelihoods = [-sum(error(b.x0[i], b.eps[i], p[i]) for (_, b), p in zip(batches, some, strict=True)) / levels
                       for some in (velocities, [b.old.v for _, b in batches])]  # fmt: skip
        rho = torch.exp(likelihoods[0] - likelihoods[1])
        held = (a > 0 and rho > 1.01) or (a < 0 and rho < 0.99)
        expected.append(0 * rho - (1.01 if a > 0 else 0.99) * a if held else -rho * a)
    expected = torch.stack(expected)
    torch.testing.assert_close(ours, expected)
    for one, wanted in zip(*(torch.autograd.grad(loss.sum(), velocities) for loss in (ours, expected)), strict=True):
        torch.testing.assert_close(one, wanted)
    assert 0 < (stats["clip_fraction/high"] + stats["clip_fraction/low"]).mean() < 1


@pytest.mark.parametrize("name", FORWARD)
def test_the_pull_to_the_reference_is_the_squared_difference_of_velocities(name):
    v, batch = random_batch()
    (plain, _), (pulled, stats) = (told(FORWARD[name](kl=kl), batch) for kl in (0.0, 0.3))
    distances = torch.stack([square(a, b) for a, b in zip(v, batch.reference.v, strict=True)])
    torch.testing.assert_close(pulled - plain, 0.3 * distances)
    torch.testing.assert_close(stats["kl"], distances.detach())
    half, logged = told(FORWARD[name](kl=0.3), replace(batch, pull=(torch.arange(30) % 2).double()))
    torch.testing.assert_close(half - plain, 0.3 * distances * (torch.arange(30) % 2))
    torch.testing.assert_close(logged["kl"], distances.detach())
    assert FORWARD[name](kl=0.3).needs_reference
    assert FORWARD[name]().needs_reference is (name in ("dgpo", "dpo"))


@pytest.mark.parametrize("name", FORWARD)
def test_two_samples_move_towards_the_better_one(name):
    """One velocity for both, at rest: descent lowers it, and x0 = x - sigma v goes up to the better sample."""
    v = torch.zeros((), dtype=torch.float64, requires_grad=True)
    x0, advantage = torch.tensor([[-1.0], [1.5]], dtype=torch.float64), torch.tensor([-1.0, 1.0], dtype=torch.float64)
    both = v.expand(2, 1)
    still, groups = both.detach(), torch.zeros(2, dtype=torch.long)
    loss, _ = told(FORWARD[name](), noised(x0, torch.zeros_like(x0), SIGMA, both, advantage, still, still, groups))
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
        groups = torch.arange(len(self.x0)) // 8
        loss, _ = told(objective, noised(self.x0, self.eps, SIGMA, self.v + shift, advantage, self.v, self.v, groups))
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
    for factory in FORWARD.values():
        assert gaussian.gradient(factory(), 0.0, gaussian.z) > 0


@pytest.mark.parametrize(
    ("factory", "bad", "words"),
    [
        (Nft, {"beta": 0.0}, "beta must be above 0"),
        (Nft, {"most": -1.0}, "most must be above 0"),
        (Rwr, {"temperature": 0.0}, "temperature must be above 0"),
        (Rwr, {"temperature": math.inf}, "temperature must be above 0 and finite"),
        (Awm, {"clip_range": 2.0}, "clip_range must be between 0 and 1"),
        (Awm, {"power": 0.5}, "power has no effect with weighting=uniform"),
        (Awm, {"weighting": "huber", "power": 1.5}, "power must be above 0 and at most 1"),
        (Awm, {"weighting": "huber", "offset": 0.0}, "offset must be above 0"),
        (Awm, {"offset": 0.1}, "offset has no effect with weighting=uniform"),
        (Nft, {"old_ramp": 0.1}, "old_ramp has no effect without old_decay"),
        (Rwr, {"old_decay": 0.5}, "old_decay has no effect"),
        (Nft, {"old_decay": 1.0}, "old_decay must be from 0 to below 1"),
        (Nft, {"old_decay": 0.5, "old_ramp": 0.0}, "old_ramp must be above 0"),
        *((factory, {"beta": beta}, "beta must be above 0") for factory in (Dpo, Dgpo, Crd) for beta in (0.0, math.inf)),
        *((factory, {"kl_gate": 0.5}, "kl_gate has no effect with kl=0") for factory in OBJECTIVES.values()),
        *((factory, {"kl_from": 0.5}, "kl_from has no effect with kl=0") for factory in OBJECTIVES.values()),
        *((factory, {"kl": 1.0, "kl_from": 2.0}, "kl_from must be a noise level") for factory in OBJECTIVES.values()),
        *((factory, {"kl": 1.0, "kl_gate": 0.0}, "kl_gate must be a share above 0") for factory in OBJECTIVES.values()),
    ],
)
def test_settings_out_of_range_are_refused(factory, bad, words):
    with pytest.raises(ValueError, match=f"objective.{words}"):
        factory(**bad)
