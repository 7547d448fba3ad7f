"""How much a mean score rose from one evaluation to another, pair by pair, and how sure that is.

The interval comes from resampling whole captions: one that is in the file many times is not many independent prompts.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from jaxtyping import Float
from torch import Tensor

from flowgrpo.data import Prompt

__all__ = ["Rise", "paired_rise", "rise_by_kind"]

LEVEL = 0.95
CELLS = 4_000_000  # resampled entries held at once


@dataclass(frozen=True)
class Rise:
    """Mean scores before and after, and their difference with a 95 % interval [low, high].

    Means are over the `num_prompts` prompts that have both scores, `num_dropped` others lack one; the interval is NaN
    when fewer than two different captions (`num_captions`) are left.
    """

    base: float
    tuned: float
    rise: float
    low: float
    high: float
    num_prompts: int
    num_captions: int
    num_dropped: int = 0

    def as_json(self) -> dict[str, float | int | None]:
        """The keys of a summary; NaN, which JSON does not know, becomes null."""
        longer = {"low": "rise_low", "high": "rise_high"}
        return {longer.get(name, name): None if math.isnan(value) else value for name, value in asdict(self).items()}


def paired_rise(base: Float[Tensor, " n"], tuned: Float[Tensor, " n"], clusters: Sequence[int | str], *,
                seed: int = 0, resamples: int = 10_000) -> Rise:  # fmt: skip
    """The rise of the mean from `base` to `tuned`, pair by pair, with a percentile bootstrap over whole clusters.

    A resample draws as many clusters as there are, with replacement; its mean weighs every pair it holds alike.
    Pairs with a NaN are left out and counted.
    """
    if not len(base) == len(tuned) == len(clusters):
        raise ValueError(f"pairs need equal lengths, got {len(base)}, {len(tuned)} and {len(clusters)} clusters")
    valid = ~(base.isnan() | tuned.isnan())
    before, after = (scores[valid].double().numpy() for scores in (base, tuned))
    numbers: dict[int | str, int] = {}
    member = [numbers.setdefault(clusters[i], len(numbers)) for i in valid.nonzero().flatten().tolist()]
    counts = len(member), len(numbers), len(base) - len(member)
    if not member:
        return Rise(math.nan, math.nan, math.nan, math.nan, math.nan, *counts)
    low, high = _interval(after - before, np.array(member), np.random.default_rng(seed), resamples)
    return Rise(float(before.mean()), float(after.mean()), float((after - before).mean()), low, high, *counts)


def _interval(differences: np.ndarray, member: np.ndarray, rng: np.random.Generator, resamples: int) -> tuple[float, float]:
    sums, sizes = np.bincount(member, differences), np.bincount(member)
    num_clusters = len(sizes)
    if num_clusters < 2:
        return math.nan, math.nan
    means, chunk = [], max(1, CELLS // num_clusters)
    for start in range(0, resamples, chunk):
        drawn = rng.integers(num_clusters, size=(min(chunk, resamples - start), num_clusters))
        means.append(sums[drawn].sum(1) / sizes[drawn].sum(1))
    low, high = np.quantile(np.concatenate(means), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def rise_by_kind(prompts: Sequence[Prompt], base: Float[Tensor, " n"], tuned: Float[Tensor, " n"], *,
                 seed: int = 0) -> dict[str, Rise]:  # fmt: skip
    """The rise among the prompts of each `kind` in their meta, in the order of the prompts; empty without kinds."""
    positions: dict[str, list[int]] = {}
    for position, prompt in enumerate(prompts):
        if "kind" in prompt.meta:
            positions.setdefault(str(prompt.meta["kind"]), []).append(position)
    return {
        kind: paired_rise(base[rows], tuned[rows], [prompts[row].text for row in rows], seed=seed)
        for kind, rows in positions.items()
    }
