"""A threshold on any reward model: what must not be, or must be, whatever else scores well."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from flowgrpo.data import Prompt
from reward_models.frames import load


class Gate:
    """1 where a model's score is on the right side of a threshold, 0 where it is not; NaN where it has none.

    s = [r <= threshold] for `keep: below`, [r >= threshold] for `keep: above`

    Such as a classifier of unsafe pictures kept below a limit. A gate says nothing between samples on one side of it: as a
    weighted reward it teaches where a group has both, as a monitor it counts what passes. `model` is an import path
    package.module:Name, `args` its arguments. Raises ValueError for a threshold that is not finite or outside its range.
    """

    unit: str = "passes"
    range: tuple[float, float] | None = (0.0, 1.0)

    def __init__(self, model: str, threshold: float, keep: Literal["below", "above"] = "below",
                 args: Mapping[str, Any] | None = None, device: str = "cpu") -> None:  # fmt: skip
        if keep not in ("below", "above"):
            raise ValueError(f"keep must be 'below' or 'above', got {keep!r}")
        self.model, self.threshold, self.sign = load(model, dict(args or {}), device), threshold, 1 if keep == "above" else -1
        low, high = getattr(self.model, "range", None) or (-math.inf, math.inf)
        if not (math.isfinite(threshold) and low <= threshold <= high):
            raise ValueError(f"threshold must be a score of {model}, finite and within ({low}, {high}), got {threshold}")
        self.takes: str = getattr(self.model, "takes", "media")
        self.needs_motion: bool = getattr(self.model, "needs_motion", False)

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Scores (b,) of what the model takes."""
        scores = self.model(media, prompts).float()
        return torch.where(scores.isfinite(), (self.sign * (scores - self.threshold) >= 0).float(), torch.nan)
