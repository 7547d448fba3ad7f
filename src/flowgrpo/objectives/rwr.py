"""Reward-weighted regression: flow matching on one's own samples, the better the heavier."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from flowgrpo.objectives.contract import ForwardBatch, Stats
from flowgrpo.objectives.forward import Forward, matching_error
from flowgrpo.transitions import bounded


@dataclass(frozen=True)
class Rwr(Forward):
    """The flow-matching loss of a finished sample, weighted by how good it is.

        w mean (v - (eps - x0))^2,    w = exp(A / temperature), or w = 1[A >= least] exp(A / temperature)

    Bad samples weigh little and never push away. temperature inf with `least` is fine-tuning on the best: all that have at
    least this advantage count alike. Source: reward-weighted regression; the form for a flow is ours.
    """

    needs_old: ClassVar[bool] = False

    temperature: float = 1.0
    least: float | None = None

    def __post_init__(self) -> None:
        self.check_kl()
        if not self.temperature > 0:
            raise ValueError(f"objective.temperature must be above 0, got {self.temperature}")

    def __call__(self, batch: ForwardBatch) -> tuple[Float[Tensor, " b"], Stats]:
        """Loss of each sample."""
        weight = bounded(batch.advantage / self.temperature).exp()
        if self.least is not None:
            weight = weight * (batch.advantage >= self.least)
        error = matching_error(batch.new, batch)
        return self.with_kl(weight * error, {"matching_error": error.detach()}, batch)
