"""At which noise levels an objective of the forward family sees the samples of an iteration.

All samples of an iteration are seen at the same levels, drawn from the key (seed, iteration): what differs between the samples
of a group is not how hard their levels are. Noise is every sample's own. (Shared levels: V-GRPO, 2604.23380, by a third
party's notes.)
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol, runtime_checkable

from flowgrpo.keys import key
from flowgrpo.schedule import shifted
from flowgrpo.window import When


@runtime_checkable
class Levels(Protocol):
    """A rule for the levels of an iteration."""

    count: int  # levels an iteration, a network call for each sample

    def at(self, when: When, sigmas: Sequence[float]) -> tuple[float, ...]:
        """`count` levels in (0, 1], for a run on the grid `sigmas`."""
        ...


def draw(when: When, number: int) -> float:
    """A uniform number in (0, 1), keyed by (seed, iteration, number)."""
    return (key("level", when.seed, when.iteration, number) + 0.5) / 2**63


def check_count(count: int) -> None:
    """Raise ValueError unless there is a level."""
    if count < 1:
        raise ValueError(f"levels.count must be at least 1, got {count}")


@dataclass(frozen=True)
class _Between:
    """Levels from `low` to `high` in unshifted time, moved towards the noise by `shift` (`schedule.shifted`)."""

    count: int = 4
    low: float = 0.0
    high: float = 1.0
    shift: float = 1.0

    def __post_init__(self) -> None:
        check_count(self.count)
        if not 0 <= self.low < self.high <= 1:
            raise ValueError(f"levels must satisfy 0 <= low < high <= 1, got {self.low} and {self.high}")
        if not self.shift > 0:
            raise ValueError(f"levels.shift must be above 0, got {self.shift}")

    def place(self, share: float) -> float:
        """The level at this share, in (0, 1), of the way from low to high."""
        return shifted(self.low + (self.high - self.low) * share, self.shift)


@dataclass(frozen=True)
class Uniform(_Between):
    """Every level drawn by itself."""

    def at(self, when: When, sigmas: Sequence[float]) -> tuple[float, ...]:
        """`count` independent draws."""
        return tuple(self.place(draw(when, j)) for j in range(self.count))


@dataclass(frozen=True)
class Stratified(_Between):
    """One level drawn in each of `count` equal parts of the way: as uniform as `Uniform` and more even in one iteration.

    Source: V-GRPO 2604.23380 (count 4), by a third party's notes.
    """

    def at(self, when: When, sigmas: Sequence[float]) -> tuple[float, ...]:
        """One draw a part."""
        return tuple(self.place((j + draw(when, j)) / self.count) for j in range(self.count))


@dataclass(frozen=True)
class LogitNormal:
    """sigma = 1 / (1 + exp(-(mean + std z))), z standard normal: most levels in the middle.

    Source: the training levels of SD3, 2403.03206 (mean 0, std 1).
    """

    count: int = 4
    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        check_count(self.count)
        if not self.std > 0:
            raise ValueError(f"levels.std must be above 0, got {self.std}")

    def at(self, when: When, sigmas: Sequence[float]) -> tuple[float, ...]:
        """`count` independent draws."""
        normal = NormalDist(self.mean, self.std)
        return tuple(1 / (1 + math.exp(-normal.inv_cdf(draw(when, j)))) for j in range(self.count))


@dataclass(frozen=True)
class OnGrid:
    """Levels of the sampler's own grid but 0, drawn without repetition: the network is trained where it is used."""

    count: int = 4

    def __post_init__(self) -> None:
        check_count(self.count)

    def at(self, when: When, sigmas: Sequence[float]) -> tuple[float, ...]:
        """`count` different levels, falling. Raises ValueError when the grid has fewer."""
        steps = range(len(sigmas) - 1)
        if self.count > len(steps):
            raise ValueError(f"levels.count={self.count} must be at most the {len(steps)} levels of the grid above 0; lower it")
        chosen = sorted(steps, key=lambda step: draw(when, step))[: self.count]
        return tuple(sigmas[step] for step in sorted(chosen))


LEVELS: Mapping[str, type] = {
    "uniform": Uniform,
    "stratified": Stratified,
    "logit_normal": LogitNormal,
    "grid": OnGrid,
}
