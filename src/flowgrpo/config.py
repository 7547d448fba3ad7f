"""The run's configuration: frozen models, strict YAML, ``key=value`` overrides.

Strings that begin with ``./`` or ``../`` are paths and are resolved against the config file's folder.
"""

import difflib
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from flowgrpo.slots import Slot, nearest
from flowgrpo.yaml_input import apply_override, read_mapping

# What other trainers call our settings, for the hint in an error.
FOREIGN_NAMES = {
    "learning_rate": "optimizer.lr",
    "num_generations": "group_size",
    "max_steps": "iterations",
    "beta": "objective.kl",
    "epsilon": "objective.clip_range",
    "eta": "sampler.transition.noise_level",
    "num_inference_steps": "sampler.num_steps",
    "gradient_accumulation_steps": "optimizer.micro_batch_size",
    "max_grad_norm": "optimizer.max_grad_norm",
}
Above0 = Annotated[float, Field(gt=0)]
Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A part of the config: unknown keys are errors, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class LoraConfig(Section):
    rank: Positive = Field(default=16, description="Rank of the update matrices.")
    alpha: Above0 | None = Field(default=None, description="Update scale is alpha / rank; default 2 × rank.")
    targets: list[str] | None = Field(
        default=None, description="Module names that get an adapter; default: attention projections."
    )
    init: Literal["default", "gaussian"] = Field(
        default="gaussian", description="How the first matrix is drawn (the second is 0)."
    )


class ModelConfig(Section):
    pipeline: str = Field(description="Hub id or local folder of any diffusers pipeline.")
    revision: str | None = Field(default=None, description="Branch, tag or commit on the hub.")
    variant: str | None = Field(default=None, description="Weights variant, such as fp16.")
    train: Literal["lora", "full"] = Field(default="lora", description="Train an adapter, or the network's own weights.")
    lora: LoraConfig = Field(default_factory=LoraConfig, description="The adapter; only with train: lora.")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Compute type of the networks. Trained weights, latents and log-probabilities stay float32.",
    )
    gradient_checkpointing: bool = Field(default=False, description="Recompute activations in the backward pass: less memory.")
    call: dict[str, Any] = Field(
        default_factory=dict, description="Further arguments of the pipeline's call, such as max_sequence_length."
    )


class PromptsConfig(Section):
    train: str = Field(description="Prompt file to train on (.txt or .jsonl).")
    heldout: str | None = Field(default=None, description="Prompt file for evaluation; never trained on.")


class TailConfig(Section):
    solver: Slot = Field(
        default=Slot(use="dpmpp_2m"), description="Deterministic step behind the window: dpmpp_2m, heun, euler."
    )
    num_steps: Positive | None = Field(default=None, description="Steps from the window's end to sigma 0, whatever the window.")
    rate: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None, description="Steps as a share of those that would be left (MixGRPO-Flash: 0.4); rounded, at least one."
    )


class SamplerConfig(Section):
    num_steps: Positive = Field(default=25, description="Network evaluations per sample (MixGRPO: 25).")
    guidance_scale: Annotated[float, Field(ge=1)] = Field(
        default=1.0, description="Classifier-free guidance in rollout and replay; 1 means no unconditional pass."
    )
    negative_prompt: str = Field(default="", description="Unconditional prompt under guidance, unless a prompt brings its own.")
    height: Positive | None = Field(default=None, description="Pixels; default: the pipeline's own.")
    width: Positive | None = Field(default=None, description="Pixels; default: the pipeline's own.")
    num_frames: Positive | None = Field(default=None, description="Frames of a film; default: the pipeline's own.")
    schedule: Slot = Field(default=Slot(use="pipeline"), description="Noise levels: pipeline, shifted, explicit.")
    window: Slot = Field(default=Slot(use="progressive"), description="Stochastic steps: progressive, coverage, ..., none.")
    transition: Slot = Field(default=Slot(use="flow_sde"), description="Law of a stochastic step: flow_sde, cps, ...")
    solver: Slot = Field(default=Slot(use="euler"), description="Deterministic step outside the window: euler, heun.")
    tail: TailConfig | None = Field(
        default=None, description="Another solver and fewer steps behind the window (MixGRPO-Flash); null: as before it."
    )
    group_noise: Slot = Field(
        default=Slot(use="shared"),
        description="Start noise of a group: shared (what comes before the window is computed once), distinct, tree.",
    )
    batch_size: Positive = Field(
        default=32, description="Samples in one pipeline call, per process. Pictures do not depend on it."
    )


class RewardConfig(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z][\w-]*$")] = Field(description="Name in metrics and summaries.")
    use: str = Field(description="Import path of the reward model, package.module:Name.")
    args: dict[str, Any] = Field(default_factory=dict, description="Arguments of its constructor.")
    weight: Annotated[float, Field(ge=0)] = Field(default=1.0, description="Share in the signal; 0 makes it a monitor.")
    batch_size: Positive = Field(default=64, description="Samples scored at once.")
    timeout_s: Above0 | None = Field(default=None, description="Seconds a batch may take; null: no limit.")
    retries: Annotated[int, Field(ge=0)] = Field(default=0, description="How often a failed batch is tried again.")
    retry_wait_s: Annotated[float, Field(ge=0)] = Field(default=1.0, description="Seconds before it; doubled for each next.")
    missing: Literal["mask", "drop", "skip", "stop"] | None = Field(
        default=None, description="No score: mask the sample (default), drop the reward in its group, skip the group, stop."
    )
    opponents: Positive | None = Field(
        default=None, description="A judge of pairs: siblings that each sample is compared with, at least; default: all."
    )
    both_orders: bool = Field(default=True, description="A judge of pairs: each pair is shown in both orders.")
    device: str | None = Field(default=None, description="Where the model and its samples are; default: the policy's device.")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="Compute type of its networks (autocast).")

    @model_validator(mode="after")
    def _monitors_have_no_policy(self) -> "RewardConfig":
        if self.weight == 0 and self.missing is not None:
            raise ValueError(f"missing={self.missing} has no effect on a monitor (weight 0); remove it, or raise the weight")
        return self


class ScoringConfig(Section):
    overlap: bool | None = Field(
        default=None, description="Score finished samples while others are drawn; default: unless the policy is on the CPU."
    )
    cache: str | None = Field(default=None, description="Folder of scores by content, for evaluations; null: none.")


class OptimizerConfig(Section):
    lr: Above0 = Field(default=1e-5, description="Learning rate of AdamW (MixGRPO, full weights: 1e-5).")
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.999), description="AdamW's decay rates.")
    eps: Above0 = Field(default=1e-8, description="AdamW's epsilon; gradients are near 1e-3 here.")
    weight_decay: Annotated[float, Field(ge=0)] = Field(default=1e-4, description="Decoupled weight decay.")
    max_grad_norm: Above0 = Field(default=1.0, description="Gradients are scaled down to this norm.")
    warmup: Annotated[int, Field(ge=0)] = Field(default=0, description="Iterations of linear warm-up.")
    decay: Fraction = Field(default=0.0, description="Last share of the run over which the rate falls linearly to 0.")
    updates_per_iteration: Positive = Field(default=2, description="Optimizer steps per rollout, each on an equal part of it.")
    micro_batch_size: Positive = Field(default=32, description="Samples in one forward and backward pass, per process.")


class EmaConfig(Section):
    decay: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None, description="Averaging of trained weights; off if null."
    )


class EvaluationConfig(Section):
    num_prompts: Positive | None = Field(default=None, description="How many held-out prompts; default: all.")
    every: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Iterations between evaluations; 0: only before and after."
    )
    watch_prompts: Positive = Field(default=100, description="Held-out prompts of the evaluations in between.")
    num_steps: Positive | None = Field(default=None, description="Steps; default: those of the sampler.")
    guidance_scale: Annotated[float, Field(ge=1)] | None = Field(default=None, description="Guidance; default: the sampler's.")
    batch_size: Positive = Field(default=100, description="Samples in one pipeline call.")
    seed: int = Field(default=20260, description="Seed of the start noise; the same for base and tuned.")
    hybrid: Fraction | None = Field(
        default=None,
        description="Share of the steps, from the noisiest, that the tuned model makes; its base makes the rest. Null: all.",
    )
    gold: str | None = Field(default=None, description="The reward, by name, that the run is judged by; default: the first.")


class DataConfig(Section):
    latents: str = Field(description="Clean latents and their prompts (.safetensors; scripts/encode_data.py).")
    weight: Above0 = Field(description="Weight of their flow-matching loss.")
    samples: Positive = Field(default=8, description="How many of them in each update, per process.")


class HealthConfig(Section):
    then: Literal["warn", "stop", "nothing"] = Field(default="warn", description="After a sign of breaking; stop saves first.")
    moved: Above0 = Field(default=0.25, description="Most change of the velocity in an iteration, in matching errors.")
    pace: Above0 = Field(default=0.006, description="The same as the median of three iterations, the first of a run left out.")
    spread: Above0 = Field(default=2.0, description="Most |log ratio| of an iteration, in clip ranges.")
    kl_old: Above0 = Field(default=25.0, description="Most divergence of an iteration, in thresholds (dppo).")
    fall: Above0 = Field(default=0.7, description="Most fall of a score, in standard deviations at the start.")
    error: Above0 = Field(default=3.0, description="Most matching error, in those of the start.")
    against: Above0 = Field(default=0.15, description="Most of minus Kendall's tau of advantages and a weighted score.")
    diversity: Above0 = Field(default=0.2, description="Least difference within groups, as a share of the start's.")
    canary: Above0 = Field(default=2.0, description="Most drift of a canary, in standard deviations at the start.")


class CheckpointConfig(Section):
    every: Annotated[int, Field(ge=0)] = Field(default=50, description="Iterations between checkpoints; 0: only when stopped.")
    keep: Positive = Field(default=2, description="How many checkpoints stay.")


class LoggingConfig(Section):
    trackers: tuple[str, ...] = Field(default=("tensorboard",), description="Beside metrics.jsonl: tensorboard.")
    samples_every: Annotated[int, Field(ge=0)] = Field(
        default=50, description="Iterations between saved sample sheets; 0: none."
    )
    watch_every: Annotated[int, Field(ge=0)] = Field(
        default=10, description="Iterations between looks at each step's gradient, which hold a second one; 0: none."
    )


class RunConfig(Section):
    """Everything a run needs."""

    name: Annotated[str, Field(pattern=r"^[\w.-]*[\w-][\w.-]*$")] = Field(description="Name of the run and of its folder.")
    output_dir: str = Field(default="runs", description="Where run folders are made.")
    seed: int = Field(default=0, description="Seed of prompts, noise and windows.")
    iterations: Positive = Field(description="Rollouts, each with its updates.")
    group_size: Positive = Field(default=12, description="Samples of one prompt (MixGRPO: 12).")
    prompts_per_iteration: Positive = Field(description="Different prompts in one rollout, over all processes.")
    model: ModelConfig
    prompts: PromptsConfig
    sampler: SamplerConfig = Field(default_factory=SamplerConfig)
    rewards: Annotated[list[RewardConfig], Field(min_length=1)]
    scoring: ScoringConfig = Field(default_factory=ScoringConfig)
    signal: Slot = Field(
        default=Slot(use="standardized_sum"), description="Scores to one number: weighted_sum, standardized_sum."
    )
    calibration: str | None = Field(
        default=None, description="File of flowgrpo calibrate: what scores are usually like, for signals and counts."
    )
    advantage: Slot = Field(
        default=Slot(use="none"), description="Signal to advantage: group, global, none (standardised already)."
    )
    objective: Slot = Field(default=Slot(use="clipped_ratio"), description="The loss: clipped_ratio, guard, ..., awm, nft, ...")
    levels: Slot = Field(
        default=Slot(use="stratified"), description="Noise levels at which a forward objective (awm, nft, vgrpo, ...) trains."
    )
    reference: Slot = Field(default=Slot(use="start"), description="Where KL is measured from: start, average, reset.")
    samples: Slot = Field(default=Slot(use="all"), description="Samples of a group that are learnt from: all, extremes.")
    step_weights: Slot = Field(default=Slot(use="none"), description="Share of each window step in the loss: none, equal, ...")
    data: DataConfig | None = Field(default=None, description="Flow matching on data beside the objective.")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    ema: EmaConfig = Field(default_factory=EmaConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    health: HealthConfig = Field(default_factory=HealthConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)

    @property
    def gold(self) -> str:
        """The reward that the run is judged by."""
        return self.evaluation.gold or self.rewards[0].name

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.output_dir) / self.name


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a YAML file, apply ``a.b=value`` overrides (values are YAML), check everything.

    Raises ValueError with one line per fault: where it is, what must hold, what was got.
    """
    raw = read_mapping(Path(path))
    for override in overrides:
        apply_override(raw, override)
    return parse_config(raw)


def parse_config(raw: Mapping[str, Any]) -> RunConfig:
    """Check a plain mapping. Raises ValueError as `load_config` does."""
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        raise ValueError("\n".join(_explain(e) for e in error.errors())) from error


def parse_rewards(raw: list[Any]) -> list[RewardConfig]:
    """Check a list of rewards by itself. Raises ValueError as `load_config` does."""
    try:
        return TypeAdapter(list[RewardConfig]).validate_python(raw)
    except ValidationError as error:
        raise ValueError("\n".join(_explain(e) for e in error.errors())) from error


def dump_config(config: RunConfig) -> str:
    """The resolved config as YAML that `load_config` reads back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _explain(error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] != "extra_forbidden":
        got = "" if error["type"] == "missing" else f", got {error['input']!r}"
        return f"{where}: {error['msg']}{got}"
    section = ".".join(str(part) for part in error["loc"][:-1]) or "top level"
    hint = _hint(str(error["loc"][-1]), error["loc"][:-1])
    return f"{where}: unknown setting in section {section!r}{hint}"


def _hint(word: str, loc: tuple[Any, ...]) -> str:
    elsewhere = [f"{section}.{word}" for section in RunConfig.model_fields if word in _fields((section,))]
    if elsewhere:
        return f"; it belongs to {elsewhere[0]!r}"
    foreign = difflib.get_close_matches(word, FOREIGN_NAMES, n=1, cutoff=0.8)
    return f" (here it is called {FOREIGN_NAMES[foreign[0]]!r})" if foreign else nearest(word, _fields(loc))


def _fields(loc: tuple[Any, ...]) -> dict[str, Any]:
    model: Any = RunConfig
    for part in loc:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        inner = [a for a in (annotation, *_flatten(annotation)) if isinstance(a, type) and issubclass(a, BaseModel)]
        if not inner:
            return {}
        model = inner[0]
    return model.model_fields


def _flatten(annotation: Any) -> list[Any]:
    return [leaf for a in typing.get_args(annotation) for leaf in (a, *_flatten(a))]
