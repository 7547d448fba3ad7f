"""What a signal is given, and what it may say of itself."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Range = tuple[float, float]  # lowest and highest possible score


@runtime_checkable
class Signal(Protocol):
    """Scores (b, k) with NaN where missing, group ids (b) and weights (k) to one number a sample (b)."""

    def __call__(
        self, values: Float[Tensor, " b k"], group_ids: Int[Tensor, " b"], weights: Float[Tensor, " k"]
    ) -> Float[Tensor, " b"]: ...


@runtime_checkable
class PairwiseSignal(Protocol):
    """A signal that compares the samples of a group in pairs, and takes a judge's word for it where there is one.

    `judged[i, l, k]` is what reward k said of sample i against l with i shown first: in [0, 1], 1 where i is better, 1/2 for a
    tie; NaN where it was not asked, which is so for samples of different groups and of a sample with itself. A reward whose
    whole plane is NaN is no judge: its comparisons follow from its scores.
    """

    takes_judged: bool

    def __call__(
        self,
        values: Float[Tensor, " b k"],
        group_ids: Int[Tensor, " b"],
        weights: Float[Tensor, " k"],
        judged: Float[Tensor, " b b k"] | None = None,
    ) -> Float[Tensor, " b"]: ...


def weighted_columns(weights: Float[Tensor, " k"]) -> Bool[Tensor, " k"]:
    """Where the weight is not 0. Raises ValueError if nowhere."""
    weighted = weights != 0
    if not weighted.any():
        raise ValueError(f"at least one reward needs a weight other than 0, got {weights.tolist()}; raise one weight")
    return weighted


def weighted_scores(values: Float[Tensor, " b k"], weights: Float[Tensor, " k"]) -> Float[Tensor, " b n"]:
    """The columns whose weight is not 0, float64, NaN where a score is not finite."""
    r = values[:, weighted_columns(weights)].double()
    return torch.where(r.isfinite(), r, torch.nan)


def relative(weights: Float[Tensor, " k"]) -> Float[Tensor, " n"]:
    """The weights other than 0, scaled to sum |w_k| = 1; float64. Raises ValueError if there is none."""
    w = weights[weighted_columns(weights)].double()
    return w / w.abs().sum()


def check_signal(signal: Any, weights: Float[Tensor, " k"], ranges: Sequence[Range | None]) -> None:
    """Raise ValueError for a signal that cannot work with these rewards: call it when a config is read.

    `weights` and `ranges`, what the reward models say of their scores (None: unbounded), are those of all rewards. A signal
    that asks something of its rewards has a method `check(weights, ranges)`.
    """
    weighted_columns(weights)
    if hasattr(signal, "check"):
        signal.check(weights, ranges)


def check_ranges(ranges: Sequence[Range | None]) -> None:
    """Raise ValueError unless each low end is below its high end."""
    for one in ranges:
        if one is not None and not one[0] < one[1]:
            raise ValueError(f"each of signal.ranges must be [low, high] with low below high, got {list(one)}")


def check_count(ranges: Sequence[Range | None] | None, count: int) -> None:
    """Raise ValueError unless there are as many as weighted rewards."""
    if ranges is not None and len(ranges) != count:
        raise ValueError(f"signal.ranges must be {count}, one for each reward of weight above 0, got {len(ranges)}")
