"""Which steps of a trajectory are stochastic at an iteration.

A window is a range inside [0, n - 1): the last step of n is always deterministic, so no picture keeps noise. It is never
shortened, and empty only as `NoWindow`. Every window of this module is a pure function of `When`, hence the same on every
process.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol, runtime_checkable

from flowgrpo.keys import key


@dataclass(frozen=True)
class When:
    """A moment of a run: what a window may depend on."""

    iteration: int  # from 0
    iterations: int  # of the whole run
    num_steps: int  # of a trajectory
    seed: int


@runtime_checkable
class Window(Protocol):
    """A rule for the stochastic steps."""

    def at(self, when: When) -> range:
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

    def at(self, when: When) -> range:
        """0 to n - 2."""
        last_start(1, when.num_steps)
        return range(when.num_steps - 1)


@dataclass(frozen=True)
class Frozen:
    """The same steps for the whole run (MixGRPO-Flash*: start 0)."""

    size: int = 4
    start: int = 0

    def at(self, when: When) -> range:
        """Always start, ..., start + size - 1."""
        latest = last_start(self.size, when.num_steps)
        if not 0 <= self.start <= latest:
            raise ValueError(f"window.start must be between 0 and {latest} here, got {self.start}")
        return range(self.start, self.start + self.size)


def sweep(when: When, size: int, stride: int, interval: Callable[[int, int], int], roll_back: bool) -> range:
    """The window of a sweep from the noisiest start to the last one.

    It stays at start l for `interval(l, last start)` iterations, at least 1, then moves on by `stride`, at most to the last
    start; there it stays for good, or, with `roll_back`, for that start's interval and begins again.
    """
    latest = last_start(size, when.num_steps)
    starts = [*range(0, latest, stride), latest]
    ends = list(accumulate(interval(start, latest) for start in starts))
    iteration = when.iteration % ends[-1] if roll_back else when.iteration
    start = starts[min(bisect_right(ends, iteration), len(starts) - 1)]
    return range(start, start + size)


@dataclass(frozen=True)
class Progressive:
    """From the noisiest step on, `stride` further every `interval` iterations, staying at the end or starting again.

        l <- min(l + stride, last start)    every `interval` iterations

    Source: MixGRPO 2507.21802 v7, algorithm 1 (size 4, interval 25, stride 1); `roll_back` is in its released code. The
    window is never shortened at the end, and the last start has a full interval before the sweep begins again; the last
    step stays deterministic, which is ours.
    """

    size: int = 4
    interval: int = 25
    stride: int = 1
    roll_back: bool = False

    def __post_init__(self) -> None:
        if self.interval < 1 or self.stride < 1:
            raise ValueError(
                f"window.interval and window.stride must be at least 1, got {self.interval} and {self.stride}; "
                "use the frozen window to stay in place"
            )

    def at(self, when: When) -> range:
        """The window after iteration // interval moves."""
        return sweep(when, self.size, self.stride, lambda *_: self.interval, self.roll_back)


@dataclass(frozen=True)
class LinearDecay:
    """A sweep that stays long at the noisy steps and hurries through the late ones.

        interval(l) = floor(max_interval (1 - p) + min_interval p),    p = l / last start

    Source: MixGRPO 2507.21802, released code (10 and 1).
    """

    size: int = 4
    max_interval: int = 10
    min_interval: int = 1
    stride: int = 1
    roll_back: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.min_interval <= self.max_interval or self.stride < 1:
            raise ValueError(
                "window must have 1 <= min_interval <= max_interval and stride >= 1, "
                f"got {self.min_interval}, {self.max_interval} and {self.stride}"
            )

    def at(self, when: When) -> range:
        """The window that the intervals passed so far lead to."""
        return sweep(when, self.size, self.stride, self._interval, self.roll_back)

    def _interval(self, start: int, latest: int) -> int:
        span = max(latest, 1)
        return (self.max_interval * (span - start) + self.min_interval * start) // span  # in integers: no rounding


@dataclass(frozen=True)
class ExponentialDecay:
    """A sweep at a constant pace up to a start, then ever faster.

        interval(l) = ceil(interval exp(-rate max(0, l - threshold)))

    Source: MixGRPO 2507.21802, released code for threshold 13 and rate 0.1, by a third party's notes; interval 25 is the
    one of its constant sweep.
    """

    size: int = 4
    interval: int = 25
    rate: float = 0.1
    threshold: int = 13
    stride: int = 1
    roll_back: bool = False

    def __post_init__(self) -> None:
        if self.interval < 1 or self.stride < 1 or not 0 <= self.rate < math.inf:
            raise ValueError(
                f"window must have interval >= 1, stride >= 1 and rate >= 0, got {self.interval}, {self.stride} and {self.rate}"
            )

    def at(self, when: When) -> range:
        """The window that the intervals passed so far lead to."""
        return sweep(when, self.size, self.stride, self._interval, self.roll_back)

    def _interval(self, start: int, latest: int) -> int:
        return max(1, math.ceil(self.interval * math.exp(-self.rate * max(0, start - self.threshold))))


@dataclass(frozen=True)
class Coverage:
    """A sweep paced by the length of the run: every start gets the same share of it, and the last one is reached.

        l = floor(iteration (last start + 1) / iterations)

    With fewer iterations than starts the sweep is spread from the first to the last start, and a run of one iteration is
    at the last. The pace is ours: a fixed interval leaves late steps untrained in a short run. A run that is resumed with
    more `iterations` goes on at their pace.
    """

    size: int = 4

    def at(self, when: When) -> range:
        """The window at this share of the run."""
        latest = last_start(self.size, when.num_steps)
        if when.iterations > latest:
            start = when.iteration * (latest + 1) // when.iterations
        elif when.iterations > 1:
            start = when.iteration * latest // (when.iterations - 1)
        else:
            start = latest
        start = min(start, latest)
        return range(start, start + self.size)


@dataclass(frozen=True)
class Random:
    """A start drawn afresh each iteration from [low, high], the same on every process.

    Source: MixGRPO 2507.21802 v7, section 3.2 (low 0, high the last start).
    """

    size: int = 4
    low: int = 0
    high: int | None = None

    def at(self, when: When) -> range:
        """A window drawn from the key (seed, iteration)."""
        latest = last_start(self.size, when.num_steps)
        high = latest if self.high is None else self.high
        if not 0 <= self.low <= high <= latest:
            raise ValueError(f"window.low and window.high must satisfy 0 <= low <= high <= {latest}, got {self.low}, {high}")
        start = self.low + key("window", when.seed, when.iteration) % (high - self.low + 1)
        return range(start, start + self.size)


@dataclass(frozen=True)
class OneStep(Random):
    """One step, drawn afresh each iteration from [low, high] and the same for all groups.

    With shared start noise that step alone makes the samples of a group differ.

    Source: TempFlow-GRPO 2508.04324 and Flash-GRPO 2605.15980, by a third party's notes. In Flash-GRPO a prompt draws
    its step; here an iteration does, because all trajectories of an iteration have one window.
    """

    size: int = field(default=1, init=False)


@dataclass(frozen=True)
class NoWindow:
    """No stochastic step: samples are those of plain inference, each from a start noise of its own.

    Only objectives that need no density learn from them (the forward family).
    """

    def at(self, when: When) -> range:
        """The empty range."""
        return range(0)


WINDOWS: Mapping[str, type] = {
    "all": All,
    "progressive": Progressive,
    "linear_decay": LinearDecay,
    "exponential_decay": ExponentialDecay,
    "coverage": Coverage,
    "random": Random,
    "frozen": Frozen,
    "one_step": OneStep,
}
