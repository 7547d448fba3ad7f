"""Noise levels: which sigmas a trajectory visits.

sigma is 1 at noise and 0 at data, x = (1 - sigma) x0 + sigma eps. A grid of n network calls has n + 1 levels, falls strictly
and ends at exactly 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Grid:
    """The levels of a trajectory and the number that the network is given at each.

    `scales` are those of a pipeline whose latents are `scale` times a flow's (see `discrete`); there the last level may lie
    above 0. Raises ValueError when the levels do not fall strictly from at most 1 to exactly 0, or the lengths disagree.
    """

    sigmas: tuple[float, ...]  # n + 1 levels
    timesteps: Tensor  # (n,), in the scheduler's own dtype
    scales: tuple[float, ...] | None = None  # n + 1; None: 1 everywhere

    def __post_init__(self) -> None:
        check_sigmas(self.sigmas if self.scales is None else (*self.sigmas[:-1], 0.0))
        if len(self.timesteps) != self.num_steps:
            raise ValueError(
                f"a grid of {self.num_steps} steps needs as many timesteps, got {len(self.timesteps)}; rebuild the grid"
            )

    @property
    def num_steps(self) -> int:
        """Network calls from the first level to 0."""
        return len(self.sigmas) - 1

    def scale(self, step: int) -> float:
        """The pipeline's latent is this times the flow's."""
        return 1.0 if self.scales is None else self.scales[step]

    def with_tail(self, start: int, num_steps: int) -> "Grid":
        """The same levels up to sigmas[start], then `tail_sigmas`; the network's numbers follow the levels linearly."""
        sigmas = tail_sigmas(self.sigmas, start, num_steps)
        if sigmas == self.sigmas:
            return self
        if self.scales is not None:
            raise ValueError("sampler.tail: this model has discrete levels of its own, leave num_steps and rate out")
        return Grid(sigmas, torch.cat([self.timesteps[:start], self._numbers(sigmas[start:-1])]))

    def level(self, sigma: float) -> "Grid":
        """One step from this level to 0; the network's number follows the levels linearly, as behind the window."""
        return Grid((sigma, 0.0), self._numbers([sigma]))

    def _numbers(self, sigmas: Sequence[float]) -> Tensor:
        """What the network is given at these levels: linear between those of the grid, and on above them."""
        levels, numbers = [*self.sigmas[::-1]], [0.0, *self.timesteps.double().flip(0).tolist()]
        above = [numbers[-1] * sigma / levels[-1] for sigma in sigmas]
        exact = torch.from_numpy(np.where(np.array(sigmas) > levels[-1], above, np.interp(sigmas, levels, numbers)))
        kind = self.timesteps.dtype
        return (exact if kind.is_floating_point else exact.round()).to(self.timesteps.device, kind)


def check_sigmas(sigmas: Sequence[float]) -> None:
    """Raise ValueError unless the levels are a falling sequence in [0, 1] that ends at 0."""
    if len(sigmas) < 2:
        raise ValueError(f"a schedule needs at least one step, got levels {list(sigmas)}; set num_steps to 1 or more")
    falling = all(a > b for a, b in pairwise(sigmas))
    if not falling or sigmas[0] > 1 or sigmas[-1] != 0:
        raise ValueError(f"noise levels must fall strictly from at most 1 to exactly 0, got {list(sigmas)}")


def shifted_sigmas(num_steps: int, shift: float = 1.0) -> tuple[float, ...]:
    """Uniform time u, shifted once towards the noise.

        u_i = 1 - i / n,    sigma_i = shift u_i / (shift u_i + 1 - u_i)

    Source: SD3 (2403.03206) resolution shift, as used by MixGRPO (2507.21802 v7): shift 3 for FLUX, 5 for HunyuanVideo-1.5.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, got {num_steps}")
    uniform = [1 - i / num_steps for i in range(num_steps)]
    return (*(shifted(u, shift) for u in uniform), 0.0)


def tail_sigmas(sigmas: Sequence[float], start: int, num_steps: int) -> tuple[float, ...]:
    """The levels up to sigmas[start], then `num_steps` steps to 0 that are uniform in unshifted time.

        u_j = u (1 - j / num_steps),    u = 1 - start / n,    odds(sigma_j) = odds(sigmas[start]) / odds(u) * odds(u_j)

    The last factor but one is the shift of a shifted grid; on other grids it is the one that fits at sigmas[start]. As many
    steps as the grid has left give the grid itself.

    Source: MixGRPO-Flash, 2507.21802 v7, section 3.3; the shift read off the grid is ours.
    """
    n = len(sigmas) - 1
    if not 0 < start < n or num_steps < 1:
        raise ValueError(f"a tail starts between the steps 0 and {n} and has at least one step, got {start} and {num_steps}")
    if num_steps == n - start:
        return tuple(sigmas)
    u = 1 - start / n
    shift = sigmas[start] / (1 - sigmas[start]) * (1 - u) / u
    times = [u * (1 - j / num_steps) for j in range(1, num_steps)]
    return (*sigmas[: start + 1], *(shifted(time, shift) for time in times), 0.0)


def shifted(u: float, shift: float) -> float:
    """Time moved towards the noise: odds(sigma) = shift * odds(u)."""
    return shift * u / (shift * u + (1 - u))


@runtime_checkable
class Schedule(Protocol):
    """Chooses the levels of a run; None stands for the pipeline's own."""

    def sigmas(self, num_steps: int) -> tuple[float, ...] | None:
        """The n + 1 levels for n steps."""
        ...


@dataclass(frozen=True)
class Pipeline:
    """The levels that the pipeline's own scheduler picks for this size: training pictures are inference pictures."""

    def sigmas(self, num_steps: int) -> tuple[float, ...] | None:
        """None: ask the pipeline."""
        return None


@dataclass(frozen=True)
class Shifted:
    """`shifted_sigmas`, whatever the pipeline would do."""

    shift: float = 3.0

    def __post_init__(self) -> None:
        if not 0 < self.shift < float("inf"):
            raise ValueError(f"schedule.shift must be a number above 0, got {self.shift}")

    def sigmas(self, num_steps: int) -> tuple[float, ...] | None:
        """n + 1 levels."""
        return shifted_sigmas(num_steps, self.shift)


@dataclass(frozen=True)
class Explicit:
    """Levels written out in the config; their number must fit sampler.num_steps."""

    levels: list[float]

    def sigmas(self, num_steps: int) -> tuple[float, ...] | None:
        """The levels as given."""
        if len(self.levels) != num_steps + 1:
            raise ValueError(
                f"sampler.schedule.levels has {len(self.levels)} levels, but sampler.num_steps={num_steps} needs "
                f"{num_steps + 1} (the last one 0); change one of the two"
            )
        check_sigmas(self.levels)
        return tuple(self.levels)


SCHEDULES: Mapping[str, type] = {"pipeline": Pipeline, "shifted": Shifted, "explicit": Explicit}
