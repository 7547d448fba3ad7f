"""The clipped ratio of each window step, with KL to the reference."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from flowgrpo.objectives.contract import Stats, StepBatch
from flowgrpo.objectives.surrogate import Clipped, Regularised
from flowgrpo.transitions import Density, Reduce, log_ratio

CLIP_RANGES: Mapping[tuple[Density, Reduce], float] = {("exact", "mean"): 1e-4, ("exact", "sum"): 0.2, ("unit", "mean"): 1e-5}


@dataclass(frozen=True)
class ClippedRatio(Clipped, Regularised):
    """The surrogate of GRPO for one window step.

        -min(rho A, clip(rho, 1 - clip_range, 1 + clip_range) A) + kl KL,    rho = exp(log pi - log pi_old)

    The density is a mean over coordinates by default, so rho is a geometric mean per coordinate and clip ranges are small.
    A clip_range that is not given becomes the usual one: 1e-4 for a mean, 0.2 for a sum, 1e-5 for the mean of the "unit"
    density, which leaves the variance out (`Gaussian.log_density`). Other clips are in `Clipped`, KL is in `Regularised`.

    Source: MixGRPO 2507.21802 v7, eq. 9 (clip 1e-4, no KL for FLUX; 0.001 for SD3.5-M). The "unit" density is that of
    Flow-CPS's released code, 2509.05952; its clip range here, a tenth of the other, is ours.
    """

    def __post_init__(self) -> None:
        self.check_band(self._usual_clip_range)
        self.check_regularised()

    def _usual_clip_range(self) -> float:
        usual = CLIP_RANGES.get((self.density, self.reduce))
        if usual is None:
            raise ValueError(
                f"objective.clip_range must be given with density={self.density} and reduce={self.reduce}, for which none is "
                "usual; set one, or use the mean"
            )
        return usual

    def __call__(self, step: StepBatch) -> tuple[Float[Tensor, " b"], Stats]:
        """Loss of each sample, and what to log (means over samples, detached)."""
        return self.with_kl(*self.surrogate(log_ratio(step.log_prob, step.old_log_prob), self.advantage(step)), step)
