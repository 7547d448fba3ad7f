"""The file of a calibration: by name of reward what its scores are usually like, so that rewards may come in another order."""

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flowgrpo.signals import Calibration

PARTS = [part.name for part in fields(Calibration)]


def as_json(calibration: Calibration, names: Sequence[str], counts: Sequence[int], model: str) -> dict[str, Any]:
    """What a file says of a calibration without gaps; `counts` are the scores that each reward was seen with."""
    rewards = {
        name: {"scores": counts[k], **{part: getattr(calibration, part)[..., k].tolist() for part in PARTS}}
        for k, name in enumerate(names)
    }
    return {"model": model, "rewards": rewards}


def write(path: Path, content: dict[str, Any]) -> None:
    """Write it, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def read(path: str | Path, names: Sequence[str]) -> Calibration:
    """The calibration of these rewards, in this order. Raises ValueError where the file is none, or lacks one of them."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"calibration: {path} must be a file of flowgrpo calibrate, there is none; make it")
    try:
        rewards = json.loads(path.read_text(encoding="utf-8"))["rewards"]
        missing = [name for name in names if name not in rewards]
        if missing:
            raise ValueError(
                f"calibration: {path} must know the rewards {', '.join(names)}, it lacks {', '.join(missing)}; calibrate anew"
            )
        columns = [[torch.tensor(rewards[name][part], dtype=torch.float64) for name in names] for part in PARTS]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"calibration: {path} must be a file of flowgrpo calibrate, it is not ({error!r}); make it") from error
    return Calibration(**{part: torch.stack(column, -1) for part, column in zip(PARTS, columns, strict=True)})


def share_outside(scores: Float[Tensor, " n"], quantiles: Float[Tensor, " q"]) -> float:
    """The share of scores below the lowest or above the highest quantile; 0 for none. About 1 % of usual scores are."""
    return float(((scores < quantiles[0]) | (scores > quantiles[-1])).double().mean()) if len(scores) else 0.0
