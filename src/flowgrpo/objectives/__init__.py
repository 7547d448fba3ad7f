"""Objectives: advantages into a loss, one a file."""

from collections.abc import Mapping
from typing import Any

from flowgrpo.objectives.clipped_ratio import ClippedRatio

OBJECTIVES: Mapping[str, type] = {"clipped_ratio": ClippedRatio}
DECLARED = ("reduce", "density", "clip_range", "needs_reference")


def check_objective(objective: Any) -> None:
    """Raise ValueError unless an objective says what the loop must know of it."""
    missing = [name for name in DECLARED if not hasattr(objective, name)]
    if missing:
        raise ValueError(
            f"objective: {type(objective).__name__} must have the attributes {', '.join(DECLARED)}; "
            f"it lacks {', '.join(missing)}"
        )
