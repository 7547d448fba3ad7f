"""How a signal becomes advantages: what is better than the rest of its group is reinforced, the rest suppressed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowgrpo.groups import group_stats


@dataclass(frozen=True)
class Advantage:
    """The signal's deviation from its group's mean, divided by a spread, then clipped.

    A_i = clip((R_i - mean_g R) / (std R + eps), -c, c)

    `std` is over the "group", over the whole batch ("global"), or left out ("none": divided by 1). Statistics use the
    valid (finite) signals only; a sample without one gets exactly 0, as does a group without spread or with one member.

    Source: Flow-GRPO, 2505.05470, released code: std over n, eps 1e-4 (its recipes take the global std), clip 5.
    """

    std: Literal["group", "global", "none"] = "group"
    eps: float = 1e-4
    clip: float | None = 5.0
    unbiased: bool = False

    def __post_init__(self) -> None:
        if self.std not in ("group", "global", "none"):
            raise ValueError(f"std must be 'group', 'global' or 'none', got {self.std!r}")
        if self.eps < 0:
            raise ValueError(f"eps={self.eps} must be 0 or more; it is added to the spread before dividing by it")
        if self.clip is not None and self.clip <= 0:
            raise ValueError(f"clip={self.clip} must be above 0, or null for no clipping")

    def __call__(self, signal: Float[Tensor, " b"], group_ids: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
        valid = signal.isfinite()
        group = group_stats(signal, group_ids, unbiased=self.unbiased)
        deviation = torch.where(valid, signal.double() - group.mean, 0)
        advantage = torch.where(deviation == 0, 0, deviation / self._spread(signal, group.std))
        limit = float("inf") if self.clip is None else self.clip
        return advantage.clamp(-limit, limit).to(signal.dtype)

    def _spread(self, signal: Tensor, group_std: Tensor) -> Tensor:
        if self.std == "none":
            return torch.ones_like(group_std)
        if self.std == "group":
            return group_std + self.eps
        one_group = torch.zeros(len(signal), dtype=torch.long, device=signal.device)
        return group_stats(signal, one_group, unbiased=self.unbiased).std + self.eps


@dataclass(frozen=True)
class GroupAdvantage(Advantage):
    """`Advantage` with the std of the group."""

    std: Literal["group"] = field(default="group", init=False)


@dataclass(frozen=True)
class GlobalAdvantage(Advantage):
    """`Advantage` with the std of the whole batch: groups that differ little also teach little."""

    std: Literal["global"] = field(default="global", init=False)


@dataclass(frozen=True)
class CentredAdvantage(Advantage):
    """`Advantage` that is not divided: for signals standardised already, such as `standardized_sum`."""

    std: Literal["none"] = field(default="none", init=False)
    eps: float = field(default=0.0, init=False)
    unbiased: bool = field(default=False, init=False)


ADVANTAGES: Mapping[str, Callable[..., Advantage]] = {
    "group": GroupAdvantage,
    "global": GlobalAdvantage,
    "none": CentredAdvantage,
}
