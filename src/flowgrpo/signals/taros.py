"""TaRoS as printed: components weighed by their group's level and sparsity."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowgrpo.groups import GroupStats, group_stats
from flowgrpo.signals.contract import Range, check_count, check_ranges, weighted_columns, weighted_scores
from flowgrpo.signals.history import Remembers

SLACK = 1e-4  # rounding at the ends of a range


@dataclass
class Taros(Remembers):
    """The sum of raw rewards with weights that each group makes anew, from easy to hard components.

        S_j = (sqrt(G) - |r_j|_1 / |r_j|_2) / (sqrt(G) - 1)
        g_j = h(mean_g r_j - tau_j) + beta (S_j - S_(j+1)),    S_(K+1) = 0,    h = sigmoid
        w_j = exp(g_j) / sum_l exp(g_l),    R_i = sum_j w_j r_ij

    The paper's advantage then is that of `advantage: group`. A group of one valid score or of zeros has S = 0. The rule has no
    weights of the user's: those above 0 must be equal.

    `order` numbers the rewards of weight above 0, from 0 in the config's order, from easy to hard; null takes the config's
    own. `thresholds` are the tau of all but the last component in that order, and `last_threshold` is its own ("none": it has
    no h term). "history" takes the running mean of the component's group means. `ranges` maps each reward linearly from
    [low, high] to [0, 1], in the config's order; null takes it as it is. A reward outside [0, 1] after that is refused.

    What it does not do: h rises with the mean, so a component at its ceiling gains weight; see docs/rewards.md.
    State: the means.

    Source: TaRoS, 2511.19356 v4, eq. 3-9; beta is in its ablation (0.1 to 0.5). It gives two thresholds for three components
    and says of the history only that they come from it: the running mean and the choices for the last component are ours.
    """

    beta: float = 0.3
    thresholds: tuple[float, ...] | Literal["history"] = "history"
    last_threshold: float | Literal["history", "none"] = "history"
    order: tuple[int, ...] | None = None
    ranges: tuple[Range, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.beta < float("inf"):
            raise ValueError(f"signal.beta must be 0 or more and finite, got {self.beta}")
        check_ranges(self.ranges or ())

    def __call__(
        self, values: Float[Tensor, " b k"], group_ids: Int[Tensor, " b"], weights: Float[Tensor, " k"]
    ) -> Float[Tensor, " b"]:
        shares, weighted = self.shares(values, group_ids, weights), weighted_columns(weights)
        return (shares[:, weighted] * self._rewards(values, weights)).sum(1).to(values.dtype)

    def shares(
        self, values: Float[Tensor, " b k"], group_ids: Int[Tensor, " b"], weights: Float[Tensor, " k"]
    ) -> Float[Tensor, " b k"]:
        """The weight w_j of each reward in the sample's group; 0 for monitors, and a row sums to 1. float64."""
        self.check(weights)
        columns = weighted_columns(weights).nonzero().flatten()
        order = torch.arange(len(columns)) if self.order is None else torch.tensor(self.order)
        stats = group_stats(self._rewards(values, weights)[:, order], group_ids, unbiased=False)
        thresholds = self._thresholds(self._mapped(self.usual(values, group_ids).mean[columns])[order])
        result = torch.zeros(values.shape, dtype=torch.float64)
        result[:, columns[order]] = organised(stats, thresholds, self.beta)
        return result

    def restricted(self, speaks: Sequence[bool]) -> "Taros":
        """The same rule where only these of the weighted rewards have a say: the others' settings are left out."""
        if all(speaks):
            return self
        order = [k for k in self.order or range(len(speaks)) if speaks[k]]
        rank = {k: position for position, k in enumerate(k for k in range(len(speaks)) if speaks[k])}
        ranges = None if self.ranges is None else tuple(self.ranges[k] for k in rank)
        thresholds, last = self.thresholds, self.last_threshold
        if thresholds != "history":
            own = dict(zip(self.order or range(len(speaks)), (*thresholds, last), strict=True))
            *first, last = (own[k] for k in order)
            thresholds = tuple(value for value in first if isinstance(value, float))
        elif order[-1] != (self.order or range(len(speaks)))[-1]:
            last = "history"
        part = replace(self, thresholds=thresholds, last_threshold=last, order=tuple(rank[k] for k in order), ranges=ranges)
        part.calibration = self.calibration
        return part

    def check(self, weights: Float[Tensor, " k"], ranges: Sequence[Range | None] = ()) -> None:
        """Raise ValueError unless weights, settings and the ranges that the reward models declare go together."""
        own = weights[weighted_columns(weights)]
        count = len(own)
        if not (own == own[0]).all() or own[0] < 0:
            raise ValueError(
                f"taros weighs rewards itself: weights must be 0 or all the same, got {weights.tolist()}; set them to 1"
            )
        if self.order is not None and sorted(self.order) != list(range(count)):
            raise ValueError(f"signal.order must hold each of 0 to {count - 1} once, got {list(self.order)}")
        if self.thresholds != "history" and len(self.thresholds) != count - 1:
            raise ValueError(
                f"signal.thresholds must be {count - 1}, one for each reward but the last, got {len(self.thresholds)}; "
                "last_threshold is the last one's"
            )
        check_count(self.ranges, count)
        if ranges and self.ranges is None:
            self._check_declared([one for one, weight in zip(ranges, weights.tolist(), strict=True) if weight])

    def _check_declared(self, ranges: Sequence[Range | None]) -> None:
        for declared in ranges:
            if declared is None or declared[0] < 0 or declared[1] > 1:
                raise ValueError(
                    f"taros needs rewards in [0, 1], got one of range {declared or 'unbounded'}; give the lowest and highest "
                    "score of each reward as signal.ranges, or take saturation_aware"
                )

    def _thresholds(self, usual: Tensor) -> Tensor:
        """tau of each component, NaN where there is no h term."""
        tau = usual.clone()
        if self.thresholds != "history":
            tau[:-1] = torch.tensor(self.thresholds, dtype=torch.float64)
        if self.last_threshold != "history":
            tau[-1] = torch.nan if self.last_threshold == "none" else self.last_threshold
        return tau

    def _mapped(self, r: Tensor) -> Tensor:
        if self.ranges is None:
            return r
        low, high = torch.tensor(self.ranges, dtype=torch.float64).T
        return (r - low) / (high - low)

    def _rewards(self, values: Tensor, weights: Tensor) -> Tensor:
        """The weighted columns in [0, 1]. Raises ValueError for a reward outside."""
        r = weighted_scores(values, weights)
        mapped = self._mapped(r)
        outside = (mapped < -SLACK) | (mapped > 1 + SLACK)
        if outside.any():
            raise ValueError(
                f"taros needs rewards in [0, 1] after signal.ranges, got one of {r[outside][0]:.4g}; give the lowest and "
                "highest score of each reward as signal.ranges"
            )
        return mapped.clamp(0, 1)


def organised(stats: GroupStats, thresholds: Float[Tensor, " k"], beta: float) -> Float[Tensor, " b k"]:
    """The weights w of ordered components beside each row; a threshold of NaN leaves h out."""
    h = torch.where(thresholds.isnan(), 0.0, (stats.mean - thresholds).sigmoid())
    s = sparsity(stats)
    following = torch.cat([s[:, 1:], torch.zeros_like(s[:, :1])], 1)
    return (h + beta * (s - following)).softmax(1)


def sparsity(stats: GroupStats) -> Float[Tensor, " b k"]:
    """The Hoyer index S of non-negative rewards, in [0, 1].

    From mean and std over n: |r|_1 = n mean, |r|_2^2 = n (mean^2 + std^2). So it is a function of std / mean.
    """
    root = stats.count.sqrt()
    length = (stats.mean**2 + stats.std**2).sqrt()
    index = root * (1 - stats.mean / length) / (root - 1)
    return torch.where((stats.count > 1) & (length > 0), index, 0.0)
