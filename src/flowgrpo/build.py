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

from flowgrpo import calibration
from flowgrpo.adapters import Reference, make_trainable
from flowgrpo.choices import Choices, check_groups, choose
from flowgrpo.config import ModelConfig, RewardConfig, RunConfig, TailConfig
from flowgrpo.data import Geometry, GroupSampler, PromptSet, check_geometry, load_prompts
from flowgrpo.ema import Ema
from flowgrpo.policy import Conditions, Policy
from flowgrpo.references import Start
from flowgrpo.rollout import Dynamics
from flowgrpo.schedule import Grid
from flowgrpo.scoring import Component, Scorer
from flowgrpo.signals import Calibrated, Calibration, check_signal
from flowgrpo.slots import call_checked, import_object

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
    usual: Calibration | None  # what scores are usually like, where the config names a calibration
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
    check_groups(config, choices, geometry)
    prompts = load_prompts(config.prompts.train)
    _check_sizes(prompts)
    if config.prompts.heldout is not None:
        load_prompts(config.prompts.heldout)
    group_sampler = GroupSampler(len(prompts), config.prompts_per_iteration, config.seed)
    scorer = build_scorer(config.rewards, str(accelerator.device))
    check_signal(choices.signal, scorer.weights, [component.traits.range for component in scorer.components])
    _check_judges(config, scorer, geometry)
    usual = None
    if config.calibration is not None:
        usual = calibration.read(config.calibration, scorer.names)
        if isinstance(choices.signal, Calibrated):
            choices.signal.load_state_dict(usual.state_dict())
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
                 scorer, usual, optimizer, ema, grid)  # fmt: skip


def _check_processes(accelerator: Accelerator) -> None:
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != accelerator.num_processes:
        raise ValueError(
            f"{launched} processes were launched, but each would train alone ({accelerator.num_processes} seen); "
            "on CPUs launch with ACCELERATE_USE_CPU=true"
        )


def _check_judges(config: RunConfig, scorer: Scorer, geometry: Geometry) -> None:
    judges = [one.name for one in scorer.components if one.traits.compares]
    if judges and geometry.samples_per_process % config.group_size:
        raise ValueError(
            f"reward {judges[0]!r} compares the samples of a group, so each process needs whole ones: prompts_per_iteration="
            f"{config.prompts_per_iteration} must be a multiple of the processes; change it"
        )
    if config.prompts.heldout is not None and config.gold in judges:
        raise ValueError(
            f"evaluation.gold: {config.gold!r} compares samples, of which an evaluation has one a prompt; name a reward that "
            "scores single ones"
        )
    for reward, one in zip(config.rewards, scorer.components, strict=True):
        if not one.traits.compares and (reward.opponents is not None or not reward.both_orders):
            raise ValueError(f"rewards.{reward.name}: opponents and both_orders are for judges of pairs; remove them")


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
        opponents=reward.opponents, both_orders=reward.both_orders,
    )  # fmt: skip
