"""The embedded world learns: a short quickstart, judged on the validation prompts."""

import json
from pathlib import Path

import pytest

from flowgrpo.config import load_config
from flowgrpo.train import train

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_thirty_iterations_of_the_quickstart_already_raise_the_strict_pass_rate(tmp_path):
    prompts = f"prompts.heldout={ROOT / 'assets/shapes/prompts/validation.jsonl'}"
    config = load_config(ROOT / "configs/shapes/mixgrpo.yaml", [f"output_dir={tmp_path}", "iterations=30", prompts])
    assert train(config) == 0
    summary = json.loads((config.folder / "summary.json").read_text())
    assert summary["gold"]["num_prompts"] == 600
    assert summary["gold"]["rise_low"] > 0.02
