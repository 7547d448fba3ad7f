"""Statistics of whole groups whose rows lie in any order: a row's group is its id, and NaN means "not there"."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class GroupStats:
    """Beside each row, the statistics of its group's valid rows; float64. No valid row: count 0, mean 0, std 0."""

    mean: Float[Tensor, " b *k"]
    std: Float[Tensor, " b *k"]
    count: Float[Tensor, " b *k"]


def group_stats(values: Float[Tensor, " b *k"], group_ids: Int[Tensor, " b"], *, unbiased: bool) -> GroupStats:
    """Mean, standard deviation and number of the valid (finite) values of each group, column by column.

    std^2 = sum (r - mean)^2 / (n - 1 if unbiased else n)

    The std of one value is 0. Sums are in float64, where the mean of equal float32 values is exactly that value, so a
    group without spread has deviations of exactly 0.
    """
    valid = values.isfinite()
    x = torch.where(valid, values, 0).double()
    rows = group_ids.unique(return_inverse=True)[1]
    count = _sum_by_group(valid.double(), rows)
    mean = _sum_by_group(x, rows) / count.clamp(min=1)
    squares = torch.where(valid, (x - mean) ** 2, 0)
    std = (_sum_by_group(squares, rows) / (count - int(unbiased)).clamp(min=1)).sqrt()
    return GroupStats(mean, std, count)


def tied_fraction(signal: Float[Tensor, " b"], group_ids: Int[Tensor, " b"]) -> float:
    """The share of groups, in [0, 1], that teach nothing: all valid values equal, or fewer than two of them."""
    groups = group_ids.unique()
    members = [signal[group_ids == group] for group in groups]
    return sum(member[member.isfinite()].unique().numel() < 2 for member in members) / max(1, len(groups))


def _sum_by_group(x: Tensor, rows: Tensor) -> Tensor:
    """Each row's group total."""
    return torch.zeros_like(x).index_add_(0, rows, x)[rows]
