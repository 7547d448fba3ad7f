"""The training pictures of an iteration."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flowgrpo.data import Prompt
from flowgrpo.group_noise import Shared
from flowgrpo.media import load_image
from flowgrpo.policy import Conditions, Policy
from flowgrpo.rollout import Dynamics, Noise, Row, Trajectory, rollout
from flowgrpo.samples import save_samples
from flowgrpo.schedule import SCHEDULES
from flowgrpo.scoring import Scores
from flowgrpo.solvers import SOLVERS
from flowgrpo.transitions import TRANSITIONS


@pytest.fixture
def trajectory(sd3: Any) -> Trajectory:
    """Two prompts with three samples each, steps 1 and 2 of 4 stochastic."""
    conditions = Conditions(2.0, "blurry", 16, 24, call={"max_sequence_length": 32})
    policy = Policy(sd3, conditions)
    grid = policy.grid(4, SCHEDULES["pipeline"]())
    dynamics = Dynamics(grid, range(1, 3), TRANSITIONS["flow_sde"](), SOLVERS["euler"]())
    rows = [Row(prompt, sample) for prompt in (Prompt("a/b", 3), Prompt("c", 8, negative="own")) for sample in range(3)]
    return rollout(policy, rows, dynamics, Noise(0, 5, Shared()), 6)


def scores(n: int) -> Scores:
    return Scores(("one", "two"), torch.stack([torch.arange(float(n)), torch.full((n,), torch.nan)], dim=1))


def test_every_picture_lies_beside_how_it_was_made_and_scored(trajectory: Trajectory, tmp_path: Path) -> None:
    folder = tmp_path / "it000005"
    lines = save_samples(folder, trajectory, scores(6), iteration=5, seed=0)
    assert [json.loads(line) for line in (folder / "manifest.jsonl").read_text().splitlines()] == lines
    assert {path.name for path in folder.iterdir()} == {line["file"] for line in lines} | {
        "manifest.jsonl",
        "sheet.png",
    }
    line = lines[4]
    assert (line["prompt"], line["prompt_id"], line["sample"]) == ("c", 8, 1)
    assert (line["iteration"], line["seed"]) == (5, 0)
    assert (line["window"], line["num_steps"], line["guidance_scale"]) == ([1, 2], 4, 2.0)
    assert line["scores"] == {"one": 4.0, "two": None}
    assert (line["negative_prompt"], lines[0]["negative_prompt"]) == ("own", "blurry")
    assert "noise_level" in line["transition"]
    torch.testing.assert_close(load_image(folder / line["file"]), trajectory.media[4, 0], atol=0.51 / 255, rtol=0)


def test_the_limit_takes_a_few_samples_of_several_prompts(trajectory: Trajectory, tmp_path: Path) -> None:
    lines = save_samples(tmp_path, trajectory, scores(6), limit=4)
    assert [(line["prompt_id"], line["sample"]) for line in lines] == [(3, 0), (3, 1), (8, 0), (8, 1)]
    assert load_image(tmp_path / "sheet.png").shape == (3, 2 * 80 + 2, 2 * 120 + 2)


def test_a_failed_sample_has_no_file_and_does_not_stop_the_run(trajectory: Trajectory, tmp_path: Path) -> None:
    trajectory.media[1, 0, 0, 0, 0] = torch.nan
    lines = save_samples(tmp_path, trajectory, scores(6))
    assert [line["file"] is None for line in lines] == [False, True, False, False, False, False]
    assert (tmp_path / "sheet.png").is_file()
