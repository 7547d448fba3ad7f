"""The run folder: what is in it, and when it may be used again."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from flowgrpo import checkpoint
from flowgrpo.config import RunConfig, dump_config

# What a resumed run may change: how long it is, how much it does at once, how carefully it steps, what it writes.
FREE_TO_CHANGE = (
    r"iterations|name|output_dir|(checkpoint|logging|health)\..*|evaluation\.(every|watch_prompts|batch_size)"
    r"|sampler\.batch_size|optimizer\.(lr|max_grad_norm|micro_batch_size|decay)|objective\.clip_range"
    r"|rewards\.\d+\.(batch_size|timeout_s|retries|retry_wait_s|device)"
)


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
    old, new = (dict(_flat(c)) for c in (yaml.safe_load(saved.read_text(encoding="utf-8")), config.model_dump(mode="json")))
    names = sorted(old.keys() | new.keys())
    changed = [n for n in names if old.get(n) != new.get(n) and not re.fullmatch(FREE_TO_CHANGE, n)]
    if changed:
        raise ValueError(
            f"a resumed run must keep its settings, but {', '.join(changed)} changed since {saved} was written; "
            "undo the change, or start a new run with name=..."
        )


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flat(part, f"{name}.{key}" if name else str(key))
    else:
        yield name, value
