"""The embedded rewards give a picture one score, whatever its type, batch or layout; what is no media is refused."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from flowgrpo.data import Prompt
from flowgrpo.media import as_shown, from_pipeline_output, from_symmetric, from_uint8, to_uint8
from flowgrpo.scoring import Component, Scorer
from reward_models.aesthetic import Aesthetic
from reward_models.clip_score import ClipScore
from reward_models.colourfulness import Colourfulness
from reward_models.shapes import Shapes
from reward_models.shapes_world import KINDS, captions, meanings, render, sample_scene

ASSETS = Path(__file__).parents[1] / "assets" / "shapes"
TOLERANCE = 1e-3  # of a point, or of the range where a reward has one that is wider than 1
NAMES = ("shapes", "clip", "aesthetic", "colourful")


@cache
def models():
    """The rewards of the embedded world and how wide the range of each is."""
    clip = str(ASSETS / "clip")
    rewards = (Shapes(), ClipScore(clip), Aesthetic(clip, str(ASSETS / "aesthetic" / "head.safetensors")), Colourfulness())
    return dict(zip(NAMES, rewards, strict=True))


@cache
def pictures() -> tuple[torch.Tensor, list[Prompt]]:
    """16 pictures of 8 bits (16, 1, 3, 32, 32), a third of them noisy, and captions, half of which are another picture's."""
    rng = np.random.default_rng(3)
    choices = [meanings(KINDS[i % len(KINDS)]) for i in range(16)]
    shown = [choice[7 * i % len(choice)] for i, choice in enumerate(choices)]
    noise = [rng.normal(0, 0.1 * (i % 3 == 0), (32, 32, 3)) for i in range(16)]
    clean = [render(sample_scene(meaning, rng)) for meaning in shown]
    media = from_uint8((255 * np.clip(np.stack(clean) + np.stack(noise), 0, 1)).round().astype(np.uint8))
    said = [shown[i] if i % 2 else shown[(i + 5) % 16] for i in range(16)]
    return media, [Prompt(captions(meaning)[0], i) for i, meaning in enumerate(said)]


def scores(media, prompts, batch_size=16):
    return Scorer([Component(name, model, 1.0, batch_size) for name, model in models().items()])(media, prompts).values


def assert_same(got, wanted):
    for column, (name, model) in enumerate(models().items()):
        low, high = model.range
        gap = (got[:, column] - wanted[:, column]).abs().max().item() / max(1.0, high - low)
        assert gap <= TOLERANCE, (name, gap)


def test_the_scores_differ_between_pictures_so_that_equal_ones_mean_something():
    values = scores(*pictures())
    assert values.isfinite().all()
    assert (values.std(0) > torch.tensor([0.1, 0.01, 0.1, 1.0])).all(), values.std(0)


@pytest.mark.parametrize("batch_size", [1, 5])
def test_a_picture_has_one_score_whatever_its_batch_and_neighbours(batch_size):
    media, prompts = pictures()
    whole, order = scores(media, prompts), list(reversed(range(16)))
    assert_same(scores(media, prompts, batch_size), whole)
    assert_same(scores(media[order], [prompts[i] for i in order], batch_size), whole[order])


def test_the_same_numbers_have_one_score_whatever_their_type_and_range_were():
    media, prompts = pictures()
    coarse = media.bfloat16()
    assert_same(scores(from_pipeline_output(coarse), prompts), scores(coarse.float(), prompts))
    assert_same(scores(from_symmetric(2 * media - 1), prompts), scores(media, prompts))


@pytest.mark.parametrize(
    "rounded",
    [
        lambda m: from_pipeline_output(m.bfloat16()),
        lambda m: from_symmetric((2 * m - 1).bfloat16()),
        lambda m: from_uint8(to_uint8(m).movedim(-1, -3)),
    ],
)
def test_a_picture_has_one_score_as_float32_bfloat16_and_as_a_file(rounded):
    media, prompts = pictures()
    assert torch.equal(as_shown(rounded(media)), media)
    assert_same(scores(rounded(media), prompts), scores(media, prompts))


def test_models_see_what_a_file_shows():
    media, prompts = torch.rand(2, 1, 3, 4, 4), pictures()[1][:2]
    seen = []
    recorder = Component("recorder", lambda samples, own: seen.append(samples) or samples.mean((1, 2, 3, 4)), 1.0)
    Scorer([recorder])(media, prompts)
    assert torch.equal(seen[0], from_uint8(to_uint8(media).movedim(-1, -3)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.bfloat16(), r"must be float32 in \[0, 1\], got torch.bfloat16; call .float\(\)"),
        (lambda m: (m * 255).byte(), "got torch.uint8; call media.from_uint8"),
        (lambda m: 2 * m - 1, r"must lie in \[0, 1\], got values from -.* to .*use media.from_symmetric"),
        (lambda m: m * 255, r"must lie in \[0, 1\], got values .*divide by 255"),
        (lambda m: m[:, 0], r"must have 5 axes \(b, f, 3, h, w\), got shape \(16, 3, 32, 32\)"),
        (lambda m: m.movedim(2, -1), r"must have 3 channels on axis 2.*got 32 in \(16, 1, 32, 32, 3\)"),
        (lambda m: m.transpose(1, 2), r"must have 3 channels on axis 2.*got 1 in \(16, 3, 1, 32, 32\)"),
    ],
)
def test_other_types_ranges_and_layouts_are_refused_with_the_call_that_converts_them(change, message):
    media, prompts = pictures()
    seen = []
    scorer = Scorer([Component("recorder", lambda samples, own: seen.append(own), 1.0)])
    with pytest.raises(ValueError, match=message):
        scorer(change(media), prompts)
    assert seen == []
