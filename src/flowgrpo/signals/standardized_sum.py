"""Scores standardised in their group, then added."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from flowgrpo.groups import group_stats
from flowgrpo.signals.contract import relative, weighted_scores


@dataclass(frozen=True)
class StandardizedSum:
    """The weighted mean of scores standardised within their group, so that equal weights mean equal say.

    R_i = sum_k w_k (r_ik - mean_g r_k) / (std_g r_k + eps),    weights scaled to sum |w_k| = 1

    Statistics are over the valid scores of a group, each column on its own; one valid score, or no spread, gives 0.

    Source: MixGRPO, 2507.21802, algorithm 1, line 17; released code for std (n - 1), eps and the scaling of weights.
    """

    eps: float = 1e-8
    unbiased: bool = True

    def __call__(
        self, values: Float[Tensor, " b k"], group_ids: Int[Tensor, " b"], weights: Float[Tensor, " k"]
    ) -> Float[Tensor, " b"]:
        w, r = relative(weights), weighted_scores(values, weights)
        stats = group_stats(r, group_ids, unbiased=self.unbiased)
        z = (r - stats.mean) / (stats.std + self.eps)
        return (z @ w).to(values.dtype)
