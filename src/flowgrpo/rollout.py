"""Rollout: sample a trajectory, stochastic in the window, deterministic outside. Replay: score its stored steps again."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowgrpo import keys
from flowgrpo.data import Prompt
from flowgrpo.group_noise import GroupNoise
from flowgrpo.mdp_scheduler import Plan, Record
from flowgrpo.policy import Conditions, Policy
from flowgrpo.schedule import Grid
from flowgrpo.solvers import Solver
from flowgrpo.transitions import Density, Gaussian, Prediction, Reduce, Transition


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
    within: GroupNoise

    def start(self, row: Row, window: range) -> torch.Generator:
        """The generator of a node's first latent."""
        return keys.generator("start", self.seed, self.iteration, row.prompt.id, self.within.node(row.sample, -1, window))

    def step(self, rows: Sequence[Row], step: int, window: range, shape: tuple[int, ...]) -> Float[Tensor, " b *s"]:
        """Standard normal noise of a window step, one node a row."""
        parts = [((self.seed, self.iteration, row.prompt.id), row.sample) for row in rows]
        return torch.stack([self.within.step_noise(key, sample, step, window, shape[1:]) for key, sample in parts])

    def forward(self, rows: Sequence[Row], number: int, shape: tuple[int, ...], shared: bool = False) -> Float[Tensor, " b *s"]:
        """Standard normal noise to noise finished samples with, for the `number`-th level of the iteration.

        Every sample has its own, or with `shared` that of its group's first.
        """
        keyed = (("forward", self.seed, self.iteration, row.prompt.id, 0 if shared else row.sample, number) for row in rows)
        return torch.stack([keys.normal(shape[1:], *key) for key in keyed])


@dataclass(frozen=True)
class Dynamics:
    """How a trajectory moves: its levels, where it is stochastic and by which law, and what moves it before and after."""

    grid: Grid
    window: range
    transition: Transition
    solver: Solver
    tail: Solver | None = None  # behind the window; None: the solver too
    reduce: Reduce = "mean"
    density: Density = "exact"
    keep_means: bool = False  # for objectives that need the old means

    def plan(self, first: int, last: int) -> Plan:
        """The steps first to last - 1."""
        return Plan(self.grid, first, last, self.window, self.transition, self.solver, self.tail or self.solver)

    def clean(self, x0: Float[Tensor, " b *s"]) -> Float[Tensor, " b *s"]:
        """The last latents of a trajectory on the pipeline's own scale."""
        return x0 * self.grid.scale(self.grid.num_steps)

    def log_density(self, law: Gaussian, x: Float[Tensor, " b *s"]) -> Float[Tensor, " b"]:
        """log pi of a step, in the form that the objective asks for."""
        return law.log_density(x, self.reduce, self.density)


@dataclass(frozen=True)
class Trajectory:
    """What a rollout stored; everything that replay needs, and nothing that holds a graph."""

    rows: tuple[Row, ...]
    dynamics: Dynamics
    noise: Noise
    conditions: Conditions
    latents: Float[Tensor, " b states *s"]  # the w + 1 latents around the window's steps, float32
    log_probs: Float[Tensor, " b window"]
    x0: Float[Tensor, " b *s"]
    media: Float[Tensor, " b f 3 h w"] | None  # in [0, 1], on the CPU; None where nobody asked for it
    calls: int  # network calls, each weighted by its share of the rows
    means: Float[Tensor, " b window *s"] | None = None  # of the window steps' laws, where `keep_means` asks for them

    @property
    def within(self) -> GroupNoise:
        """How the samples of a group are related."""
        return self.noise.within

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """The prompt of each row."""
        return tuple(row.prompt for row in self.rows)

    @property
    def clean(self) -> Float[Tensor, " b *s"]:
        """The finished latents as the pipeline has them before it decodes; for flows they are `x0`."""
        return self.dynamics.clean(self.x0)

    @property
    def group_ids(self) -> Int[Tensor, " b"]:
        """The prompt id of each row."""
        return torch.tensor([row.prompt.id for row in self.rows])

    def nodes(self, rows: Sequence[int], step: int) -> dict[int, int]:
        """One row for each node among `rows` at a step, and how many of them it stands for."""
        counts: dict[tuple[int, int], list[int]] = {}
        for i in rows:
            row = self.rows[i]
            counts.setdefault((row.prompt.id, self.within.node(row.sample, step, self.dynamics.window)), []).append(i)
        return {members[0]: len(members) for members in counts.values()}


@dataclass(frozen=True)
class Finished:
    """Samples that are done while others are still drawn: one row for each node."""

    rows: tuple[Row, ...]
    clean: Float[Tensor, " b *s"]
    media: Float[Tensor, " b f 3 h w"] | None


@dataclass(frozen=True)
class StepScore:
    """A stored step under the present weights."""

    log_prob: Float[Tensor, " b"]
    law: Gaussian
    prediction: Prediction


@dataclass(frozen=True)
class _Stored:
    """What one node of a segment left: the latents before its steps, log-density and mean of window steps, the last latent."""

    latents: Mapping[int, Tensor]
    log_probs: Mapping[int, Tensor]
    means: Mapping[int, Tensor]
    last: Tensor
    media: Tensor | None


def rollout(policy: Policy, rows: Sequence[Row], dynamics: Dynamics, noise: Noise, batch_size: int,
            between: Callable[[], None] = lambda: None, finished: Callable[[Finished], None] = lambda _: None,
            decode: bool = True) -> Trajectory:  # fmt: skip
    """Sample every row, `batch_size` at a time; `between` is called before each batch, `finished` with each that is done.

    Without `decode` there are no media. Samples of a group that are still one (with a shared start noise: before the window)
    run as one.
    """
    window, bounds = dynamics.window, list(segments(rows, dynamics, noise.within))
    stored: list[dict[Row, _Stored]] = []
    calls = 0
    for first, last in pairwise(bounds):
        nodes = list(dict.fromkeys(node_of(row, first, noise.within, window) for row in rows))
        starts = [stored[-1][node_of(n, first - 1, noise.within, window)].last for n in nodes] if stored else None
        done: dict[Row, _Stored] = {}
        for i in range(0, len(nodes), batch_size):
            between()
            batch = slice(i, i + batch_size)
            start = torch.stack(starts[batch]) if starts else None
            is_last = last == dynamics.grid.num_steps
            parts, made = _run_segment(policy, nodes[batch], start, dynamics, noise, first, last, decode and is_last)
            if is_last:
                finished(_finished(nodes[batch], parts, dynamics))
            done.update(zip(nodes[batch], parts, strict=True))
            calls += made * len(parts)
        stored.append(done)
    return _trajectory(policy, rows, dynamics, noise, bounds, stored, calls)


def segments(rows: Sequence[Row], dynamics: Dynamics, within: GroupNoise) -> Iterator[int]:
    """0, the steps before which a row parts from others of its group, asked for here or not, and the number of steps."""
    n, window = dynamics.grid.num_steps, dynamics.window
    nodes = [[node_of(row, step, within, window) for row in rows] for step in range(n)]
    yield from (0, *(step for step in range(1, n) if nodes[step] != nodes[step - 1]), n)


def node_of(row: Row, step: int, within: GroupNoise, window: range) -> Row:
    """The row that stands for all those that are one with this at a step."""
    return Row(row.prompt, within.node(row.sample, step, window))


def _run_segment(policy: Policy, nodes: Sequence[Row], start: Tensor | None, dynamics: Dynamics, noise: Noise,
                 first: int, last: int, decode: bool) -> tuple[list[_Stored], int]:  # fmt: skip
    """The steps first to last - 1 of some nodes, and the network calls that each took."""
    window = dynamics.window
    plan = replace(dynamics.plan(first, last), noise=lambda step, shape: noise.step(nodes, step, window, shape))
    generators = [noise.start(node, window) for node in nodes]
    record, media = policy.run([node.prompt for node in nodes], plan, start=start, generators=generators, decode=decode)
    log_probs = {step: dynamics.log_density(law, _after(record, step)) for step, law in record.laws.items()}
    means = {step: law.mean for step, law in record.laws.items()} if dynamics.keep_means else {}
    clips = [None] * len(nodes) if media is None else media.float().cpu()
    stored = [
        _Stored(_of(record.latents, i), _of(log_probs, i), _of(means, i), record.last[i], clips[i]) for i in range(len(nodes))
    ]
    return stored, record.calls


def _finished(nodes: Sequence[Row], stored: Sequence[_Stored], dynamics: Dynamics) -> Finished:
    last = torch.stack([node.last for node in stored])
    return Finished(tuple(nodes), dynamics.clean(last), _media(stored))


def _media(ends: Sequence[_Stored]) -> Tensor | None:
    media = [end.media for end in ends if end.media is not None]
    return torch.stack(media) if media else None


def _after(record: Record, step: int) -> Tensor:
    return record.latents.get(step + 1, record.last)


def _of(values: Mapping[int, Tensor], i: int) -> dict[int, Tensor]:
    return {step: value[i] for step, value in values.items()}


def _trajectory(policy: Policy, rows: Sequence[Row], dynamics: Dynamics, noise: Noise, bounds: Sequence[int],
                stored: Sequence[Mapping[Row, _Stored]], calls: int) -> Trajectory:  # fmt: skip
    """Every row's path through its nodes, put together."""
    window = dynamics.window
    paths = [
        [done[node_of(row, first, noise.within, window)] for first, done in zip(bounds, stored, strict=False)] for row in rows
    ]
    latents = _gathered([[part.latents for part in path] for path in paths], range(window.start, window.stop + 1))
    log_probs = _gathered([[part.log_probs for part in path] for path in paths], window)
    means = _gathered([[part.means for part in path] for path in paths], window) if dynamics.keep_means else None
    ends = [stored[-1][node_of(row, bounds[-2], noise.within, window)] for row in rows]
    return Trajectory(tuple(rows), dynamics, noise, policy.conditions, latents, log_probs,
                      torch.stack([end.last for end in ends]), _media(ends), calls, means)  # fmt: skip


def _gathered(paths: Sequence[Sequence[Mapping[int, Tensor]]], steps: range) -> Float[Tensor, " b steps *s"]:
    """What the nodes on each row's path hold at these steps."""
    if not len(steps):
        return torch.zeros(len(paths), 0)
    held = [{step: x for part in path for step, x in part.items()} for path in paths]
    return torch.stack([torch.stack([one[step] for step in steps]) for one in held])


def replay(policy: Policy, trajectory: Trajectory, rows: Sequence[int], step: int, grad: bool = True) -> StepScore:
    """Score a stored window step of some rows under the present weights, through the function that sampled it.

    Raises ValueError when the policy's conditions are no longer those of the trajectory.
    """
    if policy.conditions != trajectory.conditions:
        raise ValueError(
            f"a trajectory must be replayed under the conditions it was sampled with, {trajectory.conditions}, "
            f"got {policy.conditions}; sample again"
        )
    dynamics, chosen = trajectory.dynamics, list(rows)
    i = step - dynamics.window.start
    x, x_next = (trajectory.latents[chosen, j] for j in (i, i + 1))
    plan = replace(dynamics.plan(step, step + 1), x_next=x_next)
    record, _ = policy.run([trajectory.rows[r].prompt for r in chosen], plan, start=x, grad=grad)
    law = record.laws[step]
    return StepScore(dynamics.log_density(law, x_next), law, record.predictions[step])
