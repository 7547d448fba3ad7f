"""Group-level preference optimisation: the better half of a group against the worse one."""

from dataclasses import dataclass

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from flowgrpo.objectives.contract import ForwardBatch, Stats
from flowgrpo.objectives.forward import group_mean
from flowgrpo.objectives.preference import FromReference

USUAL_BETA = 10.0


@dataclass(frozen=True)
class Dgpo(FromReference):
    """The logistic loss of the advantage-weighted implicit rewards of a whole group.

        -log sigmoid(mean over the group of A u),    u = beta (error of the reference - error)

    Every sample of a group has its group's loss. The farther the group has got, the smaller the step: nothing is clipped.
    Source: DGPO 2510.08425, by an implementation of others (beta 10), which writes the gradient out.
    """

    beta: float = USUAL_BETA

    def __post_init__(self) -> None:
        self.check_preference()

    def __call__(self, batch: ForwardBatch) -> tuple[Float[Tensor, " b"], Stats]:
        """Loss of each sample, that of its group."""
        assert batch.groups is not None, "the loop names the groups that an objective needs"
        margin = group_mean(batch.advantage * self.implicit_reward(batch), batch.groups)
        return self.with_kl(F.softplus(-margin), {"margin": margin.detach()}, batch)
