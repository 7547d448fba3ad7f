"""Run by several processes at once: one iteration of the toy run for each set of rewards, whose outcome each writes."""

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from flowgrpo.build import Parts, build, build_scorer
from flowgrpo.config import RewardConfig
from flowgrpo.losses import Losses
from flowgrpo.metrics import Metrics, read
from flowgrpo.scoring import RewardError
from flowgrpo.trainer import Trainer
from tests.toys import config


class Recorder(Trainer):
    """Keeps an iteration's advantages."""

    advantages_seen: list[list[float]] | None = None

    def learn(self, losses: Losses) -> None:
        self.advantages_seen = losses.advantages.tolist()
        super().learn(losses)


def parts_of(folder: Path) -> Parts:
    """The toy run, whose weights stay where they are so that every iteration draws the same pictures."""
    return build(config(folder, optimizer__lr=1e-12, optimizer__updates_per_iteration=1), Accelerator(cpu=True))


def outcome(parts: Parts, rewards: list[Mapping[str, Any]], out: Path) -> dict[str, Any]:
    """One iteration with these rewards: the message it stopped with, its advantages, scores and metrics."""
    scorer = build_scorer([RewardConfig.model_validate(reward) for reward in rewards], "cpu")
    settings = parts.config.model_copy(update={"output_dir": str(out), "name": "run"})
    trainer = Recorder(replace(parts, scorer=scorer, config=settings), Metrics(out / "metrics.jsonl"))
    seen: list[Any] = []
    trainer.on_samples = lambda k, trajectory, scores: seen.append(scores.values.tolist())
    error = None
    try:
        trainer.run(1)
    except RewardError as stop:
        error = str(stop)
    parts.accelerator.wait_for_everyone()
    return {
        "error": error,
        "advantages": trainer.advantages_seen,
        "scores": seen,
        "metrics": read(out / "metrics.jsonl")[0] if error is None else None,
        "checkpoints": sorted(path.name for path in (out / "run" / "checkpoints").glob("*")),
    }


def main(folder: Path, out: Path, cases: Mapping[str, list[Mapping[str, Any]]]) -> None:
    parts = parts_of(folder)
    for path in (out / name for name in cases):
        path.mkdir(exist_ok=True)
    found = {name: outcome(parts, rewards, out / name) for name, rewards in cases.items()}
    (out / f"rank{parts.accelerator.process_index}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
