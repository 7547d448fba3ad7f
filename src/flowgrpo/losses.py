"""The loss of an iteration's samples, piece by piece, as the objective's family asks for it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowgrpo.adapters import swapped
from flowgrpo.build import Parts
from flowgrpo.choices import when
from flowgrpo.metrics import Metrics
from flowgrpo.objectives import ForwardBatch, StepBatch
from flowgrpo.rollout import StepScore, Trajectory, replay
from flowgrpo.schedule import Grid
from flowgrpo.transitions import Prediction, reduce_coordinates

Rows = tuple[int, ...]  # of a trajectory
BY_PLACE = ("ratio/mean", "ratio/spread", "moved")  # what is logged by window step or level too


class Piece(NamedTuple):
    """A part of a loss, and the window step or the number of the level that it comes from, None for all at once."""

    loss: Tensor
    place: int | None


def cleaned(trajectory: Trajectory) -> Trajectory:
    """Without NaN and infinity, which samples that failed are made of and would carry into every sum; they do not train."""
    parts = {name: getattr(trajectory, name) for name in ("latents", "log_probs", "x0", "means")}
    return replace(trajectory, **{name: part.nan_to_num(0, 0, 0) for name, part in parts.items() if part is not None})


def micro_batches(rows: Sequence[int], size: int) -> Iterator[Rows]:
    """`rows` in parts of at most this size."""
    yield from (tuple(rows[start : start + size]) for start in range(0, len(rows), size))


@dataclass(frozen=True)
class Losses:
    """The losses of a trajectory's samples under the present weights."""

    parts: Parts
    trajectory: Trajectory
    advantages: Float[Tensor, " b steps"]
    metrics: Metrics
    gate: Float[Tensor, " b"] | None = None  # how much of the pull to the reference counts for a sample; None: all
    valid: Bool[Tensor, " b"] | None = None  # which samples train; None: all
    remembered: dict[Rows, list[Tensor]] = field(default_factory=dict)  # by micro-batch, a velocity (b, *s) a level

    def of(self, batch: Rows, first: bool) -> Iterator[Piece]:
        """Scalars whose sum is the loss of a micro-batch, averaged over steps or levels and summed over samples.

        Take each backward before the next is asked for, so that one network call's graph is held at a time; only an
        objective whose scope is the whole sample holds those of all. `first` says that nothing was updated yet.
        """
        by_scope = {"trajectory": self._over_trajectory, "step": self._over_steps, "sample": self._over_sample}
        return by_scope.get(self.parts.choices.objective.scope, self._over_levels)(batch, first)

    def remember(self, batches: Sequence[Rows], watched: bool) -> None:
        """Keep what the weights predict for micro-batches that are learnt from only after the next update.

        For an objective that does not ask for it only where the iteration is `watched`, one micro-batch at one level.
        """
        objective, count = self.parts.choices.objective, self.parts.choices.levels.count
        if objective.family != "forward" or self.parts.old is not None:
            return
        if not objective.needs_old:
            batches, count = batches[: int(watched)], 1
        for batch in batches:
            noised = (self._noised(batch, number) for number in range(count))
            self.remembered[batch] = [self._predict(batch, x, level).v for _, _, x, level in noised]

    def step_batch(self, rows: Sequence[int], step: int, first: bool) -> StepBatch:
        """What the objective is told of these rows at a window step."""
        rows, objective, trajectory = list(rows), self.parts.choices.objective, self.trajectory
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
        return StepBatch(
            new.log_prob, old, self.advantages[rows, column], new.law.mean, std, old_mean, kl,
            self._pull(rows, new.prediction.sigma), self._ahead(rows, new.prediction),
        )  # fmt: skip

    def forward_batch(self, batch: Rows, number: int) -> ForwardBatch:
        """What the objective is told of a micro-batch at the `number`-th level of the iteration."""
        parts, (x0, eps, x, level) = self.parts, self._noised(batch, number)
        reference = old = None
        if parts.reference is not None:
            with parts.reference.active():
                reference = self._predict(batch, x, level)
        if parts.old is not None:
            with swapped(parts.trained, parts.old.shadow):
                old = self._predict(batch, x, level)
        new = self._predict(batch, x, level, grad=True)
        if parts.choices.objective.needs_old and old is None:  # before the first update the present weights are the old ones
            old = replace(new, v=self.remembered[batch][number] if batch in self.remembered else new.v.detach())
        self.metrics.add("calls/replay", len(batch))
        rows, groups = list(batch), self.trajectory.group_ids.to(x.device)
        if self.valid is not None:  # who does not train is compared with nobody
            groups = torch.where(self.valid, groups, -1 - torch.arange(len(groups), device=x.device))
        return ForwardBatch(x0, eps, self.advantages[rows, -1], new, old, reference, groups[rows], self._pull(rows, new.sigma))

    def _over_steps(self, batch: Rows, first: bool) -> Iterator[Piece]:
        choices, trajectory, window = self.parts.choices, self.trajectory, self.trajectory.dynamics.window
        weights = choices.step_weights(trajectory.dynamics.transition, self.parts.grid.sigmas, window)
        for step in window:
            nodes = trajectory.nodes([i for i in batch if self.valid is None or self.valid[i]] or batch, step)
            loss = self._ask(self.step_batch(list(nodes), step, first), list(nodes), step)
            counts = torch.tensor(list(nodes.values()), device=loss.device)
            yield Piece(weights[step] * (counts * loss).sum() / len(window), step)

    def _over_trajectory(self, batch: Rows, first: bool) -> Iterator[Piece]:
        steps = [self.step_batch(batch, step, first) for step in self.trajectory.dynamics.window]
        yield Piece(self._ask(steps, batch).sum(), None)

    def _over_levels(self, batch: Rows, first: bool) -> Iterator[Piece]:
        count = self.parts.choices.levels.count
        for j in range(count):
            told = self.forward_batch(batch, j)
            self._log_moved(batch, j, told)
            yield Piece(self._ask(told, batch, j).sum() / count, j)

    def _over_sample(self, batch: Rows, first: bool) -> Iterator[Piece]:
        levels = [self.forward_batch(batch, j) for j in range(self.parts.choices.levels.count)]
        yield Piece(self._ask(levels, batch).sum(), None)

    def _ask(
        self,
        told: StepBatch | ForwardBatch | list[StepBatch] | list[ForwardBatch],
        rows: Sequence[int],
        place: int | None = None,
    ) -> Tensor:
        """The objective's losses, 0 for who does not train; what it says besides is logged, some of it also by place."""
        loss, stats = self.parts.choices.objective(told)
        if self.valid is not None:
            loss = torch.where(self.valid[list(rows)], loss, 0)
        self.metrics.update({"loss": loss, **stats})
        if place is not None:
            self.metrics.update({f"{name}/{place}": stats[name] for name in BY_PLACE if name in stats})
        return loss

    def _log_moved(self, batch: Rows, number: int, told: ForwardBatch) -> None:
        """How far the policy has gone, for an objective that does not ask for old predictions, in the unit of those that do:
        the mean over an iteration's updates, which begins with one that has not gone anywhere."""
        if told.old is None and number == 0 and batch in self.remembered:
            moved = reduce_coordinates((told.new.v.detach() - self.remembered[batch][0]) ** 2, "mean")
            self.metrics.update({"moved": torch.cat([moved, torch.zeros_like(moved)])})

    def _pull(self, rows: list[int], sigma: float) -> Tensor | None:
        """How much of the pull to the reference counts for these rows at this noise level; None: all of it."""
        objective = self.parts.choices.objective
        if getattr(objective, "kl_from", 0.0) > sigma:
            return torch.zeros(len(rows), device=self.advantages.device)
        return None if self.gate is None else self.gate[rows]

    def _ahead(self, rows: list[int], prediction: Prediction) -> Tensor | None:
        """How far the clean sample that is predicted is from the one that came out, where the objective asks for it."""
        if getattr(self.parts.choices.objective, "stop_negatives", None) is None:
            return None
        x0 = self.trajectory.clean[rows]
        missed, size = ((y**2).flatten(1).mean(1).sqrt() for y in (prediction.x0.detach() - x0, x0))
        return missed / size

    def _noised(self, batch: Rows, number: int) -> tuple[Tensor, Tensor, Tensor, Grid]:
        """x0, eps, x between them, and the level that x is at."""
        trajectory, grid, parts = self.trajectory, self.parts.grid, self.parts
        moment = when(parts.config, trajectory.noise.iteration)
        level = parts.policy.level(grid, parts.choices.levels.at(moment, grid.sigmas)[number])
        x0 = trajectory.clean[list(batch)]
        rows, shared = [trajectory.rows[i] for i in batch], parts.choices.objective.shared_noise
        eps, sigma = trajectory.noise.forward(rows, number, tuple(x0.shape), shared).to(x0.device), level.sigmas[0]
        return x0, eps, (1 - sigma) * x0 + sigma * eps, level

    def _predict(self, batch: Rows, x: Tensor, level: Grid, grad: bool = False) -> Prediction:
        return self.parts.policy.predict([self.trajectory.prompts[i] for i in batch], x, level, grad=grad)

    def _reference_score(self, rows: list[int], step: int) -> StepScore | None:
        if self.parts.reference is None:
            return None
        with self.parts.reference.active():
            return replay(self.parts.policy, self.trajectory, rows, step, grad=False)
