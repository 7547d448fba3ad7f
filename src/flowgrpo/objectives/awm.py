"""Advantage-weighted matching: the flow-matching error as a likelihood, clipped like a ratio."""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from flowgrpo.objectives.contract import ForwardBatch, Stats
from flowgrpo.objectives.forward import Forward, matching_error
from flowgrpo.objectives.surrogate import Clipped
from flowgrpo.transitions import log_ratio

USUAL_CLIP_RANGE = 1e-5
POWERS = {"uniform": 0, "t": 1, "t2": 2}


@dataclass(frozen=True)
class Awm(Clipped, Forward):
    """The clipped surrogate of a ratio of likelihood proxies, at one noise level of a finished sample.

        l = -w mean (v - (eps - x0))^2,    rho = exp(l - l_old),    w = 1 ("uniform"), sigma ("t") or sigma^2 ("t2")

    Its gradient at rho = 1 is that of the flow-matching loss, weighted by -A: what scored above its group becomes likelier.
    Samples may come from any solver, without a window. l_old is from before the iteration's first update, so the clip range
    acts from the second update on.

    Source: AWM 2509.25050 (clip 1e-5), by an implementation of others. The plain square as pull to the reference is ours.
    """

    weighting: Literal["uniform", "t", "t2"] = "uniform"

    def __post_init__(self) -> None:
        self.check_band(lambda: USUAL_CLIP_RANGE)
        self.check_kl()

    def __call__(self, batch: ForwardBatch) -> tuple[Float[Tensor, " b"], Stats]:
        """Loss of each sample."""
        assert batch.old is not None, "the loop keeps the predictions that an objective needs"
        weight = batch.new.sigma ** POWERS[self.weighting]
        new, old = (-weight * matching_error(prediction, batch) for prediction in (batch.new, batch.old))
        loss, stats = self.surrogate(log_ratio(new, old), batch.advantage)
        return self.with_kl(loss, {**stats, "matching_error": matching_error(batch.new, batch).detach()}, batch)
