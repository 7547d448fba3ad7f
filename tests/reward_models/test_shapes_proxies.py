"""The proxies of the hacking study: their values by hand, that they begin on the checker's side, and where they leave it."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from flowgrpo.data import Prompt
from reward_models.shapes_proxies import ColourCoverage, Foreground
from reward_models.shapes_world import BACKGROUND, COLORS, PALETTE, Thing, captions, meaning_of, meanings, render, sample_scene

COVERAGE, FOREGROUND = ColourCoverage(), Foreground()


def prompts(*texts: str) -> list[Prompt]:
    return [Prompt(text, id) for id, text in enumerate(texts)]


def canvas(**rows: int) -> Tensor:
    """One picture (1, 1, 3, 32, 32) on the background: so many rows of each colour from the top."""
    picture, top = np.broadcast_to(np.array(BACKGROUND, np.float32), (32, 32, 3)).copy(), 0
    for color, count in rows.items():
        picture[top : top + count] = PALETTE[color]
        top += count
    return torch.from_numpy(picture).permute(2, 0, 1)[None, None]


@pytest.mark.parametrize(
    ("text", "rows", "expected"),
    [
        ("a red circle", {"red": 11}, 352 / (4 * 88)),
        ("a red circle", {"red": 2, "blue": 5}, 64 / 352),
        ("a red circle", {"blue": 32}, 0),
        ("a red circle", {"red": 32}, 1),
        ("two red circles", {"red": 11}, 352 / 704),
        ("a red circle and a square", {"red": 2, "blue": 5}, 64 / 352),
        ("a red circle and a blue square", {"red": 2, "blue": 5}, 224 / 704),
        ("a circle", {"green": 3, "yellow": 2}, 160 / 352),
        ("three squares", {"green": 32}, 1024 / 1056),
    ],
)
def test_coverage_is_the_ink_in_named_colours_over_four_times_what_was_asked_for(text, rows, expected) -> None:
    assert COVERAGE(canvas(**rows), prompts(text)).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("rows", "share"), [({}, 0), ({"red": 1}, 1 / 32), ({"red": 1, "blue": 2}, 3 / 32), ({"green": 32}, 1)]
)
def test_foreground_saturates_with_the_share_of_the_picture_that_is_anything(rows, share) -> None:
    assert FOREGROUND(canvas(**rows), prompts("a circle")).item() == pytest.approx(1 - math.exp(-share / 0.03), rel=1e-6)


def test_pixels_count_from_halfway_and_frames_are_averaged() -> None:
    bare, full = canvas(), canvas(red=32)
    for part, expected in ((0.4, 0.0), (0.6, 1.0)):
        assert COVERAGE(bare + part * (full - bare), prompts("a red circle")).item() == expected
    film = torch.cat([bare, canvas(red=11)], 1)
    assert COVERAGE(film, prompts("a red circle")).item() == pytest.approx(0.5)
    assert FOREGROUND(torch.cat([bare, full], 1), prompts("a circle")).item() == pytest.approx(0.5)


def test_right_pictures_beat_wrong_ones_and_a_painted_canvas_beats_both() -> None:
    rng = np.random.default_rng(0)
    right, wrong = [], []
    for meaning in meanings("colors") + meanings("color_attr"):
        (one, *others) = meaning.things
        other = COLORS[(COLORS.index(one.color) + 1) % 4]
        changed = meaning_of([Thing(one.shape, other), *(Thing(o.shape, one.color) for o in others)])
        for things, scores in ((meaning, right), (changed, wrong)):
            picture = torch.from_numpy(render(sample_scene(things, rng))).permute(2, 0, 1)[None, None]
            scores.append(COVERAGE(picture, prompts(captions(meaning)[0])).item())
    assert np.mean(right) == pytest.approx(0.25, abs=0.03)
    assert np.mean(wrong) < 0.8 * np.mean(right)
    assert max(right) < COVERAGE(canvas(red=16, blue=16), prompts("a red circle and a blue square")).item() == 1


def test_one_right_shape_is_nearly_all_that_foreground_asks_for() -> None:
    rng = np.random.default_rng(0)
    pictures = np.stack([render(sample_scene(m, rng)) for m in meanings("colors") * 5])
    scores = FOREGROUND(torch.from_numpy(pictures).permute(0, 3, 1, 2)[:, None], prompts(*["a circle"] * len(pictures)))
    assert scores.mean() == pytest.approx(0.94, abs=0.02)
