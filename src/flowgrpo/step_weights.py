"""How much each window step counts in the loss.

Factors are scaled over all steps of the grid but the last, so that a step's factor does not depend on the window, or, with
`budget_neutral`, over the window alone, whose factors then have mean 1: the window's place does not change the size of an
update. (The scaling is ours; the source of each weight is below.)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Protocol, runtime_checkable

from flowgrpo.transitions import Transition, sensitivity


@runtime_checkable
class StepWeights(Protocol):
    """A factor for the loss of every window step."""

    def __call__(self, transition: Transition, sigmas: Sequence[float], window: range) -> dict[int, float]:
        """The factor by step, for a window of a grid."""
        ...


def scaled(weights: Mapping[int, float], window: range, unit: float, budget_neutral: bool) -> dict[int, float]:
    """The window's weights in this unit, or in that of their mean."""
    unit = fmean(weights[step] for step in window) if budget_neutral else unit
    return {step: weights[step] / unit for step in window}


def trainable_steps(sigmas: Sequence[float]) -> range:
    """All steps of a grid but the last."""
    return range(len(sigmas) - 2)


@dataclass(frozen=True)
class NoWeights:
    """Every step counts as it is, 1: the late ones rule, because their gradients are larger. Budget-neutral either way."""

    budget_neutral: bool = False

    def __call__(self, transition: Transition, sigmas: Sequence[float], window: range) -> dict[int, float]:
        """1 for every step."""
        return dict.fromkeys(window, 1.0)


@dataclass(frozen=True)
class EqualWeights:
    """No step's gradient outweighs another's only by its noise level.

        weight_i = median(N) / N_i,    N_i the `sensitivity` of step i

    On 10 steps N grows from 0.04 at the noisiest step to 1 and beyond. Source: the gradient equaliser of SAGE-GRPO
    (2603.21872), here with the N of any transition, which is ours.
    """

    budget_neutral: bool = False

    def __call__(self, transition: Transition, sigmas: Sequence[float], window: range) -> dict[int, float]:
        """Factors whose median is 1."""
        sizes = {step: sensitivity(transition, sigmas, step) for step in trainable_steps(sigmas)}
        weights = {step: 1 / size for step, size in sizes.items()}
        return scaled(weights, window, 1 / median(sizes.values()), self.budget_neutral)


@dataclass(frozen=True)
class NoiseWeights:
    """A step counts as much as the noise that was drawn in it: what explores more learns more.

        weight_i = std_i / mean(std)

    Source: TempFlow-GRPO 2508.04324, by a third party's notes.
    """

    budget_neutral: bool = False

    def __call__(self, transition: Transition, sigmas: Sequence[float], window: range) -> dict[int, float]:
        """Factors whose mean is 1."""
        weights = {step: transition.coefficients(sigmas, step).std for step in trainable_steps(sigmas)}
        return scaled(weights, window, fmean(weights.values()), self.budget_neutral)


@dataclass(frozen=True)
class StepSizeWeights:
    """A step counts by the inverse of its size, so the short steps at the noisy end of a shifted grid count most.

        weight_i = (1 / delta_i) / mean(1 / delta),    delta_i = sigma_i - sigma_(i+1)

    Source: GRPO-Guard 2510.22319, by a third party's notes, for 1 / delta; its scale is ours.
    """

    budget_neutral: bool = False

    def __call__(self, transition: Transition, sigmas: Sequence[float], window: range) -> dict[int, float]:
        """Factors whose mean is 1."""
        weights = {step: 1 / (sigmas[step] - sigmas[step + 1]) for step in trainable_steps(sigmas)}
        return scaled(weights, window, fmean(weights.values()), self.budget_neutral)


STEP_WEIGHTS: Mapping[str, type] = {
    "none": NoWeights,
    "equal": EqualWeights,
    "noise": NoiseWeights,
    "step_size": StepSizeWeights,
}
