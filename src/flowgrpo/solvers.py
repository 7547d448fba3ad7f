"""Deterministic steps, outside the window."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from flowgrpo.transitions import Prediction


@runtime_checkable
class Solver(Protocol):
    """One step of the probability-flow ODE from the network's prediction."""

    def step(self, prediction: Prediction, sigmas: Sequence[float], step: int) -> Float[Tensor, " b *s"]:
        """x at sigmas[step + 1]."""
        ...


@dataclass(frozen=True)
class Euler:
    """x' = x + (sigma' - sigma) v, in the arithmetic of diffusers' flow-match Euler scheduler, bit for bit."""

    def step(self, prediction: Prediction, sigmas: Sequence[float], step: int) -> Float[Tensor, " b *s"]:
        """x at the next level."""
        return prediction.x + (sigmas[step + 1] - sigmas[step]) * prediction.v


SOLVERS: Mapping[str, type] = {"euler": Euler}
