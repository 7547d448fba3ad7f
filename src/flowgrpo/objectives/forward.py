"""What objectives of the forward process have in common: they need a finished sample and no density."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowgrpo.objectives.contract import ForwardBatch, PullsToReference, Stats
from flowgrpo.transitions import Prediction, reduce_coordinates

SMALLEST = 1e-5  # of what is divided by
USUAL_RAMP = 0.01


def matching_error(prediction: Prediction, batch: ForwardBatch) -> Float[Tensor, " b"]:
    """The error of flow matching, the mean over coordinates of (v - (eps - x0))^2."""
    return reduce_coordinates((prediction.v - batch.v) ** 2, "mean")


def adaptive_error(prediction: Prediction, batch: ForwardBatch) -> Float[Tensor, " b"]:
    """mean (x0(v) - x0)^2 / mean |x0(v) - x0|, whose denominator counts as a constant: levels and samples weigh alike.

    Source: DiffusionNFT 2509.16117 and V-GRPO 2604.23380, by a third party's notes.
    """
    missed = prediction.sigma * (prediction.v - batch.v)
    size = reduce_coordinates(missed.detach().abs(), "mean").clamp(min=SMALLEST)
    return reduce_coordinates(missed**2, "mean") / size


def group_mean(values: Float[Tensor, " b"], groups: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Beside each row the mean of its group's rows, with their gradient."""
    _, index, counts = groups.unique(return_inverse=True, return_counts=True)
    return (values.new_zeros(len(counts)).index_add(0, index, values) / counts)[index]


def group_range(values: Float[Tensor, " b"], groups: Int[Tensor, " b"]) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"]]:
    """Beside each row the lowest and the highest value of its group."""
    _, index, counts = groups.unique(return_inverse=True, return_counts=True)
    ends = [values.new_zeros(len(counts)).scatter_reduce(0, index, values, how, include_self=False) for how in ("amin", "amax")]
    return ends[0][index], ends[1][index]


@dataclass(frozen=True)
class Forward(PullsToReference):
    """A pull to the reference, kl times the mean over coordinates of (v - v_ref)^2, and where the old policy comes from.

    By default the old policy is the present one at the start of the iteration. With `old_decay` it is another, which also
    samples: after iteration k its weights (with an adapter, the adapter's) become d times themselves plus 1 - d times the
    trained ones, d = min(old_decay, old_ramp k), with a ramp of 0.01 by default. Then what is sampled changes slowly.

    Source: DiffusionNFT 2509.16117, by a third party's notes ("EMA old policy"; 0.5 in an implementation of others); the ramp
    is ours.
    """

    family: ClassVar[Literal["forward"]] = "forward"
    scope: ClassVar[Literal["level", "sample"]] = "level"
    needs_old: ClassVar[bool] = True
    needs_groups: ClassVar[bool] = False

    shared_noise: bool = False
    old_decay: float = 0.0
    old_ramp: float | None = None

    def old_stays(self, iteration: int) -> float:
        """The share of the old policy that stays after an iteration (from 0)."""
        return min(self.old_decay, (USUAL_RAMP if self.old_ramp is None else self.old_ramp) * iteration)

    def check_forward(self) -> None:
        """Raise ValueError for a pull or an old policy that is out of range or has no effect."""
        self.check_kl()
        if not 0 <= self.old_decay < 1:
            raise ValueError(f"objective.old_decay must be from 0 to below 1, got {self.old_decay}")
        if self.old_ramp is not None and not self.old_ramp > 0:
            raise ValueError(f"objective.old_ramp must be above 0, got {self.old_ramp}")
        if self.old_ramp is not None and not self.old_decay:
            raise ValueError("objective.old_ramp has no effect without old_decay; set objective.old_decay, or remove it")
        if self.old_decay and not self.needs_old:
            raise ValueError("objective.old_decay has no effect: this objective has no old policy; remove it")

    def with_kl(self, loss: Float[Tensor, " b"], stats: Stats, *batches: ForwardBatch) -> tuple[Float[Tensor, " b"], Stats]:
        """The loss, the pull weighted and added (its mean over the levels given), and what to log of both."""
        stats = stats | {"matching_error": _mean([matching_error(batch.new, batch) for batch in batches]).detach()}
        moved = [_distance(batch.new, batch.old) for batch in batches if batch.old is not None]
        if moved:
            stats["moved"] = _mean(moved).detach()
        kls = [_distance(batch.new, batch.reference) for batch in batches if batch.reference is not None]
        if kls:
            counted = [kl if batch.pull is None else batch.pull * kl for kl, batch in zip(kls, batches, strict=True)]
            loss, stats["kl"] = loss + self.kl * _mean(counted), _mean(kls).detach()
        return loss, stats


def _mean(values: list[Tensor]) -> Tensor:
    return torch.stack(values).mean(0)


def _distance(one: Prediction, other: Prediction) -> Float[Tensor, " b"]:
    return reduce_coordinates((one.v - other.v) ** 2, "mean")
