"""One ratio for a sample's whole window, capped above."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from flowgrpo.objectives.clipped_ratio import ClippedRatio
from flowgrpo.objectives.contract import Stats, StepBatch
from flowgrpo.transitions import bounded


def differences(steps: Sequence[StepBatch]) -> Float[Tensor, " w b"]:
    """log pi - log pi_old of each step."""
    return torch.stack([step.log_prob - step.old_log_prob for step in steps])


@dataclass(frozen=True)
class TrajectoryRatio(ClippedRatio):
    """The ratio of trajectories: the product over the window of the ratios of its steps.

        -min(rho, 1 + clip_range) A + kl KL,    rho = exp(sum over steps of (log pi - log pi_old))

    Only an upper cap, whatever the sign of A; `clip: none` drops it, which a summed density does not survive and is refused.
    For a window of one step this is the step's ratio under `clip: upper`. The gradient of as many steps as the window has is
    added up, not averaged, and the graphs of all are held at once. KL is the mean over the steps.

    Source: TIC-GRPO 2508.02833, by a third party's notes; window steps in the place of tokens, the mean of the KL and the
    default clip range, that of a step, are ours.
    """

    scope: ClassVar[Literal["trajectory"]] = "trajectory"
    clip: Literal["upper", "none"] = "upper"

    def __post_init__(self) -> None:
        if self.clip == "none" and self.reduce == "sum":
            raise ValueError(
                "objective.clip must be upper with reduce=sum: without a cap the product of summed densities bursts"
            )
        super().__post_init__()

    def __call__(self, steps: Sequence[StepBatch]) -> tuple[Float[Tensor, " b"], Stats]:
        """Loss of each sample from all its window steps."""
        difference = bounded(differences(steps).sum(0))
        return self.with_kl(*self.surrogate(difference, steps[-1].advantage), *steps)
