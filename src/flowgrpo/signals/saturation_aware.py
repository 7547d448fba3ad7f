"""Our hardened rule: a reward that has no more to say in a group loses its weight there."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowgrpo.groups import GroupStats, group_stats
from flowgrpo.signals.contract import Range, check_count, check_ranges, weighted_columns, weighted_scores
from flowgrpo.signals.history import Calibration, Remembers, check_share


@dataclass
class SaturationAware(Remembers):
    """Standardised scores, weighed in each group by their spread against the usual one and by the room above their mean.

        rho_k = s_k / (s_k + kappa S_k)                                   spread
        u_k   = clip((high_k - m_k) / (high_k - low_k), 0, 1)             headroom, 1 if the range is unknown
        c_k   = 1 - rho_k (least_headroom + (1 - least_headroom) u_k^gamma)        saturation
        w_k   = a_k (least_weight + (1 - least_weight) (1 - c_k)) / sum over rewards of the same
        R_i   = sum_k w_k (r_ik - m_k) / (s_k + delta S_k)

    with m, s the group's mean and std (over n), S the running within-group std, a the user's weights. Scale- and shift-free for
    each reward; a better sample has the larger R; noise much below S stays noise instead of being blown up to size 1. All tied:
    w = a and R = 0. A reward that no sample of a group has is left out there, and the rest is rescaled; a sample that lacks
    what its siblings have gets NaN. Goes with `advantage: {use: group, eps: 0.05}`.

    `ranges` are [low, high] or null for each reward of weight above 0, in the config's order; "running" takes the 1 % and 99 %
    quantiles of the run. S rises with `memory` and falls with `falling`, nearly 1: with one memory for both, a reward would
    get its weight back by staying saturated. State: spreads and quantiles.

    Source: ours, of the wish in TaRoS, 2511.19356, that a saturated component should not steer; no paper has this rule.
    """

    kappa: float = 0.5
    gamma: float = 1.0
    least_headroom: float = 0.25
    least_weight: float = 0.05
    delta: float = 0.1
    ranges: tuple[Range | None, ...] | Literal["running"] | None = None
    falling: float = 0.999

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("falling", self.falling)
        for name in ("kappa", "gamma", "delta"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"signal.{name} must be above 0 and finite, got {getattr(self, name)}")
        for name in ("least_headroom", "least_weight"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"signal.{name} must be in (0, 1], got {getattr(self, name)}")
        if self.ranges != "running":
            check_ranges(self.ranges or ())

    def __call__(
        self, values: Float[Tensor, " b k"], group_ids: Int[Tensor, " b"], weights: Float[Tensor, " k"]
    ) -> Float[Tensor, " b"]:
        weighted, r = weighted_columns(weights), weighted_scores(values, weights)
        stats = group_stats(r, group_ids, unbiased=False)
        w, usual = self.shares(values, group_ids, weights), self.usual(values, group_ids)
        z = _ratio(r - stats.mean, stats.std + self.delta * _spread(usual)[weighted])
        signal = torch.where(stats.count > 0, w[:, weighted] * z, 0.0).sum(1)
        return torch.where((stats.count > 0).any(1), signal, torch.nan).to(values.dtype)

    def shares(
        self, values: Float[Tensor, " b k"], group_ids: Int[Tensor, " b"], weights: Float[Tensor, " k"]
    ) -> Float[Tensor, " b k"]:
        """The weight w_k of each reward in the sample's group; 0 for monitors and where the group has none. float64."""
        self.check(weights)
        weighted = weighted_columns(weights)
        stats = group_stats(values[:, weighted], group_ids, unbiased=False)
        keeps = 1 - self._saturation(stats, self.usual(values, group_ids), weighted)
        a = weights[weighted].double() * (stats.count > 0)
        w = a * (self.least_weight + (1 - self.least_weight) * keeps)
        result = torch.zeros(values.shape, dtype=torch.float64)
        result[:, weighted] = _ratio(w, w.sum(1, keepdim=True))
        return result

    def restricted(self, speaks: Sequence[bool]) -> "SaturationAware":
        """The same rule where only these of the weighted rewards have a say: the others' ranges are left out."""
        if self.ranges is None or self.ranges == "running" or all(speaks):
            return self
        part = replace(self, ranges=tuple(one for one, own in zip(self.ranges, speaks, strict=True) if own))
        part.calibration = self.calibration
        return part

    def check(self, weights: Float[Tensor, " k"], ranges: Sequence[Range | None] = ()) -> None:
        """Raise ValueError unless weights and settings go together; what the reward models declare is not used."""
        if (weights < 0).any():
            raise ValueError(
                f"saturation_aware needs weights of 0 or more, got {weights.tolist()}; turn the reward's sign instead"
            )
        if self.ranges != "running":
            check_count(self.ranges, int(weighted_columns(weights).sum()))

    def update(self, values: Float[Tensor, " b k"], group_ids: Int[Tensor, " b"]) -> None:
        """Take up the scores of an iteration."""
        self._move(values, group_ids, self.falling)

    def _saturation(self, stats: GroupStats, usual: Calibration, weighted: Tensor) -> Tensor:
        spread = _ratio(stats.std, stats.std + self.kappa * _spread(usual)[weighted])
        low, high = self._ranges(usual.quantiles[:, weighted])
        headroom = torch.where(high > low, (high - stats.mean) / (high - low), 1.0).clamp(0, 1)
        return 1 - spread * (self.least_headroom + (1 - self.least_headroom) * headroom**self.gamma)

    def _ranges(self, quantiles: Tensor) -> Tensor:
        """The low and the high end of each weighted reward, (2, n); NaN where unknown."""
        if self.ranges == "running":
            return torch.stack([quantiles[:2].mean(0), quantiles[-2:].mean(0)])  # levels 0.005 and 0.015: 1 %
        unknown = (torch.nan, torch.nan)
        ranges = [one or unknown for one in self.ranges or [None] * quantiles.shape[1]]
        return torch.tensor(ranges, dtype=torch.float64).T


def _spread(usual: Calibration) -> Tensor:
    """The usual spread; 0 where no group ever had two scores."""
    return usual.spread.nan_to_num(nan=0.0)


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole, and 0 for 0 / 0."""
    return torch.where(part == 0, 0.0, part / whole)
