"""Fine-tuning on the best of each group."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from flowgrpo.objectives.contract import ForwardBatch, Stats
from flowgrpo.objectives.forward import Forward, group_mean, group_range, matching_error


@dataclass(frozen=True)
class Sft(Forward):
    """The flow-matching loss of the best sample of each group; samples that are best alike share its place.

        mean over the best of mean (v - (eps - x0))^2

    A group in which all are alike teaches nothing. The baseline that every other objective should beat.
    Source: best-of-n fine-tuning, RAFT in language models; the form for a flow is ours.
    """

    needs_old: ClassVar[bool] = False
    needs_groups: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.check_forward()

    def __call__(self, batch: ForwardBatch) -> tuple[Float[Tensor, " b"], Stats]:
        """Loss of each sample; its mean over a group is that of the best."""
        assert batch.groups is not None, "the loop names the groups that an objective needs"
        low, high = group_range(batch.advantage, batch.groups)
        best = (batch.advantage == high).to(low.dtype)
        weight = torch.where(high > low, best / group_mean(best, batch.groups), 0)
        return self.with_kl(weight * matching_error(batch.new, batch), {}, batch)
