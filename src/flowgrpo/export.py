"""Trained weights in the ordinary diffusers layout, read back and compared before they get their final name."""

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import Module

from flowgrpo.checkpoint import fresh_temporary, replace_folder

__all__ = ["export_full", "export_lora"]

SECOND = "transformer_2"


def export_lora(pipeline: Any, networks: Mapping[str, Module], folder: Path, *, adapter: str = "default") -> None:
    """Write the networks' LoRA so that `pipe.load_lora_weights(folder)` in plain diffusers gives the trained model.

    `networks` are the pipeline's components by name: "transformer" or "unet", and "transformer_2" for a second expert,
    which goes into a folder of that name and is loaded by `pipe.load_lora_weights(folder / "transformer_2",
    load_into_transformer_2=True)`. Rank, alpha and targets are stored beside the weights. An older export is replaced.
    Raises ValueError where diffusers has no LoRA layout, where weights outside the adapter are trained, and where the
    files do not hold the adapter exactly.
    """
    tensors = {name: _adapter_tensors(name, network, adapter) for name, network in networks.items()}
    for name in networks:
        _check_supported(pipeline, name)
    temporary = fresh_temporary(folder)
    together = {name: network for name, network in networks.items() if name != SECOND}
    if together:
        _write_lora(pipeline, together, temporary, adapter)
        wanted = {f"{name}.{key}": tensor for name in together for key, tensor in tensors[name].items()}
        _verify(temporary, wanted)
    if SECOND in networks:  # diffusers has no key prefix for a second expert: its file looks like a first one's
        _write_lora(pipeline, {"transformer": networks[SECOND]}, temporary / SECOND, adapter)
        _verify(temporary / SECOND, {f"transformer.{key}": tensor for key, tensor in tensors[SECOND].items()})
    replace_folder(temporary, folder)


def export_full(pipeline: Any, folder: Path, scheduler: Any) -> None:
    """Write the whole pipeline with its original scheduler, for `from_pretrained(folder)`. An older export is replaced.

    Raises ValueError while a network still carries an adapter, and where a written network differs from its weights.
    """
    from diffusers import ModelMixin

    networks = {name: part for name, part in pipeline.components.items() if isinstance(part, ModelMixin)}
    for name, network in networks.items():
        if any(".lora_" in key for key, _ in network.named_parameters()):
            raise ValueError(f"{name} must not carry an adapter when its full weights are exported; use export_lora")
    temporary = fresh_temporary(folder)
    with _scheduler(pipeline, scheduler):
        pipeline.save_pretrained(temporary, safe_serialization=True)
    for name, network in networks.items():
        _verify(temporary / name, network.state_dict())
    replace_folder(temporary, folder)


def _check_supported(pipeline: Any, name: str) -> None:
    kind = type(pipeline).__name__
    if not hasattr(pipeline, "save_lora_weights"):
        raise ValueError(f"{kind} must have a LoRA layout in diffusers, it has none; train its full weights instead")
    if name == SECOND:
        supported = SECOND in getattr(pipeline, "_lora_loadable_modules", ())
    else:
        supported = f"{name}_lora_layers" in inspect.signature(pipeline.save_lora_weights).parameters
    if not supported:
        raise ValueError(f"{kind} cannot store a LoRA of {name!r}; train one of {pipeline._lora_loadable_modules}")


def _adapter_tensors(name: str, network: Module, adapter: str) -> dict[str, Tensor]:
    """The adapter's parameters by their names in a file, where the adapter's own name is left out."""
    part = re.compile(rf"(\.lora_\w+)\.{re.escape(adapter)}(?=\.|$)")
    found = {key: parameter for key, parameter in network.named_parameters() if part.search(key)}
    outside = [key for key, p in network.named_parameters() if p.requires_grad and key not in found]
    if not found:
        raise ValueError(f"{name} must carry an adapter called {adapter!r}, it does not; was it trained with full weights?")
    if outside:
        raise ValueError(
            f"{name}: a LoRA export holds the adapter {adapter!r} only, but these are trained as well: "
            f"{', '.join(outside[:5])}{' ...' if len(outside) > 5 else ''}; freeze them or export the full weights"
        )
    return {part.sub(r"\1", key): parameter.detach() for key, parameter in found.items()}


def _write_lora(pipeline: Any, networks: Mapping[str, Module], folder: Path, adapter: str) -> None:
    from peft import get_peft_model_state_dict

    arguments: dict[str, Any] = {}
    for name, network in networks.items():
        layers = get_peft_model_state_dict(network, adapter_name=adapter)
        arguments[f"{name}_lora_layers"] = {key: tensor.detach().cpu().contiguous() for key, tensor in layers.items()}
        arguments[f"{name}_lora_adapter_metadata"] = _settings(network, adapter)
    pipeline.save_lora_weights(folder, safe_serialization=True, **arguments)


def _settings(network: Any, adapter: str) -> dict[str, Any]:
    """What the adapter's config sets, without its defaults: another version of peft may not know all of those."""
    config = network.peft_config[adapter]
    defaults = type(config)().to_dict()
    settings = {k: v for k, v in config.to_dict().items() if k in ("r", "lora_alpha") or v != defaults.get(k)}
    return {k: sorted(v) if isinstance(v, set) else v for k, v in settings.items()}


@contextmanager
def _scheduler(pipeline: Any, scheduler: Any) -> Iterator[None]:
    own = pipeline.scheduler
    pipeline.register_modules(scheduler=scheduler)
    try:
        yield
    finally:
        pipeline.register_modules(scheduler=own)


def _verify(folder: Path, wanted: Mapping[str, Tensor]) -> None:
    """Compare the safetensors files of a folder with what they must hold, one tensor at a time."""
    missing, faults = set(wanted), []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as content:
            for key in content.keys():  # noqa: SIM118 (not a mapping)
                missing.discard(key)
                if key not in wanted:
                    faults.append(f"extra {key}")
                elif not torch.equal(content.get_tensor(key), wanted[key].cpu()):
                    faults.append(f"{key} has other values")
    faults += [f"missing {key}" for key in sorted(missing)]
    if faults:
        shown = "; ".join(faults[:10]) + (" ..." if len(faults) > 10 else "")
        raise ValueError(f"{folder}: the written weights must be the trained ones: {shown}; please report this")
