"""A procedural world of coloured shapes: what can be said about it, what it looks like.

A caption such as "a picture of a red circle left of a blue square" has a *meaning* (`Meaning`), a meaning has many
*scenes* (where each shape lies, how large it is, which colour it has where none was asked for), and a scene has one
picture: 32 x 32 RGB on a light background. Lengths are in pixels, x grows to the right and y downwards.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import permutations, product

import numpy as np

SIZE = 32
SHAPES = ("circle", "square", "triangle")
PALETTE = {
    "red": (0.86, 0.14, 0.16),
    "green": (0.12, 0.64, 0.22),
    "blue": (0.14, 0.26, 0.86),
    "yellow": (0.95, 0.78, 0.08),
}
COLORS = tuple(PALETTE)
BACKGROUND = (0.95, 0.95, 0.95)
KINDS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
RELATIONS = ("left of", "above")

MIN_SIZE, MAX_SIZE, GAP, MARGIN = 9.0, 12.5, 2.0, 1.0
_NUMBERS = {"a": 1, "one": 1, "two": 2, "three": 3}
_FRAMES = ("{}", "a picture of {}", "an image of {}", "an image showing {}", "a drawing of {}", "there {be} {}")
_PHRASES = {  # words: (relation, does the first thing named come first in it)
    "left of": ("left of", True),
    "right of": ("left of", False),
    "above": ("above", True),
    "over": ("above", True),
    "below": ("above", False),
    "under": ("above", False),
}
_FRAME_PATTERN = re.compile(r"^(?:a picture of|an image of|an image showing|a drawing of|there (?:is|are)) ")
_JOIN_PATTERN = re.compile(r" (and|(?:left|right) of|above|over|below|under) ")
_THING_PATTERN = re.compile(rf"^(a|one|two|three) (?:({'|'.join(COLORS)}) )?({'|'.join(SHAPES)})(s?)$")


@dataclass(frozen=True)
class Thing:
    """`count` shapes of one form; `color` is None where the caption leaves it open."""

    shape: str
    color: str | None = None
    count: int = 1


@dataclass(frozen=True)
class Meaning:
    """What a caption asks for, whatever its words: things, and how the first lies to the second.

    Build it with `meaning_of`, which puts equal meanings into one form ("right of" becomes "left of", the things
    of an "and" are sorted).
    """

    things: tuple[Thing, ...]
    relation: str | None = None

    @property
    def kind(self) -> str:
        """One of `KINDS`, the six tasks of the GenEval benchmark."""
        if self.relation:
            return "position"
        if len(self.things) == 2:
            return "color_attr" if all(thing.color for thing in self.things) else "two_object"
        thing = self.things[0]
        if thing.count > 1:
            return "counting"
        return "colors" if thing.color else "single_object"

    @property
    def count(self) -> int:
        """How many shapes the picture must hold, 1 to 3."""
        return sum(thing.count for thing in self.things)


@dataclass(frozen=True)
class Placed:
    """One drawn shape: its centre and the side of its bounding box, in pixels."""

    shape: str
    color: str
    x: float
    y: float
    size: float


Scene = tuple[Placed, ...]


def meaning_of(things: Sequence[Thing], relation: str | None = None) -> Meaning:
    """The canonical meaning of these things; `relation` is any of the phrases the captions use, or None."""
    if relation is None:
        return Meaning(tuple(sorted(things, key=lambda thing: (thing.shape, thing.color or ""))))
    name, in_order = _PHRASES[relation]
    return Meaning(tuple(things) if in_order else tuple(reversed(things)), name)


@cache
def meanings(kind: str) -> tuple[Meaning, ...]:
    """Every meaning of one kind, in a fixed order."""
    pairs = list(permutations(SHAPES, 2))
    two_colors = list(permutations(COLORS, 2))
    match kind:
        case "single_object":
            found = [meaning_of([Thing(shape)]) for shape in SHAPES]
        case "colors":
            found = [meaning_of([Thing(shape, color)]) for shape, color in product(SHAPES, COLORS)]
        case "counting":
            choices = product(SHAPES, (None, *COLORS), (2, 3))
            found = [meaning_of([Thing(shape, color, count)]) for shape, color, count in choices]
        case "two_object":
            found = [meaning_of([Thing(a, color), Thing(b)]) for (a, b), color in product(pairs, (None, *COLORS))]
        case "color_attr":
            found = [meaning_of([Thing(a, c), Thing(b, d)]) for (a, b), (c, d) in product(pairs, two_colors)]
        case "position":
            choices = product(pairs, ((None, None), *two_colors), RELATIONS)
            found = [meaning_of([Thing(a, c), Thing(b, d)], relation) for (a, b), (c, d), relation in choices]
        case _:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    return tuple(dict.fromkeys(found))


@cache
def all_meanings() -> frozenset[Meaning]:
    """Every meaning the captions can have."""
    return frozenset(meaning for kind in KINDS for meaning in meanings(kind))


def parse(caption: str) -> Meaning:
    """The meaning of a caption; case and a final full stop do not matter. Raises ValueError outside the grammar."""
    text = " ".join(caption.lower().strip().rstrip(".").split())
    parts = _JOIN_PATTERN.split(_FRAME_PATTERN.sub("", text))
    matches = [_THING_PATTERN.match(part) for part in parts[::2]]
    if all(matches) and len(parts) <= 3:
        things = [Thing(m[3], m[2], _NUMBERS[m[1]]) for m in matches if m]
        plural_fits = all((thing.count > 1) == bool(m[4]) for thing, m in zip(things, matches, strict=True) if m)
        joined_by = parts[1] if len(parts) == 3 else "and"
        meaning = meaning_of(things, None if joined_by == "and" else joined_by)
        if plural_fits and meaning in all_meanings():
            return meaning
    raise ValueError(
        f"caption {caption!r} is outside the shapes grammar; write for example 'a red circle', 'two squares', "
        "'a circle and a square' or 'a red circle left of a blue square'"
    )


@cache
def captions(meaning: Meaning) -> tuple[str, ...]:
    """Every caption with this meaning, in a fixed order."""
    be = "are" if meaning.count > 1 and len(meaning.things) == 1 else "is"
    return tuple(frame.format(body, be=be) for frame in _FRAMES for body in dict.fromkeys(_bodies(meaning)))


def _bodies(meaning: Meaning) -> Iterator[str]:
    """The captions without the words around them."""
    for article in ("a", "one"):
        words = [_words(thing, article) for thing in meaning.things]
        if len(words) == 1:
            yield words[0]
        elif meaning.relation is None:
            yield f"{words[0]} and {words[1]}"
            yield f"{words[1]} and {words[0]}"
        else:
            for phrase, (relation, in_order) in _PHRASES.items():
                if relation == meaning.relation:
                    first, second = words if in_order else reversed(words)
                    yield f"{first} {phrase} {second}"


def _words(thing: Thing, article: str) -> str:
    number = {1: article, 2: "two", 3: "three"}[thing.count]
    return " ".join(filter(None, (number, thing.color, thing.shape + "s" * (thing.count > 1))))


@cache
def neighbours(meaning: Meaning) -> tuple[Meaning, ...]:
    """The meanings that differ from this one in one attribute: a colour, a shape, the count, the relation or order."""
    found = []
    for i, thing in enumerate(meaning.things):
        changed = [replace(thing, shape=shape) for shape in SHAPES]
        changed += [replace(thing, color=color) for color in COLORS if thing.color]
        changed += [replace(thing, count=count) for count in (1, 2, 3)]
        for other in changed:
            things = (*meaning.things[:i], other, *meaning.things[i + 1 :])
            found.append(meaning_of(things, meaning.relation))
    if meaning.relation:
        found += [meaning_of(things, r) for things in (meaning.things, meaning.things[::-1]) for r in RELATIONS]
    return tuple(other for other in dict.fromkeys(found) if other != meaning and other in all_meanings())


def holds(relation: str, first: tuple[float, float], second: tuple[float, float]) -> bool:
    """Whether a shape centred at `first` (x, y) lies so to `second`: the direction with the larger distance decides."""
    dx, dy = second[0] - first[0], second[1] - first[1]
    return dx > abs(dy) if relation == "left of" else dy > abs(dx)


def sample_scene(meaning: Meaning, rng: np.random.Generator) -> Scene:
    """A random scene that fits the meaning: free attributes are uniform, shapes keep a gap of 2 px."""
    things = [thing for thing in meaning.things for _ in range(thing.count)]
    while True:
        sizes = rng.uniform(MIN_SIZE, MAX_SIZE, len(things))
        half = sizes[:, None] / 2 + MARGIN
        centres = half + rng.random((len(things), 2)) * (SIZE - 2 * half)
        if _apart(centres, sizes) and _related(meaning.relation, centres):
            break
    colors = [thing.color or COLORS[rng.integers(len(COLORS))] for thing in things]
    rows = zip(things, colors, centres.tolist(), sizes.tolist(), strict=True)
    return tuple(Placed(thing.shape, color, x, y, size) for thing, color, (x, y), size in rows)


def _apart(centres: np.ndarray, sizes: np.ndarray) -> bool:
    """Whether the bounding boxes keep the gap in x or in y."""
    for i in range(len(sizes)):
        for j in range(i):
            if abs(centres[i] - centres[j]).max() < (sizes[i] + sizes[j]) / 2 + GAP:
                return False
    return True


def _related(relation: str | None, centres: np.ndarray) -> bool:
    """Whether the relation holds with some room to spare, so that nobody would argue about it."""
    if relation is None:
        return True
    return holds(relation, centres[0], centres[1]) and abs(centres[1] - centres[0]).min() < 7.0


_AXIS = np.arange(SIZE, dtype=np.float32) + 0.5


def coverage(shape: str, x: float, y: float, size: float) -> np.ndarray:
    """The share of each pixel that the shape covers, (32, 32) in [0, 1]: half a pixel of antialiasing at the edge."""
    dx, dy, half = np.abs(_AXIS - x)[None, :], (_AXIS - y)[:, None], size / 2
    match shape:
        case "circle":
            outside = np.hypot(dx, dy) - half
        case "square":
            outside = np.maximum(dx, np.abs(dy)) - half
        case "triangle":
            outside = np.maximum((2 * dx - dy - half) / 5**0.5, dy - half)
        case _:
            raise ValueError(f"shape must be one of {', '.join(SHAPES)}, got {shape!r}")
    return np.clip(0.5 - outside, 0.0, 1.0)


def render(scene: Scene) -> np.ndarray:
    """The picture of a scene: (32, 32, 3) float32 in [0, 1]."""
    picture = np.broadcast_to(np.array(BACKGROUND, np.float32), (SIZE, SIZE, 3))
    for placed in scene:
        cover = coverage(placed.shape, placed.x, placed.y, placed.size)[..., None]
        picture = picture * (1 - cover) + np.array(PALETTE[placed.color], np.float32) * cover
    return picture.astype(np.float32)
