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
Density = Literal["exact", "unit"]
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

    def log_density(self, x: Float[Tensor, " b *s"], reduce: Reduce = "mean", form: Density = "exact") -> Float[Tensor, " b"]:
        """log N(x; mean, std^2 I), averaged (the field's convention) or summed over coordinates.

            "exact"    -(x - mean)^2 / (2 std^2) - log(std) - log(2 pi) / 2
            "unit"     -(x - mean)^2, which weighs steps by their variance

        "unit" is no density. Source: the released code of Flow-CPS, 2509.05952. Raises ValueError for a law without noise.
        """
        if self.std <= 0:
            raise ValueError("a step without noise has no density; set transition.noise_level above 0")
        if form == "unit":
            return reduce_coordinates(-((x - self.mean) ** 2), reduce)
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


def at_one(sigmas: Sequence[float], step: int) -> bool:
    """Whether a step starts at sigma 1, told by its index: there the second level stands in for sigma inside 1 - sigma."""
    return step == 0 and sigmas[0] > NEAR_ONE


def _check_noise_level(noise_level: float, most: float = math.inf, remedy: str = "") -> None:
    if not 0 <= noise_level <= most:
        bounds = "at least 0" if most == math.inf else f"in [0, {most:.4g}]"
        raise ValueError(f"transition.noise_level must be {bounds}, got {noise_level}{remedy}")


def _euler_maruyama(sigmas: Sequence[float], step: int, variance: float) -> Coefficients:
    """A step of the SDE with the flow's marginals that adds this variance, with the drift that goes with it.

    mean = (1 - sigma') x0 + (sigma' - variance / (2 sigma)) eps

    On a coarse step from a low sigma the noise coefficient may fall below 0: the correction has overshot.
    """
    sigma, sigma_next = sigmas[step], sigmas[step + 1]
    return Coefficients(1 - sigma_next, sigma_next - variance / (2 * sigma), math.sqrt(variance))


OVERSHOOT = math.sqrt(2)  # above it the step from sigma 1 has a negative noise coefficient on every grid
OVERSHOOT_REMEDY = "; above that the first step turns the noise around: lower it, or use the transition precise"


@dataclass(frozen=True)
class FlowSde:
    """Euler-Maruyama step of the SDE with the flow's marginals.

        g^2 = noise_level^2 sigma / (1 - sigma),    std = g sqrt(sigma - sigma')
        mean = (1 - sigma') x0 + (sigma' - g^2 (sigma - sigma') / (2 sigma)) eps

    At a first level of 1 the second level stands in for sigma inside 1 - sigma. On grids of a few steps the coefficient of
    eps may be negative; a noise level at which it always is, is refused.

    Source: MixGRPO 2507.21802 v7, eq. 2-8 (noise_level 0.7 for FLUX); Flow-GRPO 2505.05470.
    """

    noise_level: float = 0.7

    def __post_init__(self) -> None:
        _check_noise_level(self.noise_level, most=OVERSHOOT, remedy=OVERSHOOT_REMEDY)

    def coefficients(self, sigmas: Sequence[float], step: int) -> Coefficients:
        """(a, b, std) of the step."""
        sigma = sigmas[step]
        guarded = sigmas[1] if at_one(sigmas, step) else sigma
        g_squared = self.noise_level**2 * sigma / (1 - guarded)
        return _euler_maruyama(sigmas, step, g_squared * (sigma - sigmas[step + 1]))


@dataclass(frozen=True)
class DanceSde:
    """`FlowSde` with a constant g.

        g = noise_level,    std = g sqrt(sigma - sigma')
        mean = (1 - sigma') x0 + (sigma' - g^2 (sigma - sigma') / (2 sigma)) eps

    The late steps get more noise than their level is worth: with sigma' near 0 the coefficient of eps may be negative.

    Source: DanceGRPO 2505.07818, released code (noise_level 0.3 for FLUX, 0.25 for HunyuanVideo).
    """

    noise_level: float = 0.3

    def __post_init__(self) -> None:
        _check_noise_level(self.noise_level)

    def coefficients(self, sigmas: Sequence[float], step: int) -> Coefficients:
        """(a, b, std) of the step."""
        return _euler_maruyama(sigmas, step, self.noise_level**2 * (sigmas[step] - sigmas[step + 1]))


@dataclass(frozen=True)
class Sage:
    """`FlowSde` with the noise of the whole step, integrated, in place of the noise at its start.

        variance = integral of g^2 = noise_level^2 (log((1 - sigma') / (1 - sigma)) - (sigma - sigma')),    std = its root
        mean = (1 - sigma') x0 + (sigma' - variance / (2 sigma)) eps

    At a first level of 1 the second level stands in for sigma inside 1 - sigma, under the integral: the variance is
    noise_level^2 (sigma^2 - sigma'^2) / (2 (1 - sigma')).

    Source: SAGE-GRPO 2603.21872 for the variance, by a third party's notes. The same variance in the drift and the guard
    are ours, as is the default, which is that of `flow_sde`.
    """

    noise_level: float = 0.7

    def __post_init__(self) -> None:
        _check_noise_level(self.noise_level, most=OVERSHOOT, remedy=OVERSHOOT_REMEDY)

    def coefficients(self, sigmas: Sequence[float], step: int) -> Coefficients:
        """(a, b, std) of the step."""
        sigma, sigma_next = sigmas[step], sigmas[step + 1]
        delta = sigma - sigma_next
        if at_one(sigmas, step):
            integral = delta * (sigma + sigma_next) / (2 * (1 - sigma_next))
        else:
            integral = math.log1p(delta / (1 - sigma)) - delta
        return _euler_maruyama(sigmas, step, self.noise_level**2 * integral)


@dataclass(frozen=True)
class Cps:
    """Coefficients-preserving sampling: after the step the noise level is exactly sigma'.

        mean = (1 - sigma') x0 + sigma' cos(noise_level pi / 2) eps,    std = sigma' sin(noise_level pi / 2)

    Source: Flow-CPS 2509.05952, which MixGRPO 2507.21802 v7 puts in its window. The density is the exact Gaussian one;
    the released code drops the variance (the density "unit").
    """

    noise_level: float = 0.8

    def __post_init__(self) -> None:
        _check_noise_level(self.noise_level, most=1.0)

    def coefficients(self, sigmas: Sequence[float], step: int) -> Coefficients:
        """(a, b, std) of the step."""
        sigma_next, angle = sigmas[step + 1], self.noise_level * math.pi / 2
        return Coefficients(1 - sigma_next, sigma_next * math.cos(angle), sigma_next * math.sin(angle))


def noise_kept(sigma: float, sigma_next: float) -> float:
    """(sigma' / (1 - sigma')) ((1 - sigma) / sigma): how far the ratio of noise to data falls in a step."""
    return sigma_next * (1 - sigma) / ((1 - sigma_next) * sigma)


@dataclass(frozen=True)
class Precise:
    """The SDE of `FlowSde` with x0 frozen in the step, solved exactly: any noise level, any step size.

        rho = exp(-integral of g^2 / (2 sigma^2)) = ((sigma' / (1 - sigma')) ((1 - sigma) / sigma))^(noise_level^2 / 2)
        mean = (1 - sigma') x0 + sigma' rho eps,    std = sigma' sqrt(1 - rho^2)

    At a first level of 1 the second level stands in for sigma inside 1 - sigma, under the integral:
    rho = (sigma' / sigma)^(noise_level^2 / (2 (1 - sigma'))).

    Source: PRECISE 2605.23522 for x0 frozen and the form of the step, by a third party's notes. rho for the g of
    Flow-GRPO and the guard are ours.
    """

    noise_level: float = 0.7

    def __post_init__(self) -> None:
        _check_noise_level(self.noise_level)

    def coefficients(self, sigmas: Sequence[float], step: int) -> Coefficients:
        """(a, b, std) of the step."""
        sigma, sigma_next = sigmas[step], sigmas[step + 1]
        if sigma_next == 0:
            return Coefficients(1.0, 0.0, 0.0)
        if at_one(sigmas, step):
            log_rho = self.noise_level**2 / (2 * (1 - sigma_next)) * math.log(sigma_next / sigma)
        else:
            log_rho = self.noise_level**2 / 2 * math.log(noise_kept(sigma, sigma_next))
        std = sigma_next * math.sqrt(-math.expm1(2 * log_rho))  # 1 - rho^2 would lose its digits at small noise levels
        return Coefficients(1 - sigma_next, sigma_next * math.exp(log_rho), std)


@dataclass(frozen=True)
class Ddim:
    """DDIM's family from the ODE (noise_level 0) to the ancestral step (1), in the coordinates of a flow.

        std^2 = noise_level^2 sigma'^2 (1 - sigma'^2 (1 - sigma)^2 / (sigma^2 (1 - sigma')^2))
        mean = (1 - sigma') x0 + sqrt(sigma'^2 - std^2) eps

    A variance-preserving model, x = alpha x0 + s eps, is the same flow in the coordinate x / (alpha + s) at the level
    sigma = s / (alpha + s); there this is DDIM's own formula, noise_level its eta. Nothing needs a guard at sigma 1.

    Source: DDIM 2010.02502 for eta; the change of coordinates is ours.
    """

    noise_level: float = 1.0

    def __post_init__(self) -> None:
        _check_noise_level(self.noise_level, most=1.0)

    def coefficients(self, sigmas: Sequence[float], step: int) -> Coefficients:
        """(a, b, std) of the step."""
        sigma, sigma_next = sigmas[step], sigmas[step + 1]
        kept = noise_kept(sigma, sigma_next)
        share = self.noise_level**2 * (1 - kept) * (1 + kept)
        return Coefficients(1 - sigma_next, sigma_next * math.sqrt(1 - share), sigma_next * math.sqrt(share))


def log_ratio(new: Float[Tensor, " b"], old: Float[Tensor, " b"], bound: float = 20.0) -> Float[Tensor, " b"]:
    """new - old, `bounded`."""
    return bounded(new - old, bound)


def bounded(difference: Float[Tensor, " b"], bound: float = 20.0) -> Float[Tensor, " b"]:
    """Held within ±bound, so that a summed density cannot overflow the exponential."""
    return torch.clamp(difference, -bound, bound)


TRANSITIONS: Mapping[str, type] = {
    "flow_sde": FlowSde,
    "dance_sde": DanceSde,
    "sage": Sage,
    "cps": Cps,
    "precise": Precise,
    "ddim": Ddim,
}
