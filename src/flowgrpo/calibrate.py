"""Measuring what scores are usually like under the base model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from flowgrpo import calibration
from flowgrpo.build import build
from flowgrpo.config import RunConfig
from flowgrpo.credit import gathered
from flowgrpo.metrics import Metrics
from flowgrpo.signals import Calibration
from flowgrpo.trainer import Trainer


def calibrate(
    config: RunConfig, path: Path, iterations: int, on_iteration: Callable[[int], None] = lambda _: None
) -> dict[str, Any]:
    """Sample and score some iterations of the untrained model as training would, and write what the scores are like.

    Nothing is learnt. Returns what the file holds: by name of reward the mean of its group means, the mean spread within groups
    (std over n), quantiles of all scores, and how many scores there were. Raises ValueError for a reward that gave too few.
    """
    parts = build(config.model_copy(update={"calibration": None}), Accelerator(mixed_precision="no"))
    trainer = Trainer(parts, Metrics(path))  # which are not written
    tables, groups = [], []
    for k in range(iterations):
        trajectory = trainer.rollout(k)
        scores = parts.scorer(trajectory.media, trajectory.prompts, latents=trajectory.clean)
        tables.append(gathered(parts, scores.values))
        groups.append(gathered(parts, trajectory.group_ids) + k * len(parts.prompts))  # a prompt that comes again is new
        on_iteration(1)
    values = torch.cat(tables)
    found, counts = Calibration.of(values, torch.cat(groups)), (~values.isnan()).sum(0).tolist()
    unknown = [name for name, spread in zip(parts.scorer.names, found.spread.tolist(), strict=True) if spread != spread]
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)}: no group of {len(values)} samples has two scores, so nothing is known of them; mend these "
            "rewards, or take more iterations"
        )
    content = calibration.as_json(found, parts.scorer.names, counts, config.model.pipeline)
    if parts.accelerator.is_main_process:
        calibration.write(path, content)
    return content
