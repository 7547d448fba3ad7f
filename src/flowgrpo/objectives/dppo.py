"""Flow-DPPO: no clipping; a step that has gone far enough is left out."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from jaxtyping import Float
from torch import Tensor

from flowgrpo.objectives.contract import Stats, StepBatch
from flowgrpo.objectives.surrogate import Regularised, ratio_stats
from flowgrpo.transitions import log_ratio, reduce_coordinates

USUAL_THRESHOLD = 1e-5  # of a mean over coordinates


@dataclass(frozen=True)
class Dppo(Regularised):
    """The ratio as it is, masked by the exact divergence from the policy that sampled.

        -rho A [not dropped] + kl KL,    dropped where D >= threshold and (log rho) A > 0
        D = KL(old || new) = ||mean - mean_old||^2 / (2 std^2)

    D is reduced like the density; std is each transition's own, step size included. A step on its way back is never
    dropped. threshold inf is `ClippedRatio` under `clip: none`. Source: Flow-DPPO 2606.11025 (1e-5 for a mean), by an
    implementation of others.
    """

    needs_old_means: ClassVar[bool] = True
    clip_range: ClassVar[float | None] = None

    threshold: float | None = None
    density: Literal["exact"] = "exact"

    def __post_init__(self) -> None:
        self.check_regularised()
        if self.threshold is None and self.reduce == "sum":
            raise ValueError(
                "objective.threshold must be given with reduce=sum, for which none is usual; set one, or use the mean"
            )
        if self.threshold is None:
            object.__setattr__(self, "threshold", USUAL_THRESHOLD)
        elif not self.threshold > 0:
            raise ValueError(f"objective.threshold must be above 0, got {self.threshold}")

    def __call__(self, step: StepBatch) -> tuple[Float[Tensor, " b"], Stats]:
        """Loss of each sample."""
        assert step.old_mean is not None, "the rollout keeps the means that an objective needs"
        far = reduce_coordinates((step.mean.detach() - step.old_mean) ** 2, self.reduce) / (2 * step.std**2)
        difference = log_ratio(step.log_prob, step.old_log_prob)
        ratio, advantage = difference.exp(), self.advantage(step)
        assert self.threshold is not None
        dropped = (far >= self.threshold) & (difference.detach() * advantage > 0)
        stats = {**ratio_stats(difference), "dropped": dropped.float(), "kl_old": far}
        return self.with_kl(-ratio * advantage * (~dropped).to(ratio.dtype), stats, step)
