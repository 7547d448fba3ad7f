"""A trained pipeline as plain diffusers loads it, and how it compares with its base.

It comes from a run folder, a LoRA's folder or file, or a full pipeline's folder.
"""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

from accelerate import Accelerator
from safetensors import safe_open
from torch import nn

from flowgrpo.adapters import Reference, swapped
from flowgrpo.build import build_policy, build_scorer, load_pipeline
from flowgrpo.config import ModelConfig, RunConfig
from flowgrpo.data import Prompt, load_prompts
from flowgrpo.evaluate import Evaluation, evaluate_as_configured, evaluation_steps, summary
from flowgrpo.families import policy_networks
from flowgrpo.hybrid import Hybrid, check_hybrid, hybrid_facts
from flowgrpo.policy import Policy

__all__ = ["compare", "heldout_prompts", "load_adapter", "load_hybrid", "load_tuned", "locate", "write"]

SECOND = "transformer_2"
EXPORTS = ("adapter", "pipeline")
ADAPTER_NAME = re.compile(r"(?<=[.]lora_[AB])[.][^.]+")


def locate(path: Path) -> tuple[Literal["adapter", "pipeline"], Path]:
    """What lies at a path: a LoRA or a full pipeline, of a run folder its export. Raises ValueError for all else."""
    if path.is_file() and path.suffix == ".safetensors":
        return "adapter", path
    if (path / "model_index.json").is_file():
        return "pipeline", path
    if any(path.glob("*.safetensors")) or any((path / SECOND).glob("*.safetensors")):
        return "adapter", path
    exports = [path / name for name in EXPORTS if (path / name).is_dir()]
    if exports:
        return locate(exports[0])
    found = "which has none of these" if path.is_dir() else "where there is nothing"
    raise ValueError(
        f"a trained model is a run folder with an export ({' or '.join(EXPORTS)}), a LoRA (.safetensors) or a "
        f"pipeline's folder (model_index.json), got {str(path)!r}, {found}; train first, or correct the path"
    )


def load_tuned(model: ModelConfig, path: Path) -> Any:
    """The pipeline at a path, or the model's with the adapter at that path in it."""
    kind, found = locate(path)
    if kind == "pipeline":
        changes = {"pipeline": str(found.resolve()), "revision": None, "variant": None}
        return load_pipeline(model.model_copy(update=changes))
    pipeline = load_pipeline(model)
    load_adapter(pipeline, found)
    return pipeline


def load_adapter(pipeline: Any, path: Path) -> None:
    """`load_lora_weights`, after which every weight of the files must have found its layer.

    A subfolder transformer_2 goes into the second expert. Raises ValueError for a pipeline without LoRA, for a path
    without weights and for weights that have no place in it.
    """
    if not hasattr(pipeline, "load_lora_weights"):
        raise ValueError(f"{type(pipeline).__name__} must know LoRA weights to load {str(path)!r}, it does not")
    files = [(path, {})] if path.is_file() else [(file, {}) for file in sorted(path.glob("*.safetensors"))]
    files += [(file, {"load_into_transformer_2": True}) for file in sorted((path / SECOND).glob("*.safetensors"))]
    if not files:
        raise ValueError(f"an adapter is a .safetensors file or a folder with one, {str(path)!r} has none")
    for file, options in files:
        try:
            pipeline.load_lora_weights(file.parent, weight_name=file.name, **options)
        except (ValueError, KeyError, RuntimeError) as error:
            raise ValueError(f"{file}: does not fit {type(pipeline).__name__}: {_first_line(error)}") from error
        _check_landed(pipeline, file, SECOND if options else "transformer")


def _check_landed(pipeline: Any, file: Path, target: str) -> None:
    landed = {
        f"{name}.{ADAPTER_NAME.sub('', key)}"
        for name, component in pipeline.components.items()
        if isinstance(component, nn.Module)
        for key, _ in component.named_parameters()
        if ".lora_" in key
    }
    with safe_open(file, framework="pt") as content:
        stored = {key for key in content.keys() if not key.endswith(".alpha")}  # noqa: SIM118 (not a mapping)
    if any(key.split(".")[0] in pipeline.components for key in stored):
        names = {key: f"{target}.{key.partition('.')[2]}" if key.startswith("transformer.") else key for key in stored}
        lost = sorted(key for key, name in names.items() if name not in landed)
    else:
        lost = [] if landed else sorted(stored)  # another layout, which diffusers has converted
    if lost:
        raise ValueError(
            f"{file}: {len(lost)} of {len(stored)} weights have no layer in {type(pipeline).__name__}, such as "
            f"{lost[0]!r}; the adapter would do nothing or only a part: use the model that it was trained on"
        )


def load_hybrid(policy: Policy, model: ModelConfig, path: Path, share: float) -> Hybrid:
    """Hybrid inference for a policy of `load_tuned(model, path)`: its base is the adapter off, or the model's networks.

    Raises ValueError where the base cannot take over: other layers, or an adapter in more than the denoisers.
    """
    if locate(path)[0] == "adapter":
        _check_only_denoisers(policy)
        return Hybrid(share, Reference(policy.networks, {}, "lora").active)
    own, base = _parameters(policy.networks), _parameters(policy_networks(load_pipeline(model)))
    differing = sorted(n for n in own.keys() | base.keys() if n not in own or n not in base or own[n].shape != base[n].shape)
    if differing:
        raise ValueError(
            f"{path}: hybrid needs the layers of its base {model.pipeline}, but {len(differing)} weights differ, such as "
            f"{differing[0]!r}; name the model that it was trained from"
        )
    return Hybrid(share, partial(swapped, own, base))


def _parameters(networks: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    return {f"{name}/{n}": p for name, network in networks.items() for n, p in network.named_parameters()}


def _check_only_denoisers(policy: Policy) -> None:
    for name, component in policy.pipeline.components.items():
        outside = isinstance(component, nn.Module) and name not in policy.networks
        if outside and any(".lora_" in key for key, _ in component.named_parameters()):
            raise ValueError(f"hybrid switches the denoiser only, but the adapter is in the {name} as well; leave hybrid out")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def heldout_prompts(config: RunConfig) -> list[Prompt]:
    """The prompts of an evaluation. Raises ValueError if the config names no file."""
    if config.prompts.heldout is None:
        raise ValueError("prompts.heldout must name a prompt file to evaluate on, got none; add prompts.heldout=...")
    return list(load_prompts(config.prompts.heldout).prompts[: config.evaluation.num_prompts])


def compare(config: RunConfig, path: Path, *, on_batch: Callable[[int], None] = lambda _: None) -> dict[str, Any]:
    """Evaluate the config's model and the trained one at `path` on the held-out prompts; the summary and every score.

    Both get the evaluation's settings and the same start noise; hybrid is for the trained one only. `on_batch` hears of the
    number of samples just done.
    """
    prompts, settings = heldout_prompts(config), config.evaluation
    accelerator = Accelerator(mixed_precision="no")
    scorer = build_scorer(config.rewards, str(accelerator.device)).pointwise(config.scoring.cache)

    share, steps = settings.hybrid, evaluation_steps(config)

    def scores(pipeline: Any, *, is_tuned: bool) -> Evaluation:
        policy, hybrid = build_policy(config, pipeline, accelerator.device), None
        if share is not None:
            check_hybrid(policy.own_scheduler, share, steps)
            hybrid = load_hybrid(policy, config.model, path, share) if is_tuned else Hybrid(share, nullcontext).uncut
        return evaluate_as_configured(config, policy, scorer, prompts, hybrid=hybrid, on_batch=on_batch)

    base = scores(load_pipeline(config.model), is_tuned=False)
    tuned = scores(load_tuned(config.model, path), is_tuned=True)
    return {
        **summary(base, tuned, prompts, config.gold),
        "hybrid": hybrid_facts(share, steps),
        "base": config.model.pipeline,
        "tuned": str(path),
        "settings": settings.model_dump() | {"heldout": config.prompts.heldout, "sampler": config.sampler.model_dump()},
        "samples": [_sample(prompt, row, base, tuned) for row, prompt in enumerate(prompts)],
    }


def _sample(prompt: Prompt, row: int, base: Evaluation, tuned: Evaluation) -> dict[str, Any]:
    scores = {name: _named(evaluation, row) for name, evaluation in (("base", base), ("tuned", tuned))}
    return {"prompt_id": prompt.id, "prompt": prompt.text, **scores}


def _named(evaluation: Evaluation, row: int) -> dict[str, float | None]:
    values = evaluation.values[row].tolist()
    return {name: value if value == value else None for name, value in zip(evaluation.names, values, strict=True)}


def write(result: Mapping[str, Any], path: Path) -> None:
    """Write a comparison as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
