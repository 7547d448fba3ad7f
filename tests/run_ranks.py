"""Run by several processes at once: two iterations of the toy run, whose outcome the main process writes."""

import json
import sys
from pathlib import Path

from accelerate import Accelerator
from safetensors.torch import save_file

from flowgrpo.build import build
from flowgrpo.metrics import Metrics
from flowgrpo.rollout import Trajectory
from flowgrpo.trainer import Trainer
from tests.toys import config


def main(folder: Path, out: Path, changes: str) -> None:
    accelerator = Accelerator(cpu=True)
    parts = build(config(folder, optimizer__updates_per_iteration=1, **json.loads(changes)), accelerator)
    trainer = Trainer(parts, Metrics(out / "metrics.jsonl"))
    seen: list[Trajectory] = []
    trainer.on_samples = lambda k, trajectory, scores: seen.append(trajectory)
    trainer.run(2)
    rank = accelerator.process_index
    x0 = {f"x0/{t.dynamics.window.start}/{row.prompt.id}/{row.sample}/{k}": t.x0[i].contiguous()
          for k, t in enumerate(seen) for i, row in enumerate(t.rows)}  # fmt: skip
    save_file(x0, out / f"samples{rank}.safetensors")
    if accelerator.is_main_process:
        save_file({name: p.detach().contiguous() for name, p in parts.trained.items()}, out / "weights.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
