"""The comparison with other implementations, on vectors from formulas in float64 that share no code with ours."""

import copy
import json
import sys
from itertools import pairwise

import numpy as np
import pytest

from scripts.golden import main

RNG = np.random.default_rng(0)
SIGMAS = np.array([1.0, 0.9, 0.75, 0.6, 0.3, 0.0])


def transition(name, step, noise_level):
    """x - (v + g^2 / (2 t) eps) delta and g sqrt(delta), or Flow-CPS's coefficients and its log-density without variance."""
    x, v, z = RNG.standard_normal((3, 2, 3, 5))
    t, t_next = SIGMAS[step], SIGMAS[step + 1]
    eps, x0, delta = x + (1 - t) * v, x - t * v, t - t_next
    if name == "cps":
        angle = noise_level * np.pi / 2
        mean, std = (1 - t_next) * x0 + t_next * np.cos(angle) * eps, t_next * np.sin(angle)
    else:
        g = noise_level if name == "dance_sde" else noise_level * np.sqrt(t / (1 - (SIGMAS[1] if step == 0 else t)))
        mean, std = x - (v + g**2 / (2 * t) * eps) * delta, g * np.sqrt(delta)
    log_prob = -((std * z) ** 2) if name == "cps" else -(z**2) / 2 - np.log(std * np.sqrt(2 * np.pi))
    record = {"transition": name, "step": step, "noise_level": noise_level, "sigmas": SIGMAS, "x": x, "velocity": v, "noise": z,
              "mean": mean, "std": std, "x_next": mean + std * z, "log_prob": log_prob.mean((1, 2))}  # fmt: skip
    return record | ({"log_prob_form": "without variance"} if name == "cps" else {})


def solver():
    """Euler on the slope of Gaussian data, then DPM-Solver++ with its data prediction D (MixGRPO-Flash)."""
    mean, std, x = 0.4, 0.6, RNG.standard_normal((2, 3, 5))
    start, path, history = x, [], []
    for step, (t, t_next) in enumerate(pairwise(SIGMAS)):
        total = (1 - t) ** 2 * std**2 + t**2
        x0 = mean + (1 - t) * std**2 / total * (x - (1 - t) * mean)
        velocity = t / total * (x - (1 - t) * mean) - x0
        history.append((np.log((1 - t) / t) if t < 1 else None, x0))
        if step < 2:
            x = x + (t_next - t) * velocity
        elif t_next == 0:
            x = x0
        else:
            h, h_last = np.log((1 - t_next) / t_next) - history[-1][0], history[-1][0] - history[-2][0]
            data = (1 + h / (2 * h_last)) * x0 - h / (2 * h_last) * history[-2][1]
            x = t_next / t * x - (1 - t_next) * np.expm1(-h) * data
        path.append(x)
    return {"solver": "dpmpp_2m", "sigmas": SIGMAS, "first_solver_step": 2, "data_mean": mean, "data_std": std,
            "x_start": start, "path": path}  # fmt: skip


def windows():
    """Two iterations a start, and then a window that shrinks at the end, which is not compared."""
    starts = [0, 0, 1, 1, 2, 2, 3, 3]
    return {"num_steps": 6, "size": 3, "interval": 2, "stride": 1, "windows": [list(range(s, min(s + 3, 5))) for s in starts]}


def advantages():
    """One group at a time."""
    scores, ids = RNG.random((6, 2)), np.array([0, 1, 1, 0, 0, 1])
    group, world, standard = np.zeros(6), np.zeros(6), np.zeros(6)
    for i in range(6):
        mine = scores[ids == ids[i]]
        deviation = scores[i].sum() - mine.sum(1).mean()
        group[i] = deviation / (mine.sum(1).std() + 1e-4)
        world[i] = deviation / (scores.sum(1).std() + 1e-4)
        standard[i] = ((scores[i] - mine.mean(0)) / (mine.std(0, ddof=1) + 1e-8)).mean()
    return {"scores": scores, "group_ids": ids, "flow_grpo_sum_group_std": group, "flow_grpo_sum_global_std": world,
            "mixgrpo_standardized_sum": standard}  # fmt: skip


def plain(value):
    """Arrays as lists."""
    return json.loads(json.dumps(value, default=lambda a: a.tolist()))


STEPS = [("flow_sde", 0, 0.7), ("flow_sde", 2, 0.7), ("dance_sde", 0, 0.3), ("dance_sde", 3, 0.3), ("cps", 1, 0.8)]
RECORDS = plain([*(transition(*step) for step in STEPS), solver(), windows(), advantages()])


@pytest.fixture
def golden(tmp_path, monkeypatch):
    """Runs the script on records."""

    def run(records, *options):
        file = tmp_path / "vectors.json"
        file.write_text(json.dumps(records))
        monkeypatch.setattr(sys, "argv", ["golden.py", str(file), *options])
        return main()

    return run


def test_our_functions_agree_with_the_formulas(golden, capsys):
    assert golden(RECORDS) == 0
    printed = capsys.readouterr().out
    for kind in ("flow_sde mean", "cps log_prob (unit)", "dpmpp_2m path", "windows (6 of 8", "mixgrpo_standardized_sum"):
        assert kind in printed
    assert "FAIL" not in printed


def disturbed(record, key):
    """A copy with one number moved by a thousandth, or one window by a step."""
    record = copy.deepcopy(record)
    if isinstance(record[key], float):
        record[key] += 1e-3
        return [record]
    inner = record[key]
    while isinstance(inner[0], list):
        inner = inner[0]
    inner[0] += 1 if key == "windows" else 1e-3
    return [record]


COMPARED = {
    "transition": ["mean", "std", "x_next", "log_prob"],
    "solver": ["path"],
    "windows": ["windows"],
    "scores": ["flow_grpo_sum_group_std", "flow_grpo_sum_global_std", "mixgrpo_standardized_sum"],
}


@pytest.mark.parametrize(
    ("record", "key"), [(r, key) for r in RECORDS for kind, keys in COMPARED.items() if kind in r for key in keys]
)
def test_a_single_number_that_differs_fails(golden, capsys, record, key):
    assert golden(disturbed(record, key)) == 1
    assert "FAIL" in capsys.readouterr().out


def test_the_tolerance_can_be_set_but_not_for_windows(golden):
    assert golden(disturbed(RECORDS[0], "std"), "--tolerance", "0.1") == 0
    assert golden(disturbed(RECORDS[-2], "windows"), "--tolerance", "0.1") == 1


def test_what_is_not_a_number_or_of_another_shape_fails(golden):
    assert golden([RECORDS[0] | {"std": float("nan")}]) == 1
    assert golden([RECORDS[0] | {"log_prob": [0.0, 0.0, 0.0]}]) == 1


def test_records_of_no_kind_are_refused(golden):
    with pytest.raises(ValueError, match="record 0: must have one of transition, solver, windows, scores"):
        golden([{"sigmas": [1.0, 0.0]}])
    with pytest.raises(ValueError, match="at least one number"):
        golden([])
