"""A reward model and how it is to be used: the protocol, what a model says of itself, and one entry of a run's rewards."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor

from flowgrpo.data import Prompt
from flowgrpo.missing import Policy

__all__ = ["Component", "RewardModel", "Traits"]

Takes = Literal["media", "latents"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@runtime_checkable
class RewardModel(Protocol):
    """Scores a batch of samples, one number each. The attributes may be left out; `Traits` has what then holds.

    A model may also have `applies(prompt) -> bool`, a function of the prompt alone: where it is False the model is not
    asked, and has no say in that prompt's group. Without it, it applies to every prompt.
    """

    unit: str
    range: tuple[float, float] | None
    takes: Takes
    needs_motion: bool
    compares: bool

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Media (b, f, 3, h, w) in [0, 1], or clean latents (b, ...), and b prompts to scores (b,), on any device.

        A judge, a model that `compares`, gets pairs of samples of one prompt: media (b, 2, f, 3, h, w). Its answers are in
        [0, 1]: 1 where the first is better, 1/2 for a tie.
        Latents are as the pipeline has them before it decodes: packed, and on its own scale, where it packs and scales.
        """
        ...


@dataclass(frozen=True)
class Traits:
    """What a reward model says of itself: unit and range of its scores, what it takes, whether it needs motion or compares."""

    unit: str = "score"
    range: tuple[float, float] | None = None
    takes: Takes = "media"
    needs_motion: bool = False
    compares: bool = False

    @classmethod
    def of(cls, model: Callable[..., Any]) -> "Traits":
        said: dict[str, Any] = {field.name: getattr(model, field.name, field.default) for field in fields(cls)}
        if said["takes"] not in get_args(Takes):
            raise ValueError(f"a reward model's takes must be 'media' or 'latents', got {said['takes']!r}; correct the class")
        return cls(**said)


@dataclass(frozen=True)
class Component:
    """A reward model in use: a monitor if its weight is 0.

    `timeout_s` is in seconds a batch, `retries` are further tries after a failure. Before the n-th of these it waits
    `retry_wait_s` x 2^(n - 1) seconds, a minute at most. `missing` is the policy where a score is missing in training
    (`missing.settle`). Samples are moved to `device` (None: they stay), networks compute in `dtype` (by autocast). Equal
    `identity` stands for equal scores in a cache; where it is empty nothing is cached. A judge compares each sample with at
    least `opponents` of its siblings (None: all), each pair in `both_orders` or one (`judging.pairs_of`).
    """

    name: str
    model: RewardModel | Callable[..., Any]
    weight: float
    batch_size: int = 64
    timeout_s: float | None = None
    retries: int = 0
    retry_wait_s: float = 1.0
    missing: Policy = "mask"
    device: str | None = None
    dtype: torch.dtype = torch.float32
    identity: str = ""
    opponents: int | None = None
    both_orders: bool = True

    def __post_init__(self) -> None:
        where = f"reward {self.name!r}"
        if not math.isfinite(self.weight):
            raise ValueError(f"{where}: weight must be finite, got {self.weight}; 0 makes it a monitor")
        if self.batch_size < 1 or self.retries < 0:
            raise ValueError(
                f"{where}: batch_size must be at least 1 and retries at least 0, "
                f"got {self.batch_size} and {self.retries}; correct them"
            )
        if self.opponents is not None and self.opponents < 1:
            raise ValueError(f"{where}: opponents must be at least 1, got {self.opponents}; null means all siblings")
        if self.timeout_s is not None and self.timeout_s <= 0:
            raise ValueError(f"{where}: timeout_s must be above 0, got {self.timeout_s}; null means no limit")
        if not 0 <= self.retry_wait_s < math.inf:
            raise ValueError(f"{where}: retry_wait_s must be 0 or more and finite, got {self.retry_wait_s}; correct it")
        if self.missing not in get_args(Policy):
            raise ValueError(f"{where}: missing must be one of {', '.join(get_args(Policy))}, got {self.missing!r}; choose one")
        if self.dtype not in DTYPES:
            raise ValueError(f"{where}: dtype must be one of {', '.join(map(str, DTYPES))}, got {self.dtype}; choose one")

    @property
    def traits(self) -> Traits:
        return Traits.of(self.model)

    def applies(self, prompt: Prompt) -> bool:
        """Whether the model has anything to say of this prompt's samples. Raises TypeError for an answer of another type."""
        if not hasattr(self.model, "applies"):
            return True
        answer = self.model.applies(prompt)  # type: ignore[union-attr]
        if not isinstance(answer, bool):
            raise TypeError(f"its applies must return True or False, got {answer!r} for prompt {prompt.id}")
        return answer
