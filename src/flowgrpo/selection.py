"""Which samples of a group are learnt from, once their advantages are known."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@runtime_checkable
class Selection(Protocol):
    """A rule for whole groups."""

    def count(self, group_size: int) -> int:
        """How many samples of a group are learnt from. Raises ValueError if there are not as many."""
        ...

    def __call__(self, advantages: Sequence[float]) -> list[int]:
        """Their positions in the group, rising."""
        ...


@dataclass(frozen=True)
class All:
    """Every sample."""

    def count(self, group_size: int) -> int:
        """The whole group."""
        return group_size

    def __call__(self, advantages: Sequence[float]) -> list[int]:
        """All positions."""
        return list(range(len(advantages)))


@dataclass(frozen=True)
class Extremes:
    """The `best` and the `worst` samples of each group: rollouts are many, updates few.

    Among equals the first count as better. Source: DanceGRPO 2505.07818, released code (8 of 24, for films).
    """

    best: int = 1
    worst: int = 1

    def __post_init__(self) -> None:
        if self.best < 1 or self.worst < 0:
            raise ValueError(f"samples.best must be at least 1 and samples.worst at least 0, got {self.best} and {self.worst}")

    def count(self, group_size: int) -> int:
        """best + worst."""
        count = self.best + self.worst
        if count > group_size:
            raise ValueError(f"samples.best + samples.worst = {count} must be at most group_size={group_size}; lower one")
        return count

    def __call__(self, advantages: Sequence[float]) -> list[int]:
        """The ends of the order by advantage."""
        order = sorted(range(len(advantages)), key=lambda i: -advantages[i])
        return sorted([*order[: self.best], *order[len(order) - self.worst :]])


SELECTIONS: Mapping[str, type] = {"all": All, "extremes": Extremes}
