"""Where the reference stands that KL is measured from: at the start, or following the policy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@runtime_checkable
class ReferenceRule(Protocol):
    """A rule for how a reference follows the policy."""

    def stays(self, iteration: int, kl: float) -> float:
        """The share of the reference that stays after an iteration (from 0) whose mean KL was `kl`; the rest is the policy."""
        ...


@dataclass(frozen=True)
class Start:
    """The policy as it was before the run, which needs no memory with an adapter."""

    def stays(self, iteration: int, kl: float) -> float:
        """All."""
        return 1.0


@dataclass(frozen=True)
class Average:
    """A moving average of the policy's weights (with an adapter, of the adapter's two factors), so that KL limits how fast it
    goes, not how far.

    Source: the EMA-KL of AWM 2509.25050, by an implementation of others (decay 0.3).
    """

    decay: float = 0.3

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"reference.decay must be from 0 to below 1, got {self.decay}; 1 would be the start")

    def stays(self, iteration: int, kl: float) -> float:
        """`decay`, after every iteration."""
        return self.decay


@dataclass(frozen=True)
class Reset:
    """The policy of some time ago: set anew every `every` iterations, and when the mean KL of an iteration passes `above`.

    Source: SAGE-GRPO 2603.21872 for the first, by a third party's notes; GARDO 2512.24138 for the second.
    """

    every: int | None = None
    above: float | None = None

    def __post_init__(self) -> None:
        if self.every is None and self.above is None:
            raise ValueError("reference.every or reference.above must be given, or the reference would stay; set one")
        if self.every is not None and self.every < 1:
            raise ValueError(f"reference.every must be at least 1 iteration, got {self.every}")
        if self.above is not None and not self.above > 0:
            raise ValueError(f"reference.above must be above 0, got {self.above}")

    def stays(self, iteration: int, kl: float) -> float:
        """All or nothing."""
        due = self.every is not None and (iteration + 1) % self.every == 0
        return 0.0 if due or (self.above is not None and kl > self.above) else 1.0


REFERENCES: Mapping[str, type] = {"start": Start, "average": Average, "reset": Reset}
