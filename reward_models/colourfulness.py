"""How colourful a picture is: a reward that needs no weights, easy to raise and easy to see."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flowgrpo.data import Prompt


class Colourfulness:
    """Spread and distance from grey of the two colour-opponent axes, on values 0..255, the mean over frames.

    rg = R - G,    yb = (R + G) / 2 - B
    M = sqrt(var rg + var yb) + 0.3 sqrt((mean rg)^2 + (mean yb)^2)

    0 for grey pictures; their authors call 15 slightly, 33 moderately and 59 quite colourful; none exceeds 298.

    Source: D. Hasler and S. Suesstrunk, "Measuring colourfulness in natural images", 2003, the measure for RGB.
    """

    unit: str = "M"
    range: tuple[float, float] | None = (0.0, 298.0)
    takes = "media"
    needs_motion = False

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Scores (b,) of media (b, f, 3, h, w) in [0, 1]; the prompts are not used."""
        red, green, blue = (255 * media).flatten(-2).unbind(2)
        axes = torch.stack([red - green, (red + green) / 2 - blue])
        spread = axes.var(-1, correction=0).sum(0).sqrt()
        distance = axes.mean(-1).square().sum(0).sqrt()
        return (spread + 0.3 * distance).mean(1)
