"""How steady the light of a film is."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flowgrpo.data import Prompt
from flowgrpo.media import luma


class Flicker:
    """1 less the mean change of luminance that comes and goes within three frames.

    y_t = luma of frame t, averaged over blocks of `block` pixels
    s   = 1 - gain * mean over t and blocks of |y_t - (y_{t-1} + y_{t+1}) / 2|, at least 0

    The second difference leaves a steady change of light, a fade, alone. Blocks average over what small motions move; large
    objects that jump still count, so measure motion beside it. 1 for a still film and for a steady fade; films of two frames
    have no second difference and get NaN, pictures are refused.

    Source: ours; VBench's temporal flickering (2311.17982) takes first differences, which motion raises too.
    """

    unit: str = "steadiness"
    range: tuple[float, float] | None = (0.0, 1.0)
    takes = "media"
    needs_motion = True

    def __init__(self, block: int = 8, gain: float = 4.0) -> None:
        if block < 1 or not gain > 0:
            raise ValueError(f"block must be at least 1 and gain above 0, got {block} and {gain}")
        self.block, self.gain = block, gain

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Scores (b,) of media (b, f, 3, h, w) in [0, 1]; the prompts are not used."""
        if media.shape[1] < 3:
            return torch.full((len(media),), torch.nan)
        block = min(self.block, *media.shape[-2:])
        blocks = torch.nn.functional.avg_pool2d(luma(media), block, ceil_mode=True)
        come_and_gone = (blocks[:, 1:-1] - (blocks[:, :-2] + blocks[:, 2:]) / 2).abs()
        return (1 - self.gain * come_and_gone.flatten(1).mean(1)).clamp(min=0)
