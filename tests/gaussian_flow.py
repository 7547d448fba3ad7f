"""Gaussian data under the exact velocity: every sampler is affine in x, so its law is known without sampling.

x0 ~ N(m, s^2),    x = (1 - t) x0 + t eps ~ N((1 - t) m, V_t),    V_t = (1 - t)^2 s^2 + t^2
E[x0 | x] = m + (1 - t) s^2 / V_t (x - (1 - t) m),    E[eps | x] = t / V_t (x - (1 - t) m)
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from flowgrpo.solvers import Solver
from flowgrpo.transitions import Coefficients, Prediction, Transition


@dataclass(frozen=True)
class Law:
    """What an affine chain makes of x: slope x + offset, plus noise of this variance."""

    slope: float = 1.0
    offset: float = 0.0
    variance: float = 0.0

    def at(self, mean: float, variance: float) -> tuple[float, float]:
        """Mean and variance of what comes out when N(mean, variance) goes in."""
        return self.slope * mean + self.offset, self.slope**2 * variance + self.variance


@dataclass(frozen=True)
class GaussianFlow:
    """The flow from N(0, 1) to N(mean, std^2)."""

    mean: float = 0.4
    std: float = 0.6

    def marginal(self, t: float) -> tuple[float, float]:
        """Mean and variance of x at level t."""
        return (1 - t) * self.mean, (1 - t) ** 2 * self.std**2 + t**2

    def predict(self, x: torch.Tensor, t: float) -> Prediction:
        """The network that is never wrong, in the precision of x."""
        centre, total = self.marginal(t)
        return Prediction(x, (t - (1 - t) * self.std**2) / total * (x - centre) - self.mean, t)

    def after(self, law: Law, c: Coefficients, t: float) -> Law:
        """The chain with one more step, x' = a x0 + b eps + std z, taken at level t."""
        centre, total = self.marginal(t)
        slope = (c.a * (1 - t) * self.std**2 + c.b * t) / total
        offset = c.a * self.mean + slope * (law.offset - centre)
        return Law(slope * law.slope, offset, slope**2 * law.variance + c.std**2)

    def sample(self, transition: Transition, sigmas: Sequence[float], steps: Iterable[int] | None = None) -> Law:
        """The law of a run of stochastic steps of the grid, all of them by default."""
        law = Law()
        for step in range(len(sigmas) - 1) if steps is None else steps:
            law = self.after(law, transition.coefficients(sigmas, step), sigmas[step])
        return law

    def solve(self, solver: Solver, sigmas: Sequence[float], with_history: bool = True) -> Law:
        """The map of a deterministic path, by what it does to x = 0 and x = 1 in float64."""
        x, previous = torch.tensor([0.0, 1.0], dtype=torch.float64), None
        for step in range(len(sigmas) - 1):
            predictions = [self.predict(x, sigmas[step])]
            for _ in range(solver.calls(sigmas, step) - 1):
                trial = solver.step(predictions, sigmas, step, previous)
                predictions.append(self.predict(trial, sigmas[step + 1]))
            x = solver.step(predictions, sigmas, step, previous)
            previous = predictions[0] if with_history else None
        return Law((x[1] - x[0]).item(), x[0].item())

    def exact_ode(self, t: float, t_next: float) -> Law:
        """The probability-flow ODE: deviations from the mean go with the root of V."""
        return self.exact_sde(lambda levels: 0 * levels, t, t_next)

    def exact_sde(self, g_squared: Callable[[np.ndarray], np.ndarray], t: float, t_next: float) -> Law:
        """The SDE with these marginals and this diffusion, by quadrature of 40 nodes.

        slope = root(V' / V) exp(-integral of g^2 / (2 V)),    variance = V' - slope^2 V
        """
        (centre, total), (centre_next, total_next) = self.marginal(t), self.marginal(t_next)
        nodes, weights = np.polynomial.legendre.leggauss(40)
        levels = (t + t_next) / 2 + (t - t_next) / 2 * nodes
        totals = (1 - levels) ** 2 * self.std**2 + levels**2
        lost = (t - t_next) / 2 * float(np.sum(weights * g_squared(levels) / (2 * totals)))
        slope = math.sqrt(total_next / total) * math.exp(-lost)
        return Law(slope, centre_next - slope * centre, total_next - slope**2 * total)


def levels_between(high: float, low: float, num_steps: int, shift: float) -> tuple[float, ...]:
    """A shifted grid from `high` to exactly `low`: uniform in the unshifted time."""
    first, last = (t / (shift - (shift - 1) * t) for t in (high, low))
    uniform = (first + (last - first) * i / num_steps for i in range(num_steps + 1))
    return (high, *[shift * u / (1 + (shift - 1) * u) for u in uniform][1:-1], low)


def order(errors: Sequence[float], sizes: Sequence[int]) -> float:
    """The order of convergence: minus the slope of log error in log size."""
    return -float(np.polyfit(np.log(sizes), np.log(errors), 1)[0])


def distance(one: Law, other: Law) -> float:
    """How far two chains are apart: in slope, offset and variance."""
    return abs(one.slope - other.slope) + abs(one.offset - other.offset) + abs(one.variance - other.variance)
