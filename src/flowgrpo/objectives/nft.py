"""DiffusionNFT: one network as its own better and worse policy."""

from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from flowgrpo.objectives.contract import ForwardBatch, Stats
from flowgrpo.objectives.forward import Forward, matching_error
from flowgrpo.transitions import Prediction, reduce_coordinates

SMALLEST = 1e-5  # of what is divided by


@dataclass(frozen=True)
class Nft(Forward):
    """Good samples pull the implicit positive policy, bad ones the implicit negative one.

        v+ = (1 - beta) v_old + beta v,    v- = (1 + beta) v_old - beta v
        r |v+ - (eps - x0)|^2 + (1 - r) |v- - (eps - x0)|^2,    r = (1 + clip(A / most, -1, 1)) / 2

    with |.|^2 a mean over coordinates. The optimum is v_old + (2 / beta) cov(r, eps - x0 | x): the smaller beta, the farther.
    With `adaptive` each of the two errors is taken in x0 (sigma^2 times as large) and divided by its own mean size,
    mean |x0(v) - x0|, which counts as a constant. Nothing is clipped but A.

    Source: DiffusionNFT 2509.16117, by a third party's notes and an implementation of others. Here v_old are the weights at
    the start of the iteration, not a moving average of them, and `most` is ours.
    """

    beta: float = 1.0
    most: float = 1.0
    adaptive: bool = True

    def __post_init__(self) -> None:
        self.check_kl()
        for name in ("beta", "most"):
            if not getattr(self, name) > 0:
                raise ValueError(f"objective.{name} must be above 0, got {getattr(self, name)}")

    def __call__(self, batch: ForwardBatch) -> tuple[Float[Tensor, " b"], Stats]:
        """Loss of each sample."""
        assert batch.old is not None, "the loop keeps the predictions that an objective needs"
        moved = self.beta * (batch.new.v - batch.old.v)
        good = (1 + (batch.advantage / self.most).clamp(-1, 1)) / 2
        positive, negative = (self._error(replace(batch.new, v=batch.old.v + way * moved), batch) for way in (1, -1))
        stats = {"matching_error": matching_error(batch.new, batch).detach()}
        return self.with_kl(good * positive + (1 - good) * negative, stats, batch)

    def _error(self, policy: Prediction, batch: ForwardBatch) -> Float[Tensor, " b"]:
        if not self.adaptive:
            return matching_error(policy, batch)
        missed = policy.sigma * (policy.v - batch.v)
        size = reduce_coordinates(missed.detach().abs(), "mean").clamp(min=SMALLEST)
        return reduce_coordinates(missed**2, "mean") / size
