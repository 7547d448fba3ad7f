"""The loss of an iteration's samples, piece by piece, as the objective's family asks for it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from flowgrpo.build import Parts, when
from flowgrpo.metrics import Metrics
from flowgrpo.objectives import ForwardBatch, StepBatch
from flowgrpo.rollout import StepScore, Trajectory, replay
from flowgrpo.schedule import Grid
from flowgrpo.transitions import Prediction


def micro_batches(rows: range, size: int) -> Iterator[range]:
    """`rows` in parts of at most this size."""
    yield from (range(start, min(start + size, rows.stop)) for start in range(rows.start, rows.stop, size))


@dataclass(frozen=True)
class Losses:
    """The losses of a trajectory's samples under the present weights."""

    parts: Parts
    trajectory: Trajectory
    advantages: Float[Tensor, " b steps"]
    metrics: Metrics
    remembered: dict[range, list[Tensor]] = field(default_factory=dict)  # by micro-batch, a velocity (b, *s) a level

    def of(self, batch: range, first: bool) -> Iterator[Tensor]:
        """Scalars whose sum is the loss of a micro-batch, averaged over steps or levels and summed over samples.

        Take each backward before the next is asked for, so that one network call's graph is held at a time; only an
        objective whose scope is the trajectory holds those of all window steps. `first` says that nothing was updated yet.
        """
        objective = self.parts.choices.objective
        if objective.family == "forward":
            return self._over_levels(batch)
        return self._over_trajectory(batch, first) if objective.scope == "trajectory" else self._over_steps(batch, first)

    def remember(self, batches: Sequence[range]) -> None:
        """Keep what the weights predict for micro-batches that are learnt from only after the next update."""
        choices = self.parts.choices
        if choices.objective.family == "forward" and choices.objective.needs_old:
            for batch in batches:
                noised = (self._noised(batch, number) for number in range(choices.levels.count))
                self.remembered[batch] = [self._predict(batch, x, level).v for _, _, x, level in noised]

    def step_batch(self, rows: list[int], step: int, first: bool) -> StepBatch:
        """What the objective is told of these rows at a window step."""
        objective, trajectory = self.parts.choices.objective, self.trajectory
        reference = self._reference_score(rows, step)
        new = replay(self.parts.policy, trajectory, rows, step)
        column = step - trajectory.dynamics.window.start
        old, std = trajectory.log_probs[rows, column], torch.full_like(new.log_prob, new.law.std)
        kl = None
        if reference is not None:
            kl = objective.divergence(new.law, new.prediction, reference.law, reference.prediction)
        old_mean = None if trajectory.means is None else trajectory.means[rows, column]
        self.metrics.add("calls/replay", len(rows))
        if first:
            self.metrics.add("ratio/max_gap", (new.log_prob - old).abs())
        return StepBatch(new.log_prob, old, self.advantages[rows, column], new.law.mean, std, old_mean, kl)

    def _over_steps(self, batch: range, first: bool) -> Iterator[Tensor]:
        choices, trajectory, window = self.parts.choices, self.trajectory, self.trajectory.dynamics.window
        weights = choices.step_weights(trajectory.dynamics.transition, self.parts.grid.sigmas, window)
        for step in window:
            nodes = trajectory.nodes(batch, step)
            loss, stats = choices.objective(self.step_batch(list(nodes), step, first))
            self.metrics.update({"loss": loss, **stats})
            counts = torch.tensor(list(nodes.values()), device=loss.device)
            yield weights[step] * (counts * loss).sum() / len(window)

    def _over_trajectory(self, batch: range, first: bool) -> Iterator[Tensor]:
        steps = [self.step_batch(list(batch), step, first) for step in self.trajectory.dynamics.window]
        loss, stats = self.parts.choices.objective(steps)
        self.metrics.update({"loss": loss, **stats})
        yield loss.sum()

    def _over_levels(self, batch: range) -> Iterator[Tensor]:
        choices = self.parts.choices
        for j in range(choices.levels.count):
            loss, stats = choices.objective(self.forward_batch(batch, j))
            self.metrics.update({"loss": loss, **stats})
            yield loss.sum() / choices.levels.count

    def forward_batch(self, batch: range, number: int) -> ForwardBatch:
        """What the objective is told of a micro-batch at the `number`-th level of the iteration."""
        x0, eps, x, level = self._noised(batch, number)
        reference = old = None
        if self.parts.reference is not None:
            with self.parts.reference.active():
                reference = self._predict(batch, x, level)
        new = self._predict(batch, x, level, grad=True)
        if self.parts.choices.objective.needs_old:  # before the first update the present weights are the old ones
            old = replace(new, v=self.remembered[batch][number] if batch in self.remembered else new.v.detach())
        self.metrics.add("calls/replay", len(batch))
        return ForwardBatch(x0, eps, self.advantages[batch.start : batch.stop, -1], new, old, reference)

    def _noised(self, batch: range, number: int) -> tuple[Tensor, Tensor, Tensor, Grid]:
        """x0, eps, x between them, and the level that x is at."""
        trajectory, grid, parts = self.trajectory, self.parts.grid, self.parts
        moment = when(parts.config, trajectory.noise.iteration)
        level = parts.policy.level(grid, parts.choices.levels.at(moment, grid.sigmas)[number])
        x0 = trajectory.x0[batch.start : batch.stop] * grid.scale(grid.num_steps)
        rows = trajectory.rows[batch.start : batch.stop]
        eps, sigma = trajectory.noise.forward(rows, number, tuple(x0.shape)).to(x0.device), level.sigmas[0]
        return x0, eps, (1 - sigma) * x0 + sigma * eps, level

    def _predict(self, batch: range, x: Tensor, level: Grid, grad: bool = False) -> Prediction:
        return self.parts.policy.predict(self.trajectory.prompts[batch.start : batch.stop], x, level, grad=grad)

    def _reference_score(self, rows: list[int], step: int) -> StepScore | None:
        if self.parts.reference is None:
            return None
        with self.parts.reference.active():
            return replay(self.parts.policy, self.trajectory, rows, step, grad=False)
