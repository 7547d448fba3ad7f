"""Windows: their length, their place, their sweep."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowgrpo.window import WINDOWS, All, Frozen, Progressive, Random


@st.composite
def fitting(draw):
    num_steps = draw(st.integers(2, 64))
    size = draw(st.integers(1, num_steps - 1))
    return num_steps, size


@given(fitting(), st.integers(0, 2000), st.integers(0, 5), st.integers(1, 30), st.integers(1, 5))
def test_every_window_has_its_size_and_leaves_the_last_step_alone(shape, iteration, seed, interval, stride):
    num_steps, size = shape
    for window in (Progressive(size, interval, stride), Random(size), Frozen(size)):
        steps = window.at(iteration, num_steps, seed)
        assert len(steps) == size
        assert 0 <= steps.start < steps.stop <= num_steps - 1


def test_progressive_follows_algorithm_1_of_mixgrpo():
    window = Progressive(size=4, interval=25, stride=1)
    left = 0
    for iteration in range(700):
        if iteration and iteration % 25 == 0:
            left = min(left + 1, 25 - 1 - 4)
        assert window.at(iteration, 25, seed=0) == range(left, left + 4)


def test_a_progressive_sweep_visits_every_start_and_stays_at_the_last():
    starts = [Progressive(3, 2, 1).at(k, 10, 0).start for k in range(40)]
    assert sorted(set(starts)) == list(range(7))
    assert starts == sorted(starts)


def test_random_windows_cover_every_allowed_start_and_are_keyed_by_seed_and_iteration():
    window = Random(size=3)
    starts = [window.at(k, 10, seed=1).start for k in range(700)]
    counts = [starts.count(s) for s in range(7)]
    assert sum(counts) == 700
    assert min(counts) > 60
    assert starts == [window.at(k, 10, seed=1).start for k in range(700)]
    assert starts != [window.at(k, 10, seed=2).start for k in range(700)]


def test_random_windows_stay_in_their_bounds():
    starts = {Random(3, low=1, high=4).at(k, 10, seed=0).start for k in range(200)}
    assert starts == {1, 2, 3, 4}


def test_all_is_every_step_but_the_last():
    assert All().at(7, 10, 0) == range(9)


@pytest.mark.parametrize("name", ["progressive", "random", "frozen"])
def test_a_window_that_does_not_fit_is_refused_with_the_remedy(name):
    with pytest.raises(ValueError, match=r"window.size=12 does not fit.*sampler.num_steps=10.*lower window.size or raise"):
        WINDOWS[name](size=12).at(0, 10, 0)


def test_a_window_on_a_single_step_is_refused():
    for window in WINDOWS.values():
        with pytest.raises(ValueError, match="does not fit"):
            window().at(0, 1, 0)


@pytest.mark.parametrize("bad", [Frozen(4, start=6), Frozen(4, start=-1), Random(4, low=3, high=2), Random(4, high=9)])
def test_starts_outside_the_trajectory_are_refused(bad):
    with pytest.raises(ValueError, match="must"):
        bad.at(0, 10, 0)


def test_a_window_that_never_moves_is_refused_by_the_progressive_rule():
    with pytest.raises(ValueError, match="frozen"):
        Progressive(interval=0)
