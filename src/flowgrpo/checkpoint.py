"""Checkpoints: folders of safetensors and JSON that are whole or absent; an optimizer's state as named tensors."""

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["folder_name", "latest", "load", "optimizer_tensors", "prune", "restore_optimizer", "save"]

STATE_FILE = "state.json"
_FINISHED = re.compile(r"it\d{6,}")


def folder_name(iteration: int) -> str:
    """`it000010` for iteration 10."""
    return f"it{iteration:06d}"


def save(folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
    """Write one `<group>.safetensors` a group and `state.json`, beside `folder` first; renamed once all is on the disk.

    A save that dies leaves a `*.tmp-*` folder which nothing reads, and the checkpoints before it as they were. An older
    checkpoint of the same name is replaced. `state` must be JSON: text, numbers, lists, mappings.
    """
    text = json.dumps({"groups": sorted(tensors), "state": state}, indent=1)
    temporary = fresh_temporary(folder)
    for group, named in tensors.items():
        contiguous = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in named.items()}
        save_file(contiguous, temporary / f"{group}.safetensors")
    (temporary / STATE_FILE).write_text(text, encoding="utf-8")
    replace_folder(temporary, folder)


def load(folder: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """The tensors (on the CPU) and the state that `save` was given. Raises ValueError naming what is missing."""
    if not (folder / STATE_FILE).is_file():
        raise ValueError(f"{folder}: a checkpoint must hold {STATE_FILE}, it does not; give a folder such as it000010")
    content = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    missing = [name for name in content["groups"] if not (folder / f"{name}.safetensors").is_file()]
    if missing:
        raise ValueError(f"{folder}: the checkpoint lacks {', '.join(missing)} (.safetensors); use an earlier checkpoint")
    return {name: load_file(folder / f"{name}.safetensors") for name in content["groups"]}, content["state"]


def latest(root: Path) -> Path | None:
    """The finished checkpoint of the highest iteration under `root`, or None."""
    return max(_finished(root), key=_iteration, default=None)


def prune(root: Path, keep: int) -> None:
    """Delete all but the `keep` latest checkpoints, and what broken saves have left."""
    if keep < 1:
        raise ValueError(f"keep={keep} must be at least 1; the latest checkpoint always stays")
    for folder in sorted(_finished(root), key=_iteration)[:-keep]:
        shutil.rmtree(folder)
    for leftover in root.glob("it*.tmp-*"):
        shutil.rmtree(leftover)


def fresh_temporary(folder: Path) -> Path:
    """An empty folder beside `folder`, on the same disk, whose name no reader takes for a finished one."""
    temporary = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def replace_folder(temporary: Path, folder: Path) -> None:
    """Give a folder that is complete its final name; an older one of that name is moved aside first, then deleted."""
    for file in sorted(temporary.rglob("*")):
        _flush(file)
    _flush(temporary)
    aside = folder.with_name(f"{folder.name}.tmp-{os.getpid()}-old")
    if folder.exists():
        folder.rename(aside)
    temporary.rename(folder)
    _flush(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def optimizer_tensors(optimizer: Optimizer, names: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Copies of an optimizer's tensors, called `<parameter>/<entry>`, and all else as JSON.

    `names` are the parameters' names in the order of the optimizer's groups. Raises ValueError for an optimizer that
    keeps anything but tensors and scalars for a parameter (LBFGS does).
    """
    content = optimizer.state_dict()
    names = _checked_names(content["param_groups"], names)
    entries = {f"{names[i]}/{entry}": v for i, state in content["state"].items() for entry, v in state.items()}
    tensors = {label: value.detach().clone() for label, value in entries.items() if isinstance(value, Tensor)}
    scalars = {label: value for label, value in entries.items() if not isinstance(value, Tensor)}
    for label, value in scalars.items():
        if not isinstance(value, int | float | str | None):
            raise ValueError(
                f"{label} of {type(optimizer).__name__} must be a tensor or a scalar to be saved, got a "
                f"{type(value).__name__}; use another optimizer"
            )
    return tensors, {
        "groups": [_group_json(group, names) for group in content["param_groups"]],
        "parameters": _parameter_shapes(optimizer, names),
        "tensors": {label: list(tensor.shape) for label, tensor in tensors.items()},
        "scalars": scalars,
    }


def restore_optimizer(
    optimizer: Optimizer, names: Sequence[str], tensors: Mapping[str, Tensor], state: Mapping[str, Any]
) -> None:
    """Give an optimizer, made as in the saved run, the state of `optimizer_tensors`, bit for bit.

    Raises ValueError naming each parameter, tensor or setting that is missing, extra or of another shape.
    """
    content = optimizer.state_dict()
    names = _checked_names(content["param_groups"], names)
    groups = [_group_json(group, names) for group in content["param_groups"]]
    faults = _differences("parameter", _parameter_shapes(optimizer, names), state["parameters"])
    faults += _differences("tensor", state["tensors"], {label: list(tensor.shape) for label, tensor in tensors.items()})
    faults += _group_faults(groups, state["groups"])
    if faults:
        raise ValueError(f"saved optimizer state does not fit: {'; '.join(faults)}; use the config the run was started with")
    restored: dict[int, dict[str, Any]] = {}
    for label, value in {**tensors, **state["scalars"]}.items():
        name, entry = label.rsplit("/", 1)
        restored.setdefault(names.index(name), {})[entry] = value.clone() if isinstance(value, Tensor) else value
    pairs = zip(content["param_groups"], state["groups"], strict=True)
    optimizer.load_state_dict({"state": restored, "param_groups": [_group_like(own, saved) for own, saved in pairs]})


def _checked_names(groups: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    count = sum(len(group["params"]) for group in groups)
    assert len(names) == len(set(names)) == count, f"{count} parameters need as many different names, got {len(names)}"
    return list(names)


def _parameter_shapes(optimizer: Optimizer, names: Sequence[str]) -> dict[str, list[int]]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {name: list(parameter.shape) for name, parameter in zip(names, parameters, strict=True)}


def _group_json(group: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    values = {k: v.item() if isinstance(v, Tensor) else v for k, v in group.items()}
    return {**values, "params": [names[i] for i in group["params"]]}


def _group_like(own: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """The saved settings in the types of the optimizer's own: JSON knows neither tuples nor tensors."""
    return {k: _like(own[k], v) for k, v in saved.items()} | {"params": own["params"]}


def _like(own: Any, saved: Any) -> Any:
    if isinstance(own, Tensor):
        return torch.full_like(own, saved)
    return tuple(saved) if isinstance(own, tuple) else saved


def _group_faults(own: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> list[str]:
    if len(own) != len(saved):
        return [f"{len(saved)} parameter groups saved, {len(own)} here"]
    faults = []
    for mine, theirs in zip(own, saved, strict=True):
        faults += _differences("setting", dict.fromkeys(mine), dict.fromkeys(theirs))
        if sorted(mine["params"]) == sorted(theirs["params"]) and mine["params"] != theirs["params"]:
            faults.append("the parameters are in another order")
    return faults


def _differences(kind: str, wanted: Mapping[str, Any], got: Mapping[str, Any]) -> list[str]:
    faults = [f"missing {kind} {name}" for name in wanted if name not in got]
    faults += [f"extra {kind} {name}" for name in got if name not in wanted]
    both = [name for name in wanted if name in got and list(wanted[name] or ()) != list(got[name] or ())]
    return faults + [f"{kind} {name} is {list(got[name])}, must be {list(wanted[name])}" for name in both]


def _finished(root: Path) -> list[Path]:
    folders = root.iterdir() if root.is_dir() else ()
    return [f for f in folders if _FINISHED.fullmatch(f.name) and (f / STATE_FILE).is_file()]


def _iteration(folder: Path) -> int:
    return int(folder.name.removeprefix("it"))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
