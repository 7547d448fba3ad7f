"""Raw scores added."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from flowgrpo.signals.contract import weighted_columns, weighted_scores


@dataclass(frozen=True)
class WeightedSum:
    """The weighted sum of raw scores, each in its own unit: a score with a wide scale decides.

    R_i = sum_k w_k r_ik

    Source: Flow-GRPO, 2505.05470, released code (rewards are added before advantages are taken).
    """

    def __call__(
        self, values: Float[Tensor, " b k"], group_ids: Int[Tensor, " b"], weights: Float[Tensor, " k"]
    ) -> Float[Tensor, " b"]:
        return (weighted_scores(values, weights) @ weights[weighted_columns(weights)].double()).to(values.dtype)
