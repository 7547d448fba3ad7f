"""What the scores of a run are usually like, for the signals that hold a group against it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowgrpo.groups import group_stats

NUM_QUANTILES = 100


@runtime_checkable
class Calibrated(Protocol):
    """A signal that remembers. Calling it never changes its state: `update` does, once an iteration, after the call.

    `update` wants what the signal was called with, the scores of all processes, so that every process has the same state.
    The state is JSON and belongs into the checkpoint.
    """

    def update(self, values: Float[Tensor, " b k"], group_ids: Int[Tensor, " b"]) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Calibration:
    """Usual scores, one column a reward, in its unit; float64, NaN where none was seen."""

    mean: Float[Tensor, " k"]  # of the group means
    spread: Float[Tensor, " k"]  # mean of the groups' stds (over n)
    quantiles: Float[Tensor, " q k"]  # of all scores; row i is the one of level (i + 1/2) / q

    @classmethod
    def of(cls, values: Float[Tensor, " b k"], group_ids: Int[Tensor, " b"]) -> "Calibration":
        """What one table says; every group counts the same, and missing scores do not count."""
        r = torch.where(values.isfinite(), values, torch.nan).double()
        stats = group_stats(r, group_ids, unbiased=False)
        one_row = (group_ids.unique()[:, None] == group_ids).int().argmax(1)  # of each group
        mean = torch.where(stats.count > 0, stats.mean, torch.nan)[one_row].nanmean(0)
        spread = torch.where(stats.count > 1, stats.std, torch.nan)[one_row].nanmean(0)
        return cls(mean, spread, r.nanquantile(quantile_levels(NUM_QUANTILES), dim=0))

    def moved(self, to: "Calibration", *, memory: float, falling: float) -> "Calibration":
        """The moving average of both, memory * self + (1 - memory) * to; where the spread falls, with `falling`.

        The average of quantiles is again a distribution's, and an affine change of a reward's unit passes through it.
        """
        slow = torch.where(to.spread < self.spread, torch.full_like(to.spread, falling), memory)
        return Calibration(
            _mixed(self.mean, to.mean, memory),
            _mixed(self.spread, to.spread, slow),
            _mixed(self.quantiles, to.quantiles, memory),
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON: a list for each quantity, None for NaN."""
        return {part.name: _as_lists(getattr(self, part.name).tolist()) for part in fields(self)}

    def or_else(self, other: "Calibration") -> "Calibration":
        """This, and what the other says where nothing was seen."""
        return self.moved(other, memory=1.0, falling=1.0)


@dataclass
class Remembers:
    """The state of a signal that holds a group against what was seen before.

    Each quantity is a moving average over iterations, `memory` the share that stays; with 1 what was loaded or seen first
    stays for ever. Before the first update the table at hand stands in for it, so in the first iteration of a run that loads
    none, a group's signal does depend on the other groups.
    """

    memory: float = 0.9
    calibration: Calibration | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_share("memory", self.memory)

    def update(self, values: Float[Tensor, " b k"], group_ids: Int[Tensor, " b"]) -> None:
        """Take up the scores of an iteration."""
        self._move(values, group_ids, self.memory)

    def state_dict(self) -> dict[str, Any]:
        """What was seen, a list for each quantity, None for nothing; empty before the first update."""
        return {} if self.calibration is None else self.calibration.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a `state_dict`. Raises ValueError for one that is not."""
        names = [part.name for part in fields(Calibration)]
        if state and sorted(state) != sorted(names):
            raise ValueError(f"a calibration must have {', '.join(names)}, got {', '.join(sorted(state))}; fit it anew")
        self.calibration = Calibration(**{name: _as_tensor(state[name]) for name in names}) if state else None

    def usual(self, values: Float[Tensor, " b k"], group_ids: Int[Tensor, " b"]) -> Calibration:
        """What the signal holds a table against. Raises ValueError where the state is of another number of rewards."""
        here = Calibration.of(values, group_ids)
        if self.calibration is None:
            return here
        if len(self.calibration.mean) != values.shape[1]:
            raise ValueError(
                f"the signal's calibration must be of the {values.shape[1]} rewards of this run, got one of "
                f"{len(self.calibration.mean)}; fit it anew"
            )
        return self.calibration.or_else(here)

    def _move(self, values: Tensor, group_ids: Tensor, falling: float) -> None:
        now, usual = Calibration.of(values, group_ids), self.usual(values, group_ids)
        self.calibration = usual.moved(now, memory=self.memory, falling=falling)


def quantile_levels(count: int) -> Float[Tensor, " q"]:
    """(i + 1/2) / count"""
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


def check_share(name: str, value: float) -> None:
    """Raise ValueError unless a setting is a share of the past."""
    if not 0 <= value <= 1:
        raise ValueError(f"signal.{name} must lie in [0, 1], the share of the past that stays, got {value}")


def _mixed(old: Tensor, new: Tensor, share: Tensor | float) -> Tensor:
    mixed = share * old + (1 - share) * new
    return torch.where(old.isnan(), new, torch.where(new.isnan(), old, mixed))


def _as_lists(values: Any) -> Any:
    if isinstance(values, list):
        return [_as_lists(value) for value in values]
    return None if values != values else values


def _as_tensor(values: Any) -> Tensor:
    def filled(value: Any) -> Any:
        return [filled(one) for one in value] if isinstance(value, list) else float("nan") if value is None else value

    return torch.tensor(filled(values), dtype=torch.float64)
