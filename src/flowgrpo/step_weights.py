"""How much each window step counts in the loss."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol, runtime_checkable

from flowgrpo.transitions import Transition, sensitivity


@runtime_checkable
class StepWeights(Protocol):
    """A factor for the loss of every step but the last."""

    def __call__(self, transition: Transition, sigmas: Sequence[float]) -> list[float]:
        """n - 1 factors for a grid of n steps."""
        ...


@dataclass(frozen=True)
class NoWeights:
    """Every step counts as it is: the late ones rule, because their gradients are larger."""

    def __call__(self, transition: Transition, sigmas: Sequence[float]) -> list[float]:
        """1 for every step."""
        return [1.0] * (len(sigmas) - 2)


@dataclass(frozen=True)
class EqualWeights:
    """No step's gradient outweighs another's only by its noise level.

        weight_i = median(N) / N_i,    N_i the `sensitivity` of step i

    On 10 steps N grows from 0.04 at the noisiest step to 1 and beyond. Source: the gradient equaliser of SAGE-GRPO
    (2603.21872), here with the N of any transition, which is ours.
    """

    def __call__(self, transition: Transition, sigmas: Sequence[float]) -> list[float]:
        """Factors whose median is 1."""
        sizes = [sensitivity(transition, sigmas, step) for step in range(len(sigmas) - 2)]
        return [median(sizes) / size for size in sizes]


STEP_WEIGHTS: Mapping[str, type] = {"none": NoWeights, "equal": EqualWeights}
