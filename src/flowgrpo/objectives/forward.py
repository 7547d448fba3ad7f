"""What objectives of the forward process have in common: they need a finished sample and no density."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from jaxtyping import Float
from torch import Tensor

from flowgrpo.objectives.contract import ForwardBatch, PullsToReference, Stats
from flowgrpo.transitions import Prediction, reduce_coordinates


def matching_error(prediction: Prediction, batch: ForwardBatch) -> Float[Tensor, " b"]:
    """The error of flow matching, the mean over coordinates of (v - (eps - x0))^2."""
    return reduce_coordinates((prediction.v - batch.v) ** 2, "mean")


@dataclass(frozen=True)
class Forward(PullsToReference):
    """A pull to the reference, kl times the mean over coordinates of (v - v_ref)^2."""

    family: ClassVar[Literal["forward"]] = "forward"
    needs_old: ClassVar[bool] = True

    def with_kl(self, loss: Float[Tensor, " b"], stats: Stats, batch: ForwardBatch) -> tuple[Float[Tensor, " b"], Stats]:
        """The loss with the weighted pull, which is logged before its weight; without a reference as they are."""
        if batch.reference is None:
            return loss, stats
        return self.add_kl(loss, stats, reduce_coordinates((batch.new.v - batch.reference.v) ** 2, "mean"))
