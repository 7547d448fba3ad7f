"""Prompt sets, which prompts an iteration uses, and how its samples are shared out among processes."""

import json
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import gcd
from pathlib import Path
from typing import Any

from flowgrpo.keys import key

__all__ = ["Geometry", "GroupSampler", "Prompt", "PromptSet", "check_geometry", "load_prompts", "rank_slice"]

SIZE_FIELDS = ("height", "width", "num_frames")
INVISIBLE = {"Zs", "Zl", "Zp", "Cc", "Cf"}


@dataclass(frozen=True)
class Prompt:
    """One prompt; `id` is its position in its set, and groups are keyed by it, never by the text.

    `height` and `width` are pixels, None where the run's own size holds; `meta` is what the file says besides.
    """

    text: str
    id: int
    negative: str | None = None
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    meta: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class PromptSet:
    """The prompts of one file in its order; `dropped` counts the blank ones left out."""

    prompts: tuple[Prompt, ...]
    path: Path
    dropped: int = 0

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, prompt_id: int) -> Prompt:
        return self.prompts[prompt_id]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self.prompts)


def load_prompts(path: str | Path) -> PromptSet:
    """Read prompts from a .txt (one a line) or .jsonl file, UTF-8 with or without a byte-order mark.

    A .jsonl row holds "prompt" and, if wanted, "negative_prompt", "height", "width", "num_frames"; the rest becomes
    `meta`. Blank prompts are dropped and counted; equal texts stay two prompts. Raises ValueError naming the
    file and the line.
    """
    path = Path(path)
    parse = {".txt": _text_row, ".jsonl": _json_row}.get(path.suffix.lower())
    if parse is None:
        raise ValueError(f"{path}: a prompt file ends in .txt or .jsonl, got {path.suffix!r}; convert or rename it")
    if not path.is_file():
        raise ValueError(f"{path}: a prompt file must exist, found {'a folder' if path.exists() else 'nothing'} there")
    lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines()
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        text = _checked_text(_decoded(line, where), where)
        row: dict[str, Any] = parse(text, where) if _is_visible(text) else {"text": ""}
        if _is_visible(row["text"]):
            prompts.append(Prompt(id=len(prompts), **row))
    if not prompts:
        raise ValueError(f"{path}: a prompt file needs at least one prompt, found {len(lines)} lines, all blank; fill it")
    return PromptSet(tuple(prompts), path, dropped=len(lines) - len(prompts))


def _decoded(line: bytes, where: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where}: prompts must be UTF-8, got byte 0x{line[error.start]:02x} at column {error.start + 1}; "
            "save the file as UTF-8 (it looks like another encoding, such as CP1252 or UTF-16)"
        ) from error


def _is_visible(text: str) -> bool:
    return any(unicodedata.category(character) not in INVISIBLE for character in text)


def _checked_text(text: str, where: str) -> str:
    if "\0" in text:
        raise ValueError(f"{where}: a prompt must not hold NUL; remove it (a UTF-16 file is full of them: save it as UTF-8)")
    if any(unicodedata.category(character) == "Cs" for character in text):
        raise ValueError(f"{where}: a prompt must be valid Unicode, got half of a surrogate pair; write the character itself")
    return text


def _text_row(line: str, where: str) -> dict[str, Any]:
    return {"text": line}


def _json_row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: every line must be one JSON object, got {error}; fix or remove the line") from error
    if not isinstance(row, dict):
        raise ValueError(f'{where}: every line must be one JSON object, got a {type(row).__name__}; write {{"prompt": ...}}')
    if "prompt" not in row:
        raise ValueError(f'{where}: a row needs "prompt", got only {sorted(row)}; add it')
    text, negative = row.pop("prompt"), row.pop("negative_prompt", None)
    for name, value in {"prompt": text, "negative_prompt": negative or ""}.items():
        if not isinstance(value, str):
            raise ValueError(f'{where}: "{name}" must be text, got {value!r}; put it in quotes')
        _checked_text(value, where)
    sizes = {name: _size(row.pop(name, None), name, where) for name in SIZE_FIELDS}
    return {"text": text, "negative": negative, **sizes, "meta": row}


def _size(value: Any, name: str, where: str) -> int | None:
    if value is None or (type(value) is int and value > 0):
        return value
    raise ValueError(f'{where}: "{name}" must be a whole number above 0, got {value!r}; correct or remove it')


@dataclass(frozen=True)
class GroupSampler:
    """Which prompts an iteration uses: a function of (seed, iteration) alone, so a resumed run needs no state.

    Iterations walk through epochs, each a permutation of all prompts keyed by (seed, epoch). An iteration never holds a
    prompt twice, also where it spans the end of an epoch, and each epoch holds every prompt once.
    """

    num_prompts_available: int
    prompts_per_iteration: int
    seed: int

    def __post_init__(self) -> None:
        if not 1 <= self.prompts_per_iteration <= self.num_prompts_available:
            raise ValueError(
                f"prompts_per_iteration={self.prompts_per_iteration} must be between 1 and the number of prompts "
                f"({self.num_prompts_available}): an iteration uses different prompts; lower it or add prompts"
            )

    def at(self, iteration: int) -> tuple[int, ...]:
        """The prompt ids of this iteration (counted from 0), in order."""
        n, p = self.num_prompts_available, self.prompts_per_iteration
        epoch, start = divmod(iteration * p, n)
        ids = _epoch_order(n, p, self.seed, epoch)[start : start + p]
        return ids if len(ids) == p else ids + _epoch_order(n, p, self.seed, epoch + 1)[: p - len(ids)]


@lru_cache(maxsize=4)
def _epoch_order(n: int, p: int, seed: int, epoch: int) -> tuple[int, ...]:
    """The order of this epoch: its permutation, with the prompts that an iteration still open already holds moved back.

    The walk starts at the last epoch which begins together with an iteration, at most p / gcd(n, p) epochs before.
    """
    first = epoch - epoch % (p // gcd(n, p))
    order: tuple[int, ...] = ()
    for current in range(first, epoch + 1):
        held = current * n % p
        open_ids = set(order[n - held :])
        permutation = _permutation(n, seed, current)
        head = [i for i in permutation if i not in open_ids][: (p - held) % p]
        taken = set(head)
        order = (*head, *(i for i in permutation if i not in taken))
    return order


def _permutation(n: int, seed: int, epoch: int) -> list[int]:
    return sorted(range(n), key=lambda i: key("prompt order", seed, epoch, i))


@dataclass(frozen=True)
class Geometry:
    """How many samples an iteration has in all, on each process, and in each process's part of one update."""

    samples: int
    samples_per_process: int
    samples_per_update: int


def rank_slice(total: int, rank: int, world: int) -> range:
    """The rows of the group-major sample list that this process makes: equal, contiguous slices."""
    if total % world or not 0 <= rank < world:
        raise ValueError(f"{total} samples cannot be shared equally by {world} processes (rank {rank}); see check_geometry")
    size = total // world
    return range(rank * size, (rank + 1) * size)


def check_geometry(
    prompts_per_iteration: int, group_size: int, num_processes: int = 1, updates_per_iteration: int = 1
) -> Geometry:
    """Sizes of an iteration: its rows, prompt after prompt, in equal slices for the processes, each in equal updates.

    Groups may lie across processes: their statistics are gathered. Raises ValueError with the nearest settings that
    work.
    """
    _check_counts(prompts_per_iteration, group_size, num_processes, updates_per_iteration)
    samples, parts = prompts_per_iteration * group_size, num_processes * updates_per_iteration
    if samples % parts == 0:
        return Geometry(samples, samples // num_processes, samples // parts)
    raise ValueError(
        f"prompts_per_iteration={prompts_per_iteration} x group_size={group_size} = {samples} samples must split into "
        f"num_processes={num_processes} x updates_per_iteration={updates_per_iteration} = {parts} equal parts; "
        + " or ".join(_remedies(prompts_per_iteration, group_size, num_processes, updates_per_iteration))
    )


def _check_counts(prompts_per_iteration: int, group_size: int, num_processes: int, updates_per_iteration: int) -> None:
    if group_size < 2:
        raise ValueError(
            f"group_size={group_size} must be at least 2: an advantage compares the samples of one prompt with each "
            "other, and a single sample has nothing to be compared with; raise group_size (8 to 24 is usual)"
        )
    counts = {
        "prompts_per_iteration": prompts_per_iteration,
        "num_processes": num_processes,
        "updates_per_iteration": updates_per_iteration,
    }
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name}={count} must be at least 1")


def _remedies(prompts: int, group_size: int, processes: int, updates: int) -> list[str]:
    """The nearest settings that work, one slot changed at a time; at least one always exists."""
    parts = processes * updates
    unit = parts // gcd(group_size, parts)
    below = prompts // unit * unit
    remedies = [f"set prompts_per_iteration to {_either(below, below + unit)}"]
    if prompts * group_size % processes == 0:
        rows = prompts * group_size // processes
        divisors = [d for d in range(1, rows + 1) if rows % d == 0]
        below = max((d for d in divisors if d < updates), default=0)
        above = min((d for d in divisors if d > updates), default=0)
        remedies.append(f"set updates_per_iteration to {_either(below, above)}")
    return remedies


def _either(*values: int) -> str:
    return " or ".join(str(value) for value in values if value > 0)
