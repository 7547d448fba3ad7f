"""Reward models that fail in ways that a test asks for."""

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from flowgrpo.data import Prompt
from tests.toys import redness


class Silent:
    """Has no score for the samples of some prompts, nor for those redder than `above`; raises if `raising`, else NaN."""

    def __init__(self, prompts: list[str] | None = None, above: float = 2.0, raising: bool = False) -> None:
        self.prompts, self.above, self.raising = prompts or [], above, raising

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        scores = media[:, :, 1].mean((1, 2, 3))
        lost = torch.tensor([prompt.text in self.prompts for prompt in prompts]) | (redness(media, prompts) > self.above)
        if self.raising and lost.any():
            raise OSError("no connection")
        return scores.masked_fill(lost, torch.nan)


class OnlyFor:
    """Applies to one prompt alone; the mean of green."""

    def __init__(self, prompt: str) -> None:
        self.prompt = prompt

    def applies(self, prompt: Prompt) -> bool:
        return prompt.text == self.prompt

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        assert all(prompt.text == self.prompt for prompt in prompts)
        return media[:, :, 1].mean((1, 2, 3))


class DownInProcess:
    """Raises in one of the processes of a run; elsewhere the mean of green."""

    def __init__(self, rank: int) -> None:
        self.is_down = os.environ.get("RANK", "0") == str(rank)

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        if self.is_down:
            raise OSError("no connection")
        return media[:, :, 1].mean((1, 2, 3))


class Latents:
    """The mean of the clean latents of each sample, as they are."""

    takes = "latents"

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        return media.flatten(1).mean(1)


class Redder:
    """A judge who prefers the redder sample."""

    compares = True

    def __call__(self, pairs: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        red = pairs[:, :, :, 0].mean((2, 3, 4))
        return 0.5 + 0.5 * (red[:, 0] - red[:, 1]).sign()
