"""Runs the reward models on media and prompts: batches, checks every answer, and marks what is missing with NaN.

A failure never becomes a score, and never an error here, where other processes would not see it: what it does to training
is decided on the table of all processes, by `Scorer.settle`. A model of weight 0 only watches, and its failure is a warning.
"""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowgrpo.calling import Caller
from flowgrpo.component import Component, RewardModel, Traits
from flowgrpo.data import Prompt
from flowgrpo.judging import pairs_of
from flowgrpo.media import as_shown, check_media
from flowgrpo.missing import EFFECTS, RewardError, missing_scores, settle
from flowgrpo.score_cache import ScoreCache, content_key
from flowgrpo.signals.pairs import compare

__all__ = ["Component", "RewardError", "RewardModel", "Scorer", "Scores", "Traits"]

RANGE_SLACK = 1e-4  # rounding is not worth a warning


@dataclass(frozen=True)
class Scores:
    """One row a sample, one column a reward model; float32 on the CPU, NaN where there is no score.

    `asked` says where there should be one (None: everywhere): not where a model does not apply to the prompt, nor in the
    rows of samples whose pixels or latents are not `finite` (None: all are). A judge's score is the sample's win rate; what
    it said of each pair is in `judged` (see `signals.PairwiseSignal`), None where no reward is a judge.
    """

    names: tuple[str, ...]
    values: Float[Tensor, " b k"]
    asked: Bool[Tensor, " b k"] | None = None
    finite: Bool[Tensor, " b"] | None = None
    judged: Float[Tensor, " b b k"] | None = None

    def column(self, name: str) -> Float[Tensor, " b"]:
        if name not in self.names:
            raise ValueError(f"no reward is named {name!r}; there are {', '.join(self.names)}")
        return self.values[:, self.names.index(name)]

    @property
    def not_finite(self) -> int:
        """How many samples have pixels or latents that are not finite."""
        return 0 if self.finite is None else int((~self.finite).sum())

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
        with self._lock:
            self.bad_media += int((~finite).sum())
        columns = [self._column(one, samples[one.traits.takes], prompts, finite) for one in self.components]
        values, asked, planes = zip(*columns, strict=True)
        judged = None
        if any(plane is not None for plane in planes):
            nothing = torch.full((len(prompts), len(prompts)), torch.nan)
            judged = torch.stack([nothing if plane is None else plane for plane in planes], 2)
        return Scores(self.names, torch.stack(values, 1), torch.stack(asked, 1), finite, judged)

    def pointwise(self, cache: str | Path | None = None) -> "Scorer":
        """A scorer of single samples, for evaluation: without judges, with counters of its own. `cache`: a folder for scores.

        Raises ValueError if all rewards are judges.
        """
        alone = [one for one in self.components if not one.traits.compares]
        if not alone:
            raise ValueError(
                "rewards: held-out prompts need a reward that scores single samples, all are judges; add a monitor"
            )
        return Scorer(alone, None if cache is None else ScoreCache(cache))

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
                    "(evaluation has only media), or use another reward"
                )
        for tensor in samples.values():
            if len(tensor) != num_prompts:
                raise ValueError(
                    f"every sample needs its own prompt, got {len(tensor)} samples and {num_prompts} prompts; "
                    "repeat the prompt of a group for each of its samples"
                )
        if "media" in samples:
            check_media(samples["media"])
            samples["media"] = as_shown(samples["media"])
            self._check_motion(samples["media"].shape[1])
        return samples

    def _check_motion(self, num_frames: int) -> None:
        for component in self.components:
            if component.traits.needs_motion and num_frames == 1:
                raise ValueError(
                    f"reward {component.name!r} measures motion and needs at least 2 frames, got 1; "
                    "remove it for images, or generate films"
                )

    def _column(
        self, one: Component, samples: Tensor, prompts: Sequence[Prompt], finite: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The scores (b) of one model, NaN where it was not asked or did not answer, where it was asked (b), and if it is a
        judge what it said of each pair (b, b)."""
        start, nothing = perf_counter(), torch.full((len(prompts),), torch.nan)
        judge, ids = one.traits.compares, torch.tensor([prompt.id for prompt in prompts])
        try:
            asked = finite & torch.tensor([one.applies(prompt) for prompt in prompts])
        except Exception as error:
            rows = finite.nonzero().flatten().tolist()
            self._note_failure(one, rows, [prompts[row] for row in rows], error)
            self._checked(one, nothing[finite], start)
            return nothing, finite, nothing.expand(len(prompts), -1) if judge else None
        index = pairs_of(ids, asked, one.opponents, one.both_orders) if judge else asked.nonzero()
        answers = self._checked(one, self._all_answers(one, samples, prompts, index), start)
        if not judge:
            return nothing.index_put((index[:, 0],), answers), asked, None
        plane = nothing.repeat(len(prompts), 1).index_put((index[:, 0], index[:, 1]), answers)
        win_rate = compare(nothing[:, None], ids, plane[:, :, None]).win_rate[:, 0].float()
        return win_rate, torch.zeros_like(asked).index_fill(0, index.flatten(), True), plane

    def _all_answers(self, one: Component, samples: Tensor, prompts: Sequence[Prompt], index: Tensor) -> Tensor:
        """What the model says of the samples at `index` (n, 1), or of the pairs of samples (n, 2)."""
        answers = [torch.zeros(0)]
        for part in index.split(one.batch_size) if len(index) else ():
            given = part.to(samples.device)
            mine = [prompts[row] for row in part[:, 0].tolist()]
            rows = part.squeeze(1).tolist()
            answers.append(self._answers(one, samples[given] if one.traits.compares else samples[given[:, 0]], mine, rows))
        return torch.cat(answers)

    def _answers(self, one: Component, samples: Tensor, prompts: Sequence[Prompt], rows: list[Any]) -> Tensor:
        """The scores of one batch: those that the cache knows, and for the others what the model says."""
        if self.cache is None or not one.identity:
            return self._answer(one, samples, prompts, rows)
        keys = [content_key(one.identity, *pair) for pair in zip(samples, prompts, strict=True)]
        known = [self.cache.get(key) for key in keys]
        scores = torch.tensor([torch.nan if score is None else score for score in known])
        new = [i for i, score in enumerate(known) if score is None]
        if new:
            scores[new] = self._answer(one, samples[new], [prompts[i] for i in new], [rows[i] for i in new])
            for i in new:
                self.cache.put(keys[i], scores[i].item())
        return scores

    def _answer(self, one: Component, samples: Tensor, prompts: Sequence[Prompt], rows: list[Any]) -> Tensor:
        try:
            return self._callers[one.name](samples, prompts)
        except Exception as error:
            self._note_failure(one, rows, prompts, error)
            return torch.full((len(rows),), torch.nan)

    def _note_failure(self, one: Component, rows: list[Any], prompts: Sequence[Prompt], error: Exception) -> None:
        message = f"reward {one.name!r} failed on {_described(rows, prompts)}: {type(error).__name__}: {error}"
        with self._lock:
            self.failures[one.name] = message
        effect = EFFECTS[one.missing] if one.weight != 0 else "its weight is 0, so the run goes on without it"
        self._warn_once(one.name, "failure", f"{message}; {effect}")

    def _checked(self, one: Component, scores: Tensor, start: float) -> Tensor:
        """The answers with NaN for those that are no scores, counted."""
        name, seconds = one.name, perf_counter() - start
        low, high = (0.0, 1.0) if one.traits.compares else one.traits.range or (-torch.inf, torch.inf)
        scores = torch.where(scores.isfinite(), scores, torch.nan)
        missing = int(scores.isnan().sum())
        strays = scores[(scores < low - RANGE_SLACK) | (scores > high + RANGE_SLACK)]
        with self._lock:
            self.seconds[name] += seconds
            self.missing[name] += missing
            self.outside[name] += len(strays)
        if missing:
            what = "pairs" if one.traits.compares else "samples"
            effect = EFFECTS[one.missing] if one.weight != 0 else "its weight is 0, so nothing else changes"
            message = f"reward {name!r} gave no finite score for {missing} of {len(scores)} {what}; {effect}"
            self._warn_once(name, "missing", message)
        if len(strays):
            got = f"{len(strays)} of {len(scores)} from {strays.min():.4g} to {strays.max():.4g}"
            message = f"scores of reward {name!r} should lie in [{low}, {high}], got {got}; check its inputs and weights"
            self._warn_once(name, "range", message)
        return scores.masked_fill((scores < low) | (scores > high), torch.nan) if one.traits.compares else scores

    def _warn_once(self, name: str, kind: str, message: str) -> None:
        with self._lock:
            is_new = (name, kind) not in self._warned
            self._warned.add((name, kind))
        if is_new:
            warnings.warn(message, RuntimeWarning, stacklevel=2)


def _described(rows: Iterable[Any], prompts: Sequence[Prompt]) -> str:
    """Samples and prompts for a message: the rows, and at most three of the prompts, cut to 60 characters."""
    texts = {prompt.id: f"{prompt.id} {prompt.text[:60]!r}" for prompt in prompts}
    shown = ", ".join(list(texts.values())[:3]) + (f" and {len(texts) - 3} more" if len(texts) > 3 else "")
    return f"samples {', '.join(map(str, rows))} (prompt {shown})"
