"""Whether a picture or film shows the text that its prompt asks for."""

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flowgrpo.data import Prompt
from flowgrpo.media import to_uint8
from reward_models.frames import places

QUOTED = re.compile(r'"([^"]+)"|“([^”]+)”|„([^“]+)“|«([^»]+)»')


class Ocr:
    """1 less the edit distance of what is read to what was asked, as a share of its length; the mean over texts and frames.

    s = 1 - min(d, n) / n,    d = 0 if the text asked for is part of what is read, else their Levenshtein distance; n its length

    Case, spaces and the form of letters (NFKC) do not count. What is asked for stands in the prompt's meta as `text`, one or a
    list of several, else in the prompt between double quotes; to a prompt without it does not apply. Of a film `frames` are
    read, spread evenly over time; one that shows nothing counts 0.

    `read` is RapidOCR's small PP-OCR detector and recogniser, whose weights come with its package. Raises ImportError without.

    Source: Flow-GRPO's text rendering reward (2505.05470, released code), there for the first quoted text and single pictures.
    """

    unit: str = "share of the text"
    range: tuple[float, float] | None = (0.0, 1.0)
    takes = "media"
    needs_motion = False

    def __init__(self, frames: int = 4) -> None:
        if frames < 1:
            raise ValueError(f"frames must be at least 1, got {frames}")
        try:
            from rapidocr import RapidOCR
        except ImportError as error:
            raise ImportError("reading texts needs RapidOCR: pip install 'flowgrpo[ocr]'") from error
        self.frames = frames
        threads = {"EngineConfig.onnxruntime.intra_op_num_threads": torch.get_num_threads()}  # else all cores
        self._engine: Any = RapidOCR(params={"Global.log_level": "warning", **threads})

    def applies(self, prompt: Prompt) -> bool:
        """Whether the prompt asks for a text."""
        return bool(asked_for(prompt))

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Scores (b,) of media (b, f, 3, h, w) in [0, 1]; NaN where the prompt asks for no text."""
        return torch.tensor([self._score(clip, asked_for(prompt)) for clip, prompt in zip(media, prompts, strict=True)])

    def read(self, frame: Tensor) -> str:
        """What stands in a frame (3, h, w): its lines from top to bottom, joined."""
        found = self._engine(to_uint8(frame).numpy()[..., ::-1].copy())  # it wants blue first
        if found.txts is None:
            return ""
        tops = [float(box[:, 1].mean()) for box in found.boxes]
        lefts = [float(box[:, 0].min()) for box in found.boxes]
        height = max(float(box[:, 1].max() - box[:, 1].min()) for box in found.boxes)
        order = sorted(range(len(tops)), key=lambda i: (round(tops[i] / max(height, 1.0)), lefts[i]))
        return "".join(found.txts[i] for i in order)

    def _score(self, clip: Tensor, texts: Sequence[str]) -> float:
        if not texts:
            return float("nan")
        seen = [self.read(clip[i]) for i in places(len(clip), self.frames)]
        return sum(agreement(read, text) for read in seen for text in texts) / (len(seen) * len(texts))


def asked_for(prompt: Prompt) -> list[str]:
    """The texts that a prompt asks for. Raises ValueError for a `text` in its meta that is none."""
    given = prompt.meta.get("text")
    if given is None:
        spans = ["".join(groups) for groups in QUOTED.findall(prompt.text)]
        return [span for span in spans if plain(span)]
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not all(isinstance(text, str) and plain(text) for text in texts):
        raise ValueError(f"prompt {prompt.id}: text must be a text or a list of texts, got {given!r}")
    return texts


def agreement(read: str, text: str) -> float:
    """1 less the share of a text that is not read, in [0, 1]."""
    seen, wanted = plain(read), plain(text)
    distance = 0 if wanted in seen else min(levenshtein(seen, wanted), len(wanted))
    return 1 - distance / len(wanted)


def plain(text: str) -> str:
    """A text without case, spaces and differences of form."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def levenshtein(one: str, other: str) -> int:
    """How many letters must be put in, taken out or changed to make one of the other."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, start=1):
        before, row = row, [i]
        for j, b in enumerate(other, start=1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (a != b)))
    return row[-1]
