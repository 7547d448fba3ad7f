"""Time of rollout and update against their floor, and of one recipe against another, measured in one run.

    python scripts/bench_sampler.py configs/flux.1-dev/dance_grpo.yaml configs/flux.1-dev/mixgrpo*.yaml

Of each config the sampler, the window schedule, the group and gradient checkpointing are taken; the model is a random
Stable Diffusion 3 of 3.5 million parameters on 32 x 32 latents, trained in full. Like the real ones it is large in tokens
rather than in optimizer steps; its forward pass for one group takes above a tenth of a second on a CPU. The first config
is the one that the others are compared with. Its prefix is not shared (`--shared-baseline` shares it too), as in the papers.

The floor is the network alone: each call of the plan as one bare forward of as many rows as it has, each trained step as
one bare forward and backward. `--windows` places of the schedule are timed, evenly spaced and weighted by the iterations
nearest to each; the order is shuffled anew in every repeat, and medians are taken. Absolute times mean nothing on a
shared machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, SD3Transformer2DModel
from shapes_models import new_pipeline

from flowgrpo.build import Parts, build
from flowgrpo.choices import when
from flowgrpo.config import load_config, parse_config
from flowgrpo.group_noise import Distinct
from flowgrpo.losses import Losses
from flowgrpo.metrics import Metrics
from flowgrpo.rollout import Noise, Row, Trajectory, rollout
from flowgrpo.trainer import Trainer

PIXELS = 64


def save_model(folder: Path) -> None:
    """The random pipeline: more latents than the embedded one has, and an autoencoder that costs next to nothing."""
    torch.manual_seed(0)
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, block_out_channels=(4, 4),
        latent_channels=4, norm_num_groups=2, use_quant_conv=False, use_post_quant_conv=False, mid_block_add_attention=False,
        scaling_factor=1.0, shift_factor=0.0,
    )  # fmt: skip
    pipe = new_pipeline(vae)
    changes = {"sample_size": PIXELS // 2, "pos_embed_max_size": PIXELS // 4, "num_layers": 6}
    pipe.transformer = SD3Transformer2DModel.from_config({**pipe.transformer.config, **changes})
    pipe.save_pretrained(folder / "pipeline")
    (folder / "prompts.txt").write_text("a red circle\n", encoding="utf-8")


def bench_config(path: Path, folder: Path) -> Any:
    """The recipe's sampling and updating, on the random model and one prompt."""
    raw = load_config(path).model_dump(mode="json")
    slots = ("advantage", "signal", "objective", "step_weights", "levels")
    kept = {name: raw[name] for name in ("iterations", "group_size", "seed", *slots)}
    sampler = {name: raw["sampler"][name] for name in ("num_steps", "window", "transition", "solver", "tail", "group_noise")}
    size = raw["group_size"]
    return parse_config(
        {
            **kept,
            "name": path.stem,
            "output_dir": str(folder),
            "prompts_per_iteration": 1,
            "model": {
                "pipeline": str(folder / "pipeline"),
                "train": "full",
                "gradient_checkpointing": raw["model"]["gradient_checkpointing"],
                "call": {"max_sequence_length": 1},
            },
            "prompts": {"train": str(folder / "prompts.txt")},
            "sampler": {**sampler, "height": PIXELS, "width": PIXELS, "batch_size": size},
            "rewards": [{"name": "colour", "use": "reward_models.colourfulness:Colourfulness"}],
            "optimizer": {"lr": 1e-6, "updates_per_iteration": 1, "micro_batch_size": size},
            "logging": {"trackers": []},
        }
    )


class Bare:
    """The network alone, on inputs of the shapes that the pipeline gives it."""

    def __init__(self, network: torch.nn.Module) -> None:
        self.network, self.captured = network, {}
        self.seconds: dict[tuple[int, bool], list[float]] = {}
        network.register_forward_pre_hook(self.capture, with_kwargs=True)

    def capture(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward hook that keeps the first call's arguments."""
        self.captured = self.captured or {name: v.detach() if isinstance(v, torch.Tensor) else v for name, v in kwargs.items()}

    def time(self, rows: int, train: bool) -> None:
        """One measurement of a call of so many rows."""

        def fit(v: Any) -> Any:
            return v[:1].repeat(rows, *[1] * (v.dim() - 1)) if isinstance(v, torch.Tensor) and v.dim() else v

        arguments = {name: fit(v) for name, v in self.captured.items()}
        began = time.perf_counter()
        with torch.set_grad_enabled(train):
            out = self.network(**arguments)[0]
            if train:
                out.float().square().mean().backward()
        self.seconds.setdefault((rows, train), []).append(time.perf_counter() - began)
        self.network.zero_grad(set_to_none=True)

    def of(self, rows: int, train: bool) -> float:
        return statistics.median(self.seconds[rows, train])


class Recipe:
    """A config's run: what it costs at each window of its schedule, and the floor of that."""

    def __init__(self, parts: Parts, shared: bool, places: int) -> None:
        if not shared:
            parts = replace(parts, choices=replace(parts.choices, group_noise=Distinct()))
        self.parts, self.config = parts, parts.config
        self.bare = Bare(next(iter(parts.policy.networks.values())))
        self.trainer = Trainer(parts, Metrics(Path(parts.config.output_dir) / f"{parts.config.name}.jsonl"))
        every = [parts.choices.window.at(when(self.config, k)) for k in range(self.config.iterations)]
        self.windows = spaced(Counter(every), places)
        self.times: dict[range, list[tuple[float, float]]] = {w: [] for w in self.windows}
        self.rows_called: dict[range, list[int]] = {}

    def measure(self, window: range) -> None:
        """One rollout and one update at a window."""
        rows = [Row(self.parts.prompts[0], i) for i in range(self.config.group_size)]
        noise = Noise(0, 0, self.parts.choices.group_noise)
        dynamics, size = self.parts.dynamics(window), self.config.group_size
        seconds, trajectory = timed(lambda: rollout(self.parts.policy, rows, dynamics, noise, size))
        advantages = torch.randn(size, len(window))
        losses = Losses(self.parts, trajectory, advantages, self.trainer.metrics)
        update, _ = timed(lambda: self.trainer.update(losses, range(size), first=False))
        self.times[window].append((seconds, update))
        self.rows_called.setdefault(window, called_rows(trajectory))

    def mean(self, pick: Callable[[range], float]) -> float:
        """Over the schedule."""
        return sum(share * pick(window) for window, share in self.windows.items())

    def seconds(self, part: int) -> float:
        """Median rollout (0) or update (1) time, averaged over the schedule."""
        return self.mean(lambda w: statistics.median(t[part] for t in self.times[w]))

    def floor(self, part: int) -> float:
        """What the network alone takes."""
        bare = self.bare
        if part == 0:
            return self.mean(lambda w: sum(bare.of(rows, False) for rows in self.rows_called[w]))
        return self.mean(lambda w: sum(bare.of(rows, True) for rows in trained_rows(self, w)))


def spaced(counts: Counter[range], places: int) -> dict[range, float]:
    """Some windows of a schedule, evenly spaced by their starts, each with the share of the iterations nearest to it."""
    windows = sorted(counts, key=lambda w: w.start)
    last = len(windows) - 1
    kept = sorted({round(i * last / max(1, places - 1)) for i in range(places)}) if last else [0]
    shares: dict[range, float] = dict.fromkeys((windows[k] for k in kept), 0.0)
    for i, window in enumerate(windows):
        near = [k for k in kept if abs(k - i) == min(abs(k - i) for k in kept)]
        for k in near:
            shares[windows[k]] += counts[window] / len(near)
    return {window: n / sum(counts.values()) for window, n in shares.items()}


def called_rows(trajectory: Trajectory) -> list[int]:
    """The rows of every network call of a rollout of one batch."""
    dynamics, rows = trajectory.dynamics, range(len(trajectory.rows))
    plan = dynamics.plan(0, dynamics.grid.num_steps)
    return [len(trajectory.nodes(rows, s)) for s in range(plan.last) for _ in range(plan.calls(s))]


def trained_rows(recipe: Recipe, window: range) -> list[int]:
    nodes, group = recipe.parts.choices.group_noise, range(recipe.config.group_size)
    return [len({nodes.node(i, step, window) for i in group}) for step in window]


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = run()
    return time.perf_counter() - began, result


def measure_all(recipes: list[Recipe], repeats: int) -> None:
    """Every recipe at every window, and the bare network between them, in a new order each time."""
    jobs = [(recipe, window) for recipe in recipes for window in recipe.windows]
    for repeat in range(repeats):
        for recipe, window in random.Random(repeat).sample(jobs, len(jobs)):
            recipe.measure(window)
            for rows in {*recipe.rows_called[window]}:
                recipe.bare.time(rows, train=False)
            for rows in {*trained_rows(recipe, window)}:
                recipe.bare.time(rows, train=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", type=Path, nargs="+")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--windows", type=int, default=3, help="places of each schedule that are timed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shared-baseline", action="store_true", help="let the first config share its prefix, too")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as name:
        save_model(Path(name))
        parts = [build(bench_config(path, Path(name))) for path in args.configs]
        recipes = [Recipe(p, i > 0 or args.shared_baseline, args.windows) for i, p in enumerate(parts)]
        for recipe in recipes:  # warm up
            recipe.measure(next(iter(recipe.windows)))
            recipe.times = {w: [] for w in recipe.windows}
        measure_all(recipes, args.repeats)
        report(recipes, args.json)


def report(recipes: list[Recipe], path: Path | None) -> None:
    """Print the table; write it if asked."""
    bare = recipes[0].bare
    largest = max(rows for rows, train in bare.seconds if not train)
    alone, trained = (1e3 * bare.of(largest, train) for train in (False, True))
    print(f"bare forward of {largest} rows {alone:.0f} ms, with backward {trained:.0f} ms")
    print("recipe                    calls replay  rollout/floor  update/floor  iteration vs first")
    first = sum(recipes[0].seconds(part) for part in (0, 1))
    table = []
    for r in recipes:
        row = {
            "recipe": r.config.name,
            "calls": round(r.mean(lambda w, r=r: sum(r.rows_called[w]) / r.config.group_size), 2),
            "replay": round(r.mean(lambda w, r=r: sum(trained_rows(r, w)) / r.config.group_size), 2),
            "rollout_over_floor": round(r.seconds(0) / r.floor(0), 3),
            "update_over_floor": round(r.seconds(1) / r.floor(1), 3),
            "iteration_vs_first": round((r.seconds(0) + r.seconds(1)) / first, 3),
        }
        table.append(row)
        name, *numbers = row.values()
        print("{:24} {:6.2f} {:6.2f} {:14.3f} {:13.3f} {:19.3f}".format(name, *numbers))
    if path:
        path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
