"""What an objective is given, and what it must say of itself.

An objective is a frozen dataclass of one of two families. It is called with a batch and returns the loss of each sample, (b,),
and what to log, detached, by name.
"""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float, Int
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
        "scope": "'level': called for each level; 'sample': called once with the list of them",
        "needs_reference": "whether the reference predicts too",
        "needs_old": "whether it is told what the policy that sampled predicts",
        "needs_groups": "whether a micro-batch must hold whole groups",
        "shared_noise": "whether the samples of a group are noised with one noise",
        "old_decay": "whether the policy that samples is another than the trained one; if not 0, `old_stays(iteration)` too",
    },
}
SCOPES = {"ratio": ("step", "trajectory"), "forward": ("level", "sample")}


@dataclass(frozen=True)
class StepBatch:
    """A stored window step of some samples, scored by the present weights; rows may sit at different steps.

    `log_prob` and `mean` carry the gradient. What has "old" in its name is the rollout's. `pull` is how much of `kl` counts for
    a row; `ahead` is how far its sample still is, the rms distance of the clean sample that is predicted here from the one
    that came out, in units of the latter's rms.
    """

    log_prob: Float[Tensor, " b"]
    old_log_prob: Float[Tensor, " b"]
    advantage: Float[Tensor, " b"]
    mean: Float[Tensor, " b *s"]
    std: Float[Tensor, " b"]  # the full one of each row's transition
    old_mean: Float[Tensor, " b *s"] | None = None
    kl: Float[Tensor, " b"] | None = None  # what `divergence` gave, if a reference is needed
    pull: Float[Tensor, " b"] | None = None
    ahead: Float[Tensor, " b"] | None = None


@dataclass(frozen=True)
class ForwardBatch:
    """Finished samples noised anew, x = (1 - sigma) x0 + sigma eps, and what is predicted there.

    `new` carries the gradient, `old` is the policy that sampled, `reference` the one that KL is measured from; `groups` names
    the group of each row, `pull` is how much of the pull to the reference counts for it.
    """

    x0: Float[Tensor, " b *s"]
    eps: Float[Tensor, " b *s"]
    advantage: Float[Tensor, " b"]
    new: Prediction
    old: Prediction | None = None
    reference: Prediction | None = None
    groups: Int[Tensor, " b"] | None = None
    pull: Float[Tensor, " b"] | None = None

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
    if objective.scope not in SCOPES[family]:
        scopes = " or ".join(repr(scope) for scope in SCOPES[family])
        raise ValueError(f"objective: the scope of {name} must be {scopes}, got {objective.scope!r}")


@dataclass(frozen=True)
class PullsToReference:
    """An objective with a weighted divergence from the reference beside its own loss.

    `kl_from` lets it count at noise levels sigma >= kl_from only (DiverseGRPO 2512.21514, by a third party's notes: early steps
    only), and `kl_gate` for this share of an iteration's samples only, those whose reward is doubted most
    (`flowgrpo.uncertainty`; GARDO 2512.24138: the most uncertain 10 %).
    """

    kl: float = 0.0
    kl_from: float = 0.0
    kl_gate: float = 1.0

    def check_kl(self) -> None:
        """Raise ValueError unless the weight is a number from 0 on, and what restricts it can take effect."""
        if not 0 <= self.kl < float("inf"):
            raise ValueError(f"objective.kl must be at least 0 and finite, got {self.kl}")
        if not 0 <= self.kl_from <= 1:
            raise ValueError(f"objective.kl_from must be a noise level between 0 and 1, got {self.kl_from}")
        if not 0 < self.kl_gate <= 1:
            raise ValueError(f"objective.kl_gate must be a share above 0 and at most 1, got {self.kl_gate}")
        for name, idle in (("kl_from", 0.0), ("kl_gate", 1.0)):
            if self.kl == 0 and getattr(self, name) != idle:
                raise ValueError(f"objective.{name} has no effect with kl=0; set objective.kl, or remove it")

    @property
    def needs_reference(self) -> bool:
        """Whether the reference must predict too."""
        return self.kl > 0
