"""Transitions: their density, their moments on Gaussian data, their limits."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Independent, Normal, kl_divergence

from flowgrpo.schedule import shifted_sigmas
from flowgrpo.solvers import Euler
from flowgrpo.step_weights import EqualWeights, NoWeights
from flowgrpo.transitions import (
    TRANSITIONS,
    Cps,
    FlowSde,
    Gaussian,
    Prediction,
    law,
    log_ratio,
    sensitivity,
)

SHAPE = (2, 3, 5, 7)
ALL = [factory(noise_level=level) for factory in TRANSITIONS.values() for level in (0.2, 0.7)]
grids = {"num_steps": st.integers(2, 64), "shift": st.floats(0.3, 12)}


def prediction(sigma: float = 0.8, seed: int = 0) -> Prediction:
    generator = torch.Generator().manual_seed(seed)
    return Prediction(torch.randn(SHAPE, generator=generator), torch.randn(SHAPE, generator=generator), sigma)


def test_a_prediction_puts_x_together_again():
    p = prediction(0.3)
    torch.testing.assert_close((1 - 0.3) * p.x0 + 0.3 * p.eps, p.x)
    torch.testing.assert_close(p.eps - p.x0, p.v)


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_the_log_density_is_the_normal_one(reduce):
    gaussian, x = Gaussian(prediction().v, 0.37), prediction(seed=1).x
    oracle = Independent(Normal(gaussian.mean, 0.37), 3).log_prob(x)
    if reduce == "mean":
        oracle = oracle / (3 * 5 * 7)
    torch.testing.assert_close(gaussian.log_density(x, reduce), oracle, rtol=1e-5, atol=1e-5)


def test_the_kl_is_the_normal_one():
    p, q = Gaussian(prediction().v, 0.37), Gaussian(prediction(seed=1).v, 0.37)
    oracle = kl_divergence(Independent(Normal(p.mean, 0.37), 3), Independent(Normal(q.mean, 0.37), 3))
    torch.testing.assert_close(p.kl(q, "sum"), oracle)
    torch.testing.assert_close(p.kl(q, "mean"), oracle / 105)


def test_the_flow_sde_kl_has_the_step_size_in_it():
    """KL = delta / 2 (1 / g + g (1 - sigma) / (2 sigma))^2 |v - v_ref|^2 (MixGRPO, below eq. 10)."""
    sigmas, step, eta = shifted_sigmas(10, 3.0), 4, 0.7
    sigma, delta = sigmas[step], sigmas[step] - sigmas[step + 1]
    x, v, v_ref = prediction().x, prediction().v, prediction(seed=1).v
    laws = [law(FlowSde(eta), Prediction(x, u, sigma), sigmas, step) for u in (v, v_ref)]
    g = eta * math.sqrt(sigma / (1 - sigma))
    factor = delta / 2 * (1 / g + g * (1 - sigma) / (2 * sigma)) ** 2
    torch.testing.assert_close(laws[0].kl(laws[1]), factor * ((v - v_ref) ** 2).flatten(1).mean(1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("transition", ALL, ids=str)
@given(**grids)
def test_every_step_has_finite_coefficients_and_a_bounded_std(transition, num_steps, shift):
    sigmas = shifted_sigmas(num_steps, shift)
    for step in range(len(sigmas) - 2):
        c = transition.coefficients(sigmas, step)
        assert all(math.isfinite(value) for value in (c.a, c.b, c.std))
        assert 0 < c.std < 3


@pytest.mark.parametrize("first", [1.0, 0.99999994, 0.999])
def test_a_first_level_of_nearly_one_is_one(first):
    for transition in ALL:
        near, exact = (transition.coefficients((s, 0.5, 0.0), 0) for s in (first, 1.0))
        assert near.std == pytest.approx(exact.std, rel=2e-3)
        assert near.b == pytest.approx(exact.b, abs=2e-3)


def test_without_noise_every_transition_is_the_euler_step():
    sigmas, p = shifted_sigmas(10, 3.0), prediction(shifted_sigmas(10, 3.0)[3])
    euler = Euler().step(p, sigmas, 3)
    for factory in TRANSITIONS.values():
        silent = law(factory(noise_level=0.0), p, sigmas, 3)
        assert silent.std == 0
        torch.testing.assert_close(silent.mean, euler, rtol=0, atol=1e-6)


def test_a_law_without_noise_has_no_density():
    with pytest.raises(ValueError, match="noise_level"):
        Gaussian(prediction().v, 0.0).log_density(prediction().x)


@given(noise_level=st.floats(0, 1), **grids)
def test_cps_keeps_the_noise_level_exactly(noise_level, num_steps, shift):
    sigmas = shifted_sigmas(num_steps, shift)
    for step in range(len(sigmas) - 1):
        c = Cps(noise_level).coefficients(sigmas, step)
        assert math.hypot(c.b, c.std) == pytest.approx(sigmas[step + 1], abs=1e-12)
        assert c.a == 1 - sigmas[step + 1]


def moments(transition, sigmas, window, data_mean=0.4, data_std=0.6):
    """Mean and variance at the end, propagated exactly: with Gaussian data every step is affine in x."""
    mean, variance = 0.0, 1.0
    if sigmas[0] < 1:
        mean, variance = (1 - sigmas[0]) * data_mean, (1 - sigmas[0]) ** 2 * data_std**2 + sigmas[0] ** 2
    for step in range(len(sigmas) - 1):
        sigma = sigmas[step]
        total = (1 - sigma) ** 2 * data_std**2 + sigma**2
        k_eps, k_x0 = sigma / total, (1 - sigma) * data_std**2 / total  # slopes of eps and x0 in x - (1 - sigma) mean
        c = transition.coefficients(sigmas, step) if step in window else None
        a, b, std = (1 - sigmas[step + 1], sigmas[step + 1], 0.0) if c is None else (c.a, c.b, c.std)
        mean = a * (data_mean + k_x0 * (mean - (1 - sigma) * data_mean)) + b * k_eps * (mean - (1 - sigma) * data_mean)
        variance = (a * k_x0 + b * k_eps) ** 2 * variance + std**2
    return mean, variance


@pytest.mark.parametrize(("low", "high"), [(0.3, 0.7), (0.6, 0.9)])
def test_flow_sde_keeps_the_marginals_as_the_grid_is_refined(low, high):
    errors = []
    for num_steps in (1000, 2000, 4000):
        sigmas = shifted_sigmas(num_steps, 3.0)
        window = [i for i in range(num_steps) if low < sigmas[i] < high]
        mean, variance = moments(FlowSde(0.7), sigmas, range(window[0], window[-1] + 1))
        errors.append(abs(variance / 0.36 - 1))
        assert mean == pytest.approx(0.4, abs=2e-3)
    assert errors[-1] < 2e-3
    assert 1.7 < errors[0] / errors[1] < 2.3  # weak order 1
    assert 1.7 < errors[1] / errors[2] < 2.3


def test_cps_does_not_keep_the_marginals_of_data_with_spread():
    _, variance = moments(Cps(0.7), shifted_sigmas(1000, 1.0), range(300, 700))
    assert variance / 0.36 < 0.95


def test_the_expected_log_ratio_is_minus_half_the_squared_distance_of_means():
    old, new = Gaussian(prediction().v, 0.5), Gaussian(prediction().v + 0.1, 0.5)
    noise = torch.randn((4000, *SHAPE[1:]), generator=torch.Generator().manual_seed(0))
    x = old.mean[:1] + 0.5 * noise
    wide = [Gaussian(g.mean[:1].expand_as(x), 0.5) for g in (old, new)]
    ratio = wide[1].log_density(x, "sum") - wide[0].log_density(x, "sum")
    assert ratio.mean().item() == pytest.approx(-105 * 0.1**2 / (2 * 0.25), abs=0.15)


def test_a_summed_log_ratio_does_not_overflow():
    assert torch.isfinite(log_ratio(torch.tensor([163.8]), torch.tensor([0.0])).exp()).all()


@pytest.mark.parametrize("transition", ALL, ids=str)
def test_the_sensitivity_is_the_gradient_of_the_log_density_in_noise_units(transition):
    """d log pi / d v = (z / std) d mean / d v: its size for z = 1 is the sensitivity."""
    sigmas = shifted_sigmas(10, 3.0)
    for step in range(9):
        p = prediction(sigmas[step])
        v = p.v.clone().requires_grad_()
        gaussian = law(transition, Prediction(p.x, v, sigmas[step]), sigmas, step)
        x_next = (gaussian.mean + gaussian.std).detach()
        gaussian.log_density(x_next, "sum").sum().backward()
        torch.testing.assert_close(v.grad.abs(), torch.full(SHAPE, sensitivity(transition, sigmas, step)), rtol=2e-3, atol=0)


@pytest.mark.parametrize("transition", ALL, ids=str)
def test_equal_step_weights_leave_every_step_the_same_size_of_gradient(transition):
    sigmas = shifted_sigmas(10, 3.0)
    weights = EqualWeights()(transition, sigmas)
    sizes = [weight * sensitivity(transition, sigmas, step) for step, weight in enumerate(weights)]
    assert len(weights) == 9
    assert sizes == pytest.approx([sizes[0]] * 9)
    assert sorted(weights)[4] == pytest.approx(1)  # the median step keeps its own
    assert NoWeights()(transition, sigmas) == [1.0] * 9


def test_noise_levels_out_of_range_are_refused():
    with pytest.raises(ValueError, match="noise_level"):
        FlowSde(-0.1)
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        Cps(1.2)
