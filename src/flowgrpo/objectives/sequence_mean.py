"""The geometric mean of a sample's ratios over its window, clipped on both sides."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from jaxtyping import Float
from torch import Tensor

from flowgrpo.objectives.clipped_ratio import ClippedRatio
from flowgrpo.objectives.contract import Stats, StepBatch
from flowgrpo.objectives.trajectory_ratio import differences
from flowgrpo.transitions import bounded


@dataclass(frozen=True)
class SequenceMean(ClippedRatio):
    """`ClippedRatio` with one ratio for the window, the geometric mean of those of its steps.

        rho = exp(mean over steps of (log pi - log pi_old))

    A sample is held back or not as a whole. At ratio 1 the gradient is that of `ClippedRatio`, and for a window of one step
    all of it is. The graphs of all steps are held at once.

    Source: the length-normalised ratio of GSPO, from memory; window steps in the place of tokens are ours.
    """

    scope: ClassVar[Literal["trajectory"]] = "trajectory"

    def __call__(self, steps: Sequence[StepBatch]) -> tuple[Float[Tensor, " b"], Stats]:
        """Loss of each sample from all its window steps."""
        difference = bounded(differences(steps).mean(0))
        return self.with_kl(*self.surrogate(difference, steps[-1].advantage), *steps)
