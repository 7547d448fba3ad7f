"""What a run will do, before it does it: geometry, network calls, updates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flowgrpo.build import Parts
from flowgrpo.choices import Choices, when
from flowgrpo.data import Geometry
from flowgrpo.group_noise import GroupNoise
from flowgrpo.rollout import Dynamics


@dataclass(frozen=True)
class Cost:
    """Network calls for one sample of one iteration; those that a group shares are split among its samples.

    `replay` are those with gradient, `compared` those without that ask the old policy and the reference what they say.
    """

    prefix: float
    window: float
    tail: float
    replay: float
    compared: float = 0.0

    @property
    def rollout(self) -> float:
        """Calls to sample it."""
        return self.prefix + self.window + self.tail

    def __str__(self) -> str:
        parts = f"prefix {self.prefix:.2f}, window {self.window:.2f}, tail {self.tail:.2f}"
        compared = f", compared {self.compared:.2f}" if self.compared else ""
        return f"rollout {self.rollout:.2f} ({parts}), replay {self.replay:.2f}{compared}"


def cost(dynamics: Dynamics, within: GroupNoise, group_size: int, batches: Sequence[range] = (), levels: int = 0) -> Cost:
    """Calls by part, for the group-major rows of a process: in a rollout each step's once per node of a group, in a replay
    once per node of each micro-batch. `batches` are those; without them one holds a whole group. A forward objective replays
    every sample at so many `levels` instead.
    """
    plan, window = dynamics.plan(0, dynamics.grid.num_steps), dynamics.window
    batches = batches or [range(group_size)]
    rows = range(batches[-1].stop)
    nodes = [[within.node(sample, step, window) for sample in range(group_size)] for step in range(plan.last)]

    def share(batch: range, step: int) -> float:
        return len({(row // group_size, nodes[step][row % group_size]) for row in batch}) / len(rows)

    def calls(steps: range) -> float:
        return sum((plan.calls(step) * share(rows, step) for step in steps), 0.0)

    replay = float(levels) or sum((share(batch, step) for batch in batches for step in window), 0.0)
    return Cost(calls(range(window.start)), calls(window), calls(range(window.stop, plan.last)), replay)


def learnt(whole: Cost, choices: Choices, group_size: int, updates: int) -> Cost:
    """The cost where only some samples of a group are learnt from, with what old policy and reference are asked.

    An old policy that is the trained one at the start of the iteration is asked for all updates but the first.
    """
    objective = choices.objective
    replay = whole.replay * choices.samples.count(group_size) / group_size
    old = 0.0
    if objective.family == "forward" and objective.needs_old:
        old = 1.0 if objective.old_decay else (updates - 1) / updates
    return replace(whole, replay=replay, compared=replay * (old + objective.needs_reference))


def levels_of(choices: Choices) -> int:
    """The levels at which each sample is trained; 0 for an objective that trains window steps."""
    return choices.levels.count if choices.objective.family == "forward" else 0


def micro_batches(geometry: Geometry, size: int) -> list[range]:
    """The rows of a process that are replayed at once, update after update."""
    part = geometry.samples_per_update
    starts = range(0, geometry.samples_per_process, part)
    return [range(i, min(i + size, start + part)) for start in starts for i in range(start, start + part, size)]


def describe(parts: Parts) -> Mapping[str, str]:
    """The plan in words, a line each."""
    config, g, choices = parts.config, parts.geometry, parts.choices
    s, o = config.sampler, config.optimizer
    trained = sum(p.numel() for p in parts.trained.values())
    total = sum(p.numel() for network in parts.policy.networks.values() for p in network.parameters())
    dynamics = parts.dynamics(choices.window.at(when(config, 0)))
    batches = micro_batches(g, o.micro_batch_size)
    levels = levels_of(choices)
    first = cost(dynamics, choices.group_noise, config.group_size, batches, levels)
    first = learnt(first, choices, config.group_size, o.updates_per_iteration)
    places = f"{levels} levels" if levels else f"{len(dynamics.window)} steps"
    return {
        "policy": f"{type(parts.policy.pipeline).__name__}, {config.model.train}: trains {trained:,} of {total:,} parameters",
        "groups": f"{config.prompts_per_iteration} prompts x {config.group_size} samples = {g.samples} samples an iteration",
        "processes": f"{parts.accelerator.num_processes} on {parts.accelerator.device}, {g.samples_per_process} samples each",
        "levels": ", ".join(f"{sigma:.3f}" for sigma in parts.grid.sigmas),
        "window": f"{choices.window}, {choices.transition}; before it {dynamics.solver}, behind it "
        f"{dynamics.tail or dynamics.solver}"
        if len(dynamics.window)
        else f"none; all steps {dynamics.solver}",
        "calls a sample": f"{first}; {choices.group_noise}; first iteration, of {s.num_steps} steps",
        "updates": f"{o.updates_per_iteration} an iteration, {config.iterations * o.updates_per_iteration} in all; each sums "
        f"{len(batches) // o.updates_per_iteration} micro-batches x {places} per process",
        "signal": f"{choices.signal} -> {choices.advantage} -> {choices.objective}, "
        f"{choices.levels if levels else choices.step_weights}",
    }
