"""A tiny run for tests: a random Stable Diffusion 3, two prompts, and a reward that likes red."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from flowgrpo.config import RunConfig, parse_config
from tests.tiny_pipelines import build

PROMPTS = ["a red cube", "two cats beside a dog", "a small house", "seven stars"]


def redness(media: Tensor, prompts: Sequence[Any]) -> Tensor:
    """Mean of the red channel, in [0, 1]."""
    return media[:, :, 0].mean((1, 2, 3))


def brightness(media: Tensor, prompts: Sequence[Any]) -> Tensor:
    """Mean over all channels, in [0, 1]."""
    return media.mean((1, 2, 3, 4))


def silence(media: Tensor, prompts: Sequence[Any]) -> Tensor:
    """A model that never has a score."""
    return media.mean((1, 2, 3, 4)) * float("nan")


def raw_config(folder: Path, **changes: Any) -> dict[str, Any]:
    """A config that trains in `folder` in a moment; `changes` are dotted settings, as on the command line."""
    pipeline, prompts = folder / "pipeline", folder / "prompts.txt"
    if not pipeline.exists():
        build("sd3").save_pretrained(pipeline)
        prompts.write_text("\n".join(PROMPTS), encoding="utf-8")
    raw: dict[str, Any] = {
        "name": "toy",
        "output_dir": str(folder / "runs"),
        "iterations": 6,
        "group_size": 4,
        "prompts_per_iteration": 2,
        "model": {"pipeline": str(pipeline), "lora": {"rank": 2}, "call": {"max_sequence_length": 8}},
        "prompts": {"train": str(prompts)},
        "sampler": {"num_steps": 4, "height": 16, "width": 16, "window": {"use": "random", "size": 2}, "batch_size": 3},
        "rewards": [
            {"name": "red", "use": "tests.toys:redness"},
            {"name": "bright", "use": "tests.toys:brightness", "weight": 0},
        ],
        "objective": {"use": "clipped_ratio", "clip_range": 1e-2},
        "optimizer": {"lr": 1e-2, "micro_batch_size": 3},
        "checkpoint": {"every": 0},
        "logging": {"trackers": [], "samples_every": 0},
    }
    for name, value in changes.items():
        _set(raw, name.replace("__", "."), value)
    return raw


def config(folder: Path, **changes: Any) -> RunConfig:
    """`raw_config`, checked."""
    return parse_config(raw_config(folder, **changes))


def _set(raw: dict[str, Any], name: str, value: Any) -> None:
    *parents, last = name.split(".")
    for part in parents:
        raw = raw.setdefault(part, {})
    raw[last] = value


def without_times(row: Mapping[str, Any]) -> dict[str, Any]:
    """A line of metrics without the clock."""
    return {name: value for name, value in row.items() if "seconds" not in name.split("/")}
