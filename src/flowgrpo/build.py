"""A config made into the objects of a run; everything that can be refused is refused here, before anything is sampled."""

import inspect
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import AdamW, Optimizer

from flowgrpo.adapters import Reference, make_trainable
from flowgrpo.advantages import ADVANTAGES, Advantage
from flowgrpo.config import ModelConfig, RewardConfig, RunConfig, SamplerConfig, TailConfig
from flowgrpo.data import Geometry, GroupSampler, PromptSet, check_geometry, load_prompts
from flowgrpo.ema import Ema
from flowgrpo.group_noise import GROUP_NOISES, GroupNoise, Tree, check_group_noise
from flowgrpo.levels import LEVELS, Levels
from flowgrpo.objectives import OBJECTIVES, check_objective
from flowgrpo.policy import Conditions, Policy
from flowgrpo.references import REFERENCES, ReferenceRule, Start
from flowgrpo.rollout import Dynamics
from flowgrpo.schedule import SCHEDULES, Grid, shifted_sigmas
from flowgrpo.scoring import Component, Scorer
from flowgrpo.selection import SELECTIONS, Selection
from flowgrpo.signals import SIGNALS, Signal
from flowgrpo.slots import call_checked, construct, import_object
from flowgrpo.solvers import SOLVERS, DpmSolverPp2M, Solver
from flowgrpo.step_weights import STEP_WEIGHTS, NoWeights, StepWeights
from flowgrpo.transitions import TRANSITIONS, Transition
from flowgrpo.variance_window import Variance
from flowgrpo.window import WINDOWS, NoWindow, When, Window

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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


@dataclass(frozen=True)
class Parts:
    """What a run consists of."""

    config: RunConfig
    accelerator: Accelerator
    choices: Choices
    geometry: Geometry
    prompts: PromptSet
    group_sampler: GroupSampler
    policy: Policy
    trained: dict[str, nn.Parameter]
    reference: Reference | None
    old: Ema | None  # the policy that samples, where it is not the trained one
    scorer: Scorer
    optimizer: Optimizer
    ema: Ema | None
    grid: Grid

    def dynamics(self, window: range) -> Dynamics:
        """How a trajectory with this window moves. Raises ValueError for a window that is not one."""
        c = self.choices
        if len(window) and not 0 <= window.start < window.stop <= self.grid.num_steps - 1:
            raise ValueError(f"a window must lie in steps 0 to {self.grid.num_steps - 2}, got {window} from {c.window}")
        grid, o = with_tail(self.grid, window, self.config.sampler.tail), c.objective
        dynamics = Dynamics(grid, window, c.transition, c.solver, c.tail)
        if o.family == "forward":
            return dynamics
        return replace(dynamics, reduce=o.reduce, density=o.density, keep_means=o.needs_old_means)


def with_tail(grid: Grid, window: range, tail: TailConfig | None) -> Grid:
    """The levels with the tail's own number of steps behind the window; without a window as they are."""
    if tail is None or not len(window):
        return grid
    left = grid.num_steps - window.stop
    return grid.with_tail(window.stop, tail.num_steps or max(1, round(left * (tail.rate or 1))))


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
    if getattr(objective, "kl_gate", 1.0) < 1 and all(reward.weight for reward in config.rewards):
        raise ValueError(
            "objective.kl_gate needs a second opinion, a reward of weight 0, to doubt the others by; add one, or remove it"
        )


def _check_groups(config: RunConfig, choices: Choices, geometry: Geometry) -> None:
    """Raise ValueError where updates or micro-batches cut groups that must be whole, or processes those to be chosen from."""
    learnt, whole = choices.samples.count(config.group_size), geometry.samples_per_process % config.group_size == 0
    chosen = geometry.samples_per_process // config.group_size * learnt
    updates, micro = config.optimizer.updates_per_iteration, config.optimizer.micro_batch_size
    if learnt < config.group_size and (not whole or chosen % updates):
        raise ValueError(
            f"samples: {learnt} of each group are learnt from, so each process needs whole groups, and their {chosen} samples "
            f"must split into optimizer.updates_per_iteration={updates} equal parts; change one of them"
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


def build(config: RunConfig, accelerator: Accelerator | None = None) -> Parts:
    """Load and connect everything. Raises ValueError with one clear line for what does not fit."""
    choices = choose(config)
    accelerator = accelerator or Accelerator(mixed_precision="no")
    _check_processes(accelerator)
    geometry = check_geometry(
        config.prompts_per_iteration,
        config.group_size,
        accelerator.num_processes,
        config.optimizer.updates_per_iteration,
    )
    _check_groups(config, choices, geometry)
    prompts = load_prompts(config.prompts.train)
    _check_sizes(prompts)
    if config.prompts.heldout is not None:
        load_prompts(config.prompts.heldout)
    group_sampler = GroupSampler(len(prompts), config.prompts_per_iteration, config.seed)
    scorer = build_scorer(config.rewards, str(accelerator.device))
    torch.manual_seed(config.seed)  # the adapter's first weights
    policy = build_policy(config, load_pipeline(config.model), accelerator.device)
    if config.model.train == "lora" and not hasattr(policy.pipeline, "save_lora_weights"):
        raise ValueError(f"model.train: {type(policy.pipeline).__name__} cannot hold an adapter in diffusers; set it to full")
    trained = make_trainable(policy.networks, config.model.train, config.model.lora)
    optimizer = AdamW(
        list(trained.values()), lr=config.optimizer.lr, betas=config.optimizer.betas, eps=config.optimizer.eps,
        weight_decay=config.optimizer.weight_decay,
    )  # fmt: skip
    reference = None
    if choices.objective.needs_reference:
        moves = not isinstance(choices.reference, Start)
        reference = Reference(policy.networks, trained, config.model.train, moves)
    old = Ema(trained, 0.0) if getattr(choices.objective, "old_decay", 0) else None
    ema = Ema(trained, config.ema.decay) if config.ema.decay is not None else None
    grid = policy.grid(config.sampler.num_steps, choices.schedule)
    if grid.scales is not None and (tail := config.sampler.tail) is not None and (tail.num_steps or tail.rate):
        raise ValueError("sampler.tail: this model has discrete levels of its own, leave num_steps and rate out")
    return Parts(config, accelerator, choices, geometry, prompts, group_sampler, policy, trained, reference, old,
                 scorer, optimizer, ema, grid)  # fmt: skip


def _check_processes(accelerator: Accelerator) -> None:
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != accelerator.num_processes:
        raise ValueError(
            f"{launched} processes were launched, but each would train alone ({accelerator.num_processes} seen); "
            "on CPUs launch with ACCELERATE_USE_CPU=true"
        )


def _check_sizes(prompts: PromptSet) -> None:
    for prompt in prompts:
        if (prompt.height, prompt.width, prompt.num_frames) != (None, None, None):
            raise ValueError(
                f"{prompts.path}: prompt {prompt.id} asks for a size of its own, which training does not follow; remove it "
                "from the file and set sampler.height, sampler.width or sampler.num_frames"
            )


def load_pipeline(model: ModelConfig) -> Any:
    """`from_pretrained` of a hub id or a local folder, in the compute type.

    Raises ValueError in one line when there is no such folder or the hub cannot give it.
    """
    from diffusers import DiffusionPipeline

    path = Path(model.pipeline)
    if (path.is_absolute() or model.pipeline.startswith(".")) and not path.is_dir():
        raise ValueError(f"model.pipeline: the folder {model.pipeline} does not exist; give a diffusers folder or a hub id")
    if path.is_dir() and not (path / "model_index.json").is_file():
        raise ValueError(f"model.pipeline: {model.pipeline} has no model_index.json; give a folder that save_pretrained wrote")
    extra = {name: value for name in ("revision", "variant") if (value := getattr(model, name)) is not None}
    try:
        return DiffusionPipeline.from_pretrained(model.pipeline, dtype=DTYPES[model.dtype], **extra)
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"model.pipeline: cannot load {model.pipeline!r}: {reason}") from error


def build_policy(config: RunConfig, pipeline: Any, device: torch.device) -> Policy:
    """The pipeline on its device, with the config's conditions."""
    pipeline.to(device)
    s, dtype = config.sampler, DTYPES[config.model.dtype]
    for component in pipeline.components.values():
        if isinstance(component, nn.Module):
            component.requires_grad_(False).eval()
    conditions = Conditions(s.guidance_scale, s.negative_prompt, s.height, s.width, s.num_frames, config.model.call)
    policy = Policy(pipeline, conditions, dtype)
    if config.model.gradient_checkpointing:
        for name, network in policy.networks.items():
            if not getattr(network, "_supports_gradient_checkpointing", False):
                raise ValueError(f"model.gradient_checkpointing: the {name} has no such switch; set it to false")
            network.enable_gradient_checkpointing()  # type: ignore[operator]
    return policy


def build_scorer(rewards: list[RewardConfig], device: str) -> Scorer:
    """The reward models of a config. A model that takes a device and is given none runs beside the policy."""
    return Scorer([_component(reward, device) for reward in rewards])


def _component(reward: RewardConfig, device: str) -> Component:
    where = f"rewards.{reward.name}"
    if ":" not in reward.use:
        raise ValueError(f"{where}.use: must be an import path 'package.module:Name', got {reward.use!r}")
    factory, args = import_object(reward.use, where), dict(reward.args)
    if not inspect.isclass(factory):
        if args:
            raise ValueError(f"{where}.args: {reward.use} is a function and takes no arguments, got {args}; remove them")
        model = factory
    else:
        if "device" in inspect.signature(factory).parameters:
            if reward.device is not None and "device" in args:
                raise ValueError(f"{where}: device and args.device say the same twice; remove one")
            args.setdefault("device", reward.device or device)
        model = call_checked(factory, args, f"{where}.args")
    if isinstance(model, nn.Module) and reward.device is not None:
        model.to(reward.device)
    return Component(
        reward.name, model, reward.weight, reward.batch_size, reward.timeout_s, reward.retries, reward.retry_wait_s,
        reward.missing or "mask", reward.device, DTYPES[reward.dtype],
        identity=json.dumps([reward.use, reward.args, reward.dtype], sort_keys=True, default=str),
    )  # fmt: skip
