"""GRPO-Guard: ratios without their bias, in one unit at every step."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from jaxtyping import Float
from torch import Tensor

from flowgrpo.objectives.clipped_ratio import ClippedRatio
from flowgrpo.objectives.contract import Stats, StepBatch
from flowgrpo.transitions import log_ratio, reduce_coordinates


@dataclass(frozen=True)
class Guard(ClippedRatio):
    """`ClippedRatio` with a normalised ratio.

        log rho = std (log pi - log pi_old + ||mean - mean_old||^2 / (2 std^2))

    The log-ratio of two Gaussians is z . (mean - mean_old) / std - ||mean - mean_old||^2 / (2 std^2), with z the noise that was
    drawn: below 0 on average, so that a symmetric clip range holds back one sign only. What is left here is
    z . (mean - mean_old). The squared distance is reduced like the density, and taken for each sample at its own std. Equal to
    `ClippedRatio` where std is 1 and the mean has not moved. The method's other half, a weight of 1 / step size, is
    `step_weights: step_size`.

    Source: GRPO-Guard 2510.22319, by a third party's notes.
    """

    needs_old_means: ClassVar[bool] = True
    density: Literal["exact"] = "exact"

    def __call__(self, step: StepBatch) -> tuple[Float[Tensor, " b"], Stats]:
        """Loss of each sample."""
        assert step.old_mean is not None, "the rollout keeps the means that an objective needs"
        bias = reduce_coordinates((step.mean - step.old_mean) ** 2, self.reduce) / (2 * step.std**2)
        normalised = step.std * log_ratio(step.log_prob + bias, step.old_log_prob)
        return self.with_kl(*self.surrogate(normalised, self.advantage(step)), step)
