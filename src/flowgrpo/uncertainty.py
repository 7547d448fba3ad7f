"""Which rewards are to be doubted: those that other reward models do not share."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowgrpo.signals.pairs import compare


def wins(values: Float[Tensor, " b"], group_ids: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """The share of the other valid samples of its group that each one beats, ties half; NaN where it or all others are NaN."""
    return compare(values[:, None], group_ids, None).preference.nanmean(1)[:, 0].to(values.dtype)


def doubt(signal: Float[Tensor, " b"], others: Float[Tensor, " b n"], group_ids: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """How much better a sample does by the signal than by other reward models, in [-1, 1].

        U_i = wins(signal)_i - mean over the others of wins(other)_i

    Others that are missing are left out; a sample without any has doubt 0. Source: GARDO 2512.24138.
    """
    second = torch.stack([wins(column, group_ids) for column in others.T], 1).nanmean(1)
    return (wins(signal, group_ids) - second).nan_to_num(0.0)


def most_doubted(doubts: Float[Tensor, " b"], share: float) -> Bool[Tensor, " b"]:
    """Marks this share of the samples, rounded, at least one: those of the largest doubt, the first among equals."""
    count = max(1, round(share * len(doubts)))
    marked = torch.zeros(len(doubts), dtype=torch.bool)
    marked[doubts.argsort(descending=True, stable=True)[:count]] = True
    return marked
