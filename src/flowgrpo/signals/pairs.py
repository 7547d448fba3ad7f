"""The samples of a group compared in pairs, by a judge or by their scores."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Pairs:
    """For each reward and each pair of a group; float64."""

    preference: Float[Tensor, " b b k"]  # in [0, 1], how far i is better than l; of l, i it is 1 less that; NaN: not compared
    reliability: Float[Tensor, " b b k"]  # in [0, 1], the agreement of the two orders of showing; 0: not compared
    present: Bool[Tensor, " b k"]  # whether the sample has a score, or under a judge a comparison
    by_judge: Bool[Tensor, " k"]

    @property
    def win_rate(self) -> Float[Tensor, " b k"]:
        """The mean preference over a sample's comparisons; 1/2 for a score without any, NaN for a sample not present."""
        return torch.where(self.present, self.preference.nanmean(1).nan_to_num(nan=0.5), torch.nan)


def compare(
    values: Float[Tensor, " b k"],
    group_ids: Int[Tensor, " b"],
    judged: Float[Tensor, " b b k"] | None,
    *,
    one_order: float = 1.0,
) -> Pairs:
    """Judgements where a reward is a judge (see `PairwiseSignal`), else the order of the scores, ties 1/2.

    p_il = (judged_il + 1 - judged_li) / 2,    reliability_il = 1 - |judged_il + judged_li - 1|

    A pair that was judged in one order only has that judgement, and the reliability `one_order`. Raises ValueError for
    judgements outside [0, 1], across groups, or of a sample with itself.
    """
    pairs = ((group_ids[:, None] == group_ids) & ~torch.eye(len(group_ids), dtype=torch.bool))[:, :, None]
    by_judge = torch.zeros(values.shape[1], dtype=torch.bool)
    r = torch.where(values.isfinite(), values, torch.nan).double()
    first = (r[:, None] > r).double() + 0.5 * (r[:, None] == r)
    first = torch.where(r.isnan()[:, None] | r.isnan(), torch.nan, first)
    if judged is not None:
        _check_judged(judged, pairs)
        by_judge = judged.isfinite().any(0).any(0)
        first = torch.where(by_judge, judged.double(), first)
    first = torch.where(pairs & first.isfinite(), first, torch.nan)
    second = 1 - first.transpose(0, 1)
    preference = torch.stack([first, second]).nanmean(0)
    reliability = torch.where((first + second).isfinite(), 1 - (first - second).abs(), one_order)
    present = torch.where(by_judge, preference.isfinite().any(1), r.isfinite())
    return Pairs(preference, torch.where(preference.isfinite(), reliability, 0.0), present, by_judge)


def _check_judged(judged: Tensor, pairs: Tensor) -> None:
    given = judged[judged.isfinite()]
    if ((given < 0) | (given > 1)).any():
        raise ValueError(
            f"judgements must lie in [0, 1], 1 where the first sample is better, got {given.min():.4g} to {given.max():.4g}; "
            "rescale them, and put NaN where there is none"
        )
    if (judged.isfinite() & ~pairs).any():
        raise ValueError("judgements must be of two samples of one group, got others; put NaN there")
