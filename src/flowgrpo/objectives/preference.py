"""What objectives have in common that learn from comparisons within a group."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from jaxtyping import Float
from torch import Tensor

from flowgrpo.objectives.contract import ForwardBatch
from flowgrpo.objectives.forward import Forward, matching_error


@dataclass(frozen=True)
class Preference(Forward):
    """How much better than an anchor a sample is matched, times beta: the implicit reward of a diffusion model.

        u = beta (mean (v_anchor - (eps - x0))^2 - mean (v - (eps - x0))^2)

    The samples of a group are noised alike by default, so that their u differ by the samples alone.
    """

    needs_groups: ClassVar[bool] = True
    anchor: ClassVar[Literal["old", "reference"]] = "old"

    shared_noise: bool = True
    beta: float = 100.0

    def check_preference(self) -> None:
        """Raise ValueError for settings out of range."""
        self.check_forward()
        if not 0 < self.beta < float("inf"):
            raise ValueError(f"objective.beta must be above 0 and finite, got {self.beta}")

    def implicit_reward(self, batch: ForwardBatch) -> Float[Tensor, " b"]:
        """u of each sample."""
        anchor = batch.reference if self.anchor == "reference" else batch.old
        assert anchor is not None, "the loop makes the predictions that an objective needs"
        return self.beta * (matching_error(anchor, batch) - matching_error(batch.new, batch))


@dataclass(frozen=True)
class FromReference(Preference):
    """A preference objective whose implicit reward counts from the reference, which it always needs."""

    needs_old: ClassVar[bool] = False
    anchor: ClassVar[Literal["old", "reference"]] = "reference"

    @property
    def needs_reference(self) -> bool:
        """Always."""
        return True
