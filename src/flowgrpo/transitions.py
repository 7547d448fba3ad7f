"""The policy at one step: a Gaussian whose mean is linear in the network's prediction.

    x' ~ N(a x0 + b eps, std^2 I)

Everything a step needs of sigma, of the step size and of the noise level is in (a, b, std), once: nobody multiplies by the
root of a step size again.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

Reduce = Literal["mean", "sum"]
NEAR_ONE = 0.99  # a first level above this is "sigma = 1": some schedulers start at 0.9999 or 0.999


@dataclass(frozen=True)
class Prediction:
    """What a network says at x = (1 - sigma) x0 + sigma eps, through its velocity v = eps - x0; float32.

    x0 = x - sigma v,    eps = x + (1 - sigma) v
    """

    x: Float[Tensor, " b *s"]
    v: Float[Tensor, " b *s"]
    sigma: float

    @property
    def x0(self) -> Float[Tensor, " b *s"]:
        """The data."""
        return self.x - self.sigma * self.v

    @property
    def eps(self) -> Float[Tensor, " b *s"]:
        """The noise."""
        return self.x + (1 - self.sigma) * self.v


@dataclass(frozen=True)
class Gaussian:
    """An isotropic normal law over a batch of latents."""

    mean: Float[Tensor, " b *s"]
    std: float

    def sample(self, noise: Float[Tensor, " b *s"]) -> Float[Tensor, " b *s"]:
        """mean + std noise."""
        return self.mean + self.std * noise

    def log_density(self, x: Float[Tensor, " b *s"], reduce: Reduce = "mean") -> Float[Tensor, " b"]:
        """log N(x; mean, std^2 I), averaged (the field's convention) or summed over coordinates.

        Raises ValueError for a law without noise, which has no density.
        """
        if self.std <= 0:
            raise ValueError("a step without noise has no density; set transition.noise_level above 0")
        terms = -0.5 * ((x - self.mean) / self.std) ** 2 - (math.log(self.std) + 0.5 * math.log(2 * math.pi))
        return reduce_coordinates(terms, reduce)

    def kl(self, other: "Gaussian", reduce: Reduce = "mean") -> Float[Tensor, " b"]:
        """KL(self || other) for laws of one std: ||mean - mean'||^2 / (2 std^2). The step size is in std."""
        if self.std != other.std:
            raise ValueError(f"KL in closed form needs laws of one std, got {self.std} and {other.std}")
        return reduce_coordinates((self.mean - other.mean) ** 2 / (2 * self.std**2), reduce)


def reduce_coordinates(values: Float[Tensor, " b *s"], reduce: Reduce) -> Float[Tensor, " b"]:
    """Mean or sum over all axes but the first."""
    flat = values.flatten(1)
    return flat.mean(1) if reduce == "mean" else flat.sum(1)


@dataclass(frozen=True)
class Coefficients:
    """mean = a x0 + b eps, and the full std of the step."""

    a: float
    b: float
    std: float


@runtime_checkable
class Transition(Protocol):
    """A law for every step of a grid."""

    def coefficients(self, sigmas: Sequence[float], step: int) -> Coefficients:
        """(a, b, std) for the step from sigmas[step] to sigmas[step + 1]."""
        ...


def law(transition: Transition, prediction: Prediction, sigmas: Sequence[float], step: int) -> Gaussian:
    """The step's Gaussian. Rollout and replay both come through here, so they cannot disagree."""
    c = transition.coefficients(sigmas, step)
    return Gaussian(c.a * prediction.x0 + c.b * prediction.eps, c.std)


def sensitivity(transition: Transition, sigmas: Sequence[float], step: int) -> float:
    """How far the mean of a step moves with the velocity, in stds: the size of the step's policy gradient.

    |d mean / d v| / std = |b (1 - sigma) - a sigma| / std
    """
    c, sigma = transition.coefficients(sigmas, step), sigmas[step]
    return abs(c.b * (1 - sigma) - c.a * sigma) / c.std


@dataclass(frozen=True)
class FlowSde:
    """Euler-Maruyama step of the SDE with the flow's marginals.

        g^2 = noise_level^2 sigma / (1 - sigma),    std = g sqrt(sigma - sigma')
        mean = (1 - sigma') x0 + (sigma' - g^2 (sigma - sigma') / (2 sigma)) eps

    At a first level of 1 the second level stands in for sigma inside 1 - sigma.

    Source: MixGRPO 2507.21802 v7, eq. 2-8 (noise_level 0.7 for FLUX); Flow-GRPO 2505.05470.
    """

    noise_level: float = 0.7

    def __post_init__(self) -> None:
        if self.noise_level < 0:
            raise ValueError(f"transition.noise_level must be at least 0, got {self.noise_level}")

    def coefficients(self, sigmas: Sequence[float], step: int) -> Coefficients:
        """(a, b, std) of the step."""
        sigma, sigma_next = sigmas[step], sigmas[step + 1]
        guarded = sigmas[1] if step == 0 and sigma > NEAR_ONE else sigma
        delta = sigma - sigma_next
        g_squared = self.noise_level**2 * sigma / (1 - guarded)
        return Coefficients(1 - sigma_next, sigma_next - g_squared * delta / (2 * sigma), math.sqrt(g_squared * delta))


@dataclass(frozen=True)
class Cps:
    """Coefficients-preserving sampling: after the step the noise level is exactly sigma'.

        mean = (1 - sigma') x0 + sigma' cos(noise_level pi / 2) eps,    std = sigma' sin(noise_level pi / 2)

    Source: Flow-CPS 2509.05952, which MixGRPO 2507.21802 v7 puts in its window. The density is the exact Gaussian one;
    the released code drops the variance.
    """

    noise_level: float = 0.8

    def __post_init__(self) -> None:
        if not 0 <= self.noise_level <= 1:
            raise ValueError(f"transition.noise_level must be in [0, 1] for cps, got {self.noise_level}")

    def coefficients(self, sigmas: Sequence[float], step: int) -> Coefficients:
        """(a, b, std) of the step."""
        sigma_next, angle = sigmas[step + 1], self.noise_level * math.pi / 2
        return Coefficients(1 - sigma_next, sigma_next * math.cos(angle), sigma_next * math.sin(angle))


def log_ratio(new: Float[Tensor, " b"], old: Float[Tensor, " b"], bound: float = 20.0) -> Float[Tensor, " b"]:
    """new - old, held within ±bound so that a summed density cannot overflow the exponential."""
    return torch.clamp(new - old, -bound, bound)


TRANSITIONS: Mapping[str, type] = {"flow_sde": FlowSde, "cps": Cps}
