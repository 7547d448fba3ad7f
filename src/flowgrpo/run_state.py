"""What a checkpoint of a run holds, and how a run takes it up again."""

from pathlib import Path

import torch

from flowgrpo import checkpoint
from flowgrpo.build import Parts
from flowgrpo.signals import Calibrated
from flowgrpo.variance_window import ProbingWindow


def save(parts: Parts, iteration: int) -> Path:
    """Write a checkpoint before `iteration`: weights, optimizer, average, window, and where the run stands."""
    root = parts.config.folder / "checkpoints"
    folder = root / checkpoint.folder_name(iteration)
    if parts.accelerator.is_main_process:
        tensors, optimizer_state = checkpoint.optimizer_tensors(parts.optimizer, list(parts.trained))
        groups = {"trained": {n: p.detach() for n, p in parts.trained.items()}, "optimizer": tensors}
        if parts.ema is not None:
            groups["ema"] = parts.ema.state_dict()
        if parts.old is not None:
            groups["old"] = parts.old.state_dict()
        if parts.reference is not None and parts.reference.moves:
            groups["reference"] = parts.reference.held or {}
        window = parts.choices.window
        state = {
            "iteration": iteration,
            "optimizer": optimizer_state,
            "sigmas": parts.grid.sigmas,
            "window": window.state_dict() if isinstance(window, ProbingWindow) else None,
            "signal": parts.choices.signal.state_dict() if isinstance(parts.choices.signal, Calibrated) else None,
        }
        checkpoint.save(folder, groups, state)
        checkpoint.prune(root, parts.config.checkpoint.keep)
    parts.accelerator.wait_for_everyone()  # a process that ended now would have the launcher end the one that writes
    return folder


def load(parts: Parts, folder: Path) -> int:
    """Put a checkpoint into the parts; returns the iteration to go on with. Raises ValueError when it does not fit this run."""
    tensors, state = checkpoint.load(folder)
    if tuple(state["sigmas"]) != parts.grid.sigmas:
        raise ValueError(
            f"{folder}: the run was on the noise levels {state['sigmas']}, this config gives {parts.grid.sigmas}; "
            "use the sampler and the diffusers version of the run"
        )
    if sorted(tensors["trained"]) != sorted(parts.trained):
        raise ValueError(f"{folder}: the trained weights have other names than in this config; use the run's own config")
    with torch.no_grad():
        for name, parameter in parts.trained.items():
            parameter.copy_(tensors["trained"][name])
    checkpoint.restore_optimizer(parts.optimizer, list(parts.trained), tensors["optimizer"], state["optimizer"])
    if parts.ema is not None:
        parts.ema.load_state_dict(tensors["ema"])
    if parts.old is not None:
        parts.old.load_state_dict(tensors["old"])
    if parts.reference is not None and parts.reference.moves:
        parts.reference.held = dict(tensors["reference"])
    if isinstance(parts.choices.window, ProbingWindow):
        parts.choices.window.load_state_dict(state["window"])
    if isinstance(parts.choices.signal, Calibrated):
        parts.choices.signal.load_state_dict(state["signal"])
    return state["iteration"]
