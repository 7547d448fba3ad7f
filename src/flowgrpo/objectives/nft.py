"""DiffusionNFT: one network as its own better and worse policy."""

from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from flowgrpo.objectives.contract import ForwardBatch, Stats
from flowgrpo.objectives.forward import Forward, adaptive_error, matching_error


@dataclass(frozen=True)
class Nft(Forward):
    """Good samples pull the implicit positive policy, bad ones the implicit negative one.

        v+ = (1 - beta) v_old + beta v,    v- = (1 + beta) v_old - beta v
        r |v+ - (eps - x0)|^2 + (1 - r) |v- - (eps - x0)|^2,    r = (1 + clip(A / most, -1, 1)) / 2

    with |.|^2 a mean over coordinates, or with `adaptive` the `adaptive_error` of v+ and of v-. Without, the optimum is
    v_old + (2 / beta) cov(r, eps - x0 | x): the smaller beta, the farther. Nothing is clipped but A.

    Source: DiffusionNFT 2509.16117, by a third party's notes and an implementation of others; `most` is ours.
    """

    beta: float = 1.0
    most: float = 1.0
    adaptive: bool = True

    def __post_init__(self) -> None:
        self.check_forward()
        for name in ("beta", "most"):
            if not getattr(self, name) > 0:
                raise ValueError(f"objective.{name} must be above 0, got {getattr(self, name)}")

    def __call__(self, batch: ForwardBatch) -> tuple[Float[Tensor, " b"], Stats]:
        """Loss of each sample."""
        assert batch.old is not None, "the loop keeps the predictions that an objective needs"
        error = adaptive_error if self.adaptive else matching_error
        moved = self.beta * (batch.new.v - batch.old.v)
        good = (1 + (batch.advantage / self.most).clamp(-1, 1)) / 2
        positive, negative = (error(replace(batch.new, v=batch.old.v + way * moved), batch) for way in (1, -1))
        return self.with_kl(good * positive + (1 - good) * negative, {}, batch)
