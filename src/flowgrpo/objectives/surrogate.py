"""What objectives have in common: the clipped surrogate of a ratio, and KL to the reference."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from flowgrpo.objectives.contract import PullsToReference, Stats
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
        stats = {"ratio/mean": ratio.detach(), "clip_fraction/low": below.float(), "clip_fraction/high": above.float()}
        return loss, stats


@dataclass(frozen=True)
class Regularised(PullsToReference):
    """KL to the reference at window steps, in the form and reduction that the objective asks for.

        "latent"      ||mean - mean_ref||^2 / (2 std^2), the true KL of the two laws: the step size is in std
        "velocity"    ||v - v_ref||^2

    Both are reduced like the density. Source: MixGRPO 2507.21802 v7, eq. 9 for the first; the second is offered elsewhere.
    """

    family: ClassVar[Literal["ratio"]] = "ratio"
    scope: ClassVar[Literal["step", "trajectory"]] = "step"
    needs_old_means: ClassVar[bool] = False

    kl_form: Literal["latent", "velocity"] = "latent"
    reduce: Reduce = "mean"
    density: Density = "exact"

    def divergence(
        self, law: Gaussian, prediction: Prediction, reference_law: Gaussian, reference_prediction: Prediction
    ) -> Float[Tensor, " b"]:
        """KL to the reference, in the chosen form."""
        if self.kl_form == "latent":
            return law.kl(reference_law, self.reduce)
        return reduce_coordinates((prediction.v - reference_prediction.v) ** 2, self.reduce)

    def with_kl(
        self, loss: Float[Tensor, " b"], stats: Stats, kl: Float[Tensor, " b"] | None
    ) -> tuple[Float[Tensor, " b"], Stats]:
        """The loss with the weighted KL, which is logged before its weight; without one as they are."""
        return (loss, stats) if kl is None else self.add_kl(loss, stats, kl)
