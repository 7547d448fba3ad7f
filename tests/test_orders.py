"""Orders of convergence of transitions and solvers, measured by exact propagation: no sampling, no tolerance for luck."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowgrpo.schedule import shifted_sigmas
from flowgrpo.solvers import SOLVERS
from flowgrpo.transitions import TRANSITIONS, Coefficients, Prediction, Transition, law
from tests.gaussian_flow import GaussianFlow, Law, distance, levels_between, order

FLOW = GaussianFlow(mean=0.4, std=0.6)
SPREADS = [GaussianFlow(0.4, 0.3), GaussianFlow(0.4, 1.5)]  # two, so that no error constant is 0 by accident
WINDOWS = [(0.7, 0.3), (0.9, 0.6)]  # away from sigma 1
SIZES = (40, 80, 160, 320, 640)
NOISE_LEVELS, SHIFTS = (0.3, 0.7, 1.0), (1.0, 3.0, 5.0)

Diffusion = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class RootCps:
    """CPS with its angle in proportion to the root of the step: a fixed noise level has no SDE as its limit, this has."""

    noise_level: float

    def coefficients(self, sigmas: Sequence[float], step: int) -> Coefficients:
        angle = self.noise_level * math.sqrt(sigmas[step] - sigmas[step + 1])
        return TRANSITIONS["cps"](noise_level=angle / (math.pi / 2)).coefficients(sigmas, step)


def flow_diffusion(noise_level: float) -> Diffusion:
    """g^2 = noise_level^2 t / (1 - t)."""
    return lambda t: noise_level**2 * t / (1 - t)


SDES: dict[str, tuple[Callable[[float], Transition], Callable[[float], Diffusion]]] = {
    "flow_sde": (lambda level: TRANSITIONS["flow_sde"](noise_level=level), flow_diffusion),
    "dance_sde": (lambda level: TRANSITIONS["dance_sde"](noise_level=level), lambda level: lambda t: level**2 + 0 * t),
    "sage": (lambda level: TRANSITIONS["sage"](noise_level=level), flow_diffusion),
    "precise": (lambda level: TRANSITIONS["precise"](noise_level=level), flow_diffusion),
    "ddim": (lambda level: TRANSITIONS["ddim"](noise_level=level), lambda level: flow_diffusion(math.sqrt(2) * level)),
    "cps": (RootCps, lambda level: lambda t: (level * t) ** 2),
}  # each transition with the g^2 of the SDE that it is a discretisation of


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("noise_level", NOISE_LEVELS)
@pytest.mark.parametrize("name", SDES)
def test_every_transition_is_of_weak_order_one_towards_its_sde(name, noise_level, shift):
    """The law at the window's end given x at its start: its mean, as a function of x, and its variance."""
    transition, g_squared = SDES[name][0](noise_level), SDES[name][1](noise_level)
    for high, low in WINDOWS:
        exact = FLOW.exact_sde(g_squared, high, low)
        errors = [distance(FLOW.sample(transition, levels_between(high, low, n, shift)), exact) for n in SIZES]
        assert order(errors, SIZES) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(("high", "low"), WINDOWS)
@pytest.mark.parametrize("name", SDES)
def test_a_window_away_from_sigma_one_keeps_the_marginals(name, high, low):
    """Ten thousand steps, the exact flow outside the window, which carries a ratio of variances on to the end as it is."""
    sigmas = shifted_sigmas(10_000, 3.0)
    window = [step for step, sigma in enumerate(sigmas) if low < sigma < high]
    after = FLOW.sample(SDES[name][0](0.7), sigmas, window).at(*FLOW.marginal(sigmas[window[0]]))
    mean, variance = FLOW.marginal(sigmas[window[-1] + 1])
    assert after[0] == pytest.approx(mean, abs=1e-10)
    assert after[1] / variance == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("name", TRANSITIONS)
@given(noise_level=st.floats(0.05, 1), num_steps=st.integers(2, 40), shift=st.floats(0.3, 12), std=st.floats(0, 2))
def test_the_mean_is_exact_on_every_grid_even_from_sigma_one(name, noise_level, num_steps, shift, std):
    flow, sigmas = GaussianFlow(0.4, std), shifted_sigmas(num_steps, shift)
    after = flow.sample(TRANSITIONS[name](noise_level=noise_level), sigmas, range(num_steps - 1)).at(0.0, 1.0)
    assert after[0] == pytest.approx(flow.marginal(sigmas[-2])[0], abs=1e-9)


def test_the_first_steps_from_sigma_one_gain_a_variance_that_no_refinement_removes():
    """With 1 - t = i / n a step adds g^2 delta = noise_level^2 / max(i, 1) at every n: V - 1 -> (1 - q)^2 (V - 1) + q^2."""
    noise_level, excess = 0.7, 0.0
    for i in range(4):
        q = noise_level**2 / max(i, 1) / 2
        excess = (1 - q) ** 2 * excess + q**2
    sigmas = shifted_sigmas(10_000, 1.0)
    variance = FLOW.sample(TRANSITIONS["flow_sde"](noise_level=noise_level), sigmas, range(4)).at(0.0, 1.0)[1]
    assert excess > 0.08
    assert variance / FLOW.marginal(sigmas[4])[1] == pytest.approx(1 + excess, abs=1e-3)


@pytest.mark.parametrize("name", ["cps", "precise", "ddim"])
@given(noise_level=st.floats(0, 1), num_steps=st.integers(2, 40), shift=st.floats(0.3, 12))
def test_the_noise_level_is_kept_by_every_step_and_so_is_the_law_of_point_data(name, noise_level, num_steps, shift):
    transition, sigmas = TRANSITIONS[name](noise_level=noise_level), shifted_sigmas(num_steps, shift)
    point = GaussianFlow(0.4, 0.0)
    for step in range(1, num_steps - 1):
        c = transition.coefficients(sigmas, step)
        assert math.hypot(c.b, c.std) == pytest.approx(sigmas[step + 1], rel=1e-12)
        after = point.after(Law(), c, sigmas[step]).at(*point.marginal(sigmas[step]))
        assert after == pytest.approx(point.marginal(sigmas[step + 1]), rel=1e-12)


@pytest.mark.parametrize("name", ["flow_sde", "dance_sde"])
@given(noise_level=st.floats(0.05, 1), num_steps=st.integers(3, 40), shift=st.floats(0.3, 12))
def test_an_euler_maruyama_step_leaves_more_noise_than_the_level_says(name, noise_level, num_steps, shift):
    """b^2 + std^2 = t'^2 + g^2 delta^2 / t + (g^2 delta / (2 t))^2 (Flow-CPS 2509.05952)."""
    sigmas = shifted_sigmas(num_steps, shift)
    for step in range(1, num_steps - 1):
        c, t, t_next = TRANSITIONS[name](noise_level=noise_level).coefficients(sigmas, step), *sigmas[step : step + 2]
        injected = noise_level**2 * (t - t_next) * (t / (1 - t) if name == "flow_sde" else 1)
        total = t_next**2 + injected * (t - t_next) / t + (injected / (2 * t)) ** 2
        assert c.b**2 + c.std**2 == pytest.approx(total, rel=1e-10)


@pytest.mark.parametrize("noise_level", NOISE_LEVELS)
def test_cps_of_a_fixed_noise_level_shrinks_data_with_spread_by_a_known_factor(noise_level):
    """The limit is where a step gains what it loses: V (1 + c) / (2 - (1 - c) t^2 / V), c = cos(noise_level pi / 2)."""
    cosine, errors = math.cos(noise_level * math.pi / 2), []
    total = FLOW.marginal(0.3)[1]
    limit = (1 + cosine) / (2 - (1 - cosine) * 0.3**2 / total)
    for n in SIZES[2:]:
        after = FLOW.sample(TRANSITIONS["cps"](noise_level=noise_level), levels_between(0.7, 0.3, n, 3.0))
        errors.append(abs(after.at(*FLOW.marginal(0.7))[1] / total - limit))
    assert limit < 0.97
    assert order(errors, SIZES[2:]) == pytest.approx(1, abs=0.15)


def test_cps_over_the_whole_path_keeps_seventy_three_hundredths_of_the_variance():
    """(1 + cos(0.35 pi)) / 2 at noise level 0.7, whatever the data: the limit above for t -> 0."""
    sigmas = shifted_sigmas(1000, 1.0)
    variance = FLOW.sample(TRANSITIONS["cps"](noise_level=0.7), sigmas, range(999)).at(0.0, 1.0)[1]
    assert variance / FLOW.std**2 == pytest.approx((1 + math.cos(0.35 * math.pi)) / 2, abs=0.01)


def test_ancestral_ddim_is_precise_at_root_two_and_its_mean_given_x_is_exact_at_any_step_size():
    """With eta 1 a step draws from q(x' | x, x0) at x0 = E[x0 | x]: only the variance of x0 given x is missing."""
    ddim, precise = TRANSITIONS["ddim"](noise_level=1.0), TRANSITIONS["precise"](noise_level=math.sqrt(2))
    exact = FLOW.exact_sde(flow_diffusion(math.sqrt(2)), 0.9, 0.3)
    for num_steps in (1, 3, 10):
        sigmas = levels_between(0.9, 0.3, num_steps, 3.0)
        one, other = FLOW.sample(ddim, sigmas), FLOW.sample(precise, sigmas)
        assert (one.slope, one.offset) == pytest.approx((exact.slope, exact.offset), rel=1e-10)
        assert one.variance < exact.variance
        assert distance(one, other) < 1e-12


@pytest.mark.parametrize("name", TRANSITIONS)
def test_a_window_without_noise_is_the_euler_path(name):
    sigmas = shifted_sigmas(25, 3.0)
    silent = FLOW.sample(TRANSITIONS[name](noise_level=0.0), sigmas)
    assert silent.variance == 0
    assert distance(silent, FLOW.solve(SOLVERS["euler"](), sigmas)) < 1e-13


@pytest.mark.parametrize("name", TRANSITIONS)
def test_the_log_ratio_of_a_changed_velocity_is_minus_its_kl_in_the_mean(name):
    """E log rho = -|d mean|^2 / (2 std^2), d mean = (b (1 - t) - a t) dv; three Gauss-Hermite nodes integrate a square."""
    sigmas, transition, dv = shifted_sigmas(10, 3.0), TRANSITIONS[name](noise_level=0.5), 0.03
    nodes, weights = (torch.tensor(values)[:, None] for values in np.polynomial.hermite_e.hermegauss(3))
    for step in range(9):
        x, c = torch.full((3, 1), 0.2, dtype=torch.float64), transition.coefficients(sigmas, step)
        old, new = (law(transition, Prediction(x, x - u, sigmas[step]), sigmas, step) for u in (1.0, 1.0 - dv))
        sampled = old.sample(nodes)
        expected = (weights[:, 0] * (new.log_density(sampled) - old.log_density(sampled))).sum() / weights.sum()
        shift = (c.b * (1 - sigmas[step]) - c.a * sigmas[step]) * dv
        assert expected.item() == pytest.approx(-(shift**2) / (2 * c.std**2), rel=1e-5)


def errors_of(name: str, high: float, low: float, shift: float, sizes: Sequence[int]) -> list[float]:
    """Distance from the exact flow, summed over data of two spreads."""
    return [
        sum(distance(f.solve(SOLVERS[name](), levels_between(high, low, n, shift)), f.exact_ode(high, low)) for f in SPREADS)
        for n in sizes
    ]


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize(("name", "expected"), [("euler", 1), ("heun", 2), ("dpmpp_2m", 2)])
def test_every_solver_has_its_order_between_the_ends(name, expected, shift):
    for high, low in ((0.9, 0.1), (0.7, 0.3)):
        assert order(errors_of(name, high, low, shift, SIZES[1:4]), SIZES[1:4]) == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize(("name", "expected"), [("euler", 1), ("heun", 2)])
def test_euler_and_heun_keep_their_order_from_noise_to_data(name, expected):
    assert order(errors_of(name, 1.0, 0.0, 3.0, SIZES[1:4]), SIZES[1:4]) == pytest.approx(expected, abs=0.1)


def test_dpmpp_loses_no_more_than_a_logarithm_from_noise_to_data():
    """The log-SNR is infinite at both ends; the error falls as log(n) / n^2, measured as n^2 error / log n settling."""
    sizes = (80, 160, 320, 640)
    errors = errors_of("dpmpp_2m", 1.0, 0.0, 1.0, sizes)
    scaled = [error * n**2 / math.log(n) for error, n in zip(errors, sizes, strict=True)]
    assert max(scaled) < 1.25 * min(scaled)
    assert errors[-1] < errors_of("euler", 1.0, 0.0, 1.0, sizes)[-1] / 50


@settings(max_examples=30)
@given(num_steps=st.integers(1, 40), shift=st.floats(0.3, 12), first=st.sampled_from([1.0, 0.9999, 0.8]))
def test_dpmpp_without_history_is_euler(num_steps, shift, first):
    sigmas = levels_between(first, 0.0, num_steps, shift)
    without = FLOW.solve(SOLVERS["dpmpp_2m"](), sigmas, with_history=False)
    assert distance(without, FLOW.solve(SOLVERS["euler"](), sigmas)) < 1e-12


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("first", [1.0, 0.99999994, 0.999])
def test_every_solver_starts_at_sigma_one_and_keeps_the_mean(name, first):
    sigmas = levels_between(first, 0.0, 8, 3.0)
    path = FLOW.solve(SOLVERS[name](), sigmas)
    assert math.isfinite(path.slope)
    assert path.at((1 - first) * FLOW.mean, 1.0)[0] == pytest.approx(FLOW.mean, abs=1e-12)


@pytest.mark.parametrize("name", SOLVERS)
def test_the_step_to_sigma_zero_gives_the_predicted_data(name):
    x, sigmas = torch.tensor([[-1.3, 0.2, 2.0]], dtype=torch.float64), (1.0, 0.8, 0.4, 0.0)
    now, before = FLOW.predict(x, 0.4), FLOW.predict(x + 0.5, 0.8)
    assert SOLVERS[name]().calls(sigmas, 2) == 1
    torch.testing.assert_close(SOLVERS[name]().step([now], sigmas, 2, before), now.x0, rtol=0, atol=1e-15)
