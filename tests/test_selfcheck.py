"""The self-check: passes on a sound run, and catches what it is there for."""

from dataclasses import replace

import pytest
import torch

from flowgrpo.build import build
from flowgrpo.choices import when
from flowgrpo.plan import cost, describe, micro_batches
from flowgrpo.selfcheck import check_members_differ, check_noise_off, check_ratio, selfcheck
from flowgrpo.transitions import Prediction
from tests.toys import config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("selfcheck")


def probe(parts):
    from flowgrpo.selfcheck import _probe

    return _probe(parts)


def test_a_sound_run_passes_every_check(folder):
    checks = list(selfcheck(build(config(folder))))
    assert [c.name for c in checks] == ["noise off", "ratio 1", "members differ"]
    assert all(c.passed and not c.warning for c in checks)


def test_a_velocity_of_the_wrong_sign_is_caught(folder, monkeypatch):
    parts = build(config(folder))
    monkeypatch.setattr("flowgrpo.mdp_scheduler.Prediction", lambda x, v, sigma: Prediction(x, -v, sigma))
    check = check_noise_off(parts)
    assert not check.passed
    assert "FlowMatchEulerDiscreteScheduler" in check.message


def test_a_replay_that_differs_from_the_rollout_is_caught(folder):
    parts = build(config(folder))
    trajectory = probe(parts)
    assert check_ratio(parts, trajectory).passed
    assert not check_ratio(parts, replace(trajectory, log_probs=trajectory.log_probs + 1e-4)).passed


def test_a_group_of_equal_samples_is_caught(folder):
    trajectory = probe(build(config(folder)))
    assert check_members_differ(trajectory).passed
    assert not check_members_differ(replace(trajectory, x0=torch.zeros_like(trajectory.x0))).passed


def test_other_levels_than_the_pipelines_are_a_note_and_not_a_failure(folder):
    check = check_noise_off(build(config(folder, sampler__schedule={"use": "shifted", "shift": 5.0})))
    assert check.passed
    assert check.warning
    assert "other levels" in check.message


def test_bfloat16_says_when_rounding_eats_the_clip_band(folder):
    parts = build(config(folder, model__dtype="bfloat16", objective__clip_range=1e-5, optimizer__micro_batch_size=1))
    trajectory = probe(parts)
    off = replace(trajectory, log_probs=trajectory.log_probs + 1e-4)
    check = check_ratio(parts, off)
    assert check.passed
    assert check.warning
    assert "1e-05" in check.message
    assert "raise objective.clip_range" in check.message


def test_a_summed_density_with_a_clip_range_meant_for_a_mean_is_noted(folder):
    parts = build(config(folder, objective__reduce="sum", objective__clip_range=1e-4, optimizer__micro_batch_size=1))
    check = check_ratio(parts, probe(parts))
    assert check.passed
    assert check.warning
    assert "near 0.2 is usual" in check.message


def first_cost(parts):
    batches = micro_batches(parts.geometry, parts.config.optimizer.micro_batch_size)
    dynamics = parts.dynamics(parts.choices.window.at(when(parts.config, 0)))
    return cost(dynamics, parts.choices.group_noise, parts.config.group_size, batches)


def test_the_plan_counts_calls_as_they_will_be_counted(folder):
    parts = build(config(folder))
    text = describe(parts)
    assert "2 prompts x 4 samples = 8 samples" in text["groups"]
    assert "2 an iteration, 12 in all" in text["updates"]
    assert str(first_cost(parts)) in text["calls a sample"]
    assert "2 micro-batches x 2 steps" in text["updates"]
