"""Rollout: sample a trajectory, stochastic in the window, deterministic outside. Replay: score its stored steps again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowgrpo import keys
from flowgrpo.data import Prompt
from flowgrpo.mdp_scheduler import Plan
from flowgrpo.policy import Conditions, Policy
from flowgrpo.schedule import Grid
from flowgrpo.solvers import Solver
from flowgrpo.transitions import Gaussian, Prediction, Reduce, Transition


@dataclass(frozen=True)
class Row:
    """One sample to draw: the `sample`-th of its prompt's group."""

    prompt: Prompt
    sample: int


@dataclass(frozen=True)
class Noise:
    """All noise of an iteration, keyed: a picture depends on its key alone, not on its batch, neighbours or process."""

    seed: int
    iteration: int
    shared_start: bool

    def start(self, row: Row) -> torch.Generator:
        """The generator of a sample's first latent; one for the whole group when it is shared."""
        sample = 0 if self.shared_start else row.sample
        return keys.generator("start", self.seed, self.iteration, row.prompt.id, sample)

    def step(self, rows: Sequence[Row], step: int, shape: tuple[int, ...]) -> Float[Tensor, " b *s"]:
        """Standard normal noise of a window step."""
        parts = [("step", self.seed, self.iteration, row.prompt.id, row.sample, step) for row in rows]
        return torch.stack([keys.normal(shape[1:], *part) for part in parts])


@dataclass(frozen=True)
class Dynamics:
    """How a trajectory moves: its levels, where it is stochastic, and by which law."""

    grid: Grid
    window: range
    transition: Transition
    solver: Solver
    reduce: Reduce = "mean"

    def plan(self, first: int, last: int) -> Plan:
        """The steps first to last - 1."""
        return Plan(self.grid, first, last, self.window, self.transition, self.solver)


@dataclass(frozen=True)
class Trajectory:
    """What a rollout stored; everything that replay needs, and nothing that holds a graph."""

    rows: tuple[Row, ...]
    dynamics: Dynamics
    conditions: Conditions
    latents: Float[Tensor, " b states *s"]  # the w + 1 latents around the window's steps, float32
    log_probs: Float[Tensor, " b window"]
    x0: Float[Tensor, " b *s"]
    media: Float[Tensor, " b f 3 h w"]  # in [0, 1], on the CPU
    calls: int  # network calls, each weighted by its share of the rows

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """The prompt of each row."""
        return tuple(row.prompt for row in self.rows)

    @property
    def group_ids(self) -> Int[Tensor, " b"]:
        """The prompt id of each row."""
        return torch.tensor([row.prompt.id for row in self.rows])


@dataclass(frozen=True)
class StepScore:
    """A stored step under the present weights."""

    log_prob: Float[Tensor, " b"]
    law: Gaussian
    prediction: Prediction


def rollout(policy: Policy, rows: Sequence[Row], dynamics: Dynamics, noise: Noise, batch_size: int,
            between: Callable[[], None] = lambda: None) -> Trajectory:  # fmt: skip
    """Sample every row, `batch_size` at a time; `between` is called before each batch.

    With a shared start noise the steps before the window are the same for a whole group: they run once per prompt.
    """
    prefixes: dict[int, Tensor] = {}
    parts = []
    for first in range(0, len(rows), batch_size):
        between()
        chunk = rows[first : first + batch_size]
        if noise.shared_start and dynamics.window.start > 0:
            _extend_prefixes(prefixes, policy, chunk, dynamics, noise)
        parts.append(_sample(policy, chunk, dynamics, noise, prefixes))
    joined = {name: torch.cat([getattr(p, name) for p in parts]) for name in ("latents", "log_probs", "x0", "media")}
    calls = len(prefixes) * dynamics.window.start + sum(p.calls for p in parts)
    return replace(parts[0], rows=tuple(rows), calls=calls, **joined)


def _extend_prefixes(
    prefixes: dict[int, Tensor], policy: Policy, rows: Sequence[Row], dynamics: Dynamics, noise: Noise
) -> None:
    new = list({row.prompt.id: row for row in rows if row.prompt.id not in prefixes}.values())
    if not new:
        return
    generators = [noise.start(row) for row in new]
    record, _ = policy.run([r.prompt for r in new], dynamics.plan(0, dynamics.window.start), generators=generators)
    prefixes.update(zip((row.prompt.id for row in new), record.last, strict=True))


def _sample(policy: Policy, rows: Sequence[Row], dynamics: Dynamics, noise: Noise, prefixes: dict[int, Tensor]) -> Trajectory:
    window = dynamics.window
    start = torch.stack([prefixes[row.prompt.id] for row in rows]) if prefixes else None
    generators = [noise.start(row) for row in rows]
    plan = replace(
        dynamics.plan(window.start if prefixes else 0, dynamics.grid.num_steps),
        noise=lambda step, shape: noise.step(rows, step, shape),
    )
    prompts = [row.prompt for row in rows]
    record, media = policy.run(prompts, plan, start=start, generators=generators, decode=True)
    assert media is not None
    latents = torch.stack([record.latents[step] for step in range(window.start, window.stop + 1)], dim=1)
    log_probs = [record.laws[step].log_density(latents[:, i + 1], dynamics.reduce) for i, step in enumerate(window)]
    calls = record.calls * len(rows)
    return Trajectory(tuple(rows), dynamics, policy.conditions, latents, torch.stack(log_probs, dim=1), record.last,
                      media.float().cpu(), calls)  # fmt: skip


def replay(policy: Policy, trajectory: Trajectory, rows: range, step: int, grad: bool = True) -> StepScore:
    """Score a stored window step of some rows under the present weights, through the function that sampled it.

    Raises ValueError when the policy's conditions are no longer those of the trajectory.
    """
    if policy.conditions != trajectory.conditions:
        raise ValueError(
            f"a trajectory must be replayed under the conditions it was sampled with, {trajectory.conditions}, "
            f"got {policy.conditions}; sample again"
        )
    dynamics = trajectory.dynamics
    i = step - dynamics.window.start
    x, x_next = (trajectory.latents[rows.start : rows.stop, j] for j in (i, i + 1))
    plan = replace(dynamics.plan(step, step + 1), x_next=x_next)
    prompts = [trajectory.rows[r].prompt for r in rows]
    record, _ = policy.run(prompts, plan, start=x, grad=grad)
    law = record.laws[step]
    return StepScore(law.log_density(x_next, dynamics.reduce), law, record.predictions[step])
