"""What a run will cost, from its config alone: no pipeline, no hub, no prompt file."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from flowgrpo.build import with_tail
from flowgrpo.choices import Choices, check_groups, choose, when
from flowgrpo.config import RunConfig
from flowgrpo.data import Geometry, check_geometry
from flowgrpo.group_noise import Distinct, Shared
from flowgrpo.plan import Cost, cost, learnt, levels_of, micro_batches
from flowgrpo.rollout import Dynamics
from flowgrpo.schedule import Grid, shifted_sigmas
from flowgrpo.window import Window

SHADES = " ░▒▓█"  # no, up to a quarter, half, three quarters, all of a column's iterations
COLUMNS = 20
REPLAY_PRICE = 3  # of a forward pass: forward and backward
BASELINE = "dance"  # the run of this name is what others are compared with, else the first


@dataclass(frozen=True)
class Size:
    """Values of one sample: its latent and its decoded frames; in words where they come from."""

    latent: int
    media: int
    words: str


@dataclass(frozen=True)
class Forecast:
    """The price of a run. Calls are those for one sample, averaged over the run's iterations."""

    config: RunConfig
    geometry: Geometry
    cost: Cost
    unshared: Cost  # had every sample its own noise from the start
    probe: float  # to measure where the reward varies
    windows: tuple[range, ...]  # one an iteration; where they follow measurements, every possible one
    measured: bool
    size: Size
    kept: float  # latents that are kept of a sample

    @property
    def price(self) -> float:
        """Forward passes: a replayed step, with its backward pass, counts three."""
        return self.cost.rollout + self.probe + REPLAY_PRICE * self.cost.replay + self.cost.compared

    @property
    def updates(self) -> int:
        """Optimizer steps of the run."""
        return self.config.iterations * self.config.optimizer.updates_per_iteration

    @property
    def memory(self) -> int:
        """Bytes of an iteration's trajectory on one process: latents, what the objective compares with, media."""
        return round(4 * self.geometry.samples_per_process * (self.kept * self.size.latent + self.size.media))


def forecast(config: RunConfig, num_processes: int = 1) -> Forecast:
    """Plan a run. Raises ValueError for a config that cannot work."""
    choices, updates = choose(config), config.optimizer.updates_per_iteration
    geometry = check_geometry(config.prompts_per_iteration, config.group_size, num_processes, updates)
    check_groups(config, choices, geometry)
    measured = hasattr(choices.window, "wants_probe")
    windows = possible_windows(config, choices.window) if measured else planned_windows(config, choices.window)
    moves = {window: _dynamics(config, choices, window) for window in set(windows)}
    batches, levels = micro_batches(geometry, config.optimizer.micro_batch_size), levels_of(choices)
    counted = Counter(windows).items()
    shared, unshared = (
        learnt(
            mean_cost([(cost(moves[w], within, config.group_size, batches, levels), times) for w, times in counted]),
            choices,
            config.group_size,
            updates,
        )
        for within in (choices.group_noise, Distinct())
    )
    probe = _probe_calls(config, choices) / geometry.samples_per_process if measured else 0.0
    return Forecast(config, geometry, shared, unshared, probe, windows, measured, sample_size(config),
                    kept_latents(choices, len(windows[0]), updates))  # fmt: skip


def kept_latents(choices: Choices, window: int, updates: int) -> float:
    """The latents around the window's steps and the last one, the old means, the predictions for later updates."""
    objective = choices.objective
    if objective.family == "ratio":
        return float(window + 2 + window * objective.needs_old_means)
    return window + 2 + choices.levels.count * objective.needs_old * (updates - 1) / updates


def planned_windows(config: RunConfig, window: Window) -> tuple[range, ...]:
    """The window of every iteration."""
    return tuple(window.at(when(config, iteration)) for iteration in range(config.iterations))


def possible_windows(config: RunConfig, window: Window) -> tuple[range, ...]:
    """Every place that a window of this size can take."""
    size = len(window.at(when(config, 0)))
    return tuple(range(start, start + size) for start in range(config.sampler.num_steps - size))


def mean_cost(costs: Sequence[tuple[Cost, int]]) -> Cost:
    """The mean of costs, each counted so many times."""
    total = sum(count for _, count in costs)
    columns = zip(*(astuple(one) for one, _ in costs), strict=True)
    return Cost(*(sum(x * n for x, (_, n) in zip(column, costs, strict=True)) / total for column in columns))


def _dynamics(config: RunConfig, choices: Choices, window: range) -> Dynamics:
    """As in the run, on levels that stand in for the pipeline's: the number of calls does not depend on them."""
    s = config.sampler
    sigmas = choices.schedule.sigmas(s.num_steps) or shifted_sigmas(s.num_steps)
    grid = with_tail(Grid(sigmas, 1000 * torch.tensor(sigmas[:-1])), window, s.tail)
    return Dynamics(grid, window, choices.transition, choices.solver, choices.tail)


def _probe_calls(config: RunConfig, choices: Choices) -> float:
    """Network calls an iteration for what every process measures every so many iterations."""
    window: Any = choices.window
    steps = [_dynamics(config, choices, range(step, step + 1)) for step in range(config.sampler.num_steps - 1)]
    branch = sum(cost(dynamics, Shared(), window.branches).rollout for dynamics in steps)
    return branch * window.branches * window.probe_prompts / window.every


def sample_size(config: RunConfig) -> Size:
    """From the configs of a local pipeline folder; what it does not say is assumed, in words."""
    s, folder = config.sampler, Path(config.model.pipeline)
    vae, network = _read(folder / "vae" / "config.json"), _read(folder / "transformer" / "config.json")
    channels = vae.get("latent_channels", vae.get("z_dim"))
    scale, per_frame = _downsampling(vae)
    unit = network.get("sample_size")
    own = unit * scale if isinstance(unit, int) and scale else None
    height, width, frames = s.height or own, s.width or own, s.num_frames or 1
    unknown = {"16 channels": channels, "1/8 of the size": scale, "1024 pixels": height and width}
    if frames > 1:
        unknown["1/4 of the frames"] = per_frame
    assumed = [words for words, value in unknown.items() if not value]
    channels, scale, per_frame, height, width = channels or 16, scale or 8, per_frame or 4, height or 1024, width or 1024
    shape = [channels, *([1 + (frames - 1) // per_frame] if frames > 1 else []), height // scale, width // scale]
    words = f"latents {' x '.join(map(str, shape))}, {f'{frames} frames of ' if frames > 1 else ''}{height} x {width} pixels"
    words += f" ({', '.join(assumed)} assumed)" if assumed else ""
    return Size(math.prod(shape), 3 * frames * height * width, words)


def _downsampling(vae: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Pixels a latent's side, frames a latent; None where a VAE does not say it in a form that is known here."""
    if "temperal_downsample" in vae:
        return 2 ** len(vae["temperal_downsample"]), 2 ** sum(vae["temperal_downsample"])
    return (2 ** (len(vae["block_out_channels"]) - 1) if "block_out_channels" in vae else None), None


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def describe(f: Forecast) -> Mapping[str, str]:
    """A forecast in words, a line each."""
    config, g = f.config, f.geometry
    averaged = "averaged over all places of the window" if f.measured else f"averaged over {config.iterations} iterations"
    passes = "; with guidance a call is two passes" if config.sampler.guidance_scale > 1 else ""
    probe = {"probe": f"{f.probe:.2f} calls a sample, where the reward varies"} if f.measured else {}
    return {
        "groups": f"{config.prompts_per_iteration} prompts x {config.group_size} samples = {g.samples} samples an iteration",
        "calls a sample": f"{f.cost}; {averaged}{passes}",
        "without sharing": f"{f.unshared}; with group_noise: distinct",
        **probe,
        "an iteration": f"{g.samples * (f.cost.rollout + f.probe):,.0f} calls to sample, "
        f"{g.samples * f.cost.replay:,.0f} to replay, {g.samples * f.cost.compared:,.0f} to compare",
        "updates": f"{config.optimizer.updates_per_iteration} an iteration, {f.updates:,} in all",
        "trajectory": f"{f.memory / 1e6:,.1f} MB a process for {g.samples_per_process} samples; {f.size.words}",
    }


def picture(windows: Sequence[range], num_steps: int) -> list[str]:
    """The windows over the run: a row for each step, a column for equally many iterations, darker where more train it."""
    columns = min(COLUMNS, len(windows))
    parts = [windows[i * len(windows) // columns : (i + 1) * len(windows) // columns] for i in range(columns)]
    shares = [[sum(step in window for window in part) / len(part) for part in parts] for step in range(num_steps)]
    width = len(str(num_steps - 1))
    return [f"step {step:{width}} |{''.join(map(_shade, row))}|" for step, row in enumerate(shares)]


def _shade(share: float) -> str:
    return SHADES[math.ceil(share * (len(SHADES) - 1))]


def baseline(forecasts: Sequence[Forecast]) -> Forecast:
    """What the prices of several runs are relative to."""
    return next((f for f in forecasts if BASELINE in f.config.name), forecasts[0])


def forecast_table(forecasts: Sequence[Forecast]) -> Table:
    """Several runs, a row each; see `notes`."""
    price = baseline(forecasts).price
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("run", no_wrap=True)
    for column in ("prefix", "window", "tail", "rollout", "alone", "replay", "updates", "cost"):
        table.add_column(column, justify="right", no_wrap=True)
    for f in forecasts:
        c = f.cost
        calls = (c.prefix, c.window, c.tail, c.rollout + f.probe, f.unshared.rollout, c.replay)
        table.add_row(f.config.name, *(f"{x:.2f}" for x in calls), f"{f.updates:,}", f"{f.price / price:.2f}")
    return table


def notes(forecasts: Sequence[Forecast]) -> str:
    """What the columns of `forecast_table` mean."""
    lines = [
        "Network calls a sample, averaged over the run; alone: rollout without sharing.",
        f"cost: rollout + {REPLAY_PRICE} x replay + what old policy and reference are asked; "
        f"{baseline(forecasts).config.name} is 1. Not counted: the second pass of a call under guidance.",
    ]
    if any(f.measured for f in forecasts):
        lines.append("Windows that follow measurements: averaged over all places; rollout has the measuring.")
    return "\n".join(lines)
