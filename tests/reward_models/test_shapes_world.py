"""The shapes world: its language, its pictures, and the prompt sets made from it."""

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from reward_models.shapes_world import (
    GAP,
    KINDS,
    SIZE,
    Thing,
    all_meanings,
    captions,
    holds,
    meaning_of,
    meanings,
    neighbours,
    parse,
    render,
    sample_scene,
)

PROMPTS = Path(__file__).parents[2] / "assets" / "shapes" / "prompts"
SETS = ("train", "validation", "heldout")


def rows_of(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (PROMPTS / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", KINDS)
def test_every_caption_parses_to_its_meaning_and_no_two_meanings_share_one(kind: str) -> None:
    seen: set[str] = set()
    for meaning in meanings(kind):
        assert meaning.kind == kind
        for caption in captions(meaning):
            assert parse(caption) == meaning
            assert caption not in seen
            assert len(caption.split()) <= 20
            seen.add(caption)


def test_case_spaces_and_a_full_stop_do_not_matter() -> None:
    assert parse(" A red  Circle ABOVE a blue square. ") == parse("a blue square below a red circle")


def test_left_and_right_of_are_one_meaning_with_the_things_exchanged() -> None:
    circle, square = Thing("circle"), Thing("square")
    assert meaning_of([circle, square], "left of") == meaning_of([square, circle], "right of")
    assert meaning_of([circle, square], "left of") != meaning_of([square, circle], "left of")


@pytest.mark.parametrize(
    "caption",
    [
        "",
        "a purple circle",
        "two circle",
        "a circles",
        "four squares",
        "a circle and a circle",
        "a red circle and a blue circle and a square",
        "a circle beside a square",
        "a red circle left of a square",
    ],
)
def test_captions_outside_the_grammar_are_refused_with_an_example(caption: str) -> None:
    with pytest.raises(ValueError, match="write for example"):
        parse(caption)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="kind must be one of"):
        meanings("texture")


def test_neighbours_differ_and_are_neighbours_of_each_other() -> None:
    for kind in KINDS:
        for meaning in meanings(kind):
            assert neighbours(meaning)
            for other in neighbours(meaning):
                assert other != meaning
                assert other in all_meanings()
                assert meaning in neighbours(other)


def test_scenes_fit_their_meaning_and_keep_the_gap() -> None:
    rng = np.random.default_rng(0)
    for kind in KINDS:
        for meaning in meanings(kind)[:20]:
            scene = sample_scene(meaning, rng)
            wanted = [thing for thing in meaning.things for _ in range(thing.count)]
            assert [placed.shape for placed in scene] == [thing.shape for thing in wanted]
            assert all(thing.color in (None, placed.color) for placed, thing in zip(scene, wanted, strict=True))
            if meaning.relation:
                assert holds(meaning.relation, (scene[0].x, scene[0].y), (scene[1].x, scene[1].y))
            for i, a in enumerate(scene):
                assert a.size / 2 <= min(a.x, a.y)
                assert max(a.x, a.y) <= SIZE - a.size / 2
                for b in scene[:i]:
                    assert max(abs(a.x - b.x), abs(a.y - b.y)) >= (a.size + b.size) / 2 + GAP


def test_exactly_one_direction_holds_between_two_places() -> None:
    rng = np.random.default_rng(1)
    for first, second in rng.uniform(0, SIZE, (100, 2, 2)):
        pairs = ((first, second), (second, first))
        assert sum(holds(name, tuple(a), tuple(b)) for name in ("left of", "above") for a, b in pairs) == 1


def test_pictures_are_float32_in_the_unit_interval_and_the_same_seed_draws_the_same() -> None:
    meaning = parse("three red triangles")
    first, second = (render(sample_scene(meaning, np.random.default_rng(3))) for _ in range(2))
    assert first.shape == (SIZE, SIZE, 3)
    assert first.dtype == np.float32
    assert first.min() >= 0
    assert first.max() <= 1
    assert np.array_equal(first, second)


def test_the_prompt_sets_share_no_caption_and_beyond_single_objects_no_meaning() -> None:
    captions_of = {name: {row["prompt"] for row in rows_of(name)} for name in SETS}
    meanings_of = {name: {parse(text) for text in texts} for name, texts in captions_of.items()}
    for one, other in combinations(SETS, 2):
        assert not captions_of[one] & captions_of[other]
        assert {meaning.kind for meaning in meanings_of[one] & meanings_of[other]} <= {"single_object"}
    for name in SETS:
        assert {meaning.kind for meaning in meanings_of[name]} == set(KINDS)


@pytest.mark.parametrize("name", ["validation", "heldout"])
def test_the_evaluation_sets_hold_every_kind_and_are_varied(name: str) -> None:
    rows = rows_of(name)
    for kind in KINDS:
        some = [row for row in rows if row["kind"] == kind]
        assert len(some) >= 0.07 * len(rows)
        assert all(parse(row["prompt"]).kind == kind for row in some)
        assert len({row["prompt"] for row in some}) > 1
    assert len(rows) == {"validation": 600, "heldout": 1000}[name]
    assert name == "validation" or len({row["prompt"] for row in rows}) >= 300
