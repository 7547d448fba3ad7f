"""What happens when a score is missing: each reward's policy, applied to the scores of whole groups.

All functions are pure: processes that hold the same table come to the same end, an error included.

A table of scores (b, k) has NaN where there is no score. `asked` says where there should be one: not where a reward does
not apply to the prompt, nor where a sample's pixels are not finite. An asked score that is NaN is missing.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

__all__ = ["EFFECTS", "Policy", "RewardError", "missing_scores", "settle", "signal_of", "silent_groups"]

Policy = Literal["mask", "drop", "skip", "stop"]
EFFECTS: Mapping[Policy, str] = {
    "mask": "these samples do not train",
    "drop": "it has no say in their groups",
    "skip": "their groups do not train",
    "stop": "the run stops",
}


class RewardError(RuntimeError):
    """Scores are missing in a way that the run must not go on with."""


def missing_scores(values: Float[Tensor, " b k"], asked: Bool[Tensor, " b k"]) -> Bool[Tensor, " b k"]:
    """Where a reward should have given a score and has not."""
    return asked & values.isnan()


def settle(values: Float[Tensor, " b k"], asked: Bool[Tensor, " b k"], group_ids: Int[Tensor, " b"],
           weights: Float[Tensor, " k"], policies: Mapping[str, Policy]) -> Float[Tensor, " b k"]:  # fmt: skip
    """The scores that count: `values`, in which the policies have turned more into NaN; no number is ever put in.

    `policies` are by name of reward, in the order of the columns; those of monitors (weight 0) are not looked at. Where a
    sample lacks the score of a reward with the policy

        mask    the sample does not train; its siblings do, and their statistics use what scores it has
        drop    the reward has no say in this group: its column becomes NaN there, the other rewards remain
        skip    the group does not train: its rows become NaN
        stop    RewardError, which names the reward, how many samples lack it and whose they are

    Stop comes before skip, skip before mask, and mask before drop: a sample that is masked anyway drops no reward. A mask
    on every sample of a group is a skip. Source: ours.
    """
    weighted = weights != 0
    missing = missing_scores(values, asked) & weighted
    under = {policy: missing & torch.tensor([own == policy for own in policies.values()]) for policy in set(policies.values())}
    none = torch.zeros_like(missing)
    _check_stop(under.get("stop", none), group_ids, list(policies))
    masked = under.get("mask", none)
    masked_out = masked & ~_any_in_group(values.isfinite(), group_ids)
    whole_rows = (under.get("skip", none) | masked_out).any(1, keepdim=True).expand_as(missing)
    dropped = under.get("drop", none) & ~masked.any(1, keepdim=True)
    return values.masked_fill(_any_in_group(whole_rows | dropped, group_ids) & weighted, torch.nan)


def signal_of(signal: Callable[..., Tensor], values: Float[Tensor, " b k"], group_ids: Int[Tensor, " b"],
              weights: Float[Tensor, " k"], judged: Float[Tensor, " b b k"] | None = None) -> Float[Tensor, " b"]:  # fmt: skip
    """The signal (b) of settled scores, in which a reward without any score in a group has no say there.

    Groups in which the same rewards speak are given to `signal` together, the weights of the silent ones set to 0: it sees
    monitors, which it ignores. A signal with settings for each reward has a method `restricted(speaks)`, where `speaks` says of
    each reward of weight other than 0 whether it does. When all speak everywhere this is one call with the table as it is. NaN
    where none speaks, and where a sample lacks a score that a sibling has. What was `judged` of pairs goes to a signal that
    takes it (`signals.PairwiseSignal`), less what was said of samples whose score does not count.
    """
    if judged is not None:
        judged = judged.masked_fill(values.isnan()[:, None] | values.isnan()[None], torch.nan)
    takes_judged = getattr(signal, "takes_judged", False)
    speaks = _any_in_group(values.isfinite(), group_ids) & (weights != 0)
    result = torch.full_like(values[:, 0], torch.nan)
    for pattern in speaks.unique(dim=0):
        rows = (speaks == pattern).all(1)
        if pattern.any():
            own = signal.restricted(pattern[weights != 0].tolist()) if hasattr(signal, "restricted") else signal
            told = (judged[rows][:, rows],) if judged is not None and takes_judged else ()
            result[rows] = own(values[rows], group_ids[rows], weights * pattern, *told)
    return result


def silent_groups(values: Float[Tensor, " b k"], group_ids: Int[Tensor, " b"]) -> Int[Tensor, " k"]:
    """In how many groups each column has no score at all."""
    speaks = _any_in_group(values.isfinite(), group_ids)
    first = torch.stack([(group_ids == group).nonzero()[0, 0] for group in group_ids.unique()])
    return (~speaks[first]).sum(0)


def _check_stop(missing: Tensor, group_ids: Tensor, names: list[str]) -> None:
    for name, column in zip(names, missing.T, strict=True):
        if column.any():
            prompts = group_ids[column].unique().tolist()
            shown = ", ".join(map(str, prompts[:5])) + (f" and {len(prompts) - 5} more" if len(prompts) > 5 else "")
            raise RewardError(
                f"reward {name!r} has no score for {int(column.sum())} of {len(column)} samples (of prompt {shown}), and its "
                "policy is to stop; mend it, then go on with --resume, or set its missing to mask, drop or skip"
            )


def _any_in_group(flags: Shaped[Tensor, " b k"], group_ids: Int[Tensor, " b"]) -> Bool[Tensor, " b k"]:
    """For each row and column: whether any row of its group has the flag."""
    rows = group_ids.unique(return_inverse=True)[1]
    return torch.zeros_like(flags, dtype=torch.float32).index_add_(0, rows, flags.float())[rows] > 0
