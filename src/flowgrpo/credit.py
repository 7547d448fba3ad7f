"""Scores into advantages: the signal, its deviation within groups, and what is logged of both."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowgrpo.build import Parts
from flowgrpo.calibration import share_outside
from flowgrpo.canaries import CANARIES, group_diversity, kendall_tau
from flowgrpo.data import rank_slice
from flowgrpo.group_noise import node_means
from flowgrpo.groups import group_stats, tied_fraction
from flowgrpo.judging import blocks
from flowgrpo.metrics import Metrics
from flowgrpo.missing import missing_scores, signal_of, silent_groups
from flowgrpo.rollout import Trajectory
from flowgrpo.scoring import RewardError, Scores
from flowgrpo.signals import Calibrated
from flowgrpo.uncertainty import doubt, most_doubted


@dataclass(frozen=True)
class Credit:
    """What this process's samples have earned: advantages by window step, how much of the pull to the reference counts, and
    which of them train at all: those without a signal do not."""

    advantages: Float[Tensor, " b w"]
    gate: Float[Tensor, " b"] | None
    valid: Bool[Tensor, " b"]


def credit(parts: Parts, scores: Scores, trajectory: Trajectory, metrics: Metrics) -> Credit:
    """Advantages of this process's samples at each window step, from the statistics of whole groups.

    A step's signals are those of its nodes: where samples are still one, their mean. Without a window there is one column.
    Raises RewardError when no sample has all its weighted scores.
    """
    choices, window, accelerator = parts.choices, trajectory.dynamics.window, parts.accelerator
    values, asked, ids = (gathered(parts, part) for part in (scores.values, scores.was_asked, trajectory.group_ids))
    settled = parts.scorer.settle(values, asked, ids)
    judged = None if scores.judged is None else blocks(gathered(parts, scores.judged).split(len(scores.values)))
    try:
        signal = signal_of(choices.signal, settled, ids, parts.scorer.weights, judged)
    except ValueError as error:  # such as scores out of the range that was promised: nothing of the iteration is learnt
        raise RewardError(f"iteration {trajectory.noise.iteration}: {error}") from error
    if not signal.isfinite().any():
        raise RewardError(
            f"iteration {trajectory.noise.iteration}: no sample has all its weighted scores, so nothing can be learnt; mend "
            f"the reward that is missing ({parts.scorer.account(values, asked)}), then go on with --resume"
        )
    samples, columns = range(parts.config.group_size), []
    for step in window or range(1):
        nodes = torch.tensor([trajectory.within.node(i, step, window) for i in samples]).repeat(len(ids) // len(samples))
        columns.append(choices.advantage(node_means(signal, torch.stack([ids, nodes], 1)), ids))
    advantages = torch.stack(columns, 1)
    _log_shares(parts, metrics, scores.names, settled, ids)
    if isinstance(choices.signal, Calibrated):
        choices.signal.update(settled, ids)
    _log_scores(parts, metrics, scores.names, values, advantages, ids)
    _log_missing(parts, metrics, scores, missing_scores(values, asked), silent_groups(settled, ids), signal)
    if trajectory.media is not None:
        _log_canaries(metrics, trajectory.media)
    _log_diversity(metrics, trajectory)
    metrics.update({"signal/mean": signal, "unique_prompts": len(ids.unique())})
    gate = _gate(parts, signal, values, ids)
    mine = rank_slice(len(ids), accelerator.process_index, accelerator.num_processes)
    own = slice(mine.start, mine.stop)
    gates = None if gate is None else gate[own].to(accelerator.device)
    return Credit(advantages[own].to(accelerator.device), gates, signal.isfinite()[own].to(accelerator.device))


def learnt_rows(parts: Parts, advantages: Float[Tensor, " b w"]) -> list[int]:
    """The rows of this process that are learnt from, chosen within each group by the advantages of its finished samples."""
    size, last = parts.config.group_size, advantages[:, -1].tolist()
    if parts.choices.samples.count(size) == size:
        return list(range(len(last)))
    return [start + i for start in range(0, len(last), size) for i in parts.choices.samples(last[start : start + size])]


def gathered(parts: Parts, values: Tensor) -> Tensor:
    """The rows of all processes, on the CPU."""
    accelerator = parts.accelerator
    if accelerator.num_processes == 1:
        return values
    return accelerator.gather(values.to(accelerator.device)).cpu()  # type: ignore[union-attr]


def _gate(parts: Parts, signal: Tensor, values: Tensor, ids: Tensor) -> Tensor | None:
    """1 for the samples that are doubted most, for whom alone the pull counts; None for all, also where nothing is known."""
    share = getattr(parts.choices.objective, "kl_gate", 1.0)
    if share == 1:
        return None
    doubts = doubt(signal, values[:, parts.scorer.weights == 0], ids)
    return most_doubted(doubts, share).to(signal.dtype) if doubts.any() else None


def _log_scores(parts: Parts, metrics: Metrics, names: tuple[str, ...], values: Tensor, advantages: Tensor,
                ids: Tensor) -> None:  # fmt: skip
    for k, (name, column) in enumerate(zip(names, values.T, strict=True)):
        valid = column[~column.isnan()]
        metrics.add(f"score/{name}/mean", valid.mean())
        metrics.add(f"score/{name}/std", valid.std(correction=0) if len(valid) else torch.nan)
        metrics.add(f"score/{name}/tied", tied_fraction(column, ids))
        metrics.add(f"score/{name}/tau", kendall_tau(advantages[:, -1], column, ids))
        if parts.usual is not None:
            metrics.add(f"score/{name}/outside", share_outside(valid, parts.usual.quantiles[:, k]))
    spread = torch.stack([advantages[ids == i].abs().amax() for i in ids.unique()])
    metrics.add("advantage/zero_std_groups", (spread == 0).float())
    metrics.add("advantage/abs_mean", advantages.abs())


def _log_shares(parts: Parts, metrics: Metrics, names: tuple[str, ...], settled: Tensor, ids: Tensor) -> None:
    """What the signal made of the weights, where it weighs each group by itself, and what each reward has left to say."""
    signal, weights = parts.choices.signal, parts.scorer.weights
    usual = getattr(signal, "calibration", None) or parts.usual
    within = group_stats(settled, ids, unbiased=False)
    for k, name in enumerate(names):
        spread = within.std[within.count[:, k] > 1, k].mean()
        metrics.add(f"score/{name}/within", spread)
        if usual is not None:
            metrics.add(f"score/{name}/saturation", 1 - (spread / usual.spread[k]).clamp(max=1))
        metrics.add(f"score/{name}/seconds", parts.scorer.seconds[name])
    if hasattr(signal, "shares") and not silent_groups(settled, ids)[weights != 0].any():
        for name, share in zip(names, signal.shares(settled, ids, weights).mean(0), strict=True):  # type: ignore[attr-defined]
            metrics.add(f"score/{name}/share", share)


def _log_canaries(metrics: Metrics, media: Tensor) -> None:
    for name, canary in CANARIES.items():
        found = canary(media)
        valid = found[~found.isnan()]
        metrics.add(f"canary/{name}", found)
        metrics.add(f"canary/{name}/std", valid.std(correction=0) if len(valid) else torch.nan)


def _log_diversity(metrics: Metrics, trajectory: Trajectory) -> None:
    """Of this process's part of each group, in latents, which every model has and no reward sees."""
    latents, ids = trajectory.clean.flatten(1).cpu(), trajectory.group_ids
    there = latents.isfinite().all(1) & (latents != 0).any(1)
    there &= torch.isin(ids, torch.tensor([i for i in ids.unique().tolist() if (ids[there] == i).sum() > 1], dtype=torch.long))
    if there.any():
        metrics.add("canary/group_diversity", group_diversity(latents[there], ids[there]))


def _log_missing(parts: Parts, metrics: Metrics, scores: Scores, missing: Tensor, silent: Tensor, signal: Tensor) -> None:
    """Counts; those of the whole table are divided by the processes, whose sum is taken."""
    world = parts.accelerator.num_processes
    for name, lacking, groups in zip(scores.names, missing.sum(0) / world, silent / world, strict=True):
        metrics.update({f"score/{name}/missing": lacking, f"score/{name}/silent_groups": groups})
    metrics.update({"samples/not_finite": scores.not_finite, "samples/no_signal": signal.isnan().sum() / world})
