"""A sample's share of won comparisons."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float, Int
from torch import Tensor

from flowgrpo.signals.contract import relative, weighted_columns
from flowgrpo.signals.pairs import compare


@dataclass(frozen=True)
class WinRate:
    """The weighted mean of win rates in the group: only the order counts, so a close win is as good as a clear one.

    R_i = sum_k w_k W_ik,    W_ik = mean over the comparisons of i with l of p_il,    weights scaled to sum |w_k| = 1

    p is 1 where i is better by reward k, 1/2 for a tie, or what a judge said. Without a judge R is a rank: invariant under any
    rising change of a reward. Goes with `advantage: group`, whose division blows up a group of near-ties like any other.

    Source: Pref-GRPO, 2508.20751, released code, with its judge; win rates of point scores are ours.
    """

    takes_judged: ClassVar[bool] = True

    def __call__(
        self,
        values: Float[Tensor, " b k"],
        group_ids: Int[Tensor, " b"],
        weights: Float[Tensor, " k"],
        judged: Float[Tensor, " b b k"] | None = None,
    ) -> Float[Tensor, " b"]:
        w, rates = relative(weights), compare(values, group_ids, judged).win_rate
        return (rates[:, weighted_columns(weights)] @ w).to(values.dtype)
