"""Measuring where the reward varies, for windows that follow it."""

from collections.abc import Callable

import torch
from accelerate.utils import broadcast_object_list
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowgrpo.build import Parts
from flowgrpo.group_noise import Shared
from flowgrpo.rollout import Noise, Row, rollout
from flowgrpo.variance_window import ProbingWindow
from flowgrpo.window import When


def probe(parts: Parts, when: When, between: Callable[[], None] = lambda: None) -> int:
    """Let a window that asks for it see the variance of the signal at every step; returns the network calls made.

    Branches of one base path differ in the noise of one step alone. Every process measures the same samples, and takes the
    first one's numbers, so that windows cannot part.
    """
    window = parts.choices.window
    if not (isinstance(window, ProbingWindow) and window.wants_probe(when)):
        return 0
    chosen = [parts.prompts[i] for i in parts.group_sampler.at(when.iteration)[: window.probe_prompts]]
    rows = [Row(prompt, sample) for prompt in chosen for sample in range(window.branches)]
    noise = Noise(when.seed, when.iteration, Shared())
    variances, calls = {}, 0
    for step in range(when.num_steps - 1):
        trajectory = rollout(
            parts.policy,
            rows,
            parts.dynamics(range(step, step + 1)),
            noise,
            parts.config.sampler.batch_size,
            between,
            decode="media" in parts.scorer.takes,
        )
        scores = parts.scorer(trajectory.media, trajectory.prompts, latents=trajectory.clean)
        signal = raw_signal(scores.values, scores.was_asked, parts.scorer.weights)
        calls += trajectory.calls
        value = within_group_variance(signal, trajectory.group_ids)
        if value == value:
            variances[step] = value
    shared = [variances]
    if parts.accelerator.num_processes > 1:
        broadcast_object_list(shared)
    window.observe(shared[0])
    return calls


def raw_signal(values: Float[Tensor, " b k"], asked: Bool[Tensor, " b k"], weights: Float[Tensor, " k"]) -> Float[Tensor, " b"]:
    """The weighted sum of the scores that count: no standardisation, which would make every group's variance 1.

    A score that was not asked for adds nothing; a sample of which none was asked, or one is missing, has NaN.
    """
    counts = weights > 0
    total = (values.masked_fill(~asked, 0)[:, counts] * weights[counts]).sum(1)
    return torch.where(asked[:, counts].any(1), total, torch.nan)


def within_group_variance(signal: Float[Tensor, " b"], group_ids: Int[Tensor, " b"]) -> float:
    """Mean over groups of the variance within; samples without a signal (NaN) are left out, NaN if no group has two."""
    groups = [signal[(group_ids == i) & ~signal.isnan()] for i in group_ids.unique()]
    found = [group.var(correction=1) for group in groups if len(group) > 1]
    return float(torch.stack(found).mean()) if found else float("nan")
