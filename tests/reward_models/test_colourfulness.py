"""Colourfulness against its definition, pixel by pixel."""

import math
import statistics

import pytest
import torch

from reward_models.colourfulness import Colourfulness

B, F, H, W = 2, 3, 5, 7


def looped(frame: torch.Tensor) -> float:
    red, green, blue = (channel.flatten().tolist() for channel in 255 * frame.double())
    rg = [r - g for r, g in zip(red, green, strict=True)]
    yb = [(r + g) / 2 - b for r, g, b in zip(red, green, blue, strict=True)]
    spread = math.hypot(statistics.pstdev(rg), statistics.pstdev(yb))
    return spread + 0.3 * math.hypot(statistics.fmean(rg), statistics.fmean(yb))


def plain(*colour: float) -> torch.Tensor:
    return torch.tensor(colour).view(1, 1, 3, 1, 1).expand(1, 1, 3, H, W)


def test_the_score_is_its_definition_averaged_over_frames():
    media = torch.rand(B, F, 3, H, W)
    wanted = [statistics.fmean(looped(frame) for frame in clip) for clip in media]
    assert torch.allclose(Colourfulness()(media, []), torch.tensor(wanted), rtol=1e-4)


def test_grey_pictures_score_zero():
    assert Colourfulness()(torch.rand(B, F, 1, H, W).expand(B, F, 3, H, W), []).abs().max() < 1e-3


def test_a_plain_colour_scores_its_distance_from_grey():
    score = Colourfulness()(plain(1.0, 0.0, 0.0), [])
    assert score.item() == pytest.approx(0.3 * math.hypot(255, 127.5), rel=1e-5)


def test_only_the_colours_matter_not_where_they_are():
    media = torch.rand(1, 1, 3, H, W)
    shuffled = media.flatten(-2)[..., torch.randperm(H * W)].unflatten(-1, (H, W))
    assert torch.allclose(Colourfulness()(media, []), Colourfulness()(shuffled, []), rtol=1e-5)


def test_no_picture_leaves_the_declared_range():
    corners = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 3)
    pairs = torch.stack([torch.stack([a, b], 1) for a in corners for b in corners])  # halves of two pure colours
    scores = Colourfulness()(pairs.view(len(pairs), 1, 3, 1, 2), [])
    assert scores.max() <= Colourfulness.range[1]
    assert scores.max() > 0.8 * Colourfulness.range[1]
    assert scores.min() >= 0
