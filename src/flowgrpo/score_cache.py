"""Scores by content: the same samples, prompt and reward model need no second call."""

import hashlib
import json
import math
from pathlib import Path

import torch
from torch import Tensor

from flowgrpo.data import Prompt

__all__ = ["ScoreCache", "content_key"]

FILE = "scores.jsonl"


def content_key(identity: str, sample: Tensor, prompt: Prompt) -> str:
    """A hash of the sample's numbers, its shape and type, the prompt's text and meta, and the reward model's identity."""
    said = [identity, prompt.text, dict(prompt.meta), list(sample.shape), str(sample.dtype)]
    digest = hashlib.sha256(json.dumps(said, sort_keys=True, default=repr).encode())
    digest.update(sample.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class ScoreCache:
    """Finite scores by `content_key`, in memory, and in a folder if one is given.

    Several processes may use a folder at once: each appends whole lines, and reads what was there when it began. A line that
    was cut off is left out. Weights that change under an unchanged identity are not noticed: empty the folder then.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.hits = 0
        self._scores: dict[str, float] = {}
        self._path = None if folder is None else Path(folder) / FILE
        if self._path is not None and self._path.is_file():
            for line in self._path.read_text(encoding="utf-8").splitlines():
                self._read(line)

    def __len__(self) -> int:
        return len(self._scores)

    def get(self, key: str) -> float | None:
        """The score kept under this key, or None."""
        score = self._scores.get(key)
        self.hits += score is not None
        return score

    def put(self, key: str, score: float) -> None:
        """Keep a score. One that is not finite is not a score and is not kept: it will be asked for again."""
        if not math.isfinite(score) or key in self._scores:
            return
        self._scores[key] = score
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write("\n" + json.dumps({"key": key, "score": score}))  # ahead: a cut line spoils no later one

    def _read(self, line: str) -> None:
        try:
            row = json.loads(line or "null")
        except json.JSONDecodeError:
            return
        if isinstance(row, dict) and {"key", "score"} <= row.keys():
            self._scores[row["key"]] = float(row["score"])
