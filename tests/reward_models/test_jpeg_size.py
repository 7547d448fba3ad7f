"""The size of pictures as JPEG."""

import pytest
import torch
from PIL import Image

from flowgrpo.media import to_uint8
from reward_models.jpeg_size import JpegSize


def media() -> torch.Tensor:
    """A flat clip, a gradient, and noise."""
    noise = torch.rand(2, 3, 40, 56, generator=torch.Generator().manual_seed(0))
    gradient = torch.linspace(0, 1, 56).expand(2, 3, 40, 56)
    return torch.stack([torch.full_like(noise, 0.5), gradient, noise])


def test_the_score_is_the_size_of_the_file_averaged_over_frames(tmp_path):
    scores = JpegSize("incompressible")(media(), [])
    for clip, score in zip(media(), scores.tolist(), strict=True):
        sizes = []
        for frame in to_uint8(clip).numpy():
            Image.fromarray(frame).save(tmp_path / "a.jpg", quality=95)
            sizes.append((tmp_path / "a.jpg").stat().st_size)
        assert score == pytest.approx(sum(sizes) / len(sizes) / 1000)


def test_noise_is_larger_than_a_gradient_and_a_gradient_larger_than_nothing():
    flat, gradient, noise = JpegSize("incompressible")(media(), []).tolist()
    assert 0 < flat < gradient < noise


def test_the_two_signs_are_opposites_and_small_files_win_by_default():
    assert torch.equal(JpegSize()(media(), []), -JpegSize("incompressible")(media(), []))
    assert JpegSize()(media(), []).argmax() == 0


def test_an_unknown_sign_is_refused():
    with pytest.raises(ValueError, match="sign must be 'compressible' or 'incompressible', got 'small'"):
        JpegSize("small")  # type: ignore[arg-type]
