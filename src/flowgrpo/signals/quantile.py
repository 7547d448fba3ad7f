"""Scores by their place in the run's own distribution of scores."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowgrpo.signals.contract import relative, weighted_columns, weighted_scores
from flowgrpo.signals.history import Remembers


@dataclass
class Quantile(Remembers):
    """The weighted mean of quantiles: each score by the share of the run's scores below it, whatever its unit or shape.

        R_i = sum_k w_k g(F_k(r_ik)),    weights scaled to sum |w_k| = 1

    F_k is the running distribution of all prompts' scores, kept as 100 quantiles, linear in between; equal scores get the
    middle of their share. It stays within [0.005, 0.995]: scores beyond what was seen are not told apart. g is Phi^-1, the
    quantile of the standard normal (`scale: normal`), or F itself (`uniform`).

    Invariant under any rising change of a reward's unit that the scores of its past have gone through as well (exactly if the
    change is affine). Unlike a group's own ranks it keeps how far apart the samples of a group are. State: the distributions.

    Source: the idea of a paper on distributional reward calibration known to us by title only; the rule is ours.
    """

    scale: Literal["normal", "uniform"] = "normal"

    def __call__(
        self, values: Float[Tensor, " b k"], group_ids: Int[Tensor, " b"], weights: Float[Tensor, " k"]
    ) -> Float[Tensor, " b"]:
        w, r = relative(weights), weighted_scores(values, weights)
        quantiles = self.usual(values, group_ids).quantiles[:, weighted_columns(weights)]
        share = torch.stack([shares_below(one, table) for one, table in zip(r.T, quantiles.T, strict=True)], 1)
        return ((torch.special.ndtri(share) if self.scale == "normal" else share) @ w).to(values.dtype)


def shares_below(r: Float[Tensor, " b"], quantiles: Float[Tensor, " q"]) -> Float[Tensor, " b"]:
    """F(r) of a distribution given by rising quantiles at the levels (i + 1/2) / q; NaN stays NaN.

    Below the first and above the last quantile F is theirs; on a run of equal quantiles it is the middle of their levels.
    """
    q = quantiles.contiguous()
    x = r.nan_to_num(nan=0.0).contiguous()
    below, upto = torch.searchsorted(q, x), torch.searchsorted(q, x, right=True)
    left, right = q[(below - 1).clamp(min=0)], q[below.clamp(max=len(q) - 1)]
    between = below - 0.5 + (x - left) / (right - left)  # inf or NaN where x is a quantile or outside, and not used there
    place = torch.where(below < upto, (below + upto) / 2, between)
    place = torch.where(upto == 0, 0.5, torch.where(below == len(q), len(q) - 0.5, place))
    return torch.where(r.isnan(), torch.nan, place / len(q))
