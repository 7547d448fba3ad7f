"""The hacking study: its arms fit together, its table says what made-up runs say, and one tiny study as a user runs it."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from flowgrpo.build import build_scorer
from flowgrpo.canaries import CANARIES
from flowgrpo.choices import choose
from flowgrpo.config import HealthConfig, load_config
from flowgrpo.data import load_prompts
from flowgrpo.health import Health
from flowgrpo.signals import check_signal
from reward_models.shapes_world import parse, render, sample_scene
from scripts import study_report
from tests.test_study import cells, made_up

ROOT = Path(__file__).parent.parent


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module; it finds its neighbours beside itself."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("study_signals")


def run_of(arm: str, seed: int, rises: list[float], **signs: int) -> dict[str, Any]:
    """A run with these rises at its marks of 5 iterations, and the iterations (from 0) of what health said."""
    one = made_up(arm, seed, rises[-1])
    mark = one["points"][-1]
    one["points"] = [{**mark, "mark": k + 1, "iterations": 5 * k + 5, "rise": rise, "rise_low": rise - 0.05,
                      "rise_high": rise + 0.05} for k, rise in enumerate(rises)]  # fmt: skip
    words = {"contrast": "contrast of the samples has gone from", "clip": "clip has fallen from"}
    return {**one, "signs": [[iteration, words[name]] for name, iteration in signs.items()]}


RUNS = [
    run_of("gold", 1, [0.2, 0.4]),
    run_of("gold", 2, [0.2, 0.6]),
    run_of("plain", 1, [0.1, 0.12, 0.06, -0.2], clip=3, contrast=9),
    run_of("plain", 2, [0.1, 0.2, 0.1, 0.0], contrast=10),
]


def test_the_table_says_what_was_kept_and_who_spoke_first(signals: ModuleType) -> None:
    gold, plain = cells(signals.table(RUNS))
    assert gold["kept of the rise on gold itself"] == "100 % (70 to 130)"
    assert (gold["gold 5 points below its best"], gold["first canary"], gold["a canary in time"]) == (
        "never, never", "never, never", "-, -",
    )  # fmt: skip
    assert plain == {
        "signal": "plain", "rise of gold": "-0.100 (-0.250 to +0.050)", "kept of the rise on gold itself": "-20 % (-50 to 10)",
        "best rise at a mark": "+0.120, +0.200", "last": "-0.200, +0.000", "gold 5 points below its best": "10 to 15, 10 to 15",
        "first canary": "10, 11", "first warning": "4, 11", "a canary in time": "yes, between",
    }  # fmt: skip


def test_gold_may_be_lost_from_the_start_and_a_late_canary_is_not_in_time(signals: ModuleType) -> None:
    late = run_of("plain", 1, [-0.1, -0.2], contrast=7)
    assert (signals.lost(late), signals.in_time(late)) == ((0, 5), "no")
    assert signals.in_time(run_of("plain", 1, [-0.1, -0.2])) == "no"


def test_without_training_on_gold_nothing_is_called_kept(signals: ModuleType) -> None:
    (plain,) = cells(signals.table(RUNS[2:]))
    assert plain["kept of the rise on gold itself"] == "-"


def test_the_parquet_rows_have_the_first_warnings_and_what_was_measured_at_each_mark() -> None:
    one = run_of("plain", 1, [0.1, 0.2], clip=3, contrast=9)
    one["points"][0]["measured"] = {"reward": {"clip": {"base": 0.5, "tuned": 0.625, "rise_low": 0.1, "rise_high": 0.2}}}
    first, last = study_report.rows([one])
    assert (first["first_warning"], first["first_canary"]) == (4, 10)
    assert (first["reward/clip/after"], last["reward/clip/after"]) == (0.625, 0.75)
    assert "measured" not in first


@pytest.mark.parametrize("canary", CANARIES)
def test_what_health_says_of_a_canary_is_known_as_one(canary: str) -> None:
    health = Health(SimpleNamespace(family="forward"), ["clip"], [], HealthConfig())
    values = (1.0, 1.0, 1.0, 9.0, 9.0, 9.0)
    signs = [health.look({f"canary/{canary}": value, f"canary/{canary}/std": 1.0}) for value in values]
    said = [[iteration, sign] for iteration, some in enumerate(signs) for sign in some]
    assert said
    assert study_report.first_canary({"signs": said}) == said[0][0] + 1
    assert study_report.first_canary({"signs": [[0, "clip has fallen from 1 to 0"]]}) is None


def test_tau_and_diversity_are_canaries_too() -> None:
    health = Health(SimpleNamespace(family="forward"), ["clip"], [], HealthConfig())
    signs = [health.look({"score/clip/tau": tau}) for tau in (0.3, -0.4, -0.4)]
    assert study_report.first_canary({"signs": [[k, sign] for k, some in enumerate(signs) for sign in some]}) == 3
    health = Health(SimpleNamespace(family="forward"), ["clip"], [], HealthConfig())
    signs = [health.look({"canary/group_diversity": value}) for value in (0.5, 0.5, 0.5, 0.01, 0.01, 0.01)]
    assert study_report.first_canary({"signs": [[k, sign] for k, some in enumerate(signs) for sign in some]}) == 6


def test_every_arm_fits_its_rewards_and_has_the_weights_it_is_said_to_have(signals: ModuleType) -> None:
    ranges = [part.traits.range for part in build_scorer(load_config(signals.CONFIG).rewards, "cpu").components]
    for arm, overrides in signals.SIGNALS.items():
        config = load_config(signals.CONFIG, overrides)
        weights = [float(reward.weight) for reward in config.rewards]
        assert weights == {"gold": [1, 0, 0, 0, 0, 0], "clip_alone": [0, 0, 0, 0, 0, 1]}.get(arm, [0, 1, 1, 1, 1, 1])
        check_signal(choose(config).signal, torch.tensor(weights), ranges)


def test_enough_is_what_right_pictures_have_on_average(signals: ModuleType) -> None:
    config, rng = load_config(signals.CONFIG), np.random.default_rng(0)
    prompts = load_prompts(config.prompts.train).prompts[::3]
    pictures = np.stack([render(sample_scene(parse(prompt.text), rng)) for prompt in prompts])
    media = torch.from_numpy(pictures).permute(0, 3, 1, 2)[:, None]
    models = [component.model for component in build_scorer(config.rewards, "cpu").components]
    means = [model(media, prompts).mean().item() for model in models[1:5]]
    assert means == pytest.approx([high for _, high in yaml.safe_load(signals.ENOUGH)[:4]], rel=0.05)


@pytest.mark.slow
def test_a_tiny_study_runs_from_the_command_line(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "scripts/study_signals.py"),
        "--out",
        str(tmp_path),
        "--seeds",
        "1",
        "--samples",
        "192",
    ]
    command += ["--marks", "2", "--watch", "4", "--prompts", "6", "--diversity-prompts", "2", "--diversity-samples", "2"]
    command += ["--signals", "gold", "saturation_calibrated", "--set", "sampler.num_steps=2", "optimizer.micro_batch_size=48"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "study.md").read_text(encoding="utf-8")
    assert {row["signal"] for row in cells(text.split("\n\n")[0])} == {"gold", "saturation_calibrated"}
    runs = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text(encoding="utf-8").splitlines()]
    for one in runs:
        assert one["points"][0]["measured"].keys() == {"reward", "canary"}
        assert one["end"]["reward"].keys() == {"gold", "foreground", "colourfulness", "aesthetic", "coverage", "clip"}
        assert one["points"][-1]["samples"] == 192
