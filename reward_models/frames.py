"""Any reward model of pictures, on the frames of a film."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from flowgrpo.data import Prompt

Reduce = Literal["mean", "min", "median", "last"]


class Frames:
    """Scores some frames of a film one by one and takes their mean, the worst, the median, or the last alone.

    `count` frames are taken, spread evenly from the first to the last (all if there are fewer; the middle one for 1), so that
    the frame rate does not matter. `model` is an import path package.module:Name, `args` its arguments. A frame without a score
    is left out; a film without one has NaN.
    """

    takes = "media"
    needs_motion = False

    def __init__(self, model: str, args: Mapping[str, Any] | None = None, count: int = 8, reduce: Reduce = "mean",
                 device: str = "cpu") -> None:  # fmt: skip
        if count < 1:
            raise ValueError(f"count must be at least 1, got {count}")
        if reduce not in get_args(Reduce):
            raise ValueError(f"reduce must be one of {', '.join(get_args(Reduce))}, got {reduce!r}; choose one")
        self.model, self.count, self.reduce = load(model, dict(args or {}), device), count, reduce
        self.unit: str = getattr(self.model, "unit", "score")
        self.range: tuple[float, float] | None = getattr(self.model, "range", None)

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Scores (b,) of media (b, f, 3, h, w) in [0, 1]."""
        chosen = media[:, places(media.shape[1], self.count)]
        frames, copies = chosen.flatten(0, 1)[:, None], chosen.shape[1]
        scores = self.model(frames, [prompt for prompt in prompts for _ in range(copies)])
        scores = scores.float().view(len(media), copies)
        if self.reduce == "last":
            return scores[:, -1]
        if self.reduce == "min":
            least = scores.nan_to_num(nan=torch.inf).amin(1)
            return torch.where(least.isfinite(), least, torch.nan)
        return scores.nanmean(1) if self.reduce == "mean" else scores.nanmedian(1).values


def places(frames: int, count: int) -> list[int]:
    """`count` places among frames, spread evenly over time, each once."""
    if count >= frames:
        return list(range(frames))
    if count == 1:
        return [frames // 2]
    return [round(i * (frames - 1) / (count - 1)) for i in range(count)]


def load(path: str, args: dict[str, Any], device: str) -> Any:
    """The reward model at an import path package.module:Name; a device is given to a constructor that takes one."""
    import importlib

    module, _, name = path.partition(":")
    if not name:
        raise ValueError(f"model must be an import path 'package.module:Name', got {path!r}")
    made = getattr(importlib.import_module(module), name)
    if not inspect.isclass(made):
        return made
    if "device" in inspect.signature(made).parameters:
        args.setdefault("device", device)
    return made(**args)
