"""Levels: in (0, 1], as many as asked for, keyed, spread as they say; and what the network says there."""

import statistics

import pytest
import torch

from flowgrpo.data import Prompt
from flowgrpo.group_noise import Distinct, Shared
from flowgrpo.levels import LEVELS, LogitNormal, OnGrid, Stratified, Uniform
from flowgrpo.policy import Conditions, Policy
from flowgrpo.rollout import Dynamics, Noise, Row, replay, rollout
from flowgrpo.schedule import Pipeline, shifted, shifted_sigmas
from flowgrpo.solvers import Euler
from flowgrpo.transitions import Cps, Ddim
from flowgrpo.window import When
from tests.test_discrete import stable_diffusion
from tests.tiny_pipelines import CALLS, build

SIGMAS = shifted_sigmas(10, 3.0)
PROMPTS = [Prompt("a red cube", 0), Prompt("two cats beside a dog", 1)]
ROWS = [Row(prompt, sample) for prompt in PROMPTS for sample in range(2)]


def at(levels, iteration, seed=0):
    return levels.at(When(iteration, 1000, 10, seed), SIGMAS)


@pytest.mark.parametrize("name", LEVELS)
def test_levels_are_as_many_as_asked_for_above_zero_and_keyed_by_seed_and_iteration(name):
    levels = LEVELS[name](count=3)
    drawn = [at(levels, k) for k in range(50)]
    assert all(len(one) == 3 and all(0 < sigma <= 1 for sigma in one) for one in drawn)
    assert drawn == [at(levels, k) for k in range(50)]
    assert len(set(drawn)) > 30
    assert at(levels, 0) != at(levels, 0, seed=1)


def test_uniform_levels_have_the_quantiles_of_their_interval_before_the_shift():
    drawn = [sigma for k in range(2000) for sigma in at(Uniform(2, 0.2, 0.8, shift=3.0), k)]
    for share, found in zip((0.25, 0.5, 0.75), statistics.quantiles(drawn, n=4), strict=True):
        assert found == pytest.approx(shifted(0.2 + 0.6 * share, 3.0), abs=0.02)


def test_stratified_levels_have_one_in_each_part():
    for k in range(100):
        assert [int(4 * sigma) for sigma in at(Stratified(4), k)] == [0, 1, 2, 3]


def test_logit_normal_levels_have_the_mean_and_spread_asked_for():
    drawn = torch.tensor([sigma for k in range(2000) for sigma in at(LogitNormal(2, 0.5, 0.7), k)], dtype=torch.float64).logit()
    assert drawn.mean() == pytest.approx(0.5, abs=0.04)
    assert drawn.std() == pytest.approx(0.7, abs=0.03)


def test_levels_of_the_grid_are_different_ones_of_it_and_each_has_its_turn():
    drawn = [at(OnGrid(4), k) for k in range(200)]
    assert all(len(set(one)) == 4 for one in drawn)
    assert {sigma for one in drawn for sigma in one} == set(SIGMAS[:-1])
    with pytest.raises(ValueError, match=r"levels.count=11 must be at most the 10 levels"):
        at(OnGrid(11), 0)


@pytest.mark.parametrize(
    ("name", "bad", "words"),
    [
        ("uniform", {"count": 0}, "count must be at least 1"),
        ("stratified", {"low": 0.5, "high": 0.5}, "0 <= low < high <= 1"),
        ("uniform", {"shift": 0.0}, "shift must be above 0"),
        ("logit_normal", {"std": 0.0}, "std must be above 0"),
    ],
)
def test_settings_out_of_range_are_refused(name, bad, words):
    with pytest.raises(ValueError, match=words):
        LEVELS[name](**bad)


def tiny_policy(name, guidance):
    if name == "epsilon":
        return Policy(stable_diffusion("epsilon"), Conditions(guidance, "blurry", height=16, width=16))
    size = {k: v for k, v in CALLS[name].items() if k in ("height", "width", "num_frames")}
    call = {k: v for k, v in CALLS[name].items() if k == "max_sequence_length"}
    return Policy(build(name), Conditions(guidance, "blurry", **size, call=call))


@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize("name", [*CALLS, "epsilon"])
def test_a_prediction_at_a_level_of_the_grid_is_the_one_of_the_replay(name, guidance):
    policy = tiny_policy(name, guidance)
    transition = Ddim() if name == "epsilon" else Cps()
    dynamics = Dynamics(policy.grid(5, Pipeline()), range(1, 4), transition, Euler())
    trajectory = rollout(policy, ROWS, dynamics, Noise(0, 0, Shared()), 4)
    for i, step in enumerate(dynamics.window):
        level = policy.level(dynamics.grid, dynamics.grid.sigmas[step])
        assert level.sigmas[0] == pytest.approx(dynamics.grid.sigmas[step], abs=1e-6)
        predicted = policy.predict(trajectory.prompts, trajectory.latents[:, i], level)
        replayed = replay(policy, trajectory, range(4), step, grad=False).prediction
        torch.testing.assert_close(predicted.v, replayed.v, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(predicted.x, replayed.x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["sd3", "wan"])
def test_between_the_levels_of_the_grid_the_network_is_told_what_lies_between(name):
    policy = tiny_policy(name, 1.0)
    grid = policy.grid(5, Pipeline())
    a, b = float(grid.timesteps[2]), float(grid.timesteps[1])
    level = policy.level(grid, 0.7 * grid.sigmas[2] + 0.3 * grid.sigmas[1])
    assert float(level.timesteps[0]) == pytest.approx(0.7 * a + 0.3 * b, abs=0.51 if name == "wan" else 1e-3)
    assert float(policy.level(grid, 1.0).timesteps[0]) == pytest.approx(float(grid.timesteps[0]) / grid.sigmas[0], abs=0.51)
    assert level.timesteps.dtype == grid.timesteps.dtype


def test_a_model_with_discrete_levels_is_asked_at_the_nearest_that_it_knows():
    policy = tiny_policy("epsilon", 1.0)
    grid = policy.grid(5, Pipeline())
    for sigma in (0.1, 0.45, 0.9):
        level = policy.level(grid, sigma)
        number, scale = int(level.timesteps[0]), level.scales[0]
        kept = float(policy.own_scheduler.alphas_cumprod[number])
        assert level.sigmas[0] == pytest.approx(sigma, abs=5e-3)
        assert scale * (1 - level.sigmas[0]) == pytest.approx(kept**0.5, abs=1e-5)


def test_a_prediction_carries_the_gradient_only_where_it_is_asked_to():
    policy = tiny_policy("sd3", 1.0)
    x = plain_x0(policy)
    weight = next(p for p in policy.networks["transformer"].parameters() if p.dim() > 1).requires_grad_()
    level = policy.level(policy.grid(5, Pipeline()), 0.5)
    assert not policy.predict(PROMPTS, x, level).v.requires_grad
    policy.predict(PROMPTS, x, level, grad=True).v.square().mean().backward()
    assert weight.grad.abs().max() > 0


def plain_x0(policy):
    rows = [Row(prompt, 0) for prompt in PROMPTS]
    return rollout(policy, rows, Dynamics(policy.grid(3, Pipeline()), range(0), Cps(), Euler()), Noise(0, 0, Distinct()), 2).x0


def test_without_a_window_samples_are_those_of_plain_inference():
    policy = tiny_policy("sd3", 4.0)
    noise = Noise(0, 3, Distinct())
    trajectory = rollout(policy, ROWS, Dynamics(policy.grid(5, Pipeline()), range(0), Cps(), Euler()), noise, 4)
    own = policy.generate(trajectory.prompts, 5, [noise.start(row, range(0)) for row in ROWS])
    torch.testing.assert_close(trajectory.media, own, rtol=0, atol=1e-4)
    assert trajectory.calls == 4 * 5
    assert trajectory.log_probs.shape == (4, 0)
