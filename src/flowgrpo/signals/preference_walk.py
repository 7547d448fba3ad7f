"""A walk from worse to better samples, which cycles in a judge's word cannot break."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowgrpo.groups import group_stats
from flowgrpo.signals.contract import Range, relative, weighted_columns
from flowgrpo.signals.pairs import Pairs, compare


@dataclass(frozen=True)
class PreferenceWalk:
    """The weighted mean of log shares of time that a walk spends with a sample.

        M_ij = rho_ij p_ji / sum_l p_li,                        one step from i to what is better
        pi   = alpha M^T pi + (1 - alpha sum of M^T pi) a,      what M does not carry goes to the anchor
        R_i  = sum_k w_k log(n pi_ik),                          weights scaled to sum |w_k| = 1

    p is the judge's preference, rho its reliability (the agreement of both orders of showing; `one_order` where one only was
    asked), n the number of samples in the walk. The anchor a is uniform, or, from trusted point scores, a_i = exp(sharpness
    z_i) normalised, z standardised in the group. An unreliable judgement gives way to the anchor; pi stays unique and above
    (1 - alpha) a whatever cycles there are. Without a judge R is a rank. Goes with `advantage: group`.

    `anchor` is the number of the trusted reward, from 0 in the config's order, monitors counted; a sample without its score
    does not train.

    Source: the idea of a paper on a reliability-anchored preference walk, known to us by title only; the rule is ours.
    """

    takes_judged: ClassVar[bool] = True

    alpha: float = 0.85
    anchor: int | None = None
    sharpness: float = 1.0
    one_order: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.alpha < 1:
            raise ValueError(f"signal.alpha must lie in (0, 1), got {self.alpha}")
        if not 0 < self.sharpness <= 10:
            raise ValueError(f"signal.sharpness must be above 0 and at most 10, got {self.sharpness}")
        if not 0 <= self.one_order <= 1:
            raise ValueError(f"signal.one_order must lie in [0, 1], got {self.one_order}")

    def __call__(
        self,
        values: Float[Tensor, " b k"],
        group_ids: Int[Tensor, " b"],
        weights: Float[Tensor, " k"],
        judged: Float[Tensor, " b b k"] | None = None,
    ) -> Float[Tensor, " b"]:
        self.check(weights)
        w, columns = relative(weights), weighted_columns(weights).nonzero().flatten().tolist()
        pairs = compare(values, group_ids, judged, one_order=self.one_order)
        preferred = self._anchors(values, group_ids)
        log_shares = torch.full((len(values), len(columns)), torch.nan, dtype=torch.float64)
        for group in group_ids.unique():
            for place, column in enumerate(columns):
                rows = ((group_ids == group) & pairs.present[:, column] & preferred.isfinite()).nonzero().flatten()
                log_shares[rows, place] = self._log_shares(pairs, rows, column, preferred[rows])
        return (log_shares @ w).to(values.dtype)

    def check(self, weights: Float[Tensor, " k"], ranges: Sequence[Range | None] = ()) -> None:
        """Raise ValueError unless the anchor is one of the rewards."""
        if self.anchor is not None and not 0 <= self.anchor < len(weights):
            raise ValueError(f"signal.anchor must be the number of a reward, 0 to {len(weights) - 1}, got {self.anchor}")

    def _anchors(self, values: Tensor, group_ids: Tensor) -> Tensor:
        """The anchor of each sample, not yet normalised; NaN without its score."""
        if self.anchor is None:
            return torch.ones(len(values), dtype=torch.float64)
        r = values[:, self.anchor].double()
        stats = group_stats(r, group_ids, unbiased=False)
        deviation = torch.where(r.isfinite(), r - stats.mean, torch.nan)
        return (self.sharpness * torch.where(deviation == 0, 0.0, deviation / stats.std)).exp()

    def _log_shares(self, pairs: Pairs, rows: Tensor, column: int, preferred: Tensor) -> Tensor:
        p = pairs.preference[rows][:, rows, column].nan_to_num(nan=0.0)
        reliability = pairs.reliability[rows][:, rows, column]
        better = p.T / p.T.sum(1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
        return (len(rows) * walk(reliability * better, preferred / preferred.sum(), self.alpha)).log()


def walk(steps: Float[Tensor, " n n"], anchor: Float[Tensor, " n"], alpha: float) -> Float[Tensor, " n"]:
    """The stationary law of a walk that follows `steps` (rows of sum at most 1) with probability alpha, else the anchor.

    pi = alpha M^T pi + (1 - alpha sum of M^T pi) a; it sums to 1.
    """
    system = torch.eye(len(anchor), dtype=steps.dtype) - alpha * steps.T
    visits = torch.linalg.solve(system, anchor)  # pi is a multiple of it: what goes to the anchor is one number
    return visits / visits.sum()
