"""How the k scores of a sample become one number: pure functions of a score table, group ids and weights.

A column of weight 0 is a monitor and is ignored. A sample that lacks a weighted score gets NaN: it does not train.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from flowgrpo.groups import group_stats


@runtime_checkable
class Signal(Protocol):
    """Scores (b, k) with NaN where missing, group ids (b) and weights (k) to one number a sample (b)."""

    def __call__(
        self, values: Float[Tensor, " b k"], group_ids: Int[Tensor, " b"], weights: Float[Tensor, " k"]
    ) -> Float[Tensor, " b"]: ...


@dataclass(frozen=True)
class WeightedSum:
    """The weighted sum of raw scores, each in its own unit: a score with a wide scale decides.

    R_i = sum_k w_k r_ik

    Source: Flow-GRPO, 2505.05470, released code (rewards are added before advantages are taken).
    """

    def __call__(
        self, values: Float[Tensor, " b k"], group_ids: Int[Tensor, " b"], weights: Float[Tensor, " k"]
    ) -> Float[Tensor, " b"]:
        weighted = _weighted_columns(weights)
        return (values[:, weighted].double() @ weights[weighted].double()).to(values.dtype)


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
        weighted = _weighted_columns(weights)
        r, w = values[:, weighted].double(), weights[weighted].double()
        stats = group_stats(r, group_ids, unbiased=self.unbiased)
        z = (r - stats.mean) / (stats.std + self.eps)
        return (z @ (w / w.abs().sum())).to(values.dtype)


def _weighted_columns(weights: Tensor) -> Tensor:
    """Where the weight is not 0. Raises ValueError if nowhere."""
    weighted = weights != 0
    if not weighted.any():
        raise ValueError(f"at least one reward needs a weight other than 0, got {weights.tolist()}; raise one weight")
    return weighted


SIGNALS: Mapping[str, Callable[..., Signal]] = {"weighted_sum": WeightedSum, "standardized_sum": StandardizedSum}
