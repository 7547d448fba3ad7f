"""The variance window: it goes where rewards vary, starves no step, and remembers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowgrpo.build import build
from flowgrpo.metrics import Metrics
from flowgrpo.probe import probe, within_group_variance
from flowgrpo.trainer import Trainer
from flowgrpo.variance_window import Variance
from flowgrpo.window import When
from tests.toys import config


def run(window, variances, iterations, num_steps):
    seen = []
    for k in range(iterations):
        moment = When(k, iterations, num_steps, 0)
        if window.wants_probe(moment):
            window.observe(dict(enumerate(variances)))
        seen.append(window.at(moment))
        window.count(seen[-1])
    return seen


def test_it_goes_where_the_variance_is_and_trains_every_step_sometimes():
    variances = [0.01] * 9
    variances[5] = 1.0
    seen = run(Variance(size=2), variances, 300, 10)
    assert sum(5 in window for window in seen) > 200
    assert {step for window in seen for step in window} == set(range(9))


@given(st.integers(2, 20), st.data())
def test_it_has_its_size_and_stays_inside(num_steps, data):
    size = data.draw(st.integers(1, num_steps - 1))
    variances = data.draw(st.lists(st.floats(0, 1e3), min_size=num_steps - 1, max_size=num_steps - 1))
    for window in run(Variance(size=size), variances, 12, num_steps):
        assert len(window) == size
        assert window.start >= 0
        assert window.stop <= num_steps - 1


def test_steps_that_were_never_measured_are_tried_first():
    window = Variance(size=1, exploration=1e-6)
    window.observe({0: 1.0, 1: 2.0})
    assert window.at(When(0, 9, 5, 0)).start != 0  # 1 is the highest, 2 and 3 count as high until they are measured
    window.observe({2: 0.5, 3: 0.1})
    assert window.at(When(0, 9, 5, 0)) == range(1, 2)


def test_its_state_survives_a_checkpoint():
    window, other = Variance(size=2), Variance(size=2)
    run(window, [0.1, 0.9, 0.3, 0.2], 7, 5)
    other.load_state_dict(window.state_dict())
    assert other.at(When(7, 9, 5, 0)) == window.at(When(7, 9, 5, 0))
    assert other.state_dict() == window.state_dict()


@pytest.mark.parametrize("wrong", [{"every": 0}, {"branches": 1}, {"exploration": 0.0}, {"memory": 1.0}, {"trained": [1]}])
def test_settings_that_cannot_work_are_refused(wrong):
    with pytest.raises(ValueError, match=r"window\."):
        Variance(**wrong)


def test_within_group_variance_is_the_mean_over_groups_without_the_missing():
    signal, ids = torch.tensor([1.0, 3.0, 5.0, float("nan"), 7.0, 7.0]), torch.tensor([0, 0, 1, 1, 2, 2])
    assert within_group_variance(signal, ids) == pytest.approx((2.0 + 0.0) / 2)
    assert within_group_variance(signal[2:4], ids[2:4]) != within_group_variance(signal[2:4], ids[2:4])


CHANGES = {"sampler__window": {"use": "variance", "size": 1, "every": 2, "branches": 3, "probe_prompts": 1}, "iterations": 4}


def test_a_probe_measures_every_step_and_counts_its_calls(tmp_path):
    parts = build(config(tmp_path, **CHANGES))
    assert probe(parts, When(1, 4, 4, 0)) == 0
    calls = probe(parts, When(0, 4, 4, 0))
    assert calls == sum(step + 3 * (4 - step) for step in range(3))  # one prompt, three branches, a shared path before them
    state = parts.choices.window.state_dict()
    assert len(state["variances"]) == 3
    assert all(v > 0 for v in state["variances"])


def test_a_resumed_run_has_the_windows_of_the_straight_one(tmp_path):
    def trainer():
        return Trainer(build(config(tmp_path, **CHANGES)), Metrics(tmp_path / "m.jsonl"))

    straight = trainer()
    straight.run(4)
    first = trainer()
    first.run(3)
    second = trainer()
    second.resume(first.save())
    second.run(4)
    assert second.parts.choices.window.state_dict() == straight.parts.choices.window.state_dict()
    for name, p in straight.parts.trained.items():
        assert torch.equal(p, second.parts.trained[name])


def test_an_iteration_given_up_after_its_probe_leaves_the_window_as_it_was(tmp_path):
    def trainer(name):
        return Trainer(build(config(tmp_path, name=name, **CHANGES)), Metrics(tmp_path / f"{name}.jsonl"))

    straight = trainer("straight")
    straight.run(4)
    first = trainer("stopped")
    first.run(2)
    first.parts.choices.window.observe = _stopping(first)
    assert first.run(4) is False
    second = trainer("stopped")
    second.resume(tmp_path / "runs" / "stopped" / "checkpoints" / "it000002")
    second.run(4)
    assert second.parts.choices.window.state_dict() == straight.parts.choices.window.state_dict()
    for name, p in straight.parts.trained.items():
        assert torch.equal(p, second.parts.trained[name])


def _stopping(trainer):
    """The window's own `observe`, after which the run is asked to stop."""
    own = trainer.parts.choices.window.observe

    def observe(variances):
        own(variances)
        trainer.stop_asked = True

    return observe


def test_more_probe_prompts_than_an_iteration_has_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"probe_prompts=3 must be at most prompts_per_iteration=2"):
        build(config(tmp_path, sampler__window={"use": "variance", "size": 1, "probe_prompts": 3}))
