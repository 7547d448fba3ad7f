"""Advantage-weighted matching: the flow-matching error as a likelihood, clipped like a ratio."""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from flowgrpo.objectives.contract import ForwardBatch, Stats
from flowgrpo.objectives.forward import Forward, matching_error
from flowgrpo.objectives.surrogate import Clipped
from flowgrpo.transitions import Prediction, log_ratio

USUAL_CLIP_RANGE = 1e-5
USUAL_POWER, USUAL_OFFSET = 0.5, 1e-4
POWERS = {"uniform": 0, "t": 1, "t2": 2}


@dataclass(frozen=True)
class Awm(Clipped, Forward):
    """The clipped surrogate of a ratio of likelihood proxies, at one noise level of a finished sample.

        rho = exp(l - l_old),    e = mean (v - (eps - x0))^2
        "uniform", "t", "t2"     l = -w e,    w = 1, sigma or sigma^2
        "huber"                  l = -(sigma / p) ((e + offset)^p - offset^p),    p = power, 1/2, and offset, 1e-4, unless given

    The gradient at rho = 1 is that of the flow-matching loss, weighted by -A: what scored above its group becomes likelier.
    The smaller `power`, the less a sample weighs that is badly matched. Samples may come from any solver, without a window.
    l_old is the old policy's, so the clip range acts from the second update on.

    Source: AWM 2509.25050 (clip 1e-5; generalised Huber with p = 0.25; its pull is from a moving average, `reference:
    average`), by an implementation of others. The plain square as pull and the default offset are ours.
    """

    weighting: Literal["uniform", "t", "t2", "huber"] = "uniform"
    power: float | None = None
    offset: float | None = None

    def __post_init__(self) -> None:
        self.check_band(lambda: USUAL_CLIP_RANGE)
        self.check_forward()
        if self.power is not None and self.weighting != "huber":
            raise ValueError(f"objective.power has no effect with weighting={self.weighting}; remove it, or set huber")
        if self.power is not None and not 0 < self.power <= 1:
            raise ValueError(f"objective.power must be above 0 and at most 1, got {self.power}")
        if self.offset is not None and self.weighting != "huber":
            raise ValueError(f"objective.offset has no effect with weighting={self.weighting}; remove it, or set huber")
        if self.offset is not None and not self.offset > 0:
            raise ValueError(f"objective.offset must be above 0, got {self.offset}")

    def __call__(self, batch: ForwardBatch) -> tuple[Float[Tensor, " b"], Stats]:
        """Loss of each sample."""
        assert batch.old is not None, "the loop keeps the predictions that an objective needs"
        new, old = (self._likelihood(prediction, batch) for prediction in (batch.new, batch.old))
        return self.with_kl(*self.surrogate(log_ratio(new, old), batch.advantage), batch)

    def _likelihood(self, prediction: Prediction, batch: ForwardBatch) -> Float[Tensor, " b"]:
        error, sigma = matching_error(prediction, batch), prediction.sigma
        if self.weighting != "huber":
            return -(sigma ** POWERS[self.weighting]) * error
        power, offset = self.power or USUAL_POWER, self.offset or USUAL_OFFSET
        return -sigma / power * ((error + offset) ** power - offset**power)
