"""Which steps of a trajectory are stochastic at an iteration.

A window is a range inside [0, n - 1): the last step of n is always deterministic, so no picture keeps noise. It is a pure
function of the seed and the iteration, hence the same on every process, never empty and never shortened.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from flowgrpo.keys import key


@runtime_checkable
class Window(Protocol):
    """A rule for the stochastic steps."""

    def at(self, iteration: int, num_steps: int, seed: int) -> range:
        """The steps of this iteration."""
        ...


def last_start(size: int, num_steps: int) -> int:
    """The latest first step of a window. Raises ValueError when none fits."""
    if size < 1:
        raise ValueError(f"window.size must be at least 1, got {size}")
    if size > num_steps - 1:
        raise ValueError(
            f"window.size={size} does not fit: of sampler.num_steps={num_steps} steps the last is always deterministic, "
            f"which leaves {num_steps - 1}; lower window.size or raise sampler.num_steps"
        )
    return num_steps - 1 - size


@dataclass(frozen=True)
class All:
    """Every step but the last (Flow-GRPO)."""

    def at(self, iteration: int, num_steps: int, seed: int) -> range:
        """0 to n - 2."""
        last_start(1, num_steps)
        return range(num_steps - 1)


@dataclass(frozen=True)
class Frozen:
    """The same steps for the whole run (MixGRPO-Flash*: start 0)."""

    size: int = 4
    start: int = 0

    def at(self, iteration: int, num_steps: int, seed: int) -> range:
        """Always start, ..., start + size - 1."""
        latest = last_start(self.size, num_steps)
        if not 0 <= self.start <= latest:
            raise ValueError(f"window.start must be between 0 and {latest} here, got {self.start}")
        return range(self.start, self.start + self.size)


@dataclass(frozen=True)
class Progressive:
    """From the noisiest step on, `stride` further every `interval` iterations, staying at the end.

        l <- min(l + stride, last start)    every `interval` iterations

    Source: MixGRPO 2507.21802 v7, algorithm 1 (size 4, interval 25, stride 1). The window is never shortened at the end;
    the last step stays deterministic, which is ours.
    """

    size: int = 4
    interval: int = 25
    stride: int = 1

    def __post_init__(self) -> None:
        if self.interval < 1 or self.stride < 1:
            raise ValueError(
                f"window.interval and window.stride must be at least 1, got {self.interval} and {self.stride}; "
                "use the frozen window to stay in place"
            )

    def at(self, iteration: int, num_steps: int, seed: int) -> range:
        """The window after iteration // interval moves."""
        start = min(iteration // self.interval * self.stride, last_start(self.size, num_steps))
        return range(start, start + self.size)


@dataclass(frozen=True)
class Random:
    """A start drawn afresh each iteration from [low, high], the same on every process.

    Source: MixGRPO 2507.21802 v7, section 3.2 (low 0, high the last start).
    """

    size: int = 4
    low: int = 0
    high: int | None = None

    def at(self, iteration: int, num_steps: int, seed: int) -> range:
        """A window drawn from the key (seed, iteration)."""
        latest = last_start(self.size, num_steps)
        high = latest if self.high is None else self.high
        if not 0 <= self.low <= high <= latest:
            raise ValueError(f"window.low and window.high must satisfy 0 <= low <= high <= {latest}, got {self.low}, {high}")
        start = self.low + key("window", seed, iteration) % (high - self.low + 1)
        return range(start, start + self.size)


WINDOWS: Mapping[str, type] = {"all": All, "progressive": Progressive, "random": Random, "frozen": Frozen}
