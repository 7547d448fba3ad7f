"""What a run will do, before it does it: geometry, network calls, updates."""

from collections.abc import Mapping
from dataclasses import dataclass

from flowgrpo.build import Parts


@dataclass(frozen=True)
class Cost:
    """Network calls for one sample of one iteration; a shared prefix is split among its group."""

    prefix: float
    window: int
    tail: int
    replay: int

    @property
    def rollout(self) -> float:
        """Calls to sample it."""
        return self.prefix + self.window + self.tail


def cost(window: range, num_steps: int, group_size: int, shared: bool) -> Cost:
    """Calls by part, for a window in a trajectory of num_steps."""
    prefix = window.start / group_size if shared else float(window.start)
    return Cost(prefix, len(window), num_steps - window.stop, len(window))


def describe(parts: Parts) -> Mapping[str, str]:
    """The plan in words, a line each."""
    config, g, choices = parts.config, parts.geometry, parts.choices
    s, o = config.sampler, config.optimizer
    trained = sum(p.numel() for p in parts.trained.values())
    total = sum(p.numel() for network in parts.policy.networks.values() for p in network.parameters())
    first = cost(choices.window.at(0, s.num_steps, config.seed), s.num_steps, config.group_size, s.group_noise == "shared")
    micro = -(-g.samples_per_update // min(o.micro_batch_size, g.samples_per_update))
    return {
        "policy": f"{type(parts.policy.pipeline).__name__}, {config.model.train}: trains {trained:,} of {total:,} parameters",
        "groups": f"{config.prompts_per_iteration} prompts x {config.group_size} samples = {g.samples} samples an iteration",
        "processes": f"{parts.accelerator.num_processes} on {parts.accelerator.device}, {g.samples_per_process} samples each",
        "levels": ", ".join(f"{sigma:.3f}" for sigma in parts.grid.sigmas),
        "window": f"{choices.window}, {choices.transition}, then {choices.solver}",
        "calls a sample": f"rollout {first.rollout:.2f} of {s.num_steps} (prefix {first.prefix:.2f}, window {first.window}, "
        f"tail {first.tail}; {s.group_noise} start noise), replay {first.replay}; first iteration",
        "updates": f"{o.updates_per_iteration} an iteration, {config.iterations * o.updates_per_iteration} in all; each sums "
        f"{micro} micro-batches x {first.window} steps per process",
        "signal": f"{choices.signal} -> {choices.advantage} -> {choices.objective}, {choices.step_weights}",
    }
