"""Runs the reward models on media and prompts: batches, checks every answer, and marks what is missing with NaN.

A failure never becomes a score: a model of weight 0 only watches, and its failure is a warning; others stop the run.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, fields
from threading import Lock, Thread
from time import perf_counter
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from flowgrpo.data import Prompt
from flowgrpo.media import check_media

RANGE_SLACK = 1e-4  # rounding is not worth a warning


@runtime_checkable
class RewardModel(Protocol):
    """Scores a batch of samples, one number each. The attributes may be left out; `Traits` has what then holds."""

    unit: str
    range: tuple[float, float] | None
    takes: Literal["media", "latents"]
    needs_motion: bool

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Media (b, f, 3, h, w) in [0, 1], or clean latents, and b prompts to scores (b,), on any device."""
        ...


@dataclass(frozen=True)
class Traits:
    """What a reward model says of itself: unit and range of its scores, what it takes, whether it needs motion."""

    unit: str = "score"
    range: tuple[float, float] | None = None
    takes: Literal["media", "latents"] = "media"
    needs_motion: bool = False

    @classmethod
    def of(cls, model: Callable[..., Any]) -> "Traits":
        said: dict[str, Any] = {field.name: getattr(model, field.name, field.default) for field in fields(cls)}
        return cls(**said)


@dataclass(frozen=True)
class Component:
    """A reward model in use: a monitor if its weight is 0.

    `timeout_s` is in seconds a batch, `retries` are further tries after a failure. A call that hangs cannot be ended,
    only left: its thread stays until the process ends.
    """

    name: str
    model: RewardModel | Callable[..., Any]
    weight: float
    batch_size: int = 64
    timeout_s: float | None = None
    retries: int = 0

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ValueError(f"reward {self.name!r}: weight must be finite, got {self.weight}; 0 makes it a monitor")
        if self.batch_size < 1 or self.retries < 0:
            raise ValueError(
                f"reward {self.name!r}: batch_size must be at least 1 and retries at least 0, "
                f"got {self.batch_size} and {self.retries}; correct them"
            )
        if self.timeout_s is not None and self.timeout_s <= 0:
            raise ValueError(f"reward {self.name!r}: timeout_s must be above 0, got {self.timeout_s}; null means no limit")

    @property
    def traits(self) -> Traits:
        return Traits.of(self.model)


@dataclass(frozen=True)
class Scores:
    """One row a sample, one column a reward model; float32 on the CPU, NaN where a score is missing."""

    names: tuple[str, ...]
    values: Float[Tensor, " b k"]

    def column(self, name: str) -> Float[Tensor, " b"]:
        if name not in self.names:
            raise ValueError(f"no reward is named {name!r}; there are {', '.join(self.names)}")
        return self.values[:, self.names.index(name)]


class RewardError(RuntimeError):
    """A weighted reward model failed or gave an answer that is not one score a sample."""


class Scorer:
    """Scores samples with several reward models.

    Counters, by name, since the start or the last `reset`: `seconds` spent, `missing` scores (failed or non-finite
    answers), scores `outside` the declared range. `bad_media` counts samples that are not finite: no model sees these.
    """

    def __init__(self, components: Sequence[Component]) -> None:
        self.components = tuple(components)
        self.names = tuple(component.name for component in components)
        if not self.names or len(set(self.names)) != len(self.names):
            raise ValueError(f"there must be rewards, each with its own name, got {list(self.names)}; rename or add one")
        self.weights: Float[Tensor, " k"] = torch.tensor([c.weight for c in components], dtype=torch.float32)
        self.takes = frozenset(component.traits.takes for component in components)
        self._lock = Lock()
        self._warned: set[tuple[str, str]] = set()
        self.reset()

    def reset(self) -> None:
        """Set the counters to zero."""
        self.seconds = dict.fromkeys(self.names, 0.0)
        self.missing = dict.fromkeys(self.names, 0)
        self.outside = dict.fromkeys(self.names, 0)
        self.bad_media = 0

    def __call__(self, media: Tensor | None, prompts: Sequence[Prompt], *, latents: Tensor | None = None) -> Scores:
        """Scores of samples and their prompts, paired by position.

        `media` may be None if no model takes it; `latents` are only for models that take them. Raises ValueError for
        media out of contract or a wrong number of prompts, `RewardError` if a weighted model fails.
        """
        samples = self._samples({"media": media, "latents": latents}, len(prompts))
        valid = torch.stack([given.isfinite().flatten(1).all(1).cpu() for given in samples.values()]).all(0)
        with self._lock:
            self.bad_media += int((~valid).sum())
        rows = valid.nonzero().flatten()
        columns = [self._column(one, samples[one.traits.takes], prompts, rows) for one in self.components]
        return Scores(self.names, torch.stack(columns, dim=1))

    def _samples(self, given: dict[str, Tensor | None], num_prompts: int) -> dict[str, Tensor]:
        """What the models take, checked."""
        samples = {takes: tensor for takes, tensor in given.items() if tensor is not None and takes in self.takes}
        for takes in self.takes:
            if takes not in samples:
                raise ValueError(f"a reward takes {takes}, got none; pass {takes} to the scorer")
            if len(samples[takes]) != num_prompts:
                raise ValueError(
                    f"every sample needs its own prompt, got {len(samples[takes])} samples and {num_prompts} prompts; "
                    "repeat the prompt of a group for each of its samples"
                )
        if "media" in samples:
            check_media(samples["media"])
            self._check_motion(samples["media"].shape[1])
        return samples

    def _check_motion(self, num_frames: int) -> None:
        for component in self.components:
            if component.traits.needs_motion and num_frames == 1:
                raise ValueError(
                    f"reward {component.name!r} measures motion and needs at least 2 frames, got 1; "
                    "remove it for images, or generate films"
                )

    def _column(self, component: Component, samples: Tensor, prompts: Sequence[Prompt], rows: Tensor) -> Tensor:
        """The scores (b) of one model, NaN in the rows it did not see or did not answer."""
        start = perf_counter()
        column = torch.full((len(prompts),), torch.nan)
        for part in rows.split(component.batch_size) if len(rows) else ():
            column[part] = self._answer(component, samples[part.to(samples.device)], prompts, part.tolist())
        column[~column.isfinite()] = torch.nan
        self._count(component, column[rows], perf_counter() - start)
        return column

    def _answer(self, component: Component, samples: Tensor, prompts: Sequence[Prompt], rows: list[int]) -> Tensor:
        mine = [prompts[row] for row in rows]
        try:
            with torch.no_grad():
                return _checked(_called(component, samples, mine), len(rows))
        except Exception as error:
            message = f"reward {component.name!r} failed on {_described(rows, mine)}: {type(error).__name__}: {error}"
            if component.weight != 0:
                raise RewardError(message) from error
            self._warn_once(component.name, "failure", f"{message}; its weight is 0, so the run goes on without it")
            return torch.full((len(rows),), torch.nan)

    def _count(self, component: Component, scores: Tensor, seconds: float) -> None:
        name = component.name
        low, high = component.traits.range or (-torch.inf, torch.inf)
        missing = int(scores.isnan().sum())
        strays = scores[(scores < low - RANGE_SLACK) | (scores > high + RANGE_SLACK)]
        with self._lock:
            self.seconds[name] += seconds
            self.missing[name] += missing
            self.outside[name] += len(strays)
        if missing:
            effect = "they will not train" if component.weight != 0 else "its weight is 0, so nothing else changes"
            message = f"reward {name!r} gave no finite score for {missing} of {len(scores)} samples; {effect}"
            self._warn_once(name, "missing", message)
        if len(strays):
            got = f"{len(strays)} of {len(scores)} from {strays.min():.4g} to {strays.max():.4g}"
            message = f"scores of reward {name!r} should lie in [{low}, {high}], got {got}; check its inputs and weights"
            self._warn_once(name, "range", message)

    def _warn_once(self, name: str, kind: str, message: str) -> None:
        with self._lock:
            is_new = (name, kind) not in self._warned
            self._warned.add((name, kind))
        if is_new:
            warnings.warn(message, RuntimeWarning, stacklevel=2)


def _called(component: Component, samples: Tensor, prompts: list[Prompt]) -> Any:
    """What the model answers, tried 1 + `retries` times, each within `timeout_s`."""
    for attempt in range(component.retries + 1):
        try:
            if component.timeout_s is None:
                return component.model(samples, prompts)
            return _within(component.timeout_s, component.model, samples, prompts)
        except Exception:
            if attempt == component.retries:
                raise
    raise AssertionError("unreachable")


def _within(seconds: float, model: Callable[..., Any], samples: Tensor, prompts: list[Prompt]) -> Any:
    answer: Future[Any] = Future()

    def work() -> None:
        try:
            with torch.no_grad():  # the mode belongs to a thread
                answer.set_result(model(samples, prompts))
        except Exception as error:
            answer.set_exception(error)

    Thread(target=work, daemon=True).start()
    if not wait([answer], timeout=seconds).done:
        raise TimeoutError(f"no answer within {seconds:g} seconds; raise timeout_s or lower batch_size")
    return answer.result()


def _checked(answer: Any, count: int) -> Tensor:
    """The answer as float32 (count,) on the CPU; nothing is broadcast, squeezed or parsed."""
    if isinstance(answer, Tensor) and answer.is_floating_point() and answer.shape == (count,):
        return answer.detach().to("cpu", torch.float32)
    if isinstance(answer, Tensor):
        got = f"{answer.dtype} of shape {tuple(answer.shape)}"
    else:
        got = type(answer).__name__ + (f" of length {len(answer)}" if hasattr(answer, "__len__") else "")
    raise ValueError(f"it must return a float tensor of shape ({count},), one score a sample, got {got}")


def _described(rows: Iterable[int], prompts: Sequence[Prompt]) -> str:
    """Samples and prompts for a message: the rows, and at most three of the prompts, cut to 60 characters."""
    texts = {prompt.id: f"{prompt.id} {prompt.text[:60]!r}" for prompt in prompts}
    shown = ", ".join(list(texts.values())[:3]) + (f" and {len(texts) - 3} more" if len(texts) > 3 else "")
    return f"samples {', '.join(map(str, rows))} (prompt {shown})"
