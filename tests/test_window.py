"""Windows: their length, their place, their sweep."""

import math
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowgrpo.window import (
    WINDOWS,
    All,
    Coverage,
    ExponentialDecay,
    Frozen,
    LinearDecay,
    OneStep,
    Progressive,
    Random,
    When,
)


def at(window, iteration, num_steps, seed=0, iterations=1000):
    return window.at(When(iteration, iterations, num_steps, seed))


def starts(window, iterations, num_steps, seed=0):
    return [at(window, k, num_steps, seed, iterations).start for k in range(iterations)]


@st.composite
def moments(draw):
    """A moment of a run and a size that fits."""
    num_steps, iterations = draw(st.integers(2, 64)), draw(st.integers(1, 2000))
    when = When(draw(st.integers(0, iterations - 1)), iterations, num_steps, draw(st.integers(0, 5)))
    return when, draw(st.integers(1, num_steps - 1))


sweeps = {"interval": st.integers(1, 8), "stride": st.integers(1, 5), "roll_back": st.booleans()}


@settings(deadline=None)
@given(moments(), st.data())
def test_every_window_has_its_size_and_leaves_the_last_step_alone(moment, data):
    when, size = moment
    interval, stride, roll_back = (data.draw(values) for values in sweeps.values())
    every = {
        "all": (All(), when.num_steps - 1),
        "progressive": (Progressive(size, interval, stride, roll_back), size),
        "linear_decay": (LinearDecay(size, interval, 1, stride, roll_back), size),
        "exponential_decay": (ExponentialDecay(size, interval, 0.1, 13, stride, roll_back), size),
        "coverage": (Coverage(size), size),
        "random": (Random(size), size),
        "frozen": (Frozen(size), size),
        "one_step": (OneStep(), 1),
    }
    assert every.keys() == {name for name, made in WINDOWS.items() if made.__module__ == "flowgrpo.window"}
    for window, length in every.values():
        steps = window.at(when)
        assert len(steps) == length
        assert steps.step == 1
        assert 0 <= steps.start < steps.stop <= when.num_steps - 1


def test_progressive_follows_algorithm_1_of_mixgrpo():
    window = Progressive(size=4, interval=25, stride=1)
    left = 0
    for iteration in range(700):
        if iteration and iteration % 25 == 0:
            left = min(left + 1, 25 - 1 - 4)
        assert at(window, iteration, 25) == range(left, left + 4)


def walk(iterations, num_steps, size, stride, roll_back, interval):
    """The starts of a sweep, counted out move by move."""
    last, left, stayed, visited = num_steps - 1 - size, 0, 0, []
    for _ in range(iterations):
        if stayed >= interval(left, last):
            left = 0 if left == last and roll_back else min(left + stride, last)
            stayed = 0
        visited.append(left)
        stayed += 1
    return visited


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 20), st.data())
def test_a_sweep_moves_on_after_each_interval_and_visits_every_start_of_its_stride(num_steps, data):
    size = data.draw(st.integers(1, num_steps - 1))
    interval, stride, roll_back = (data.draw(values) for values in sweeps.values())
    last = num_steps - 1 - size
    sweeping = {
        Progressive(size, interval, stride, roll_back): lambda left, last: interval,
        LinearDecay(size, interval, 1, stride, roll_back): lambda left, last: (
            interval if last == 0 else math.floor((interval * (last - left) + left) / last)
        ),
        ExponentialDecay(size, interval, 0.1, 13, stride, roll_back): lambda left, last: math.ceil(
            interval * math.exp(-0.1 * max(0, left - 13))
        ),
    }
    for window, rule in sweeping.items():
        visited = starts(window, 200, num_steps)
        assert visited == walk(200, num_steps, size, stride, roll_back, rule)
        assert set(visited) == {*range(0, last, stride), last}
        assert roll_back or visited[-1] == last


def test_a_sweep_that_rolls_back_gives_the_last_start_its_full_interval():
    counts = Counter(starts(Progressive(size=4, interval=25, roll_back=True), 2 * 21 * 25, 25))
    assert counts == dict.fromkeys(range(21), 50)


def test_linear_decay_goes_from_its_longest_interval_to_its_shortest():
    counts = Counter(starts(LinearDecay(size=4, max_interval=10, min_interval=1, roll_back=True), 2 * 55, 14))
    assert counts == {start: 2 * (10 - start) for start in range(10)}


def test_exponential_decay_is_constant_up_to_its_threshold_and_faster_beyond():
    counts = Counter(starts(ExponentialDecay(size=4, interval=25, rate=0.1, threshold=13), 2000, 64))
    assert [counts[start] for start in range(14)] == [25] * 14
    assert [counts[start] for start in (14, 15, 20, 40)] == [23, 21, 13, 2]  # ceil(25 exp(-0.1 (start - 13)))


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 64), st.integers(1, 200), st.data())
def test_coverage_gives_every_start_an_even_share_of_the_run_and_ends_at_the_last(num_steps, iterations, data):
    size = data.draw(st.integers(1, num_steps - 1))
    last = num_steps - 1 - size
    visited = starts(Coverage(size), iterations, num_steps)
    counts = Counter(visited)
    assert visited == sorted(visited)
    assert visited[-1] == last
    if iterations > last:
        assert set(counts) == set(range(last + 1))
        assert max(counts.values()) - min(counts.values()) <= 1
    else:
        assert max(counts.values()) == 1
        assert iterations == 1 or visited[0] == 0
        gaps = [b - a for a, b in pairwise(visited)]
        assert max(gaps, default=0) - min(gaps, default=0) <= 1


def test_coverage_stays_at_the_last_start_beyond_the_end():
    assert at(Coverage(3), 250, 10, iterations=100) == range(6, 9)


def test_random_windows_cover_every_allowed_start_and_are_keyed_by_seed_and_iteration():
    drawn = starts(Random(size=3), 700, 10, seed=1)
    counts = [drawn.count(s) for s in range(7)]
    assert sum(counts) == 700
    assert min(counts) > 60
    assert drawn == starts(Random(size=3), 700, 10, seed=1)
    assert drawn != starts(Random(size=3), 700, 10, seed=2)


def test_random_windows_stay_in_their_bounds():
    assert set(starts(Random(3, low=1, high=4), 200, 10)) == {1, 2, 3, 4}


def test_one_step_is_any_step_but_the_last_or_those_that_were_asked_for():
    assert set(starts(OneStep(), 300, 10)) == set(range(9))
    assert set(starts(OneStep(low=2, high=4), 100, 10)) == {2, 3, 4}
    assert len(at(OneStep(), 0, 10)) == 1


def test_all_is_every_step_but_the_last():
    assert at(All(), 7, 10) == range(9)


sized = [name for name in WINDOWS if name not in ("all", "one_step")]


@pytest.mark.parametrize("name", sized)
def test_a_window_that_does_not_fit_is_refused_with_the_remedy(name):
    with pytest.raises(ValueError, match=r"window.size=12 does not fit.*sampler.num_steps=10.*lower window.size or raise"):
        at(WINDOWS[name](size=12), 0, 10)
    with pytest.raises(ValueError, match=r"window\.size must be at least 1"):
        at(WINDOWS[name](size=0), 0, 10)


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_on_a_single_step_is_refused(name):
    with pytest.raises(ValueError, match="does not fit"):
        at(WINDOWS[name](), 0, 1)


@pytest.mark.parametrize(
    "bad", [Frozen(4, start=6), Frozen(4, start=-1), Random(4, low=3, high=2), Random(4, high=9), OneStep(high=9)]
)
def test_starts_outside_the_trajectory_are_refused(bad):
    with pytest.raises(ValueError, match="must"):
        at(bad, 0, 10)


@pytest.mark.parametrize(
    ("window", "bad"),
    [
        (Progressive, {"interval": 0}),
        (Progressive, {"stride": 0}),
        (LinearDecay, {"min_interval": 0}),
        (LinearDecay, {"max_interval": 3, "min_interval": 4}),
        (LinearDecay, {"stride": 0}),
        (ExponentialDecay, {"interval": 0}),
        (ExponentialDecay, {"rate": -0.1}),
        (ExponentialDecay, {"rate": math.nan}),
        (ExponentialDecay, {"stride": 0}),
    ],
)
def test_a_sweep_that_cannot_move_is_refused(window, bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))}"):
        window(**bad)
