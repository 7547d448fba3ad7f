"""The media contract, its converters, and pictures and films on disk."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from flowgrpo import media
from flowgrpo.media import check_media

B, F, H, W = 2, 5, 6, 7
FILMS = [(".mp4", 7), (".mp4", 12.5), (".mp4", 24), (".gif", 7), (".gif", 8), (".gif", 24)]


def smooth_clip(frames: int, height: int, width: int) -> torch.Tensor:
    """Slow gradients that move, as encoders expect."""
    time, row, column = torch.meshgrid(
        torch.arange(frames) / 40, torch.linspace(0, 0.6, height), torch.linspace(0, 0.3, width), indexing="ij"
    )
    return torch.stack([row + time, column + 0.2 + 0 * time, 0.9 - row], dim=1).clamp(0, 1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.rand(B, 3, H, W), "5 axes .b, f, 3, h, w., got shape .2, 3, 6, 7.*media.:, None."),
        (torch.rand(B, F, 4, H, W), "3 channels on axis 2.*got 4"),
        (torch.rand(B, F, H, W, 3), "3 channels on axis 2.*got 6"),
        (torch.zeros(B, F, 3, H, W, dtype=torch.uint8), "float32.*got torch.uint8; call media.from_uint8"),
        (torch.zeros(B, F, 3, H, W, dtype=torch.bool), "float32.*got torch.bool"),
        (torch.zeros(B, F, 3, H, W, dtype=torch.float16), "float32.*got torch.float16"),
        (torch.rand(B, F, 3, H, W) * 2 - 1, "lie in .0, 1., got values from -0.*from_symmetric"),
        (torch.rand(B, F, 3, H, W) * 255, "lie in .0, 1.*divide by 255"),
        (torch.rand(0, F, 3, H, W), "must not be empty"),
        (np.zeros((B, F, 3, H, W), np.float32), "must be a tensor, got ndarray"),
    ],
)
def test_what_is_not_media_is_refused_with_the_remedy(wrong, message):
    with pytest.raises(ValueError, match=message):
        check_media(wrong)


def test_media_in_range_passes_with_rounding_but_no_more():
    check_media(torch.rand(B, F, 3, H, W))
    check_media(torch.full((B, 1, 3, H, W), 1 + 9e-4))
    with pytest.raises(ValueError, match=r"got values from 1\.002"):
        check_media(torch.full((B, 1, 3, H, W), 1.002))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_pixels_pass_unless_finiteness_is_asked_for_and_hide_no_other_fault(bad):
    clip = torch.rand(B, F, 3, H, W)
    clip[1, 2, 0, 3, 4] = bad
    check_media(clip)
    with pytest.raises(ValueError, match="finite, got 1 NaN or infinite"):
        check_media(clip, finite=True)
    clip[0] = 3
    with pytest.raises(ValueError, match=r"got values from .* to 3"):
        check_media(clip)


def test_pipeline_outputs_of_both_kinds_become_the_same_media():
    film = torch.rand(B, F, 3, H, W)
    assert torch.equal(media.from_pipeline_output(film), film)
    assert torch.equal(media.from_pipeline_output(film.movedim(2, -1).numpy()), film)
    picture = film[:, 0]
    assert torch.equal(media.from_pipeline_output(picture), film[:, :1])
    assert torch.equal(media.from_pipeline_output(picture.movedim(1, -1).numpy()), film[:, :1])


def test_converters_undo_what_was_done():
    clip = (torch.rand(B, F, 3, H, W) * 255).round() / 255
    assert torch.equal(media.from_uint8((clip * 255).round().to(torch.uint8)), clip)
    assert torch.equal(media.from_uint8(media.to_uint8(clip).numpy()), clip)
    assert torch.allclose(media.from_symmetric(clip * 2 - 1), clip, atol=1e-6)
    pictures = [[Image.fromarray(frame) for frame in sample] for sample in media.to_uint8(clip).numpy()]
    assert torch.equal(media.from_pil(pictures), clip)
    assert torch.equal(media.from_pil(pictures[0]), clip[0][:, None])


def test_half_precision_output_becomes_float32_and_keeps_its_failures():
    picture = torch.rand(B, 3, H, W).to(torch.bfloat16)
    picture[0, 0, 0, 0] = torch.nan
    converted = media.from_pipeline_output(picture)
    assert converted.dtype == torch.float32
    assert converted.isnan().sum() == 1


@pytest.mark.parametrize(
    ("convert", "wrong", "message"),
    [
        (media.from_pipeline_output, [[1]], "tensor or an array, got list; call the pipeline with output_type='pt'"),
        (media.from_pipeline_output, torch.rand(B, H, W, 3), r"a tensor of pictures must be \(b, 3, h, w\)"),
        (
            media.from_pipeline_output,
            np.zeros((B, 3, H, W), np.float32),
            r"an array of pictures must be \(b, h, w",
        ),
        (media.from_pipeline_output, torch.rand(3, H, W), "permute"),
        (media.from_pipeline_output, torch.zeros(B, 3, H, W, dtype=torch.uint8), "floats here.*media.from_uint8"),
        (media.from_pipeline_output, torch.rand(B, 3, H, W) * 2 - 1, "from_symmetric"),
        (media.from_symmetric, torch.zeros(B, 3, H, W, dtype=torch.int64), "floats here"),
        (media.from_uint8, torch.rand(B, 3, H, W), "needs uint8, got torch.float32"),
        (media.from_pil, [], "one size"),
        (media.from_pil, [Image.new("RGB", (4, 5)), Image.new("RGB", (5, 4))], "one size"),
    ],
)
def test_a_converter_refuses_what_it_is_not_for(convert, wrong, message):
    with pytest.raises(ValueError, match=message):
        convert(wrong)


def test_nan_never_becomes_a_black_pixel():
    frame = torch.rand(3, H, W)
    frame[0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="finite to become 8-bit"):
        media.to_uint8(frame)


def test_a_picture_on_disk_is_the_picture(tmp_path):
    frame = torch.rand(3, H, W)
    media.save_image(frame, tmp_path / "a.png")
    assert (media.load_image(tmp_path / "a.png") - frame).abs().max() <= 0.5 / 255 + 1e-6


@pytest.mark.parametrize(("suffix", "fps"), FILMS)
def test_a_film_read_back_has_its_frames_rate_size_and_colour(tmp_path, suffix, fps):
    clip = smooth_clip(17, 53, 55)
    film = media.save_video(clip, tmp_path / f"a{suffix}", fps)
    assert film == media.Film(num_frames=17, fps=float(fps), height=54, width=56)
    back, rate = media.load_video(tmp_path / f"a{suffix}")
    assert back.shape == (17, 3, 54, 56)
    assert rate == pytest.approx(fps, rel=1e-3)
    assert (back.mean((0, 2, 3)) - clip.mean((0, 2, 3))).abs().max() < 0.02
    assert (back[:, :, :53, :55] - clip).abs().mean() < 0.03


@pytest.mark.parametrize("suffix", [".mp4", ".gif"])
def test_a_still_film_keeps_its_length(tmp_path, suffix):
    media.save_video(smooth_clip(1, 32, 32).expand(7, -1, -1, -1), tmp_path / f"still{suffix}", fps=24)
    back, fps = media.load_video(tmp_path / f"still{suffix}")
    assert (len(back), fps) == (7, 24)


def test_a_gif_of_another_program_gets_its_rate_from_its_delays(tmp_path):
    pictures = [Image.fromarray(frame) for frame in media.to_uint8(smooth_clip(3, 8, 8)).numpy()]
    pictures[0].save(tmp_path / "a.gif", save_all=True, append_images=pictures[1:], duration=50)
    clip, fps = media.load_video(tmp_path / "a.gif")
    assert (len(clip), fps) == (3, 20)


def test_an_unknown_kind_of_film_or_rate_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must end in .mp4 or .gif, got '.mov'"):
        media.save_video(smooth_clip(2, 8, 8), tmp_path / "a.mov", 8)
    with pytest.raises(ValueError, match="fps=0 must be above 0"):
        media.save_video(smooth_clip(2, 8, 8), tmp_path / "a.gif", 0)


def test_a_missing_encoder_is_named(tmp_path, monkeypatch):
    import imageio.v3 as iio

    def fail(*_args, **_kwargs):
        raise ImportError("no av")

    monkeypatch.setattr(iio, "imopen", fail)
    with pytest.raises(ImportError, match="needs PyAV: pip install"):
        media.save_video(smooth_clip(2, 8, 8), tmp_path / "a.mp4", 8)


def test_a_contact_sheet_holds_every_frame_at_its_place():
    frames = torch.rand(5, 3, H, W) * 0.5
    sheet = media.grid([list(frames[:3]), list(frames[3:])])
    assert sheet.shape == (3, 2 * H + media.GAP, 3 * W + 2 * media.GAP)
    for number, frame in enumerate(frames):
        top, left = number // 3 * (H + media.GAP), number % 3 * (W + media.GAP)
        assert torch.equal(sheet[:, top : top + H, left : left + W], frame)
    assert (sheet[:, -H:, -W:] == 1).all()


def test_a_contact_sheet_of_different_sizes_or_of_nothing_is_refused():
    with pytest.raises(ValueError, match="one size"):
        media.grid([[torch.rand(3, H, W), torch.rand(3, W, H)]])
    with pytest.raises(ValueError, match="one size"):
        media.grid([[]])


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**9), st.text(max_size=5000))
def test_a_file_name_is_short_plain_and_starts_with_its_number(index, text):
    name = media.safe_name(index, text, ".png")
    assert len(name.encode()) <= 255
    assert name.isascii()
    assert not set(name) & set('/\\:\0*?"<>| \n')
    assert int(name.removesuffix(".png").split("_")[0]) == index
    assert name.endswith(".png")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("A red circle, left of…", "000012_a-red-circle-left-of.png"),
        ("../../x", "000012_x.png"),
        ("Éclair \u202e au café", "000012_eclair-au-cafe.png"),
        ("🙂\0", "000012.png"),
        ("x" * 5000, "000012_" + "x" * 80 + ".png"),
    ],
)
def test_a_file_name_keeps_what_is_readable(text, name):
    assert media.safe_name(12, text, ".png") == name


@pytest.mark.parametrize(("index", "suffix"), [(-1, ".png"), (1, "/../x"), (1, "x" * 300)])
def test_a_file_name_with_a_bad_number_or_suffix_is_refused(index, suffix):
    with pytest.raises(ValueError, match="number from 0"):
        media.safe_name(index, "x", suffix)
