"""What objectives have in common: the clipped surrogate of a ratio, and KL to the reference."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from flowgrpo.objectives.contract import PullsToReference, Stats, StepBatch
from flowgrpo.transitions import Density, Gaussian, Prediction, Reduce, reduce_coordinates

SIDES = {"both": ("clip_low", "clip_high"), "upper": ("clip_high",), "none": ()}


@dataclass(frozen=True)
class Clipped:
    """The surrogate of a ratio rho and an advantage A, with low and high the ends of the clip range.

        "both"     -min(rho A, clip(rho, 1 - low, 1 + high) A)
        "upper"    -min(rho, 1 + high) A, whatever the sign of A
        "none"     -rho A

    low and high are `clip_range` unless they are given by themselves. `soft` bends the advantage first, to
    soft tanh(A / soft). Source: PPO's clip; "upper" is that of TIC-GRPO (2508.02833) and `soft` that of V-GRPO (2604.23380),
    both by a third party's notes.
    """

    clip_range: float | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    clip: Literal["both", "upper", "none"] = "both"
    soft: float | None = None

    def check_band(self, usual: Callable[[], float]) -> None:
        """Fill in the clip range that is not given. Raises ValueError for what is out of range or has no effect."""
        sides = SIDES[self.clip]
        given = [getattr(self, side) for side in sides if getattr(self, side) is not None]
        idle = [side for side in SIDES["both"] if side not in sides and getattr(self, side) is not None]
        if len(given) == len(sides) and self.clip_range not in (None, *([min(given)] if given else [])):
            idle.append("clip_range")
        if idle:
            told = f" and {' and '.join(sides)} given" if sides else ""
            raise ValueError(f"objective.{idle[0]} has no effect with clip={self.clip}{told}; remove it")
        if self.clip_range is None and sides:
            object.__setattr__(self, "clip_range", min(given) if len(given) == len(sides) else usual())
        for name in ("clip_range", "clip_low", "clip_high"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise ValueError(f"objective.{name} must be between 0 and 1, got {value}")
        if self.soft is not None and not self.soft > 0:
            raise ValueError(f"objective.soft must be above 0, got {self.soft}; leave it out for advantages as they are")

    @property
    def low(self) -> float:
        """How far below 1 the clip range goes."""
        return self._side(self.clip_low)

    @property
    def high(self) -> float:
        """How far above 1 it goes."""
        return self._side(self.clip_high)

    def _side(self, own: float | None) -> float:
        value = self.clip_range if own is None else own
        assert value is not None
        return value

    def surrogate(self, log_ratio: Float[Tensor, " b"], advantage: Float[Tensor, " b"]) -> tuple[Float[Tensor, " b"], Stats]:
        """Loss of each sample; mean ratio and the shares that are held back."""
        ratio = log_ratio.exp()
        if self.soft is not None:
            advantage = self.soft * torch.tanh(advantage / self.soft)
        below = above = torch.zeros_like(ratio, dtype=torch.bool)
        if self.clip == "none":
            loss = -ratio * advantage
        elif self.clip == "upper":
            loss, above = -ratio.clamp(max=1 + self.high) * advantage, ratio > 1 + self.high
        else:
            loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - self.low, 1 + self.high) * advantage)
            below, above = (ratio < 1 - self.low) & (advantage < 0), (ratio > 1 + self.high) & (advantage > 0)
        return loss, {**ratio_stats(log_ratio), "clip_fraction/low": below.float(), "clip_fraction/high": above.float()}


def ratio_stats(log_ratio: Float[Tensor, " b"]) -> Stats:
    """What every ratio is watched by: its mean, the size of its logarithm, and the share of samples that it leaves effective.

    The last is (sum rho)^2 / (n sum rho^2), the effective sample size of importance weights over n.
    """
    ratio = log_ratio.detach().exp()
    effective = ratio.mean() ** 2 / (ratio**2).mean()
    return {"ratio/mean": ratio, "ratio/spread": log_ratio.detach().abs(), "ratio/effective": effective}


@dataclass(frozen=True)
class Regularised(PullsToReference):
    """KL to the reference at window steps, in the form and reduction that the objective asks for.

        "latent"      ||mean - mean_ref||^2 / (2 std^2), the true KL of the two laws: the step size is in std
        "mean"        ||mean - mean_ref||^2, without the variance
        "velocity"    ||v - v_ref||^2

    All are reduced like the density. Source: MixGRPO 2507.21802 v7, eq. 9 for the first; the second is DiverseGRPO's
    (2512.21514, by a third party's notes); the third is offered elsewhere.

    `stop_negatives` ends what is bad about a sample where it is decided: an advantage below 0 counts only at steps where the
    clean sample that the policy predicts is still farther than this from the one that came out (`StepBatch.ahead`). The idea
    is named in the field (Martingale GRPO); this measure of "decided" is ours.
    """

    family: ClassVar[Literal["ratio"]] = "ratio"
    scope: ClassVar[Literal["step", "trajectory"]] = "step"
    needs_old_means: ClassVar[bool] = False

    kl_form: Literal["latent", "mean", "velocity"] = "latent"
    reduce: Reduce = "mean"
    density: Density = "exact"
    stop_negatives: float | None = None

    def check_regularised(self) -> None:
        """Raise ValueError for a pull or a stop that is out of range or has no effect."""
        self.check_kl()
        if self.stop_negatives is None:
            return
        if self.scope != "step":
            raise ValueError("objective.stop_negatives needs a ratio for each step, this objective has one a sample; remove it")
        if not 0 < self.stop_negatives < float("inf"):
            raise ValueError(f"objective.stop_negatives must be a distance above 0, got {self.stop_negatives}; 0.2 is a start")

    def advantage(self, step: StepBatch) -> Float[Tensor, " b"]:
        """The advantages that count at this step."""
        if self.stop_negatives is None:
            return step.advantage
        assert step.ahead is not None, "the loop measures what an objective needs"
        return torch.where((step.advantage < 0) & (step.ahead < self.stop_negatives), 0, step.advantage)

    def divergence(
        self, law: Gaussian, prediction: Prediction, reference_law: Gaussian, reference_prediction: Prediction
    ) -> Float[Tensor, " b"]:
        """KL to the reference, in the chosen form."""
        if self.kl_form == "latent":
            return law.kl(reference_law, self.reduce)
        if self.kl_form == "mean":
            return reduce_coordinates((law.mean - reference_law.mean) ** 2, self.reduce)
        return reduce_coordinates((prediction.v - reference_prediction.v) ** 2, self.reduce)

    def with_kl(self, loss: Float[Tensor, " b"], stats: Stats, *steps: StepBatch) -> tuple[Float[Tensor, " b"], Stats]:
        """The loss with the weighted KL, its mean over the steps that are given; without a reference as they are."""
        kls = [step.kl for step in steps if step.kl is not None]
        if not kls:
            return loss, stats
        pulls = [torch.ones_like(step.advantage) if step.pull is None else step.pull for step in steps]
        counted = torch.stack([pull * kl for pull, kl in zip(pulls, kls, strict=True)]).mean(0)
        return loss + self.kl * counted, {**stats, "kl": torch.stack(kls).mean(0).detach()}
