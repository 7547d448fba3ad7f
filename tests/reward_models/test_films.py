"""Rewards of films that need no optical flow, and of pictures on a film's frames: against their formulas."""

import math
from pathlib import Path

import pytest
import torch

from flowgrpo.data import Prompt
from reward_models.flicker import Flicker
from reward_models.frames import Frames, places
from reward_models.sharpness import Sharpness
from reward_models.temporal_consistency import TemporalConsistency

CLIP = str(Path(__file__).parents[2] / "assets" / "shapes" / "clip")
PROMPTS = [Prompt("a film", 0)]


def lit(*levels, size=16):
    """A grey film whose frames have these levels."""
    return torch.tensor(levels).view(1, -1, 1, 1, 1).expand(1, len(levels), 3, size, size).float()


def noise(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def test_flicker_is_the_light_that_comes_and_goes():
    score = Flicker(gain=2.0)
    assert score(lit(0.5, 0.5, 0.5, 0.5), PROMPTS).tolist() == [1.0]
    assert score(lit(0.2, 0.4, 0.6, 0.8), PROMPTS).item() == pytest.approx(1.0, abs=1e-6)  # a fade
    assert score(lit(0.5, 0.6, 0.5, 0.6), PROMPTS).item() == pytest.approx(1 - 2 * 0.1, abs=1e-6)
    assert score(lit(0.0, 1.0, 0.0), PROMPTS).tolist() == [0.0]
    assert score(lit(0.0, 1.0), PROMPTS).isnan().all()
    with pytest.raises(ValueError, match="block must be at least 1 and gain above 0"):
        Flicker(block=0)


def test_noise_within_a_block_is_averaged_and_blocks_are_those_of_the_formula():
    clip = noise(1, 4, 3, 10, 12)
    luma = (clip * torch.tensor([0.299, 0.587, 0.114]).view(1, 1, 3, 1, 1)).sum(2)[0]
    blocks = torch.stack([luma[:, :8, :8].mean((1, 2)), luma[:, :8, 8:].mean((1, 2)),
                          luma[:, 8:, :8].mean((1, 2)), luma[:, 8:, 8:].mean((1, 2))], 1)  # fmt: skip
    wanted = (
        1 - 4 * ((blocks[1] - (blocks[0] + blocks[2]) / 2).abs() + (blocks[2] - (blocks[1] + blocks[3]) / 2).abs()).mean() / 2
    )
    assert Flicker()(clip, PROMPTS).item() == pytest.approx(float(wanted), abs=1e-5)
    assert Flicker(block=1)(clip, PROMPTS) < Flicker()(clip, PROMPTS)


def test_sharpness_is_the_variance_of_the_laplacian():
    clip = noise(2, 2, 3, 6, 7)
    scores = Sharpness()(clip, PROMPTS * 2)
    kernel = torch.tensor([[0.0, 1, 0], [1, -4, 1], [0, 1, 0]])
    luma = 255 * (clip * torch.tensor([0.299, 0.587, 0.114]).view(1, 1, 3, 1, 1)).sum(2)
    wanted = torch.nn.functional.conv2d(luma.flatten(0, 1)[:, None], kernel[None, None]).flatten(1).var(1, correction=0)
    torch.testing.assert_close(scores, wanted.view(2, 2).mean(1))
    assert Sharpness()(lit(0.3), PROMPTS).item() == pytest.approx(0, abs=1e-6)
    blurred = torch.nn.functional.avg_pool2d(clip.flatten(0, 1), 3, 1, 1).view_as(clip)
    assert (Sharpness()(blurred, PROMPTS * 2) < scores).all()
    with pytest.raises(ValueError, match="at least 3 x 3 pixels, got 2 x 5"):
        Sharpness()(noise(1, 1, 3, 2, 5), PROMPTS)


def test_consistency_is_the_similarity_of_neighbours_and_of_the_first():
    model = TemporalConsistency(CLIP)
    clip = noise(2, 4, 3, 32, 32)
    e = model.clip.embed_frames(clip)
    for i, score in enumerate(model(clip, PROMPTS * 2).tolist()):
        pairs = [(float(e[i, t] @ e[i, t + 1]) + float(e[i, 0] @ e[i, t + 1])) / 2 for t in range(3)]
        assert score == pytest.approx(sum(pairs) / 3, abs=1e-5)
    alone = TemporalConsistency(CLIP, first=False)(clip, PROMPTS * 2)
    assert alone[0].item() == pytest.approx(sum(float(e[0, t] @ e[0, t + 1]) for t in range(3)) / 3, abs=1e-5)
    still = clip[:, :1].expand(-1, 4, -1, -1, -1)
    torch.testing.assert_close(model(still, PROMPTS * 2), torch.ones(2))
    assert (model(clip, PROMPTS * 2) < 1).all()


def test_places_are_even_over_time_and_come_once():
    assert places(9, 3) == [0, 4, 8]
    assert places(9, 1) == [4]
    assert places(3, 8) == [0, 1, 2]
    assert places(81, 5) == [0, 20, 40, 60, 80]
    assert len(set(places(50, 49))) == 49


class Level:
    """The level of a grey picture; NaN for one that is black."""

    unit = "level"
    range = (0.0, 1.0)

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def __call__(self, media, prompts):
        assert media.shape[1] == 1
        assert len(media) == len(prompts)
        level = media.mean((1, 2, 3, 4))
        return torch.where(level > 0, self.factor * level, torch.nan)


@pytest.mark.parametrize(("reduce", "wanted"), [("mean", 0.5), ("min", 0.2), ("median", 0.4), ("last", 0.9)])
def test_frames_are_scored_one_by_one(reduce, wanted):
    model = Frames("tests.reward_models.test_films:Level", count=3, reduce=reduce)
    clips = torch.cat([lit(0.2, 0.0, 0.4, 0.0, 0.9), lit(0.0, 0.1, 0.0, 0.1, 0.0)])
    scores = model(clips, PROMPTS * 2)
    assert scores[0].item() == pytest.approx(wanted, abs=1e-6)
    assert math.isnan(scores[1])
    assert (model.unit, model.range) == ("level", (0.0, 1.0))
    halved = Frames("tests.reward_models.test_films:Level", {"factor": 0.5}, 3, reduce)
    assert halved(clips, PROMPTS * 2)[0].item() == pytest.approx(wanted / 2, abs=1e-6)


def test_the_frame_rate_does_not_count_for_chosen_frames():
    slow, fast = lit(*torch.linspace(0.1, 0.9, 9).tolist()), lit(*torch.linspace(0.1, 0.9, 33).tolist())
    model = Frames("tests.reward_models.test_films:Level", count=5)
    torch.testing.assert_close(model(slow, PROMPTS), model(fast, PROMPTS))
    with pytest.raises(ValueError, match="must be an import path"):
        Frames("nothing")
    with pytest.raises(ValueError, match="count must be at least 1"):
        Frames("tests.toys:redness", count=0)
    with pytest.raises(ValueError, match="reduce must be one of mean, min, median, last"):
        Frames("tests.toys:redness", reduce="max")  # pyright: ignore[reportArgumentType]
