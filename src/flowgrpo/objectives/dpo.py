"""Online DPO: the best of a group against its worst."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from flowgrpo.objectives.contract import ForwardBatch, Stats
from flowgrpo.objectives.forward import group_mean, group_range
from flowgrpo.objectives.preference import FromReference


@dataclass(frozen=True)
class Dpo(FromReference):
    """The logistic loss of the difference of implicit rewards between the best and the worst of a group.

        -log sigmoid(u_best - u_worst),    u = beta (error of the reference - error)

    Samples that are best, or worst, alike share the place; a group in which all are alike teaches nothing. Only the two ends
    of a group are learnt from: `samples: extremes` spares the network calls of the rest. Source: Diffusion-DPO (2311.12908),
    from memory, with pairs drawn on the way (beta 100 in an implementation of others, for a mean over coordinates).
    """

    def __post_init__(self) -> None:
        self.check_preference()

    def __call__(self, batch: ForwardBatch) -> tuple[Float[Tensor, " b"], Stats]:
        """Loss of each sample, that of its group."""
        assert batch.groups is not None, "the loop names the groups that an objective needs"
        u, (low, high) = self.implicit_reward(batch), group_range(batch.advantage, batch.groups)
        best, worst = ((batch.advantage == end).to(u.dtype) for end in (high, low))
        shares = [end / group_mean(end, batch.groups) for end in (best, worst)]
        margin = group_mean((shares[0] - shares[1]) * u, batch.groups)
        return self.with_kl(torch.where(high > low, F.softplus(-margin), 0), {"margin": margin.detach()}, batch)
