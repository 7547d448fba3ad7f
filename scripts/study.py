"""Learning per second: recipes side by side on the embedded world, at equal wall time, with several seeds.

    python scripts/study.py configs/shapes/{flow_grpo,mixgrpo,mixgrpo_flash}.yaml --seeds 1 2 3 --seconds 100 --out runs/study

Every run has its config's settings but for a constant learning rate (so that each point of a curve is what a run of that
length would give), and stops when its iterations have taken the seconds; evaluation does not count. Gold is the strict pass
on the first `--prompts` held-out prompts, after each of `--marks` equal shares of the time. One JSON line a finished run in
OUT/runs.jsonl; finished runs are not repeated. Writes OUT/study.md and OUT/study.png. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from flowgrpo.build import build
from flowgrpo.config import RunConfig, load_config
from flowgrpo.data import load_prompts
from flowgrpo.evaluate import evaluate_as_configured
from flowgrpo.metrics import Metrics
from flowgrpo.paired import paired_rise
from flowgrpo.trainer import Trainer


def configured(path: Path, seed: int, args: argparse.Namespace) -> RunConfig:
    """The recipe with what the study sets."""
    fixed = [f"seed={seed}", "iterations=5000", "optimizer.decay=0", "checkpoint.every=0", "logging.samples_every=0"]
    return load_config(path, [*fixed, f"name={path.stem}-{seed}", f"output_dir={args.out}", "logging.trackers=[]", *args.set])


def run(path: Path, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Train one recipe with one seed; gold and its interval at every mark."""
    config = configured(path, seed, args)
    parts = build(config)
    assert config.prompts.heldout is not None
    prompts = load_prompts(config.prompts.heldout).prompts[: args.prompts]

    def gold() -> torch.Tensor:
        return evaluate_as_configured(config, parts.policy, parts.scorer, prompts).column(config.gold)

    trainer = Trainer(parts, Metrics(config.folder / "metrics.jsonl"))
    base, used, points = gold(), 0.0, []
    captions = [prompt.text for prompt in prompts]
    for mark in range(1, args.marks + 1):
        while used < args.seconds * mark / args.marks:
            began = time.perf_counter()
            trainer.iteration(trainer.next_iteration)
            trainer.next_iteration += 1
            used += time.perf_counter() - began
        rise = paired_rise(base, gold(), captions)
        points.append({"seconds": used, "iterations": trainer.next_iteration, **rise.as_json()})
        print(f"{path.stem} seed {seed}: {used:.0f} s, {trainer.next_iteration} iterations, {rise.rise:+.3f}", flush=True)
    return {"recipe": path.stem, "seed": seed, "points": points}


def table(runs: list[dict[str, Any]]) -> str:
    """Markdown: mean over seeds, the spread between them, and the worst seed's interval."""
    by_recipe: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in runs:
        by_recipe[one["recipe"]].append(one)
    lines = [
        "| recipe | iterations | rise of gold, mean of seeds | between seeds (sd) | each seed | lowest 95 % bound |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for recipe, some in sorted(by_recipe.items(), key=lambda item: -mean(r["points"][-1]["rise"] for r in item[1])):
        ends = [r["points"][-1] for r in some]
        rises = [end["rise"] for end in ends]
        spread = f"{stdev(rises):.3f}" if len(rises) > 1 else "-"
        lines.append(
            f"| {recipe} | {mean(end['iterations'] for end in ends):.0f} | {mean(rises):+.3f} | {spread} | "
            f"{', '.join(f'{r:+.3f}' for r in rises)} | {min(end['rise_low'] for end in ends):+.3f} |"
        )
    return "\n".join(lines)


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    """Gold's rise against seconds: a line for the mean of the seeds, a band from the lowest to the highest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for recipe in sorted({one["recipe"] for one in runs}):
        some = [one["points"] for one in runs if one["recipe"] == recipe]
        seconds = [0.0, *(mean(p["seconds"] for p in mark) for mark in zip(*some, strict=True))]
        rises = [[0.0], *([p["rise"] for p in mark] for mark in zip(*some, strict=True))]
        (line,) = axes.plot(seconds, [mean(r) for r in rises], label=recipe)
        axes.fill_between(seconds, [min(r) for r in rises], [max(r) for r in rises], alpha=0.12, color=line.get_color())
    axes.set(xlabel="seconds of iterations", ylabel="rise of gold on held-out prompts")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", type=Path, nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--marks", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings for all recipes")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    log = args.out / "runs.jsonl"
    runs = [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []
    done = {(one["recipe"], one["seed"]) for one in runs}
    for seed in args.seeds:
        for path in args.configs:
            if (path.stem, seed) not in done:
                runs.append(run(path, seed, args))
                with log.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(runs[-1]) + "\n")
    (args.out / "study.md").write_text(table(runs) + "\n", encoding="utf-8")
    plot(runs, args.out / "study.png")
    print(table(runs))


if __name__ == "__main__":
    main()
