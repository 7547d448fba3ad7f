"""Objectives: advantages into a loss, one a file."""

from collections.abc import Mapping

from flowgrpo.objectives.clipped_ratio import ClippedRatio

OBJECTIVES: Mapping[str, type] = {"clipped_ratio": ClippedRatio}
