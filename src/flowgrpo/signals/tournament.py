"""Win rates held against 1/2, the baseline that a tournament has by itself."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float, Int
from torch import Tensor

from flowgrpo.groups import group_stats
from flowgrpo.signals.contract import relative, weighted_columns
from flowgrpo.signals.pairs import compare


@dataclass(frozen=True)
class Tournament:
    """The weighted mean of win rates less 1/2, divided by a spread that near-ties do not reach.

    R_i = sum_k w_k (W_ik - 1/2) / (std_g W_k + delta),    weights scaled to sum |w_k| = 1

    W is the win rate of `win_rate`, its std over n. The mean of W is exactly 1/2 where every pair was compared. A strict order
    of a large group has std 0.29, so `delta` takes a quarter there, and nearly all where a judge is hardly decided. Without a
    judge R is a rank; comparisons that were left out (a judge that saw some pairs only) are left out of W. Goes with
    `advantage: none`.

    Source: the idea of a paper on rewards that depend on the group, known to us by title only; the rule is ours.
    """

    takes_judged: ClassVar[bool] = True

    delta: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.delta < float("inf"):
            raise ValueError(f"signal.delta must be above 0 and finite, got {self.delta}")

    def __call__(
        self,
        values: Float[Tensor, " b k"],
        group_ids: Int[Tensor, " b"],
        weights: Float[Tensor, " k"],
        judged: Float[Tensor, " b b k"] | None = None,
    ) -> Float[Tensor, " b"]:
        w, rates = relative(weights), compare(values, group_ids, judged).win_rate[:, weighted_columns(weights)]
        spread = group_stats(rates, group_ids, unbiased=False).std + self.delta
        return (((rates - 0.5) / spread) @ w).to(values.dtype)
