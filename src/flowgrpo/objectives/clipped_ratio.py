"""The clipped ratio of each window step, with KL to the reference."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from flowgrpo.transitions import (
    Density,
    Gaussian,
    Prediction,
    Reduce,
    log_ratio,
    reduce_coordinates,
)

CLIP_RANGES: Mapping[tuple[Density, Reduce], float] = {("exact", "mean"): 1e-4, ("exact", "sum"): 0.2, ("unit", "mean"): 1e-5}


@dataclass(frozen=True)
class ClippedRatio:
    """The surrogate of GRPO for one window step.

        -min(rho A, clip(rho, 1 - clip_range, 1 + clip_range) A) + kl KL,    rho = exp(log pi - log pi_old)

    The density is a mean over coordinates by default, so rho is a geometric mean per coordinate and clip ranges are small.
    A clip_range that is not given becomes the usual one: 1e-4 for a mean, 0.2 for a sum, 1e-5 for the mean of the "unit"
    density, which leaves the variance out (`Gaussian.log_density`). KL is the true Gaussian one, ||mean - mean_ref||^2 /
    (2 std^2) with the step size in std ("latent"), or the squared difference of velocities ("velocity"); both reduced like
    the density.

    Source: MixGRPO 2507.21802 v7, eq. 9 (clip 1e-4, no KL for FLUX; 0.001 for SD3.5-M). The "unit" density is that of
    Flow-CPS's released code, 2509.05952; its clip range here, a tenth of the other, is ours.
    """

    clip_range: float | None = None
    kl: float = 0.0
    kl_form: Literal["latent", "velocity"] = "latent"
    reduce: Reduce = "mean"
    density: Density = "exact"

    def __post_init__(self) -> None:
        if self.clip_range is None:
            object.__setattr__(self, "clip_range", self._usual_clip_range())
        if not 0 < self.band < 1:
            raise ValueError(f"objective.clip_range must be between 0 and 1, got {self.clip_range}")
        if self.kl < 0:
            raise ValueError(f"objective.kl must be at least 0, got {self.kl}")

    @property
    def band(self) -> float:
        """The clip range in force: the given or the usual one."""
        assert self.clip_range is not None
        return self.clip_range

    def _usual_clip_range(self) -> float:
        usual = CLIP_RANGES.get((self.density, self.reduce))
        if usual is None:
            raise ValueError(
                f"objective.clip_range must be given with density={self.density} and reduce={self.reduce}, for which none is "
                "usual; set one, or use the mean"
            )
        return usual

    @property
    def needs_reference(self) -> bool:
        """Whether a step must also be scored by the reference."""
        return self.kl > 0

    def __call__(
        self,
        log_prob: Float[Tensor, " b"],
        old_log_prob: Float[Tensor, " b"],
        advantage: Float[Tensor, " b"],
        kl: Float[Tensor, " b"] | None = None,
    ) -> tuple[Float[Tensor, " b"], dict[str, Tensor]]:
        """Loss of each sample, and what to log (means over samples, detached)."""
        difference = log_ratio(log_prob, old_log_prob)
        ratio = difference.exp()
        clipped = ratio.clamp(1 - self.band, 1 + self.band)
        loss = -torch.minimum(ratio * advantage, clipped * advantage)
        stats = {
            "ratio/mean": ratio.detach(),
            "clip_fraction/low": ((ratio < 1 - self.band) & (advantage < 0)).float(),
            "clip_fraction/high": ((ratio > 1 + self.band) & (advantage > 0)).float(),
        }
        if kl is not None:
            loss = loss + self.kl * kl
            stats["kl"] = kl.detach()
        return loss, stats

    def divergence(
        self, law: Gaussian, prediction: Prediction, reference_law: Gaussian, reference_prediction: Prediction
    ) -> Float[Tensor, " b"]:
        """KL to the reference, in the chosen form."""
        if self.kl_form == "latent":
            return law.kl(reference_law, self.reduce)
        return reduce_coordinates((prediction.v - reference_prediction.v) ** 2, self.reduce)
