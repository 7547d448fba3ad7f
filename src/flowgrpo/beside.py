"""Scoring beside sampling: what is finished is scored in a thread of its own while the next batch is drawn."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from types import TracebackType

import torch

from flowgrpo.judging import blocks
from flowgrpo.rollout import Finished, Row, Trajectory, node_of
from flowgrpo.scoring import Scorer, Scores

__all__ = ["Scoring", "joined"]


class Scoring:
    """Scores a rollout's samples: beside it, batch by batch, or when all are there.

    Give `take` to `rollout` as `finished`, then ask for the scores `of` its trajectory. A judge is asked once the
    `group_size` samples of a group are there. Leaving the context drops what is not yet scored; a call that hangs is left
    behind. Scores are the same either way.
    """

    def __init__(self, scorer: Scorer, beside: bool, group_size: int) -> None:
        self.scorer, self.beside = scorer, beside
        self._whole = group_size if any(one.traits.compares for one in scorer.components) else 1
        self._waiting: dict[int, list[Finished]] = {}
        self._scored: list[tuple[tuple[Row, ...], Future[Scores]]] = []
        self._tasks: SimpleQueue[tuple[Finished, Future[Scores]] | None] = SimpleQueue()

    def __enter__(self) -> "Scoring":
        if self.beside:
            Thread(target=self._work, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for _, future in self._scored:
            future.cancel()
        self._tasks.put(None)

    def take(self, done: Finished) -> None:
        """Score these samples as soon as the thread is free."""
        if not self.beside:
            return
        if self._whole == 1:
            self._begin(done)
            return
        for i, row in enumerate(done.rows):
            group = self._waiting.setdefault(row.prompt.id, [])
            group.append(_part(done, i))
            if len(group) == self._whole:
                self._begin(_together(self._waiting.pop(row.prompt.id)))

    def of(self, trajectory: Trajectory) -> Scores:
        """The scores of a trajectory's rows. Raises what the scorer raised."""
        if not self.beside:
            return self.scorer(trajectory.media, trajectory.prompts, latents=trajectory.clean)
        for group in self._waiting.values():  # of samples that are fewer nodes than rows
            self._begin(_together(group))
        rows = [row for part, _ in self._scored for row in part]
        last = trajectory.dynamics.grid.num_steps - 1
        ends = [node_of(row, last, trajectory.within, trajectory.dynamics.window) for row in trajectory.rows]
        return joined([future.result() for _, future in self._scored], _places(rows, ends))

    def _begin(self, done: Finished) -> None:
        future: Future[Scores] = Future()
        self._scored.append((done.rows, future))
        self._tasks.put((done, future))

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            done, future = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self.scorer(done.media, [row.prompt for row in done.rows], latents=done.clean))
            except BaseException as error:
                future.set_exception(error)


def joined(parts: Sequence[Scores], order: Sequence[int]) -> Scores:
    """The rows of several scores as one, in this order; samples of different parts have not been compared."""
    chosen = list(order)
    values, asked = torch.cat([part.values for part in parts]), torch.cat([part.was_asked for part in parts])
    finite = torch.cat([torch.ones(len(p.values), dtype=torch.bool) if p.finite is None else p.finite for p in parts])
    judged = None
    if all(part.judged is not None for part in parts):
        judged = blocks([part.judged for part in parts if part.judged is not None])[chosen][:, chosen]
    return Scores(parts[0].names, values[chosen], asked[chosen], finite[chosen], judged)


def _places(rows: Sequence[Row], ends: Sequence[Row]) -> list[int]:
    places: Mapping[Row, int] = {row: i for i, row in enumerate(rows)}
    return [places[end] for end in ends]


def _part(done: Finished, i: int) -> Finished:
    media = None if done.media is None else done.media[i : i + 1]
    return Finished((done.rows[i],), done.clean[i : i + 1], media)


def _together(parts: Sequence[Finished]) -> Finished:
    media = [part.media for part in parts if part.media is not None]
    rows = tuple(row for part in parts for row in part.rows)
    return Finished(rows, torch.cat([part.clean for part in parts]), torch.cat(media) if media else None)
