"""Runs the reward models on media and prompts: batches, checks every answer, and marks what is missing with NaN.

A failure never becomes a score, and never an error here, where other processes would not see it: what it does to training
is decided on the table of all processes, by `Scorer.settle`. A model of weight 0 only watches, and its failure is a warning.
"""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import Lock
from time import perf_counter

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowgrpo.calling import Caller
from flowgrpo.component import Component, RewardModel, Traits
from flowgrpo.data import Prompt
from flowgrpo.media import check_media
from flowgrpo.missing import EFFECTS, RewardError, missing_scores, settle
from flowgrpo.score_cache import ScoreCache, content_key

__all__ = ["Component", "RewardError", "RewardModel", "Scorer", "Scores", "Traits"]

RANGE_SLACK = 1e-4  # rounding is not worth a warning


@dataclass(frozen=True)
class Scores:
    """One row a sample, one column a reward model; float32 on the CPU, NaN where there is no score.

    `asked` says where there should be one (None: everywhere): not where a model does not apply to the prompt, nor in the
    rows of the `not_finite` samples whose pixels or latents are not finite.
    """

    names: tuple[str, ...]
    values: Float[Tensor, " b k"]
    asked: Bool[Tensor, " b k"] | None = None
    not_finite: int = 0

    def column(self, name: str) -> Float[Tensor, " b"]:
        if name not in self.names:
            raise ValueError(f"no reward is named {name!r}; there are {', '.join(self.names)}")
        return self.values[:, self.names.index(name)]

    @property
    def was_asked(self) -> Bool[Tensor, " b k"]:
        """`asked` as a table."""
        return torch.ones_like(self.values, dtype=torch.bool) if self.asked is None else self.asked


class Scorer:
    """Scores samples with several reward models.

    Counters, by name, since the start or the last `reset`: `seconds` spent, `missing` scores (failed or non-finite
    answers), scores `outside` the declared range. `bad_media` counts samples that are not finite: no model sees these.
    `failures` holds the message of each model's last failure.
    """

    def __init__(self, components: Sequence[Component], cache: ScoreCache | None = None) -> None:
        self.components = tuple(components)
        self.names = tuple(component.name for component in components)
        if not self.names or len(set(self.names)) != len(self.names):
            raise ValueError(f"there must be rewards, each with its own name, got {list(self.names)}; rename or add one")
        self.weights: Float[Tensor, " k"] = torch.tensor([c.weight for c in components], dtype=torch.float32)
        self.takes = frozenset(component.traits.takes for component in components)
        self.cache = cache
        self._callers = {component.name: Caller(component) for component in components}
        self._lock = Lock()
        self._warned: set[tuple[str, str]] = set()
        self.reset()

    def reset(self) -> None:
        """Set the counters to zero."""
        self.seconds = dict.fromkeys(self.names, 0.0)
        self.missing = dict.fromkeys(self.names, 0)
        self.outside = dict.fromkeys(self.names, 0)
        self.bad_media = 0
        self.failures: dict[str, str] = {}

    def __call__(self, media: Tensor | None, prompts: Sequence[Prompt], *, latents: Tensor | None = None) -> Scores:
        """Scores of samples and their prompts, paired by position.

        `media` may be None if no model takes it; `latents` are for models that take them. Raises ValueError for media out
        of contract or a wrong number of prompts; a model that fails leaves NaN, a warning and its message in `failures`.
        """
        samples = self._samples({"media": media, "latents": latents}, len(prompts))
        finite = torch.stack([given.isfinite().flatten(1).all(1).cpu() for given in samples.values()]).all(0)
        bad = int((~finite).sum())
        with self._lock:
            self.bad_media += bad
        columns = [self._column(one, samples[one.traits.takes], prompts, finite) for one in self.components]
        values, asked = (torch.stack(part, dim=1) for part in zip(*columns, strict=True))
        return Scores(self.names, values, asked, bad)

    def settle(self, values: Float[Tensor, " b k"], asked: Bool[Tensor, " b k"],
               group_ids: Int[Tensor, " b"]) -> Float[Tensor, " b k"]:  # fmt: skip
        """`missing.settle` by the components' policies: give it the table of all processes, and all come to the same end.

        Raises RewardError under the policy "stop", with what failed here; another process may know more.
        """
        try:
            return settle(values, asked, group_ids, self.weights, {one.name: one.missing for one in self.components})
        except RewardError as error:
            raise RewardError(f"{error}{self._reasons()}") from None

    def account(self, values: Float[Tensor, " b k"], asked: Bool[Tensor, " b k"]) -> str:
        """Which rewards lack how many scores of a table, and why, for a message."""
        counts = zip(self.names, missing_scores(values, asked).sum(0).tolist(), asked.sum(0).tolist(), strict=True)
        unasked = int((~asked.any(1)).sum())
        silent = f", {unasked} samples are not finite or no reward applies to them" if unasked else ""
        return ", ".join(f"{name} {lacking} of {total}" for name, lacking, total in counts) + silent + self._reasons()

    def _reasons(self) -> str:
        said = "; ".join(message for name, message in self.failures.items() if self._counts(name))
        return f"; last failure in this process: {said}" if said else ""

    def _counts(self, name: str) -> bool:
        return bool(self.weights[self.names.index(name)] != 0)

    def _samples(self, given: dict[str, Tensor | None], num_prompts: int) -> dict[str, Tensor]:
        """What the models take, checked."""
        samples = {takes: tensor for takes, tensor in given.items() if tensor is not None and takes in self.takes}
        for one in self.components:
            if one.traits.takes not in samples:
                raise ValueError(
                    f"reward {one.name!r} takes {one.traits.takes}, got none; pass {one.traits.takes} to the scorer "
                    "(evaluation and the variance window have only media), or use another reward"
                )
        for tensor in samples.values():
            if len(tensor) != num_prompts:
                raise ValueError(
                    f"every sample needs its own prompt, got {len(tensor)} samples and {num_prompts} prompts; "
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

    def _column(self, one: Component, samples: Tensor, prompts: Sequence[Prompt], finite: Tensor) -> tuple[Tensor, Tensor]:
        """The scores (b) of one model, NaN where it was not asked or did not answer, and where it was asked (b)."""
        start = perf_counter()
        column, asked = torch.full((len(prompts),), torch.nan), finite
        try:
            asked = finite & torch.tensor([one.applies(prompt) for prompt in prompts])
            rows = asked.nonzero().flatten()
        except Exception as error:
            self._note_failure(one, finite.nonzero().flatten().tolist(), prompts, error)
            rows = torch.tensor([], dtype=torch.long)
        for part in rows.split(one.batch_size) if len(rows) else ():
            column[part] = self._answers(one, samples[part.to(samples.device)], prompts, part.tolist())
        column[~column.isfinite()] = torch.nan
        self._count(one, column[asked], perf_counter() - start)
        return column, asked

    def _answers(self, one: Component, samples: Tensor, prompts: Sequence[Prompt], rows: list[int]) -> Tensor:
        """The scores of these rows: those that the cache knows, and for the others what the model says."""
        if self.cache is None or not one.identity:
            return self._answer(one, samples, prompts, rows)
        keys = [content_key(one.identity, sample, prompts[row]) for sample, row in zip(samples, rows, strict=True)]
        known = [self.cache.get(key) for key in keys]
        scores = torch.tensor([torch.nan if score is None else score for score in known])
        new = [i for i, score in enumerate(known) if score is None]
        if new:
            scores[new] = self._answer(one, samples[new], prompts, [rows[i] for i in new])
            for i in new:
                self.cache.put(keys[i], scores[i].item())
        return scores

    def _answer(self, one: Component, samples: Tensor, prompts: Sequence[Prompt], rows: list[int]) -> Tensor:
        try:
            return self._callers[one.name](samples, [prompts[row] for row in rows])
        except Exception as error:
            self._note_failure(one, rows, prompts, error)
            return torch.full((len(rows),), torch.nan)

    def _note_failure(self, one: Component, rows: list[int], prompts: Sequence[Prompt], error: Exception) -> None:
        mine = [prompts[row] for row in rows]
        message = f"reward {one.name!r} failed on {_described(rows, mine)}: {type(error).__name__}: {error}"
        with self._lock:
            self.failures[one.name] = message
        effect = EFFECTS[one.missing] if one.weight != 0 else "its weight is 0, so the run goes on without it"
        self._warn_once(one.name, "failure", f"{message}; {effect}")

    def _count(self, one: Component, scores: Tensor, seconds: float) -> None:
        name = one.name
        low, high = one.traits.range or (-torch.inf, torch.inf)
        missing = int(scores.isnan().sum())
        strays = scores[(scores < low - RANGE_SLACK) | (scores > high + RANGE_SLACK)]
        with self._lock:
            self.seconds[name] += seconds
            self.missing[name] += missing
            self.outside[name] += len(strays)
        if missing:
            effect = EFFECTS[one.missing] if one.weight != 0 else "its weight is 0, so nothing else changes"
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


def _described(rows: Iterable[int], prompts: Sequence[Prompt]) -> str:
    """Samples and prompts for a message: the rows, and at most three of the prompts, cut to 60 characters."""
    texts = {prompt.id: f"{prompt.id} {prompt.text[:60]!r}" for prompt in prompts}
    shown = ", ".join(list(texts.values())[:3]) + (f" and {len(texts) - 3} more" if len(texts) > 3 else "")
    return f"samples {', '.join(map(str, rows))} (prompt {shown})"
