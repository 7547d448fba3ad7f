"""How sharp a picture is."""

from collections.abc import Sequence

from torch import Tensor

from flowgrpo.data import Prompt
from flowgrpo.media import luma


class Sharpness:
    """Variance of the Laplacian of luminance, on values 0..255, the mean over frames.

    L = y_left + y_right + y_above + y_below - 4 y,    s = var L over the inner pixels

    0 for a flat picture; it rises with detail and with noise alike, and with contrast. No upper end that pictures reach.

    Source: the focus measure of Pech-Pacheco et al., "Diatom autofocusing in brightfield microscopy", 2000.
    """

    unit: str = "variance of the Laplacian"
    range: tuple[float, float] | None = None
    takes = "media"
    needs_motion = False

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Scores (b,) of media (b, f, 3, h, w) in [0, 1], of at least 3 x 3 pixels; the prompts are not used."""
        if min(media.shape[-2:]) < 3:
            raise ValueError(f"sharpness needs pictures of at least 3 x 3 pixels, got {media.shape[-2]} x {media.shape[-1]}")
        y = 255 * luma(media)
        around = y[..., 1:-1, :-2] + y[..., 1:-1, 2:] + y[..., :-2, 1:-1] + y[..., 2:, 1:-1]
        return (around - 4 * y[..., 1:-1, 1:-1]).flatten(2).var(2, correction=0).mean(1)
