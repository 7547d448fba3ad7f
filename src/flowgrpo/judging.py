"""Which samples of a group a judge compares, and how tables of what it said are put together."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = ["blocks", "pairs_of"]


def pairs_of(
    group_ids: Int[Tensor, " b"], there: Bool[Tensor, " b"], opponents: int | None = None, both_orders: bool = True
) -> Int[Tensor, " n 2"]:
    """Rows (shown first, shown second) of the samples that are `there`, group by group.

    All pairs of a group, or with `opponents` a ring, in which every sample meets at least that many siblings, its nearest
    ones: all as often as another, to within one where the group is small or odd. Each pair is shown in both orders, else in
    one, in which half of a sample's pairs show it first.
    """
    pairs: list[tuple[int, int]] = []
    for group in group_ids.unique():
        rows = ((group_ids == group) & there).nonzero().flatten().tolist()
        n = len(rows)
        reach = n // 2 if opponents is None else min(n // 2, (opponents + 1) // 2)
        met = {
            frozenset((i, (i + step) % n)): (rows[i], rows[(i + step) % n]) for step in range(1, reach + 1) for i in range(n)
        }  # the opposite of an even ring is met once
        pairs += met.values()
        pairs += [(second, first) for first, second in met.values()] if both_orders else []
    return torch.tensor(pairs, dtype=torch.long).view(-1, 2)


def blocks(parts: Sequence[Float[Tensor, "_ _ k"]]) -> Float[Tensor, " b b k"]:
    """Judgements (b, b, k) of several sets of samples as one table, NaN between them."""
    sizes = [len(part) for part in parts]
    table = torch.full((sum(sizes), sum(sizes), parts[0].shape[2]), torch.nan)
    start = 0
    for part, size in zip(parts, sizes, strict=True):
        table[start : start + size, start : start + size] = part
        start += size
    return table
