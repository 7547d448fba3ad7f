"""Deterministic steps, outside the window.

A solver makes a step from the predictions made within it, and may look at the prediction of the step before, whoever
made that one: the last steps of a window feed the history of the tail.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from flowgrpo.transitions import Prediction


@runtime_checkable
class Solver(Protocol):
    """One step of the probability-flow ODE."""

    def calls(self, sigmas: Sequence[float], step: int) -> int:
        """Network calls from sigmas[step] to sigmas[step + 1]; all after the first are made at the latter."""
        ...

    def step(
        self, predictions: Sequence[Prediction], sigmas: Sequence[float], step: int, previous: Prediction | None
    ) -> Float[Tensor, " b *s"]:
        """x at sigmas[step + 1], as good as the predictions made so far within the step allow.

        `previous` is the prediction of the step before, None at the first.
        """
        ...


class _OneCall:
    def calls(self, sigmas: Sequence[float], step: int) -> int:
        """One."""
        return 1


@dataclass(frozen=True)
class Euler(_OneCall):
    """x' = x + (sigma' - sigma) v, in the arithmetic of diffusers' flow-match Euler scheduler, bit for bit."""

    def step(
        self, predictions: Sequence[Prediction], sigmas: Sequence[float], step: int, previous: Prediction | None
    ) -> Float[Tensor, " b *s"]:
        """x at the next level."""
        return predictions[0].x + (sigmas[step + 1] - sigmas[step]) * predictions[0].v


@dataclass(frozen=True)
class DpmSolverPp2M(_OneCall):
    """DPM-Solver++, multistep of second order (midpoint), on rectified flow.

        lambda = log((1 - sigma) / sigma),    h = lambda' - lambda
        x' = (sigma' / sigma) x + (1 - sigma') (1 - exp(-h)) (x0 + h / (2 h_previous) (x0 - x0_previous))

    First order, which is Euler, without a prediction before it or with one at sigma 1, where lambda is infinite, and on
    the step to sigma 0, which gives x0.

    Source: MixGRPO 2507.21802 v7, appendix on MixGRPO-Flash; DPM-Solver++ 2211.01095.
    """

    def step(
        self, predictions: Sequence[Prediction], sigmas: Sequence[float], step: int, previous: Prediction | None
    ) -> Float[Tensor, " b *s"]:
        """x at the next level."""
        now, sigma, sigma_next = predictions[0], sigmas[step], sigmas[step + 1]
        x0 = now.x0
        if sigma_next == 0:
            return x0
        decay = sigma_next * (1 - sigma) / (sigma * (1 - sigma_next))  # exp(-h); 0 at sigma 1
        if previous is not None and previous.sigma < 1:
            h, h_previous = -math.log(decay), log_snr(sigma) - log_snr(previous.sigma)
            x0 = x0 + h / (2 * h_previous) * (x0 - previous.x0)
        return sigma_next / sigma * now.x + (1 - sigma_next) * (1 - decay) * x0


@dataclass(frozen=True)
class Heun:
    """Euler's step, then the mean of the velocities at both of its ends: second order, two calls a step.

        x~ = x + (sigma' - sigma) v(x, sigma),    x' = x + (sigma' - sigma) (v(x, sigma) + v(x~, sigma')) / 2

    The last step is Euler's, as in Karras et al. (2206.00364, algorithm 1).
    """

    def calls(self, sigmas: Sequence[float], step: int) -> int:
        """Two, on the last step one."""
        return 1 if step == len(sigmas) - 2 else 2

    def step(
        self, predictions: Sequence[Prediction], sigmas: Sequence[float], step: int, previous: Prediction | None
    ) -> Float[Tensor, " b *s"]:
        """The trial latent from one prediction, the corrected one from two."""
        v = predictions[0].v if len(predictions) == 1 else (predictions[0].v + predictions[1].v) / 2
        return predictions[0].x + (sigmas[step + 1] - sigmas[step]) * v


def log_snr(sigma: float) -> float:
    """lambda = log((1 - sigma) / sigma), for sigma strictly between 0 and 1."""
    return math.log((1 - sigma) / sigma)


SOLVERS: Mapping[str, type] = {"euler": Euler, "dpmpp_2m": DpmSolverPp2M, "heun": Heun}
