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

        exp(A / temperature) mean (v - (eps - x0))^2

    Bad samples weigh little and never push away. Source: reward-weighted regression; the form for a flow is ours.
    """

    needs_old: ClassVar[bool] = False

    temperature: float = 1.0

    def __post_init__(self) -> None:
        self.check_forward()
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"objective.temperature must be above 0 and finite, got {self.temperature}")

    def __call__(self, batch: ForwardBatch) -> tuple[Float[Tensor, " b"], Stats]:
        """Loss of each sample."""
        weight = bounded(batch.advantage / self.temperature).exp()
        return self.with_kl(weight * matching_error(batch.new, batch), {}, batch)
