"""Calibration: measured as training samples, written by name, read into signals, and what falls outside is counted."""

import json

import pytest
import torch
import yaml
from typer.testing import CliRunner

from flowgrpo import calibration
from flowgrpo.build import build
from flowgrpo.calibrate import calibrate
from flowgrpo.cli import app
from flowgrpo.metrics import Metrics
from flowgrpo.signals import Calibration
from flowgrpo.trainer import Trainer
from tests.toys import config, raw_config

NAMES = ("red", "bright")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibrated")
    calibrate(config(folder), folder / "usual.json", 2)
    return folder


def test_it_is_what_two_rollouts_of_the_base_say_group_by_group(folder):
    trainer = Trainer(build(config(folder)), Metrics(folder / "metrics.jsonl"))
    scores = []
    for k in range(2):
        trajectory = trainer.rollout(k)
        scores.append(trainer.parts.scorer(trajectory.media, trajectory.prompts).values.double().view(2, 4, 2))
    groups = torch.cat(scores)  # four groups of four
    found = calibration.read(folder / "usual.json", NAMES)
    torch.testing.assert_close(found.mean, groups.mean((0, 1)))
    torch.testing.assert_close(found.spread, groups.std(1, correction=0).mean(0))
    ordered = groups.flatten(0, 1).sort(0).values
    torch.testing.assert_close(found.quantiles[50], torch.quantile(ordered, 0.505, dim=0))
    assert json.loads((folder / "usual.json").read_text())["rewards"]["red"]["scores"] == 16


def test_rewards_are_found_by_name_in_any_order(folder):
    found, turned = (calibration.read(folder / "usual.json", names) for names in (NAMES, NAMES[::-1]))
    for part in calibration.PARTS:
        assert torch.equal(getattr(found, part), getattr(turned, part).flip(-1))


@pytest.mark.parametrize("signal", [{"use": "taros", "ranges": [[0, 1]]}, "saturation_aware", "quantile"], ids=str)
def test_a_signal_that_remembers_begins_with_it(folder, signal):
    parts = build(config(folder, signal=signal, calibration=str(folder / "usual.json"), advantage="group"))
    held, wanted = parts.choices.signal.calibration, calibration.read(folder / "usual.json", NAMES)
    for part in calibration.PARTS:
        torch.testing.assert_close(getattr(held, part), getattr(wanted, part))


def test_what_a_run_remembers_comes_back_with_its_checkpoint(folder):
    changes = {"signal": "quantile", "advantage": "group", "name": "remembers"}
    first = Trainer(build(config(folder, **changes)), Metrics(folder / "metrics.jsonl"))
    first.run(2)
    second = Trainer(build(config(folder, **changes)), Metrics(folder / "metrics.jsonl"))
    second.resume(first.save())
    assert second.parts.choices.signal.state_dict() == first.parts.choices.signal.state_dict() != {}


def test_scores_outside_of_what_was_seen_are_counted(folder):
    narrow = json.loads((folder / "usual.json").read_text())
    narrow["rewards"]["red"]["quantiles"] = [0.0] * 100
    (folder / "narrow.json").write_text(json.dumps(narrow))
    for name, expected in (("narrow", 1.0), ("usual", 0.5)):
        trainer = Trainer(build(config(folder, calibration=str(folder / f"{name}.json"))), Metrics(folder / "metrics.jsonl"))
        share = trainer.iteration(0)["score/red/outside"]
        assert share == expected if name == "narrow" else share <= expected
    quantiles = torch.tensor([1.0, 2.0, 3.0])
    assert calibration.share_outside(torch.tensor([0.9, 1.0, 3.0, 3.1]), quantiles) == 0.5
    assert calibration.share_outside(torch.tensor([]), quantiles) == 0.0
    assert "score/red/outside" not in Trainer(build(config(folder)), Metrics(folder / "metrics.jsonl")).iteration(0)


def test_files_that_are_none_or_lack_a_reward_are_refused(folder):
    (folder / "other.json").write_text("[1]")
    cases = {"nowhere.json": "there is none", "other.json": "it is not", "usual.json": "it lacks third"}
    for name, words in cases.items():
        with pytest.raises(ValueError, match=words):
            calibration.read(folder / name, [*NAMES, "third"])
    with pytest.raises(ValueError, match=r"calibration: .*there is none; make it"):
        build(config(folder, calibration=str(folder / "nowhere.json")))


def test_a_reward_without_scores_stops_it(folder):
    rewards = [{"name": "red", "use": "tests.toys:redness"}, {"name": "silent", "use": "tests.toys:silence", "weight": 0}]
    with pytest.raises(ValueError, match="silent: no group of 8 samples has two scores"):
        calibrate(config(folder, rewards=rewards), folder / "none.json", 1)
    assert not (folder / "none.json").exists()


def test_the_command_writes_the_file_and_says_what_it_found(folder):
    (folder / "run.yaml").write_text(yaml.safe_dump(raw_config(folder)))
    target = folder / "made" / "usual.json"
    result = CliRunner().invoke(app, ["calibrate", str(folder / "run.yaml"), "--output", str(target), "--iterations", "2"])
    assert result.exit_code == 0, result.output
    assert json.loads(target.read_text()) == json.loads((folder / "usual.json").read_text())
    assert "red: 0." in result.output
    assert isinstance(calibration.read(target, NAMES), Calibration)
