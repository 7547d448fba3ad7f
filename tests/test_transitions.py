"""Transitions: their density, their moments on Gaussian data, their limits."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Independent, Normal, kl_divergence

from flowgrpo.schedule import shifted_sigmas
from flowgrpo.solvers import Euler
from flowgrpo.transitions import (
    OVERSHOOT,
    TRANSITIONS,
    Cps,
    DanceSde,
    Ddim,
    FlowSde,
    Gaussian,
    Precise,
    Prediction,
    Sage,
    law,
    log_ratio,
    sensitivity,
)

SHAPE = (2, 3, 5, 7)
ALL = [factory(noise_level=level) for factory in TRANSITIONS.values() for level in (0.2, 0.7)]
grids = {"num_steps": st.integers(2, 64), "shift": st.floats(0.3, 12)}


any_grid = {**grids, "first": st.sampled_from([1.0, 0.9999, 0.999]) | st.floats(0.3, 1)}


def levels(num_steps, shift, first):
    """Levels from 1, from nearly 1, or from below."""
    return tuple(first * sigma for sigma in shifted_sigmas(num_steps, shift))


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


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_the_unit_density_is_the_exact_one_without_variance_and_constant(reduce):
    gaussian, x, coordinates = Gaussian(prediction().v, 0.37), prediction(seed=1).x, 105
    constant = (math.log(0.37) + 0.5 * math.log(2 * math.pi)) * (coordinates if reduce == "sum" else 1)
    unit = gaussian.log_density(x, reduce, form="unit")
    torch.testing.assert_close(unit / (2 * 0.37**2) - constant, gaussian.log_density(x, reduce), rtol=1e-5, atol=1e-5)
    assert (gaussian.log_density(gaussian.mean, reduce, form="unit") == 0).all()


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


@pytest.mark.parametrize("name", TRANSITIONS)
@settings(deadline=None, max_examples=30)
@given(noise_level=st.floats(0.01, 1), **any_grid)
def test_every_step_but_the_last_of_every_grid_is_a_law_with_a_density(name, noise_level, num_steps, shift, first):
    sigmas = levels(num_steps, shift, first)
    for step in range(len(sigmas) - 2):
        c = TRANSITIONS[name](noise_level=noise_level).coefficients(sigmas, step)
        assert all(math.isfinite(value) for value in (c.a, c.b, c.std))
        assert c.std > 0
        assert c.a == 1 - sigmas[step + 1]
        assert c.b <= sigmas[step + 1]


@pytest.mark.parametrize("transition", [factory() for factory in TRANSITIONS.values()], ids=str)
def test_a_grid_of_a_single_step_is_finite_too(transition):
    c = transition.coefficients((1.0, 0.0), 0)
    assert all(math.isfinite(value) for value in (c.a, c.b, c.std))


@pytest.mark.parametrize("transition", ALL, ids=str)
@settings(deadline=None, max_examples=30)
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
    euler = Euler().step([p], sigmas, 3, None)
    for factory in TRANSITIONS.values():
        silent = law(factory(noise_level=0.0), p, sigmas, 3)
        assert silent.std == 0
        torch.testing.assert_close(silent.mean, euler, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("transition", "g"), [(FlowSde(0.7), lambda t: 0.7 * math.sqrt(t / (1 - t))), (DanceSde(0.3), lambda t: 0.3)]
)
def test_the_sde_steps_are_the_euler_maruyama_steps_of_the_velocity(transition, g):
    """mean = x - (v + g^2 / (2 t) eps) delta (MixGRPO, eq. 2-8)."""
    sigmas = shifted_sigmas(10, 3.0)
    for step in range(1, 9):
        t, delta = sigmas[step], sigmas[step] - sigmas[step + 1]
        p = prediction(t)
        step_law = law(transition, p, sigmas, step)
        torch.testing.assert_close(step_law.mean, p.x - (p.v + g(t) ** 2 / (2 * t) * p.eps) * delta, rtol=1e-5, atol=1e-5)
        assert step_law.std == pytest.approx(g(t) * math.sqrt(delta), rel=1e-12)


def integral(function, low, high):
    """By Gauss and Legendre, 60 nodes."""
    nodes, weights = np.polynomial.legendre.leggauss(60)
    return (high - low) / 2 * float(weights @ function((low + high) / 2 + (high - low) / 2 * nodes))


@settings(deadline=None, max_examples=30)
@given(noise_level=st.floats(0.05, 1), **any_grid)
def test_sage_and_precise_have_the_integrals_of_the_flow_sde(noise_level, num_steps, shift, first):
    """From sigma 1 too, with the second level inside 1 - sigma."""
    sigmas = levels(num_steps, shift, first)
    for step in range(len(sigmas) - 2):
        t, t_next = sigmas[step : step + 2]
        data = (lambda s, fixed=1 - t_next: fixed + 0 * s) if step == 0 and t > 0.99 else lambda s: 1 - s
        variance = integral(lambda s, data=data: noise_level**2 * s / data(s), t_next, t)
        decay = math.exp(-integral(lambda s, data=data: noise_level**2 / (2 * s * data(s)), t_next, t))
        sage, precise = (made(noise_level).coefficients(sigmas, step) for made in (Sage, Precise))
        assert sage.std == pytest.approx(math.sqrt(variance), rel=1e-4)
        assert sage.b == pytest.approx(t_next - variance / (2 * t), abs=1e-4)
        assert precise.b == pytest.approx(t_next * decay, abs=1e-4)
        assert math.hypot(precise.b, precise.std) == pytest.approx(t_next, rel=1e-12)


@settings(deadline=None)
@given(st.floats(0.6, 0.98), st.floats(0.3, 0.55), st.floats(0.05, 0.25), st.floats(0, 5))
def test_two_precise_steps_to_one_x0_are_the_long_one(start, middle, end, noise_level):
    transition = Precise(noise_level)
    first, second = (transition.coefficients((start, middle, end, 0.0), step) for step in (0, 1))
    whole = transition.coefficients((start, end, 0.0), 0)
    assert second.b * (first.b / middle) == pytest.approx(whole.b, abs=1e-12)  # (x - (1 - t) x0) / t is eps
    assert math.hypot(second.b * (first.std / middle), second.std) == pytest.approx(whole.std, abs=1e-12)


@settings(deadline=None)
@given(st.floats(0.02, 0.9), st.floats(0.05, 0.95), st.floats(0, 1))
def test_ddim_is_the_variance_preserving_one_in_other_coordinates(signal, share, eta):
    """sigma = eta sqrt((1 - A') / (1 - A)) sqrt(1 - A / A'), x' = sqrt(A') x0 + sqrt(1 - A' - sigma^2) eps + sigma z."""
    later = signal + share * (0.999 - signal)  # A and A', the squares of alpha
    levels = [math.sqrt(1 - a) / (math.sqrt(a) + math.sqrt(1 - a)) for a in (signal, later)]
    scale = math.sqrt(later) + math.sqrt(1 - later)
    std = eta * math.sqrt((1 - later) / (1 - signal)) * math.sqrt(1 - signal / later)
    c = Ddim(eta).coefficients((*levels, 0.0), 0)
    assert c.a == pytest.approx(math.sqrt(later) / scale, abs=1e-9)
    assert c.b == pytest.approx(math.sqrt(1 - later - std**2) / scale, abs=1e-6)
    assert c.std == pytest.approx(std / scale, abs=1e-6)


def test_the_ancestral_ddim_step_is_the_precise_one_of_root_two():
    sigmas = shifted_sigmas(10, 3.0)
    for step in range(1, 9):
        ancestral, precise = (t.coefficients(sigmas, step) for t in (Ddim(1.0), Precise(math.sqrt(2))))
        assert (ancestral.b, ancestral.std) == pytest.approx((precise.b, precise.std), rel=1e-9)


def test_a_law_without_noise_has_no_density():
    with pytest.raises(ValueError, match="noise_level"):
        Gaussian(prediction().v, 0.0).log_density(prediction().x)


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


@pytest.mark.parametrize("name", TRANSITIONS)
@pytest.mark.parametrize("noise_level", [-0.1, math.nan])
def test_noise_levels_out_of_range_are_refused(name, noise_level):
    with pytest.raises(ValueError, match=r"transition\.noise_level must be"):
        TRANSITIONS[name](noise_level=noise_level)


@pytest.mark.parametrize("factory", [Cps, Ddim])
def test_shares_of_noise_are_at_most_one(factory):
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        factory(1.2)


@pytest.mark.parametrize("factory", [FlowSde, Sage])
def test_a_noise_level_that_turns_the_noise_around_on_every_grid_is_refused(factory):
    for num_steps in (2, 10, 1000):
        assert factory(OVERSHOOT).coefficients(shifted_sigmas(num_steps, 3.0), 0).b < 1e-9
    with pytest.raises(ValueError, match="lower it, or use the transition precise"):
        factory(1.5)
