"""Grids: levels fall from noise to exactly 0, shifted once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowgrpo.schedule import Explicit, Grid, Pipeline, Shifted, check_sigmas, shifted_sigmas


@given(st.integers(1, 200), st.floats(0.2, 20))
def test_shifted_levels_fall_strictly_from_one_to_zero(num_steps, shift):
    sigmas = shifted_sigmas(num_steps, shift)
    assert len(sigmas) == num_steps + 1
    assert sigmas[0] == 1
    check_sigmas(sigmas)


def test_shift_three_on_ten_steps_is_the_published_grid():
    expected = [1, 0.964286, 0.923077, 0.875, 0.818182, 0.75, 0.666667, 0.5625, 0.428571, 0.25, 0]
    assert shifted_sigmas(10, 3.0) == pytest.approx(expected, abs=1e-6)


def test_the_shift_is_applied_once():
    assert shifted_sigmas(1000, 3.0)[-2] == pytest.approx(3e-3 / (1 + 2e-3), rel=1e-9)  # 0.00299, not 0.00893


def test_shift_one_is_uniform():
    assert shifted_sigmas(4, 1.0) == pytest.approx((1, 0.75, 0.5, 0.25, 0))


@pytest.mark.parametrize("levels", [[1.0, 0.5, 0.5, 0.0], [0.5, 1.0, 0.0], [1.0, 0.5], [1.2, 0.5, 0.0], [1.0, -0.1, 0.0]])
def test_levels_that_do_not_fall_to_zero_are_refused(levels):
    with pytest.raises(ValueError, match="fall strictly"):
        check_sigmas(levels)


def test_zero_steps_are_refused_and_one_step_is_allowed():
    with pytest.raises(ValueError, match="at least one step"):
        check_sigmas([0.0])
    with pytest.raises(ValueError, match="at least 1"):
        shifted_sigmas(0)
    assert shifted_sigmas(1, 3.0) == (1.0, 0.0)


def test_explicit_levels_must_be_as_many_as_the_steps_need():
    assert Explicit([1.0, 0.4, 0.0]).sigmas(2) == (1.0, 0.4, 0.0)
    with pytest.raises(ValueError, match=r"has 3 levels, but sampler.num_steps=4 needs 5"):
        Explicit([1.0, 0.4, 0.0]).sigmas(4)


def test_a_grid_refuses_timesteps_of_another_length():
    with pytest.raises(ValueError, match="as many timesteps"):
        Grid((1.0, 0.5, 0.0), torch.zeros(3))


def test_only_the_pipelines_own_schedule_leaves_the_levels_to_the_pipeline():
    assert Pipeline().sigmas(7) is None
    assert Shifted(2.0).sigmas(7) == shifted_sigmas(7, 2.0)
