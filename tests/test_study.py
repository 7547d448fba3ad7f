"""A study: what its report says of made-up runs, what it repeats, and one tiny study as a user runs it."""

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from PIL import Image
from pyarrow.parquet import read_table

from flowgrpo.canaries import CANARIES
from scripts import study_report
from tests.toys import raw_config

ROOT = Path(__file__).parent.parent
STUDY = {
    "heldout": None, "seconds": 8.0, "samples": None, "clock": "cpu", "threads": 1, "prompts": 1000, "watch": 250, "marks": 2,
    "diversity_prompts": 40, "diversity_samples": 8, "set": [],
}  # fmt: skip


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module; it finds its neighbours beside itself."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("study")


def change(base: float | None, tuned: float | None) -> dict[str, float | int | None]:
    rise = None if base is None or tuned is None else tuned - base
    low, high = (None, None) if rise is None else (rise - 0.05, rise + 0.05)
    return {"base": base, "tuned": tuned, "rise": rise, "rise_low": low, "rise_high": high, "num_prompts": 1000,
            "num_captions": 400, "num_dropped": 0}  # fmt: skip


def made_up(recipe: str, seed: int, rise: float, **more: Any) -> dict[str, Any]:
    points = [
        {"mark": mark, "seconds": 4.0 * mark, "iterations": 3 * mark, "samples": 96 * mark, "calls": 960 * mark,
         **change(0.25, 0.25 + rise * mark / 2)} for mark in (1, 2)
    ]  # fmt: skip
    end = {
        "reward": {"gold": change(0.25, 0.25 + rise), "clip": change(0.5, 0.75), "none": change(None, None)},
        "canary": {"contrast": change(0.25, 0.25 - rise / 2), "edge_density": change(0.0, 0.5)},
        "diversity": {"clip_distance": change(0.5, 0.125 * seed)},
    }
    return {"recipe": recipe, "seed": seed, "gold": "gold", "commit": "abc1234", "points": points, "end": end, "study": STUDY,
            **more}  # fmt: skip


RUNS = [made_up("slow", 1, 0.125), made_up("quick", 2, 0.25), made_up("quick", 1, 0.5)]


def cells(table: str) -> list[dict[str, str]]:
    header, _, *lines = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()]
    return [dict(zip(header, line, strict=True)) for line in lines]


def test_the_table_has_means_of_seeds_and_what_they_were_paid_with() -> None:
    quick, slow = cells(study_report.table(RUNS))
    assert quick == {
        "recipe": "quick", "iterations": "6", "samples": "192", "rise of gold, mean of seeds": "+0.375",
        "between seeds (sd)": "0.177", "each seed": "+0.500, +0.250", "lowest 95 % bound": "+0.200",
        "clip_distance, after / before": "0.38", "contrast, change": "-75 %", "edge_density, change": "-",
    }  # fmt: skip
    assert (slow["recipe"], slow["between seeds (sd)"], slow["contrast, change"]) == ("slow", "-", "-25 %")


def test_the_second_table_has_every_reward() -> None:
    found = cells(study_report.rewards(RUNS))
    assert [(row["recipe"], row["reward"]) for row in found] == [
        (recipe, reward) for recipe in ("quick", "slow") for reward in ("gold", "clip", "none")
    ]
    assert found[0] == {"recipe": "quick", "reward": "gold", "before": "0.250", "after": "0.625", "rise": "+0.375",
                        "each seed": "+0.500, +0.250"}  # fmt: skip


def test_the_parquet_file_has_a_row_a_run_and_mark(tmp_path: Path) -> None:
    study_report.parquet(RUNS, tmp_path / "runs.parquet")
    rows = read_table(tmp_path / "runs.parquet").to_pylist()
    assert [(row["recipe"], row["seed"], row["mark"]) for row in rows] == [
        (one["recipe"], one["seed"], mark) for one in RUNS for mark in (1, 2)
    ]
    first, last = rows[2:4]
    assert (first["seconds"], first["iterations"], first["samples"], first["calls"]) == (4.0, 3, 96, 960)
    assert (first["rise"], last["rise"], last["rise_low"], last["rise_high"]) == (0.125, 0.25, 0.2, 0.3)
    assert (last["commit"], last["clock"], last["threads"]) == ("abc1234", "cpu", 1)
    assert (first["reward/clip/after"], last["reward/clip/before"], last["reward/clip/after"]) == (None, 0.5, 0.75)
    assert (last["canary/contrast/after"], last["diversity/clip_distance/after"]) == (0.125, 0.25)


def test_all_is_written_and_nothing_without_a_run(tmp_path: Path) -> None:
    text = study_report.write(RUNS, tmp_path)
    assert (tmp_path / "study.md").read_text(encoding="utf-8") == text
    assert "8 CPU seconds of iterations, 1 thread(s)" in text
    assert "abc1234" in text
    with Image.open(tmp_path / "study.png") as picture:
        assert picture.size[0] > 400
    with pytest.raises(ValueError, match="at least one finished run"):
        study_report.write([], tmp_path)


def test_a_missing_pyarrow_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SystemExit, match=r"pip install 'flowgrpo\[study\]'"):
        study_report.need_pyarrow()


def arguments(study: ModuleType, out: Path, *more: str) -> argparse.Namespace:
    recipes = [f"{name}.yaml" for name in ("quick", "slow")]
    return study.parsed([*recipes, "--out", str(out), "--seconds", "8", "--clock", "cpu", "--marks", "2", *more])


def test_finished_runs_are_not_repeated_and_seeds_come_one_after_the_other(study: ModuleType, tmp_path: Path) -> None:
    wanted = [("quick", 1), ("slow", 1), ("quick", 2), ("slow", 2)]
    args = arguments(study, tmp_path, "--seeds", "1", "2")
    assert [(arm.name, seed) for arm, seed in study.study_jobs.todo(args)] == wanted
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in RUNS[:2]), encoding="utf-8")
    assert [(arm.name, seed) for arm, seed in study.study_jobs.todo(args)] == [("quick", 1), ("slow", 2)]


def test_runs_of_another_study_are_refused(study: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "runs.jsonl").write_text(json.dumps(RUNS[0]) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"holds runs with \{'watch': 250\}, not \{'watch': 100\}"):
        study.study_jobs.todo(arguments(study, tmp_path, "--watch", "100"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--samples", "9"], "exactly one of the two"),
        (["--diversity-samples", "1"], "--diversity-samples is too low, got 1"),
        (["--marks", "0"], "--marks is too low, got 0"),
        (["other/quick.yaml"], "configs need different names"),
    ],
)
def test_settings_that_cannot_be_are_refused(study: ModuleType, tmp_path: Path, more: list[str], message: str,
                                             capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    with pytest.raises(SystemExit):
        study.parsed([*more, "quick.yaml", "--out", str(tmp_path), "--seconds", "8"])
    assert message in capsys.readouterr().err


def test_a_run_that_fails_is_reported_with_its_last_lines(study: ModuleType, tmp_path: Path,
                                                          capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    (tmp_path / "logs").mkdir()
    args = arguments(study, tmp_path)
    assert not study.study_jobs.in_process(args.arms[0], 1, args, ["--out", str(tmp_path)])  # no config: the process refuses
    error = capsys.readouterr().err
    assert "quick seed 1 failed with exit code 2" in error
    assert "give at least one config" in error


def run_study(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/study.py"), "--out", str(folder / "study"), *more]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_a_tiny_study_runs_from_the_command_line_and_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT}")
    raw = raw_config(tmp_path, prompts__heldout=str(tmp_path / "prompts.txt"))
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(raw), encoding="utf-8")
    command = [str(tmp_path / "toy.yaml"), "--seeds", "1", "--samples", "16", "--marks", "2", "--watch", "3"]
    command += ["--diversity-prompts", "2", "--diversity-samples", "3"]
    done = run_study(tmp_path, *command)
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "study" / "runs.jsonl").read_text(encoding="utf-8")
    first, last = json.loads(log)["points"]
    assert (first["samples"], first["iterations"], first["num_prompts"]) == (8, 1, 3)
    assert (last["samples"], last["iterations"], last["num_prompts"]) == (16, 2, 4)
    metrics = [json.loads(line) for line in (tmp_path / "study/toy-1/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    calls = [int(one["calls/rollout"] + one["calls/replay"]) for one in metrics]
    assert (first["calls"], last["calls"]) == (calls[0], sum(calls))
    (row,) = [row for row in read_table(tmp_path / "study" / "runs.parquet").to_pylist() if row["mark"] == 2]
    measured = [f"reward/{name}" for name in ("red", "bright")] + [f"canary/{name}" for name in CANARIES]
    for name in [*measured, "diversity/clip_distance", "diversity/pixel_std"]:
        assert row[f"{name}/before"] is not None
        assert row[f"{name}/after"] is not None
    assert row["rise"] != 0
    assert row["rise"] == pytest.approx(row["reward/red/after"] - row["reward/red/before"], abs=1e-9)
    assert (tmp_path / "study" / "study.png").is_file()
    again = run_study(tmp_path, *command)
    assert (again.returncode, again.stdout) == (0, done.stdout[-len(again.stdout) :])
    assert (tmp_path / "study" / "runs.jsonl").read_text(encoding="utf-8") == log
