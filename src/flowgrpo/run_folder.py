"""The run folder: what is in it, and when it may be used again."""

import shutil
from pathlib import Path

import yaml

from flowgrpo import checkpoint
from flowgrpo.config import RunConfig, dump_config

FREE_TO_CHANGE = {"iterations", "checkpoint", "logging", "evaluation", "output_dir", "name"}


def check_folder(config: RunConfig, *, resume: bool, overwrite: bool) -> Path | None:
    """Look at the run's folder without touching it; returns the checkpoint to go on from, if any.

    Raises ValueError when there is a run already that was neither to be resumed nor overwritten, when there is none to
    resume, or when a resumed run's settings have changed.
    """
    folder, saved = config.folder, config.folder / "config.yaml"
    if resume and overwrite:
        raise ValueError("--resume and --overwrite contradict each other; give one")
    if resume and not saved.is_file():
        raise ValueError(f"nothing to resume: {folder} holds no run; start it without --resume")
    if saved.is_file() and not (resume or overwrite):
        raise ValueError(
            f"{folder} already holds a run; go on with --resume, start again with --overwrite, or choose another name=..."
        )
    if resume:
        _check_unchanged(saved, config)
    return checkpoint.latest(folder / "checkpoints") if resume else None


def open_folder(config: RunConfig, *, resume: bool) -> None:
    """Make the run's folder ready, an older run in it gone unless it is resumed, and write the config."""
    folder = config.folder
    if not resume and (folder / "config.yaml").is_file():
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")


def _check_unchanged(saved: Path, config: RunConfig) -> None:
    old, new = yaml.safe_load(saved.read_text(encoding="utf-8")), config.model_dump(mode="json")
    changed = [name for name in new if name not in FREE_TO_CHANGE and old.get(name) != new[name]]
    if changed:
        raise ValueError(
            f"a resumed run must keep its settings, but {', '.join(changed)} changed since {saved} was written; "
            "undo the change, or start a new run with name=..."
        )
