"""Checks at the start of a run, on its own pipeline and settings: is the sampler the pipeline's, is the first ratio 1?

An objective of the forward family has no ratio to the rollout; there the network must say at a level what it said in sampling.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowgrpo import keys
from flowgrpo.build import Parts
from flowgrpo.choices import when
from flowgrpo.rollout import Noise, Row, Trajectory, replay, rollout
from flowgrpo.schedule import Pipeline
from flowgrpo.solvers import Euler

PICTURE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}  # of a pixel in [0, 1]
RATIO_TOLERANCE = 1e-6  # of a mean over coordinates; a sum has as many times the rounding
SUMMED_CLIP = 0.01


@dataclass(frozen=True)
class Check:
    """One check: what was measured, and whether it holds. A `warning` is worth knowing and does not stop the run."""

    name: str
    passed: bool
    message: str
    warning: bool = False


def selfcheck(parts: Parts) -> Iterator[Check]:
    """Run the checks, a few samples each."""
    yield check_noise_off(parts)
    trajectory = _probe(parts)
    yield (check_levels if parts.choices.objective.family == "forward" else check_ratio)(parts, trajectory)
    yield check_members_differ(trajectory)


def check_noise_off(parts: Parts) -> Check:
    """Without a window the trajectory must be the pipeline's own picture."""
    policy, grid = parts.policy, parts.grid
    prompt = parts.prompts[parts.group_sampler.at(0)[0]]
    plan = parts.dynamics(range(0)).plan(0, grid.num_steps)
    _, ours = policy.run([prompt], plan, generators=[keys.generator("check", 0)], decode=True)
    own = policy.generate([prompt], grid.num_steps, [keys.generator("check", 0)])
    assert ours is not None
    gap, name = float((ours - own).abs().max()), type(policy.own_scheduler).__name__
    message = f"with noise off the picture differs from {name}'s by at most {gap:.1e} of 1"
    exact = isinstance(parts.choices.schedule, Pipeline) and isinstance(parts.choices.solver, Euler)
    if name != "FlowMatchEulerDiscreteScheduler" or not exact:
        message += "; another solver or other levels than the pipeline's explain a difference"
        return Check("noise off", True, message, warning=gap > PICTURE_TOLERANCE[policy.dtype])
    return Check("noise off", gap <= PICTURE_TOLERANCE[policy.dtype], message)


def check_ratio(parts: Parts, trajectory: Trajectory) -> Check:
    """Before any update the replayed log-probabilities must be those of the rollout."""
    objective = parts.choices.objective
    gap = max(_gap(parts, trajectory, step) for step in trajectory.dynamics.window)
    message, band = f"|log ratio| before the first update is at most {gap:.1e}", objective.clip_range
    message += "" if band is None else f"; clip range {band:.0e}"
    summed = objective.reduce == "sum"
    small = summed and band is not None and band < SUMMED_CLIP
    if small:
        message += f"; with reduce=sum a clip range near 0.2 is usual, and below {SUMMED_CLIP:g} nearly all is clipped"
    if parts.policy.dtype == torch.float32:
        tolerance = RATIO_TOLERANCE * (trajectory.x0[0].numel() if summed else 1)
        return Check("ratio 1", gap < tolerance, message, warning=small)
    coarse = band is not None and gap > band / 10
    if coarse:
        message += (
            f"; rounding takes a tenth of the band or more: raise objective.clip_range, set "
            f"optimizer.micro_batch_size={parts.config.sampler.batch_size} as in sampling, or use model.dtype=float32"
        )
    return Check("ratio 1", True, message, warning=coarse)


def check_levels(parts: Parts, trajectory: Trajectory) -> Check:
    """At a level of the grid `predict` must say what the network said in sampling."""
    policy, dynamics = parts.policy, trajectory.dynamics
    step, x = dynamics.window.start, trajectory.latents[:, 0]
    record, _ = policy.run(trajectory.prompts, replace(dynamics.plan(step, step + 1), x_next=x), start=x)
    sampled = record.predictions[step].v
    predicted = policy.predict(trajectory.prompts, x, policy.level(parts.grid, parts.grid.sigmas[step])).v
    gap = float((predicted - sampled).abs().max() / sampled.abs().max())
    message = f"at sigma {parts.grid.sigmas[step]:.3f} a prediction differs from sampling's by at most {gap:.1e} of its size"
    return Check("levels", gap <= PICTURE_TOLERANCE[policy.dtype], message)


def check_members_differ(trajectory: Trajectory) -> Check:
    """Samples of one prompt must differ, else there is nothing to compare."""
    x0, ids = trajectory.x0.flatten(1), trajectory.group_ids
    spread = min(float(x0[ids == i].std(0).mean()) for i in ids.unique())
    return Check("members differ", spread > 0, f"the samples of a prompt differ (mean spread {spread:.2e} in latents)")


def _probe(parts: Parts) -> Trajectory:
    config = parts.config
    prompts = [parts.prompts[i] for i in parts.group_sampler.at(0)[:2]]
    rows = [Row(prompt, sample) for prompt in prompts for sample in range(min(config.group_size, 4))]
    dynamics = parts.dynamics(parts.choices.window.at(when(config, 0)))
    noise = Noise(config.seed, 0, parts.choices.group_noise)
    return rollout(parts.policy, rows, dynamics, noise, config.sampler.batch_size)


def _gap(parts: Parts, trajectory: Trajectory, step: int) -> float:
    old = trajectory.log_probs[:, step - trajectory.dynamics.window.start]
    size = min(parts.config.optimizer.micro_batch_size, len(old))
    new: list[Tensor] = []
    for start in range(0, len(old), size):
        rows = range(start, min(start + size, len(old)))
        new.append(replay(parts.policy, trajectory, rows, step, grad=False).log_prob)
    return float((torch.cat(new) - old).abs().max())
