"""Scores standardised in their group, added, and standardised again over the iteration."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowgrpo.groups import group_stats
from flowgrpo.signals.contract import weighted_columns, weighted_scores


@dataclass(frozen=True)
class Gdpo:
    """Each reward standardised within its group, the weighted sum standardised over the whole table.

        z_ik = (r_ik - mean_g r_k) / (std_g r_k + eps),    s_i = sum_k w_k z_ik,    R_i = (s_i - mean s) / (std s + eps)

    The last mean and std are over all groups: of all signals here only this one's value depends on the other groups by its
    formula, though by one common factor. Groups without spread shrink the std of s and so enlarge the others. Use it with
    `advantage: none`, which leaves it as it is but for the mean of a group with missing scores.

    Source: GDPO, 2601.05242; the released code's std (n - 1) and eps. That code puts 0 in the place of a missing score; here
    the sample does not train.
    """

    eps: float = 1e-4

    def __post_init__(self) -> None:
        if not self.eps >= 0:
            raise ValueError(f"signal.eps must be 0 or more, got {self.eps}; it is added to the spread that is divided by")

    def __call__(
        self, values: Float[Tensor, " b k"], group_ids: Int[Tensor, " b"], weights: Float[Tensor, " k"]
    ) -> Float[Tensor, " b"]:
        w = weights[weighted_columns(weights)].double()
        total = self._standardized(weighted_scores(values, weights), group_ids) @ w
        return self._standardized(total, torch.zeros_like(group_ids)).to(values.dtype)

    def _standardized(self, r: Tensor, group_ids: Tensor) -> Tensor:
        stats = group_stats(r, group_ids, unbiased=True)
        deviation = r - stats.mean
        return torch.where(deviation == 0, 0.0, deviation / (stats.std + self.eps))
