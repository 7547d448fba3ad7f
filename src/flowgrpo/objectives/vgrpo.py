"""V-GRPO: the denoising error over several levels as a variational likelihood."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from flowgrpo.objectives.contract import ForwardBatch, Stats
from flowgrpo.objectives.forward import Forward, adaptive_error
from flowgrpo.objectives.surrogate import Clipped
from flowgrpo.transitions import log_ratio

USUAL_CLIP_RANGE = 1e-3


@dataclass(frozen=True)
class VGrpo(Clipped, Forward):
    """The clipped surrogate of one ratio a sample, from its denoising errors at all levels of the iteration.

        rho = exp(L_old - L),    L = mean over levels of the `adaptive_error`

    Levels and noise are the group's, so that what differs between its samples is not how hard their draws are; `levels:
    stratified` with a count of 4 is its own. `soft` is its way to hold advantages back. The graphs of all levels are held at
    once. Source: V-GRPO 2604.23380, by a third party's notes; the clip range and the size of `soft` are ours.
    """

    scope: ClassVar[Literal["sample"]] = "sample"

    shared_noise: bool = True
    soft: float | None = 5.0

    def __post_init__(self) -> None:
        self.check_band(lambda: USUAL_CLIP_RANGE)
        self.check_forward()

    def __call__(self, batches: Sequence[ForwardBatch]) -> tuple[Float[Tensor, " b"], Stats]:
        """Loss of each sample from all its levels."""
        new = torch.stack([-adaptive_error(batch.new, batch) for batch in batches]).mean(0)
        old = torch.stack([-adaptive_error(batch.old, batch) for batch in batches if batch.old is not None]).mean(0)
        return self.with_kl(*self.surrogate(log_ratio(new, old), batches[0].advantage), *batches)
