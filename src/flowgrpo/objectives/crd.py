"""Centred reward distillation: implicit rewards made equal to the given ones, up to a constant of the prompt."""

from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from flowgrpo.objectives.contract import ForwardBatch, Stats
from flowgrpo.objectives.forward import group_mean
from flowgrpo.objectives.preference import Preference


@dataclass(frozen=True)
class Crd(Preference):
    """The difference of implicit and given rewards, both with their group's mean taken off.

        "mse"    (c(u) - c(A))^2
        "bce"    the cross-entropy of sigmoid(c(u)) with sigmoid(c(A)) as target
        u = beta (error of the old policy - error),    c(y) = y - its mean over the group

    Centring takes the unknown normaliser of the prompt away. The optimum is u = A: the larger beta, the nearer.
    Source: CRD 2603.14128, by an implementation of others; beta is ours.
    """

    beta: float = 10.0
    form: Literal["mse", "bce"] = "mse"

    def __post_init__(self) -> None:
        self.check_preference()

    def __call__(self, batch: ForwardBatch) -> tuple[Float[Tensor, " b"], Stats]:
        """Loss of each sample."""
        groups, u, a = batch.groups, self.implicit_reward(batch), batch.advantage
        assert groups is not None, "the loop names the groups that an objective needs"
        u, a = (y - group_mean(y, groups) for y in (u, a))
        loss = (u - a) ** 2 if self.form == "mse" else F.binary_cross_entropy_with_logits(u, a.sigmoid(), reduction="none")
        return self.with_kl(loss, {"margin": (u * a).detach()}, batch)
