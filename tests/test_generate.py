"""Generated files: named safely, described exactly, resumable, and each a function of its own key."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flowgrpo.data import Prompt
from flowgrpo.generate import generate, policy_from, read_manifest, save_media
from flowgrpo.media import load_image, load_video
from flowgrpo.policy import Conditions, Policy
from tests.tiny_pipelines import build

CALL = {"max_sequence_length": 32}
ODD = ["a red cube", "../../x", "ü 🚀 \u200fשלום", "x" * 5000, 'comma, "quote"\nnew line']


def policy_of(pipeline: Any, **changes: Any) -> Policy:
    return Policy(pipeline, Conditions(**({"height": 16, "width": 24, "call": CALL} | changes)))


def run(policy: Policy, folder: Path, texts: list[str], **options: Any) -> list[dict[str, Any]]:
    defaults = {"samples_per_prompt": 2, "num_steps": 1, "seed": 0, "batch_size": 4}
    return generate(policy, [Prompt(t, i) for i, t in enumerate(texts)], folder, **(defaults | options))


def test_names_are_safe_and_the_manifest_keeps_the_exact_prompt(sd3: Any, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    lines = run(policy_of(sd3), folder, ODD)
    assert [line["prompt"] for line in lines] == [text for text in ODD for _ in range(2)]
    assert read_manifest(folder) == json.loads(json.dumps(lines))
    files = {path.name for path in folder.iterdir()}
    assert files == {line["file"] for line in lines} | {"manifest.jsonl"}
    assert all(len(name.encode()) <= 255 for name in files)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert load_image(folder / lines[0]["file"]).shape == (3, 16, 24)


def test_the_manifest_says_how_a_picture_was_made(sd3: Any, tmp_path: Path) -> None:
    policy = policy_of(sd3, guidance_scale=3.0, negative_prompt="blurry")
    prompts = [Prompt("a", 0), Prompt("b", 1, negative="own")]
    lines = generate(policy, prompts, tmp_path, samples_per_prompt=1, num_steps=2, seed=7, batch_size=4,
                     origin={"pipeline": "p"})  # fmt: skip
    assert lines[0] == {
        "file": "000000_a_000.png", "height": 16, "width": 24, "prompt": "a", "prompt_id": 0, "sample": 0,
        "negative_prompt": "blurry", "asked_size": {"height": 16, "width": 24}, "pipeline": "p",
        "sampler": "FlowMatchEulerDiscreteScheduler", "shift": 3.0, "num_steps": 2, "guidance_scale": 3.0, "call": CALL,
        "seed": 7, "hybrid": None, "key": ["generate", 7, 0, 0],
    }  # fmt: skip
    assert lines[1]["negative_prompt"] == "own"


def test_a_picture_depends_on_seed_prompt_and_sample_alone(sd3: Any, tmp_path: Path) -> None:
    policy = policy_of(sd3)
    lines = run(policy, tmp_path / "all", ["a", "b", "c"], samples_per_prompt=3, batch_size=9)
    run(policy, tmp_path / "one", ["a", "b", "c"], samples_per_prompt=3, batch_size=1)
    alone = generate(policy, [Prompt("b", 1)], tmp_path / "alone", samples_per_prompt=3, num_steps=1, seed=0, batch_size=2)
    for line in lines:
        assert _gap(tmp_path / "all" / line["file"], tmp_path / "one" / line["file"]) <= 1 / 255 + 1e-6
    for line in alone:
        assert _gap(tmp_path / "all" / line["file"], tmp_path / "alone" / line["file"]) <= 1 / 255 + 1e-6
    assert _gap(tmp_path / "all" / lines[0]["file"], tmp_path / "all" / lines[1]["file"]) > 0.1


def _gap(one: Path, two: Path) -> float:
    return float((load_image(one) - load_image(two)).abs().max())


def test_a_cut_off_call_goes_on_where_it_stopped(sd3: Any, tmp_path: Path) -> None:
    policy, counts = policy_of(sd3), []
    whole = run(policy, tmp_path / "whole", ["a", "b"])
    part = tmp_path / "part"
    run(policy, part, ["a"], samples_per_prompt=2)
    (part / whole[1]["file"]).unlink()
    with (part / "manifest.jsonl").open("a") as manifest:
        manifest.write('{"file": "cut o')
    untouched = (part / whole[0]["file"]).stat().st_mtime_ns
    resumed = run(policy, part, ["a", "b"], on_batch=counts.append)
    assert resumed == json.loads(json.dumps(whole))
    assert counts == [1, 3]
    assert (part / whole[0]["file"]).stat().st_mtime_ns == untouched
    assert len(read_manifest(part)) == 4
    assert run(policy, part, ["a", "b"], samples_per_prompt=3)[:2] == resumed[:2], "more samples keep those there are"


@pytest.mark.parametrize("change", [{"seed": 1}, {"num_steps": 2}, {"texts": ["other"]}, {"origin": {"pipeline": "q"}}])
def test_a_folder_made_otherwise_is_refused(sd3: Any, tmp_path: Path, change: dict[str, Any]) -> None:
    policy = policy_of(sd3)
    first = {"texts": ["a"], "origin": {"pipeline": "p"}}
    run(policy, tmp_path, **first)
    with pytest.raises(ValueError, match="or another folder"):
        run(policy, tmp_path, **(first | change))


def test_another_size_in_the_same_folder_is_refused(sd3: Any, tmp_path: Path) -> None:
    run(policy_of(sd3), tmp_path, ["a"])
    with pytest.raises(ValueError, match="asked_size"):
        run(policy_of(build("sd3"), height=24), tmp_path, ["a"])


def test_prompts_of_different_sizes_are_not_mixed(sd3: Any, tmp_path: Path) -> None:
    prompts = [Prompt("a", 0, width=16), Prompt("b", 1), Prompt("c", 2, width=16)]
    lines = generate(policy_of(sd3), prompts, tmp_path, samples_per_prompt=1, num_steps=1, seed=0, batch_size=8)
    assert [line["width"] for line in lines] == [16, 24, 16]
    assert [line["prompt_id"] for line in lines] == [0, 1, 2]


def test_films_are_written_with_their_rate(wan_euler: Any, tmp_path: Path) -> None:
    policy = policy_of(wan_euler, height=32, width=48, num_frames=5)
    line, *_ = run(policy, tmp_path, ["a cube turns"], samples_per_prompt=1, fps=7)
    assert line["file"] == "000000_a-cube-turns_000.mp4"
    assert (line["num_frames"], line["fps"], line["height"], line["width"]) == (5, 7.0, 32, 48)
    frames, fps = load_video(tmp_path / line["file"])
    assert (len(frames), fps) == (5, 7.0)


def test_a_picture_of_nan_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="prompt 3, sample 1: pixels must be finite"):
        save_media(torch.full((1, 3, 4, 4), float("nan")), tmp_path, Prompt("a", 3), 1, 16)


def test_the_pipelines_own_defaults_hold_where_nothing_is_given(tmp_path: Path) -> None:
    build("sd3").save_pretrained(tmp_path)
    policy, num_steps, origin = policy_from(str(tmp_path), None)
    assert (num_steps, policy.conditions.guidance_scale) == (28, 7.0)
    assert origin == {"pipeline": str(tmp_path), "adapter": None, "dtype": "float32"}
    with pytest.raises(ValueError, match="negative_prompt cannot take effect at guidance_scale=1"):
        policy_from(str(tmp_path), None, guidance_scale=1.0, negative_prompt="blurry")
