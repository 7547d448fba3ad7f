"""Scores of pictures and films that lie in files, made here or elsewhere, as one table."""

import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowgrpo.config import RewardConfig, parse_rewards
from flowgrpo.data import Prompt, PromptSet
from flowgrpo.generate import MANIFEST
from flowgrpo.media import load_image, load_video
from flowgrpo.scoring import Scorer
from flowgrpo.yaml_input import read_mapping

__all__ = ["Item", "find_items", "read_rewards", "score_items", "write_table"]

PICTURES = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}
FILMS = {".mp4", ".gif", ".webm", ".mov", ".mkv"}
READERS = 4  # threads that read ahead


@dataclass(frozen=True)
class Item:
    """A picture or film, its prompt, and what its manifest says besides."""

    name: str  # as it was given, for the table
    path: Path
    prompt: Prompt
    facts: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> Tensor:
        """One clip (f, 3, h, w) in [0, 1]."""
        return load_video(self.path)[0] if self.path.suffix.lower() in FILMS else load_image(self.path)[None]


def find_items(paths: Sequence[Path], prompts: PromptSet | None = None) -> list[Item]:
    """The pictures and films at these paths, in their order.

    A path is a file, a folder, or a table with a column `file` and, if wanted, `prompt`, `prompt_id` and others: .jsonl, or
    .parquet; files are relative to it. A folder's `manifest.jsonl` is such a table; without one it is searched, and the prompt
    of a file is what a .txt file beside it says. With `prompts` a `prompt_id` stands for the prompt of that number there,
    with all that its file says of it. Raises ValueError for what is not there, and for a prompt that is another one.
    """
    rows = [row for path in paths for row in _rows(path)]
    items = [_item(row, folder, i, prompts) for i, (row, folder) in enumerate(rows)]
    if not items:
        raise ValueError(
            f"there must be pictures or films to score, found none in {', '.join(map(str, paths))}; correct the path"
        )
    return items


def _rows(path: Path) -> Iterator[tuple[dict[str, Any], Path]]:
    """Rows of a table, and the folder that their files are relative to."""
    suffix = path.suffix.lower()
    if path.is_dir() and not (path / MANIFEST).is_file():
        for file in sorted(file for file in path.rglob("*") if file.suffix.lower() in PICTURES | FILMS):
            yield {"file": str(file.relative_to(path)), **_text_beside(file)}, path
    elif not path.exists():
        raise ValueError(f"{path}: there is no such file or folder; correct the path")
    elif path.is_dir() or suffix in (".jsonl", ".parquet"):
        table = path / MANIFEST if path.is_dir() else path
        for number, row in enumerate(_table(table), start=1):
            if "file" not in row:
                raise ValueError(
                    f"{table}, row {number}: a row must name its file, got only {sorted(row)}; add a column 'file'"
                )
            if row["file"] is not None:  # a sample that failed
                yield row, table.parent
    elif suffix in PICTURES | FILMS:
        yield {"file": path.name, **_text_beside(path)}, path.parent
    else:
        known = ", ".join(sorted(PICTURES | FILMS))
        raise ValueError(f"{path}: must be a folder, a table (.jsonl, .parquet), a picture or a film ({known}); convert it")


def _text_beside(file: Path) -> dict[str, str]:
    text = file.with_suffix(".txt")
    return {"prompt": text.read_text(encoding="utf-8").strip()} if text.is_file() else {}


def _table(path: Path) -> list[dict[str, Any]]:
    if path.suffix.lower() == ".parquet":
        return _pyarrow().read_table(path).to_pylist()
    lines = path.read_text(encoding="utf-8").split("\n")
    try:
        return [json.loads(line) for line in lines if line.strip()]
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: every line must be one JSON object, got {error}; mend or remove it") from error


def _item(row: dict[str, Any], folder: Path, position: int, prompts: PromptSet | None) -> Item:
    facts = {name: value for name, value in row.items() if name in ("prompt_id", "sample", "seed")}
    prompt = Prompt(row.get("prompt") or "", position, meta=row)
    if prompts is not None and "prompt_id" in row:
        number = row["prompt_id"]
        known = prompts[number] if 0 <= number < len(prompts) else None
        if known is None or ("prompt" in row and known.text != row["prompt"]):
            raise ValueError(
                f"{folder / row['file']}: its prompt {number} is {row.get('prompt')!r}, in {prompts.path} it is "
                f"{known and known.text!r}; give the prompt file that it was made from"
            )
        prompt = Prompt(known.text, position, meta=known.meta)
    return Item(row["file"], folder / row["file"], prompt, facts)


def read_rewards(where: Sequence[str]) -> list[RewardConfig]:
    """Rewards of a YAML file, all else in it ignored, or import paths package.module:Name. Raises ValueError for neither."""
    rewards: list[RewardConfig] = []
    for text in where:
        if Path(text).suffix in (".yaml", ".yml"):
            found = read_mapping(Path(text)).get("rewards")
            if not isinstance(found, list):
                raise ValueError(
                    f"{text}: there must be a list of rewards in it, got {type(found).__name__}; add rewards: [...]"
                )
            rewards += parse_rewards(found)
        else:
            name = text.rpartition(":")[2].rpartition(".")[2].lower()
            rewards += parse_rewards([{"name": name, "use": text, "weight": 0}])
    return rewards


def score_items(scorer: Scorer, items: Sequence[Item], log: Path, *, batch_size: int = 32,
                on_batch: Callable[[int], None] = lambda _: None) -> list[list[float]]:  # fmt: skip
    """The scores of every item, a list of the rewards' values each, NaN where there is none.

    What is scored is appended to `log`, a .jsonl file, at once: a call that was cut off goes on where it stopped. Files are
    read by threads while others are scored. Raises ValueError for a log of other items or rewards.
    """
    head = {"rewards": [[one.name, one.identity] for one in scorer.components], "files": [str(item.path) for item in items]}
    done = _read_log(log, head)
    on_batch(len(done))
    todo = [i for i in range(len(items)) if i not in done]
    parts = [todo[start : start + batch_size] for start in range(0, len(todo), batch_size)]
    with ThreadPoolExecutor(READERS) as readers, log.open("a", encoding="utf-8") as file:
        ahead = [readers.submit(_load, items[i]) for i in (parts[0] if parts else ())]
        for number, part in enumerate(parts):
            clips = [future.result() for future in ahead]
            ahead = [readers.submit(_load, items[i]) for i in (parts[number + 1] if number + 1 < len(parts) else ())]
            found = _scored(scorer, clips, [items[i].prompt for i in part])
            file.writelines(json.dumps([i, _nulls(scores)]) + "\n" for i, scores in zip(part, found, strict=True))
            file.flush()
            done.update(zip(part, found, strict=True))
            on_batch(len(part))
    return [done[i] for i in range(len(items))]


def _load(item: Item) -> Tensor | None:
    try:
        return item.load()
    except Exception as error:
        warnings.warn(f"{item.path} cannot be read and has no scores: {type(error).__name__}: {error}", stacklevel=2)
        return None


def _scored(scorer: Scorer, clips: Sequence[Tensor | None], prompts: Sequence[Prompt]) -> list[list[float]]:
    """Clips of one size are scored together."""
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for i, clip in enumerate(clips):
        if clip is not None:
            by_shape.setdefault(tuple(clip.shape), []).append(i)
    values = torch.full((len(clips), len(scorer.names)), torch.nan)
    for rows in by_shape.values():
        media = torch.stack([clip for i in rows if (clip := clips[i]) is not None])
        values[rows] = scorer(media, [prompts[i] for i in rows]).values
    return values.tolist()


def _read_log(log: Path, head: dict[str, Any]) -> dict[int, list[float]]:
    """What a log holds, which is begun if it is not there; a last line that was cut off is taken away."""
    whole = log.read_text(encoding="utf-8").rpartition("\n")[0] if log.is_file() else ""
    if not whole:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(json.dumps(head) + "\n", encoding="utf-8")
        return {}
    first, *lines = whole.split("\n")
    if json.loads(first) != json.loads(json.dumps(head)):
        raise ValueError(f"{log} holds scores of other files or rewards; remove it, or give another output")
    log.write_text(whole + "\n", encoding="utf-8")
    rows = [json.loads(line) for line in lines]
    return {i: [math.nan if score is None else score for score in scores] for i, scores in rows}


def write_table(path: Path, items: Sequence[Item], names: Sequence[str], scores: Sequence[Sequence[float]]) -> None:
    """A parquet file: file, prompt, what the manifest said, and a column for each reward, null where there is no score."""
    extra = sorted({name for item in items for name in item.facts})
    columns: dict[str, list[Any]] = {"file": [item.name for item in items], "prompt": [item.prompt.text for item in items]}
    columns |= {name: [item.facts.get(name) for item in items] for name in extra}
    clash = sorted(columns.keys() & set(names))
    if clash:
        raise ValueError(f"a reward must not be named like the column {clash[0]!r}; rename it")
    columns |= {name: _nulls([row[k] for row in scores]) for k, name in enumerate(names)}
    temporary = path.with_name(path.name + ".tmp")
    _pyarrow().write_table(_arrow_table(columns), temporary)
    temporary.replace(path)


def _nulls(values: Sequence[float]) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values]


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("parquet files need pyarrow: pip install 'flowgrpo[study]'") from error
    return pyarrow.parquet


def _arrow_table(columns: Mapping[str, list[Any]]) -> Any:
    import pyarrow

    return pyarrow.table(dict(columns))
