"""The media contract, and pictures and films to and from files.

Media is a float32 tensor (b, f, 3, h, w) in [0, 1]; an image is a clip of one frame. Anything else is refused, or
converted by a call that says what it was.
"""

import json
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image, ImageSequence
from torch import Tensor

TOLERANCE = 1e-3  # rounding in half precision may leave [0, 1] by this much
LUMA = (0.299, 0.587, 0.114)
MAX_NAME_BYTES = 255
MAX_SLUG = 80
GAP = 2  # pixels between the cells of a contact sheet
FILM_CODECS = {".mp4": "libx264"}


def check_media(media: Any, *, finite: bool = False) -> None:
    """Refuse what is not media: ValueError says what must hold, what was got and which call converts it.

    Non-finite pixels pass unless `finite` is set: they mark a failed sample, which the scorer leaves out.
    """
    if not isinstance(media, Tensor):
        raise ValueError(f"media must be a tensor, got {type(media).__name__}; use from_pipeline_output or from_pil")
    if media.ndim != 5:
        raise ValueError(
            f"media must have 5 axes (b, f, 3, h, w), got shape {tuple(media.shape)}; "
            "a picture is a clip of one frame: media[:, None] makes (b, 1, 3, h, w) of (b, 3, h, w)"
        )
    if media.shape[2] != 3:
        raise ValueError(
            f"media must have 3 channels on axis 2 (b, f, 3, h, w), got {media.shape[2]} in {tuple(media.shape)}; "
            "move the channels there, or use media.from_pipeline_output"
        )
    _check_dtype(media)
    _check_range(media, finite)


def _check_dtype(media: Tensor) -> None:
    if media.dtype == torch.float32:
        return
    remedy = "call media.from_uint8" if media.dtype == torch.uint8 else "call .float() if its range is [0, 1]"
    raise ValueError(f"media must be float32 in [0, 1], got {media.dtype}; {remedy}")


def _check_range(media: Tensor, finite: bool) -> None:
    if media.numel() == 0:
        raise ValueError(f"media must not be empty, got shape {tuple(media.shape)}; leave the empty batch out")
    low, high = media.aminmax()
    if not (low.isfinite() and high.isfinite()):
        is_finite = media.isfinite()
        if finite:
            raise ValueError(
                f"media must be finite, got {int((~is_finite).sum())} NaN or infinite pixels; leave these samples out, "
                "and decode in float32 or bfloat16 rather than float16"
            )
        low, high = torch.where(is_finite, media, 0.5).aminmax()
    if low < -TOLERANCE or high > 1 + TOLERANCE:
        raise ValueError(
            f"media must lie in [0, 1], got values from {low:.4g} to {high:.4g}; "
            "use media.from_symmetric for [-1, 1], or divide by 255 and clamp"
        )


def from_uint8(pictures: np.ndarray | Tensor) -> Float[Tensor, " b f 3 h w"]:
    """Media of 8-bit pictures 0..255; layouts as in `from_pipeline_output`. Raises ValueError for another type."""
    clips = _clips(pictures)
    if clips.dtype != torch.uint8:
        raise ValueError(f"from_uint8 needs uint8, got {clips.dtype}; use from_pipeline_output for floats in [0, 1]")
    return clips.float() / 255


def from_symmetric(pictures: np.ndarray | Tensor) -> Float[Tensor, " b f 3 h w"]:
    """Media of pictures in [-1, 1], as decoders give them; what overshoots is clipped, NaN stays NaN.

    Layouts as in `from_pipeline_output`. Raises ValueError for integers.
    """
    return (_floats(pictures) / 2 + 0.5).clamp(0, 1)


def from_pipeline_output(pictures: Any) -> Float[Tensor, " b f 3 h w"]:
    """Media of what a diffusers pipeline returns for ``output_type="pt"`` or ``"np"``.

    A tensor has its channels before height and width: images (b, 3, h, w), films (b, f, 3, h, w). An array has them
    last: (b, h, w, 3), (b, f, h, w, 3). Raises ValueError for lists, other layouts, integers and other ranges.
    """
    media = _floats(pictures)
    check_media(media)
    return media.clamp(0, 1)


def from_pil(pictures: Sequence[Image.Image] | Sequence[Sequence[Image.Image]]) -> Float[Tensor, " b f 3 h w"]:
    """Media of a list of pictures (clips of one frame) or of a list of clips, each a list of pictures of one size."""
    clips = [[picture] if isinstance(picture, Image.Image) else list(picture) for picture in pictures]
    sizes = sorted({(len(clip), *picture.size[::-1]) for clip in clips for picture in clip})
    if len(sizes) != 1:
        raise ValueError(f"pictures must have one size and clips one length, got (f, h, w) {sizes}; convert each alone")
    return torch.stack([torch.stack([_from_pil(picture) for picture in clip]) for clip in clips])


def to_uint8(frames: Tensor) -> UInt8[Tensor, " *f h w 3"]:
    """Frames (*f, 3, h, w) in [0, 1] to 8 bits, channels last. Raises ValueError for NaN: a cast makes it black."""
    if not frames.isfinite().all():
        raise ValueError("pixels must be finite to become 8-bit, got NaN or infinite ones; leave this sample out")
    return (frames.detach().clamp(0, 1) * 255).round().to("cpu", torch.uint8).movedim(-3, -1).contiguous()


def luma(frames: Float[Tensor, "*b 3 h w"]) -> Float[Tensor, "*b h w"]:
    """Luminance of gamma-encoded red, green, blue by ITU-R BT.601, without a product that autocast would round."""
    return (frames * frames.new_tensor(LUMA).view(3, 1, 1)).sum(-3)


def as_shown(media: Float[Tensor, " b f 3 h w"]) -> Float[Tensor, " b f 3 h w"]:
    """Media rounded to 8 bits, as a file would show it; NaN and infinity stay.

    A picture of 8 bits that went through bfloat16 comes back as it was: its steps are half as wide.
    """
    return torch.where(media.isfinite(), (media.clamp(0, 1) * 255).round() / 255, media)


def save_image(frame: Float[Tensor, " 3 h w"], path: str | Path) -> None:
    """Write one frame; the suffix of `path` says how (.png, .jpg, .webp)."""
    Image.fromarray(to_uint8(frame).numpy()).save(path)


def load_image(path: str | Path) -> Float[Tensor, " 3 h w"]:
    """Read a picture as one frame in [0, 1]; transparency is dropped."""
    with Image.open(path) as picture:
        return _from_pil(picture)


@dataclass(frozen=True)
class Film:
    """What lies in a film file: frames, frames per second, and the size after padding."""

    num_frames: int
    fps: float
    height: int
    width: int


def save_video(clip: Float[Tensor, " f 3 h w"], path: str | Path, fps: int | float) -> Film:
    """Write a clip as .mp4 (H.264) or .gif and say what was written.

    Odd sizes are padded to even ones by repeating the last row or column. Raises ValueError for another suffix or rate,
    ImportError if no encoder is installed.
    """
    path, fps = Path(path), float(fps)
    if path.suffix not in {*FILM_CODECS, ".gif"}:
        raise ValueError(f"{path}: a film must end in .mp4 or .gif, got {path.suffix!r}; rename it")
    if not 0 < fps <= 240:
        raise ValueError(f"fps={fps:g} must be above 0 and at most 240 frames a second; correct it")
    frames = to_uint8(clip).numpy()
    frames = np.pad(frames, ((0, 0), (0, frames.shape[1] % 2), (0, frames.shape[2] % 2), (0, 0)), mode="edge")
    _write_gif(frames, path, fps) if path.suffix == ".gif" else _write_film(frames, path, fps)
    return Film(len(frames), fps, frames.shape[1], frames.shape[2])


def load_video(path: str | Path) -> tuple[Float[Tensor, " f 3 h w"], float]:
    """Read a film or GIF: its frames in [0, 1] and its frames per second."""
    path = Path(path)
    frames, fps = _read_gif(path) if path.suffix == ".gif" else _read_film(path)
    return torch.from_numpy(frames).movedim(-1, -3).float() / 255, fps


def grid(rows: Sequence[Sequence[Float[Tensor, " 3 h w"]]]) -> Float[Tensor, " 3 H W"]:
    """A contact sheet: one row of frames under the other, white between them and where a row is short.

    Raises ValueError if there is no frame or if the frames differ in size.
    """
    shapes = {tuple(frame.shape) for row in rows for frame in row}
    if len(shapes) != 1:
        raise ValueError(f"a contact sheet needs frames (3, h, w) of one size, got {sorted(shapes)}; resize them")
    _, height, width = shapes.pop()
    columns = max(len(row) for row in rows)
    sheet = torch.ones(3, len(rows) * (height + GAP) - GAP, columns * (width + GAP) - GAP)
    for top, row in zip(range(0, sheet.shape[1], height + GAP), rows, strict=True):
        for left, frame in zip(range(0, sheet.shape[2], width + GAP), row, strict=False):
            sheet[:, top : top + height, left : left + width] = frame
    return sheet


def safe_name(index: int, text: str, suffix: str = "") -> str:
    """A file name of a number and what ASCII letters and digits a text has, such as ``000012_a-red-circle.png``.

    At most 255 bytes, no separators; names of different numbers differ. Raises ValueError for a bad number or suffix.
    """
    if index < 0 or not re.fullmatch(r"[A-Za-z0-9._-]{0,32}", suffix):
        raise ValueError(f"a file name needs a number from 0 and a suffix such as '.png', got {index} and {suffix!r}")
    plain = unicodedata.normalize("NFKD", text[: 4 * MAX_SLUG]).encode("ascii", "ignore").decode()
    slug = re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-")[:MAX_SLUG].rstrip("-")
    name = f"{index:06d}_{slug}{suffix}" if slug else f"{index:06d}{suffix}"
    assert len(name.encode()) <= MAX_NAME_BYTES
    return name


def _clips(pictures: Any) -> Tensor:
    """Tensor (b, f, 3, h, w) of any dtype: tensors carry channels first, arrays last; four axes are images."""
    if not isinstance(pictures, np.ndarray | Tensor):
        raise ValueError(
            f"pictures must be a tensor or an array, got {type(pictures).__name__}; "
            "call the pipeline with output_type='pt', or use media.from_pil for a list of pictures"
        )
    wanted = "(b, 3, h, w) or (b, f, 3, h, w)" if isinstance(pictures, Tensor) else "(b, h, w, 3) or (b, f, h, w, 3)"
    channels = -3 if isinstance(pictures, Tensor) else -1
    if pictures.ndim not in (4, 5) or pictures.shape[channels] != 3:
        kind = "a tensor" if isinstance(pictures, Tensor) else "an array"
        raise ValueError(f"{kind} of pictures must be {wanted}, got {tuple(pictures.shape)}; permute its axes")
    clips = pictures if isinstance(pictures, Tensor) else torch.from_numpy(pictures).movedim(-1, -3)
    return clips if clips.ndim == 5 else clips[:, None]


def _floats(pictures: Any) -> Tensor:
    clips = _clips(pictures)
    if not clips.is_floating_point():
        raise ValueError(f"pictures must be floats here, got {clips.dtype}; use media.from_uint8 for 8-bit pictures")
    return clips.float()


def _from_pil(picture: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(picture.convert("RGB"))).movedim(-1, -3).float() / 255


def _write_film(frames: np.ndarray, path: Path, fps: float) -> None:
    import imageio.v3 as iio

    try:
        with iio.imopen(path, "w", plugin="pyav") as film:
            film.init_video_stream(FILM_CODECS[path.suffix], fps=fps, pixel_format="yuv420p")
            film.write(frames)
    except ImportError as error:
        raise ImportError("writing films needs PyAV: pip install 'imageio[pyav]', or save a .gif") from error


def _read_film(path: Path) -> tuple[np.ndarray, float]:
    import imageio.v3 as iio

    with iio.imopen(path, "r", plugin="pyav") as film:
        return film.read(), float(film.metadata()["fps"])


def _write_gif(frames: np.ndarray, path: Path, fps: float) -> None:
    """A GIF counts in hundredths of a second and merges equal neighbours, so its comment holds the true rate."""
    first, *rest = [Image.fromarray(frame) for frame in frames]
    comment = json.dumps({"fps": fps})
    first.save(path, save_all=True, append_images=rest, duration=_gif_delay(fps), loop=0, comment=comment.encode())


def _read_gif(path: Path) -> tuple[np.ndarray, float]:
    frames, durations = [], []
    with Image.open(path) as film:
        comment = film.info.get("comment", b"")
        for frame in ImageSequence.Iterator(film):
            frames.append(np.array(frame.convert("RGB")))
            durations.append(frame.info.get("duration") or 100)
    fps = json.loads(comment)["fps"] if comment.startswith(b'{"fps"') else 1000 / min(durations)
    repeats = [max(1, round(duration / _gif_delay(fps))) for duration in durations]
    return np.repeat(np.stack(frames), repeats, axis=0), float(fps)


def _gif_delay(fps: float) -> int:
    """Milliseconds a frame: whole hundredths, and at least two, below which viewers play slowly."""
    return 10 * max(2, round(100 / fps))
