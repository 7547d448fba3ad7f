"""The objects in a config's slots, and whether they go together: all that can be refused before a model is loaded."""

from dataclasses import dataclass
from typing import Any

from flowgrpo.advantages import ADVANTAGES, Advantage
from flowgrpo.config import RunConfig, SamplerConfig
from flowgrpo.data import Geometry
from flowgrpo.group_noise import GROUP_NOISES, GroupNoise, Tree, check_group_noise
from flowgrpo.levels import LEVELS, Levels
from flowgrpo.objectives import OBJECTIVES, check_objective
from flowgrpo.references import REFERENCES, ReferenceRule, Start
from flowgrpo.schedule import SCHEDULES, shifted_sigmas
from flowgrpo.selection import SELECTIONS, Selection
from flowgrpo.signals import SIGNALS, Signal
from flowgrpo.slots import construct
from flowgrpo.solvers import SOLVERS, DpmSolverPp2M, Solver
from flowgrpo.step_weights import STEP_WEIGHTS, NoWeights, StepWeights
from flowgrpo.transitions import TRANSITIONS, Transition
from flowgrpo.variance_window import Variance
from flowgrpo.window import WINDOWS, NoWindow, When, Window


@dataclass(frozen=True)
class Choices:
    """The objects in the config's slots."""

    schedule: Any
    window: Window
    transition: Transition
    solver: Solver
    tail: Solver | None
    group_noise: GroupNoise
    signal: Signal
    advantage: Advantage
    objective: Any
    step_weights: StepWeights
    levels: Levels
    reference: ReferenceRule
    samples: Selection


def when(config: RunConfig, iteration: int) -> When:
    """An iteration of the configured run, as its window sees it."""
    return When(iteration, config.iterations, config.sampler.num_steps, config.seed)


def choose(config: RunConfig) -> Choices:
    """Fill the slots. Raises ValueError for what is unknown or cannot work."""
    s = config.sampler
    choices = Choices(
        schedule=construct(s.schedule, SCHEDULES, "sampler.schedule"),
        window=construct(s.window, {**WINDOWS, "none": NoWindow, "variance": Variance}, "sampler.window"),
        transition=construct(s.transition, TRANSITIONS, "sampler.transition"),
        solver=construct(s.solver, SOLVERS, "sampler.solver"),
        tail=None if s.tail is None else construct(s.tail.solver, SOLVERS, "sampler.tail.solver"),
        group_noise=construct(s.group_noise, GROUP_NOISES, "sampler.group_noise"),
        signal=construct(config.signal, SIGNALS, "signal"),
        advantage=construct(config.advantage, ADVANTAGES, "advantage"),
        objective=construct(config.objective, OBJECTIVES, "objective"),
        step_weights=construct(config.step_weights, STEP_WEIGHTS, "step_weights"),
        levels=construct(config.levels, LEVELS, "levels"),
        reference=construct(config.reference, REFERENCES, "reference"),
        samples=construct(config.samples, SELECTIONS, "samples"),
    )
    check_objective(choices.objective)
    for iteration in range(config.iterations):
        window = choices.window.at(when(config, iteration))
        _check_window(choices, config.group_size, window)
        check_group_noise(choices.group_noise, config.group_size, window)
    _check_family(config, choices)
    _check_regularisers(config, choices)
    _check_together(config, choices)
    return choices


def _check_window(choices: Choices, group_size: int, window: range) -> None:
    """Raise ValueError for a window that the objective or the group noise cannot do with."""
    objective, within = choices.objective, choices.group_noise

    def shared(step: int) -> bool:
        return len({within.node(sample, step, window) for sample in range(group_size)}) < group_size

    if not len(window) and objective.family == "ratio":
        raise ValueError(
            f"sampler.window: {type(objective).__name__} needs stochastic steps; choose a window, or an objective such as awm"
        )
    if not len(window) and shared(-1):
        raise ValueError("sampler.group_noise must be distinct without a window, or the samples of a group are all the same")
    if objective.family == "ratio" and objective.scope == "trajectory" and shared(window.start):
        raise ValueError(
            f"sampler.group_noise: {type(objective).__name__} has one ratio for the whole window of a sample, but here samples "
            "share a part of it; set shared or distinct"
        )


def _check_family(config: RunConfig, choices: Choices) -> None:
    """Raise ValueError for settings that the objective or the missing window leave without effect."""
    objective, s, name = choices.objective, config.sampler, type(choices.objective).__name__
    by_step = objective.family == "ratio" and objective.scope == "step"
    if not by_step and not isinstance(choices.step_weights, NoWeights):
        raise ValueError(f"step_weights has no effect on {name}, which has no loss for each window step; remove it")
    if objective.family == "ratio" and config.data is None and config.levels != RunConfig.model_fields["levels"].default:
        raise ValueError(f"levels has no effect on {name}, which is trained at the window's steps; remove it")
    idle = [n for n in ("transition", "tail") if getattr(s, n) != SamplerConfig.model_fields[n].default]
    if isinstance(choices.window, NoWindow) and idle:
        raise ValueError(f"sampler.{idle[0]} has no effect without a window; remove it, or choose a window")
    if objective.family == "forward" or config.data is not None:
        sigmas = choices.schedule.sigmas(s.num_steps) or shifted_sigmas(s.num_steps)
        choices.levels.at(when(config, 0), sigmas)


def _check_regularisers(config: RunConfig, choices: Choices) -> None:
    """Raise ValueError for a reference or a gate that cannot take effect."""
    objective = choices.objective
    if not isinstance(choices.reference, Start) and not objective.needs_reference:
        raise ValueError(f"reference has no effect on {type(objective).__name__} without KL; set objective.kl, or remove it")
    single = [n for n, idle in (("kl_gate", 1.0), ("stop_negatives", None)) if getattr(objective, n, idle) != idle]
    if single and isinstance(choices.group_noise, Tree):
        raise ValueError(
            f"objective.{single[0]} is for single samples, a tree's steps are those of many; remove one of the two"
        )
    if getattr(objective, "kl_gate", 1.0) < 1 and all(reward.weight for reward in config.rewards):
        raise ValueError(
            "objective.kl_gate needs a second opinion, a reward of weight 0, to doubt the others by; add one, or remove it"
        )


def check_groups(config: RunConfig, choices: Choices, geometry: Geometry) -> None:
    """Raise ValueError where updates or micro-batches cut groups that must be whole, or processes those to be chosen from."""
    learnt, whole = choices.samples.count(config.group_size), geometry.samples_per_process % config.group_size == 0
    chosen = geometry.samples_per_process // config.group_size * learnt
    updates, micro = config.optimizer.updates_per_iteration, config.optimizer.micro_batch_size
    if learnt < config.group_size and (not whole or chosen % updates):
        raise ValueError(
            f"samples: {learnt} of each group are learnt from, so each process needs whole groups, and their {chosen} samples "
            f"must split into optimizer.updates_per_iteration={updates} equal parts; change one of them"
        )
    if getattr(choices.objective, "needs_groups", False) and (learnt < 2 or getattr(choices.samples, "worst", 1) == 0):
        raise ValueError(
            f"samples: {type(choices.objective).__name__} compares the better samples of a group with the worse, of which "
            f"{choices.samples} leaves none; set samples.worst, or samples: all"
        )
    if getattr(choices.objective, "needs_groups", False) and not (whole and chosen % (updates * learnt) == micro % learnt == 0):
        raise ValueError(
            f"{type(choices.objective).__name__} compares the samples of a group, {learnt} of each: prompts_per_iteration must "
            f"be a multiple of processes x updates_per_iteration, and optimizer.micro_batch_size of {learnt}, got {micro}"
        )


def _check_together(config: RunConfig, choices: Choices) -> None:
    if getattr(choices.transition, "noise_level", 1) <= 0:
        raise ValueError(
            "sampler.transition.noise_level must be above 0 to train: without noise a step has no density and no ratio"
        )
    if isinstance(choices.solver, DpmSolverPp2M):
        raise ValueError(
            "sampler.solver: dpmpp_2m serves behind the window only, before it its error would enter the stochastic steps "
            "(MixGRPO-Flash, table 12); set sampler.tail.solver, and sampler.solver: euler or heun"
        )
    if isinstance(choices.group_noise, Tree) and isinstance(choices.window, Variance):
        raise ValueError("sampler.group_noise: a tree needs a window that holds its splits, the variance window moves; use all")
    probed = getattr(choices.window, "probe_prompts", 1)
    if probed > config.prompts_per_iteration:
        raise ValueError(
            f"sampler.window.probe_prompts={probed} must be at most prompts_per_iteration={config.prompts_per_iteration}, "
            "from whose prompts it takes; change one"
        )
    if config.sampler.negative_prompt and config.sampler.guidance_scale <= 1:
        raise ValueError("sampler.negative_prompt cannot take effect at sampler.guidance_scale=1; raise that, or leave it out")
    tail = config.sampler.tail
    if tail is not None and tail.num_steps is not None and tail.rate is not None:
        raise ValueError("sampler.tail takes num_steps or rate, not both; remove one")
    if all(reward.weight == 0 for reward in config.rewards):
        raise ValueError("rewards: at least one must have a weight above 0, all are monitors; raise one weight")
    names = [reward.name for reward in config.rewards]
    if len(set(names)) < len(names):
        raise ValueError(f"rewards: names must differ, got {names}; rename one")
    gold = config.evaluation.gold
    if gold is not None and gold not in names:
        raise ValueError(f"evaluation.gold={gold!r} must be the name of a reward, one of {names}")
    if config.model.train == "full" and "lora" in config.model.model_fields_set:
        raise ValueError("model.lora has no effect with model.train: full; remove it, or set model.train: lora")
