"""How well a picture compresses: the classic first reward to try, for it rises within minutes if training works."""

import io
from collections.abc import Sequence
from typing import Literal

import torch
from PIL import Image
from torch import Tensor

from flowgrpo.data import Prompt
from flowgrpo.media import to_uint8

QUALITY = 95


class JpegSize:
    """Size as a JPEG of quality 95, in kB (1000 bytes), the mean over frames.

    "incompressible" rewards large files (detail, noise); "compressible" rewards small ones: minus the size.

    Source: DDPO, 2305.13301 (compressibility and incompressibility as tasks).
    """

    unit: str = "kB"
    range: tuple[float, float] | None = None
    takes = "media"
    needs_motion = False

    def __init__(self, sign: Literal["compressible", "incompressible"] = "compressible") -> None:
        if sign not in ("compressible", "incompressible"):
            raise ValueError(f"sign must be 'compressible' or 'incompressible', got {sign!r}")
        self.factor = -1.0 if sign == "compressible" else 1.0

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Scores (b,) of media (b, f, 3, h, w) in [0, 1]; the prompts are not used."""
        sizes = [[_jpeg_kb(frame) for frame in clip] for clip in media]
        return self.factor * torch.tensor(sizes).mean(1)


def _jpeg_kb(frame: Tensor) -> float:
    buffer = io.BytesIO()
    Image.fromarray(to_uint8(frame).numpy()).save(buffer, "JPEG", quality=QUALITY)
    return len(buffer.getvalue()) / 1000
