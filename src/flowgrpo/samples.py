"""The training pictures of an iteration, each with how it was made and how it was scored."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from flowgrpo.generate import FPS, MANIFEST, save_media
from flowgrpo.media import grid, save_image
from flowgrpo.rollout import Trajectory
from flowgrpo.scoring import Scores

__all__ = ["save_samples"]

SHEET = "sheet.png"
CELL = 128  # pixels; smaller pictures are enlarged to it on the sheet, by whole factors


def save_samples(folder: Path, trajectory: Trajectory, scores: Scores, limit: int = 16, *,
                 fps: int | float = FPS, **facts: Any) -> list[dict[str, Any]]:  # fmt: skip
    """Write up to `limit` samples of as many groups as fit in a square sheet, `manifest.jsonl` and `sheet.png`.

    The sheet has one prompt a row and of a film its first frame. A sample with NaN pixels has no file (null) and is
    grey. `facts` go beside each picture as they are: the iteration, the run's seed. Returns the manifest.
    """
    folder.mkdir(parents=True, exist_ok=True)
    groups = _chosen(trajectory.group_ids.tolist(), limit)
    shared = {**_settings(trajectory), **facts}
    manifest = [_save(folder, trajectory, scores, row, shared, fps) for rows in groups for row in rows]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in manifest)
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    save_image(grid([[_cell(_media(trajectory)[row, 0]) for row in rows] for rows in groups]), folder / SHEET)
    return manifest


def _chosen(group_ids: Sequence[int], limit: int) -> list[list[int]]:
    """Rows by group: the first ones of the first groups, about as many groups as samples of each."""
    by_group: dict[int, list[int]] = {}
    for row, group in enumerate(group_ids):
        by_group.setdefault(group, []).append(row)
    num_groups = min(len(by_group), math.ceil(math.sqrt(limit)))
    return [rows[: max(1, limit // num_groups)] for rows in list(by_group.values())[:num_groups]]


def _settings(trajectory: Trajectory) -> dict[str, Any]:
    dynamics, conditions = trajectory.dynamics, trajectory.conditions
    return {
        "transition": repr(dynamics.transition),
        "solver": repr(dynamics.solver),
        "tail": repr(dynamics.tail or dynamics.solver),
        "window": list(dynamics.window),
        "num_steps": dynamics.grid.num_steps,
        "sigmas": [round(sigma, 6) for sigma in dynamics.grid.sigmas],
        "guidance_scale": conditions.guidance_scale,
        "call": dict(conditions.call),
    }


def _save(folder: Path, trajectory: Trajectory, scores: Scores, row: int, shared: dict[str, Any],
          fps: int | float) -> dict[str, Any]:  # fmt: skip
    (prompt, sample), clip = (trajectory.rows[row].prompt, trajectory.rows[row].sample), _media(trajectory)[row]
    where = save_media(clip, folder, prompt, sample, fps) if clip.isfinite().all() else {"file": None}
    negative = trajectory.conditions.negative_prompt if prompt.negative is None else prompt.negative
    pairs = zip(scores.names, scores.values[row].tolist(), strict=True)
    return {
        **where,
        "prompt": prompt.text,
        "prompt_id": prompt.id,
        "sample": sample,
        "scores": {name: None if math.isnan(value) else value for name, value in pairs},
        "negative_prompt": negative if trajectory.conditions.guidance_scale > 1 else None,
        **shared,
    }


def _media(trajectory: Trajectory) -> Float[Tensor, " b f 3 h w"]:
    if trajectory.media is None:
        raise ValueError("samples can be saved only where they were decoded, these were not; sample with decode=True")
    return trajectory.media


def _cell(frame: Float[Tensor, " 3 h w"]) -> Float[Tensor, " 3 H W"]:
    factor = max(1, CELL // max(frame.shape[1:]))
    return frame.nan_to_num(0.5, 0.5, 0.5).repeat_interleave(factor, 1).repeat_interleave(factor, 2)
