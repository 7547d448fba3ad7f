"""An exact checker for pictures of coloured shapes: reads a picture back and compares it with its caption.

A picture is quantised to the palette, cut into connected blobs, and each blob is compared with a circle, a square
and a triangle of its own size. The caption's meaning is then checked clause by clause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from reward_models.shapes_world import BACKGROUND, COLORS, PALETTE, SHAPES, SIZE, Meaning, coverage, holds, parse

if TYPE_CHECKING:
    from flowgrpo.data import Prompt

_COLORS = np.array([BACKGROUND, *PALETTE.values()], dtype=np.float32)
_WAYS = _COLORS[1:] - _COLORS[0]
_MIN_AREA = 5
_MIN_PURITY = 0.8
_MAX_STRAY = 0.35
_MIN_OVERLAP = 0.75
_SIZES = (7.0, 15.0)
_FILL = {"circle": np.pi / 4, "square": 1.0, "triangle": 0.5}
_AXIS = np.arange(SIZE) + 0.5


@dataclass(frozen=True)
class Blob:
    """A connected patch of ink: its centre in pixels; `shape` or `color` is None where it is not a clean one."""

    shape: str | None
    color: str | None
    x: float
    y: float

    @property
    def is_clean(self) -> bool:
        return self.shape is not None and self.color is not None


@dataclass(frozen=True)
class Verdict:
    """`passed`: the right things, well formed, and nothing else. `fraction`: mean of the clauses met, in [0, 1]."""

    passed: bool
    fraction: float


class Shapes:
    """Does the picture show what the caption says?

    `score` is "graded" (mean over the caption's clauses: count, shape, colour, both together, relation), "strict"
    (1 when all is right and nothing else is there, or 0) or "mean" (half of each: a slope to climb and a summit).
    Raises ValueError for a caption outside the grammar and for pictures that are not 32 x 32.
    """

    unit = "fraction of clauses"
    range = (0.0, 1.0)
    takes = "media"
    needs_motion = False

    def __init__(self, score: Literal["graded", "strict", "mean"] = "graded") -> None:
        if score not in ("graded", "strict", "mean"):
            raise ValueError(f"score must be 'graded', 'strict' or 'mean', got {score!r}")
        self.score = score

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Scores (b,) float32 for media (b, 1, 3, 32, 32) in [0, 1]."""
        if media.ndim != 5 or media.shape[1:] != (1, 3, SIZE, SIZE) or len(media) != len(prompts):
            raise ValueError(
                f"media must be (b, 1, 3, {SIZE}, {SIZE}) with one prompt a picture, "
                f"got {tuple(media.shape)} and {len(prompts)} prompts"
            )
        meanings = [parse(prompt.text) for prompt in prompts]
        pictures = media[:, 0].permute(0, 2, 3, 1).float().cpu().numpy()
        verdicts = [judge(blobs, meaning) for blobs, meaning in zip(read(pictures), meanings, strict=True)]
        return torch.tensor([self._value(verdict) for verdict in verdicts], dtype=torch.float32)

    def _value(self, verdict: Verdict) -> float:
        parts = {"graded": (verdict.fraction,), "strict": (verdict.passed,), "mean": (verdict.fraction, verdict.passed)}
        return float(np.mean(parts[self.score]))


def read(pictures: np.ndarray) -> list[list[Blob]]:
    """The blobs in each of the pictures (b, 32, 32, 3) in [0, 1]; specks of less than 5 px are taken for noise."""
    colors, ink = quantise(pictures)
    labels = label(ink > 0.5)
    return [
        [blob for one in np.unique(ids[ids > 0]) if (blob := _blob(pictures[i], colors[i], ink[i], ids == one))]
        for i, ids in enumerate(labels)
    ]


def quantise(pictures: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which colour each pixel is mixed with (b, h, w), and how far it is on the way to it, in [0, 1].

    The direction away from the background decides, not the nearest colour: half a pixel of red is pale red, which
    lies near yellow.
    """
    away = pictures.astype(np.float32) - _COLORS[0]
    along = away @ (_WAYS / (_WAYS**2).sum(1, keepdims=True)).T
    cosines = along * np.linalg.norm(_WAYS, axis=1)
    colors = cosines.argmax(-1)
    return colors, np.clip(np.take_along_axis(along, colors[..., None], -1)[..., 0], 0.0, 1.0)


def label(mask: np.ndarray) -> np.ndarray:
    """Connected components (four neighbours) of masks (b, h, w): 0 outside, one positive number for each inside.

    The largest index floods its component, one pixel a sweep, so convex blobs are done after a dozen sweeps.
    """
    ids = np.zeros((len(mask), mask.shape[1] + 2, mask.shape[2] + 2), dtype=np.int32)
    inside = ids[:, 1:-1, 1:-1]
    inside[:] = np.arange(1, mask[0].size + 1).reshape(mask.shape[1:]) * mask
    while True:
        flooded = np.maximum(ids[:, :-2, 1:-1], ids[:, 2:, 1:-1])
        np.maximum(flooded, ids[:, 1:-1, :-2], out=flooded)
        np.maximum(flooded, ids[:, 1:-1, 2:], out=flooded)
        np.maximum(flooded, inside, out=flooded)
        flooded *= mask
        if np.array_equal(flooded, inside):
            return flooded
        inside[:] = flooded


def _blob(picture: np.ndarray, colors: np.ndarray, ink: np.ndarray, inside: np.ndarray) -> Blob | None:
    """The blob on the pixels `inside`, or None if it is too small to count."""
    if inside.sum() < _MIN_AREA:
        return None
    core = inside & (ink > 0.7)
    color = int(np.bincount(colors[inside]).argmax())
    stray = np.linalg.norm(picture[core] - _COLORS[color + 1], axis=-1) > _MAX_STRAY
    is_pure = core.any() and stray.mean() <= 1 - _MIN_PURITY
    shape, x, y = _shape(ink * _grown(inside))
    return Blob(shape, COLORS[color] if is_pure else None, x, y)


def _grown(inside: np.ndarray) -> np.ndarray:
    """The mask and the pixels around it, whose soft edges belong to the blob."""
    padded = np.pad(inside, 1)
    tall = padded[:-2] | padded[1:-1] | padded[2:]
    return tall[:, :-2] | tall[:, 1:-1] | tall[:, 2:]


def _shape(ink: np.ndarray) -> tuple[str | None, float, float]:
    """The shape that overlaps the ink (h, w) best, None if none does well, and the middle of its box in pixels.

    Area and centroid fix the size and place of each template: blur changes neither of them.
    """
    area = ink.sum()
    x, y = float(ink.sum(0) @ _AXIS / area), float(ink.sum(1) @ _AXIS / area)
    fits = [(*_overlap(ink, shape, x, y, area), shape) for shape in SHAPES]
    overlap, size, shape = max(fits)
    middle = y - size / 6 if shape == "triangle" else y
    is_good = overlap >= _MIN_OVERLAP and _SIZES[0] <= size <= _SIZES[1]
    return shape if is_good else None, x, middle


def _overlap(ink: np.ndarray, shape: str, x: float, y: float, area: float) -> tuple[float, float]:
    """Intersection over union with the shape of this area and centroid, and the side of its box in pixels."""
    size = float((area / _FILL[shape]) ** 0.5)
    template = coverage(shape, x, y - size / 6 if shape == "triangle" else y, size)
    return float(np.minimum(ink, template).sum() / np.maximum(ink, template).sum()), size


def judge(blobs: Sequence[Blob], meaning: Meaning) -> Verdict:
    """Compare what was read with what was meant, clause by clause.

    Clauses are fractions: of the shapes asked for, how many are there (and so for colours and for shape and colour
    together), divided by the number asked for or found, whichever is larger, so that extra shapes cost something.
    """
    wanted = [(thing.shape, thing.color) for thing in meaning.things for _ in range(thing.count)]
    most = max(len(wanted), len(blobs))
    colors = Counter(color for _, color in wanted if color)
    clauses = [
        min(len(wanted), len(blobs)) / most,
        _common(Counter(shape for shape, _ in wanted), Counter(blob.shape for blob in blobs)) / most,
    ]
    if colors:
        found = _common(colors, Counter(blob.color for blob in blobs))
        clauses += [found / (colors.total() + max(0, len(blobs) - len(wanted))), _bound(blobs, wanted) / most]
    if meaning.relation:
        clauses.append(float(_related(blobs, wanted, meaning.relation)))
    fraction = float(np.mean(clauses))
    return Verdict(fraction == 1.0 and all(blob.is_clean for blob in blobs), fraction)


def _common(wanted: Counter, found: Counter) -> int:
    return (wanted & found).total()


def _fits(blob: Blob, wanted: tuple[str, str | None]) -> bool:
    return blob.shape == wanted[0] and (blob.color == wanted[1] if wanted[1] else blob.color is not None)


def _bound(blobs: Sequence[Blob], wanted: Sequence[tuple[str, str | None]]) -> int:
    """How many wanted shapes have a blob of their own with the right shape and colour; exact colours go first."""
    left, bound = list(blobs), 0
    for one in sorted(wanted, key=lambda pair: pair[1] is None):
        match = next((blob for blob in left if _fits(blob, one)), None)
        if match:
            left.remove(match)
            bound += 1
    return bound


def _related(blobs: Sequence[Blob], wanted: Sequence[tuple[str, str | None]], relation: str) -> bool:
    """Whether some two blobs are the things of the relation and lie as it says."""
    return any(
        _fits(first, wanted[0]) and _fits(second, wanted[1]) and holds(relation, (first.x, first.y), (second.x, second.y))
        for first, second in permutations(blobs, 2)
    )
