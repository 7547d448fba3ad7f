"""What an objective is given, and what it must say of itself.

An objective is a frozen dataclass of one of two families. It is called with a batch and returns the loss of each sample, (b,),
and what to log, detached, by name.
"""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from flowgrpo.transitions import Prediction

Stats = dict[str, Tensor]
SAID: dict[str, dict[str, str]] = {
    "ratio": {
        "scope": "'step': called for each window step; 'trajectory': called once with the list of them",
        "reduce": "'mean' or 'sum': how densities are reduced over coordinates",
        "density": "'exact' or 'unit': the form in which they are taken",
        "clip_range": "what the start check compares rounding with, or None",
        "needs_reference": "whether the reference scores each step too; then it has `divergence`",
        "needs_old_means": "whether the rollout keeps the means of its steps, a latent each",
    },
    "forward": {
        "needs_reference": "whether the reference predicts too",
        "needs_old": "whether it is told what was predicted before the iteration's first update",
    },
}


@dataclass(frozen=True)
class StepBatch:
    """A stored window step of some samples, scored by the present weights; rows may sit at different steps.

    `log_prob` and `mean` carry the gradient. What has "old" in its name is the rollout's.
    """

    log_prob: Float[Tensor, " b"]
    old_log_prob: Float[Tensor, " b"]
    advantage: Float[Tensor, " b"]
    mean: Float[Tensor, " b *s"]
    std: Float[Tensor, " b"]  # the full one of each row's transition
    old_mean: Float[Tensor, " b *s"] | None = None
    kl: Float[Tensor, " b"] | None = None  # what `divergence` gave, if a reference is needed


@dataclass(frozen=True)
class ForwardBatch:
    """Finished samples noised anew, x = (1 - sigma) x0 + sigma eps, and what is predicted there.

    `new` carries the gradient, `old` is from before the iteration's first update, `reference` from the start of the run.
    """

    x0: Float[Tensor, " b *s"]
    eps: Float[Tensor, " b *s"]
    advantage: Float[Tensor, " b"]
    new: Prediction
    old: Prediction | None = None
    reference: Prediction | None = None

    @property
    def v(self) -> Float[Tensor, " b *s"]:
        """The velocity from the sample to its noise, eps - x0, that a prediction is held against."""
        return self.eps - self.x0


def check_objective(objective: Any) -> None:
    """Raise ValueError unless an objective says what the loop must know of it."""
    family, name = getattr(objective, "family", None), type(objective).__name__
    if family not in SAID:
        raise ValueError(f"objective: {name} must have the attribute family, 'ratio' or 'forward', got {family!r}")
    missing = [said for said in SAID[family] if not hasattr(objective, said)]
    if missing:
        raise ValueError(f"objective: {name} must have the attributes {', '.join(SAID[family])}; it lacks {', '.join(missing)}")
    if family == "ratio" and objective.scope not in ("step", "trajectory"):
        raise ValueError(f"objective: the scope of {name} must be 'step' or 'trajectory', got {objective.scope!r}")


@dataclass(frozen=True)
class PullsToReference:
    """An objective with a weighted divergence from the reference beside its own loss."""

    kl: float = 0.0

    def check_kl(self) -> None:
        """Raise ValueError unless the weight is a number from 0 on."""
        if not 0 <= self.kl < float("inf"):
            raise ValueError(f"objective.kl must be at least 0 and finite, got {self.kl}")

    @property
    def needs_reference(self) -> bool:
        """Whether the reference must predict too."""
        return self.kl > 0

    def add_kl(self, loss: Float[Tensor, " b"], stats: Stats, kl: Float[Tensor, " b"]) -> tuple[Float[Tensor, " b"], Stats]:
        """The loss with the weighted divergence, which is logged before its weight."""
        return loss + self.kl * kl, {**stats, "kl": kl.detach()}
