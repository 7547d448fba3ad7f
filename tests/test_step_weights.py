"""Step weights: their definition, their scale, what they make equal."""

from statistics import fmean, median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowgrpo.schedule import shifted_sigmas
from flowgrpo.step_weights import STEP_WEIGHTS, EqualWeights, NoiseWeights, NoWeights, StepSizeWeights
from flowgrpo.transitions import TRANSITIONS, Cps, FlowSde, sensitivity

SIGMAS = shifted_sigmas(10, 3.0)
ALL = [factory() for factory in TRANSITIONS.values()]


@pytest.mark.parametrize("name", STEP_WEIGHTS)
@settings(deadline=None, max_examples=30)
@given(st.sampled_from(ALL), st.integers(2, 64), st.floats(0.3, 12), st.booleans(), st.data())
def test_every_window_step_has_one_positive_factor(name, transition, num_steps, shift, budget_neutral, data):
    first = data.draw(st.integers(0, num_steps - 2))
    window = range(first, data.draw(st.integers(first + 1, num_steps - 1)))
    sigmas = shifted_sigmas(num_steps, shift)
    weights = STEP_WEIGHTS[name](budget_neutral=budget_neutral)(transition, sigmas, window)
    assert list(weights) == list(window)
    assert all(0 < weight < float("inf") for weight in weights.values())
    if budget_neutral:
        assert fmean(weights.values()) == pytest.approx(1)


@pytest.mark.parametrize("name", STEP_WEIGHTS)
def test_a_step_counts_the_same_in_every_window_but_for_the_budget(name):
    whole = STEP_WEIGHTS[name]()(FlowSde(), SIGMAS, range(9))
    part = STEP_WEIGHTS[name]()(FlowSde(), SIGMAS, range(3, 6))
    neutral = STEP_WEIGHTS[name](budget_neutral=True)(FlowSde(), SIGMAS, range(3, 6))
    assert part == {step: whole[step] for step in range(3, 6)}
    for step in (4, 5):
        assert neutral[step] / neutral[3] == pytest.approx(part[step] / part[3])


@pytest.mark.parametrize("transition", ALL, ids=str)
def test_equal_step_weights_leave_every_step_the_same_size_of_gradient(transition):
    weights = EqualWeights()(transition, SIGMAS, range(9))
    sizes = [weights[step] * sensitivity(transition, SIGMAS, step) for step in range(9)]
    assert sizes == pytest.approx([sizes[0]] * 9)
    assert median(weights.values()) == pytest.approx(1)  # the median step keeps its own


def test_noise_weights_are_the_stds_in_units_of_their_mean():
    """CPS draws a fixed share of the next level as noise, so the share cancels."""
    weights = NoiseWeights()(Cps(0.5), SIGMAS, range(9))
    assert weights == pytest.approx({step: SIGMAS[step + 1] / fmean(SIGMAS[1:10]) for step in range(9)})
    assert fmean(weights.values()) == pytest.approx(1)


def test_step_size_weights_make_the_products_with_the_step_equal():
    weights = StepSizeWeights()(FlowSde(), SIGMAS, range(9))
    products = [weights[step] * (SIGMAS[step] - SIGMAS[step + 1]) for step in range(9)]
    assert products == pytest.approx([products[0]] * 9)
    assert fmean(weights.values()) == pytest.approx(1)


def test_without_weights_every_step_counts_as_it_is():
    assert NoWeights()(FlowSde(), SIGMAS, range(2, 5)) == {2: 1.0, 3: 1.0, 4: 1.0}
