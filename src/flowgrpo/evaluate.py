"""Paired evaluation: base and tuned see the same prompts and start noise, under the pipeline's own sampler."""

import inspect
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowgrpo import keys
from flowgrpo.checkpoint import fresh_temporary, replace_folder
from flowgrpo.config import RunConfig
from flowgrpo.data import SIZE_FIELDS, Prompt
from flowgrpo.families import check_size, guidance_argument, pipeline_call
from flowgrpo.hybrid import Hybrid, check_hybrid, draw
from flowgrpo.paired import Rise, paired_rise, rise_by_kind
from flowgrpo.policy import Policy
from flowgrpo.scoring import Scorer

__all__ = [
    "Evaluation", "Rise", "check_sizes", "conditions", "evaluate", "evaluate_as_configured", "evaluation_steps",
    "load", "own_size", "paired_rise", "rise_by_kind", "save", "size_batches", "summary",
]  # fmt: skip

SCORES, MEDIA = "scores.safetensors", "media.safetensors"


@dataclass(frozen=True)
class Evaluation:
    """Scores of one sample a prompt, NaN where missing; `media` holds the clips (f, 3, h, w) of the kept positions."""

    names: tuple[str, ...]
    values: Float[Tensor, " n k"]
    media: dict[int, Tensor]

    def column(self, name: str) -> Float[Tensor, " n"]:
        """The scores of one reward."""
        if name not in self.names:
            raise ValueError(f"no reward is named {name!r}; there are {', '.join(self.names)}")
        return self.values[:, self.names.index(name)]


def save(evaluation: Evaluation, folder: Path) -> None:
    """Write a folder that `load` reads, whole or not at all; an older one of that name is replaced."""
    temporary = fresh_temporary(folder)
    clips = {str(position): clip.contiguous() for position, clip in evaluation.media.items()}
    save_file({"values": evaluation.values.contiguous()}, temporary / SCORES, {"names": json.dumps(evaluation.names)})
    save_file(clips, temporary / MEDIA)
    replace_folder(temporary, folder)


def load(folder: Path) -> Evaluation:
    """Read what `save` wrote. Raises ValueError if it is not there."""
    if not (folder / SCORES).is_file():
        raise ValueError(f"{folder}: must be a saved evaluation, it holds no {SCORES}; evaluate first")
    with safe_open(folder / SCORES, framework="pt") as file:
        names, values = json.loads(file.metadata()["names"]), file.get_tensor("values")
    clips = load_file(folder / MEDIA)
    return Evaluation(tuple(names), values, {int(position): clips[position] for position in sorted(clips, key=int)})


def evaluate(policy: Policy, scorer: Scorer, prompts: Sequence[Prompt], *, num_steps: int, batch_size: int, seed: int,
             guidance_scale: float | None = None, hybrid: Hybrid | None = None, keep: Collection[int] = (),
             on_batch: Callable[[int], None] = lambda _: None) -> Evaluation:  # fmt: skip
    """Generate and score one sample a prompt.

    Start noise is keyed by (seed, position of the prompt): two policies see the same, whatever the batch size. Guidance
    is the policy's own unless given; with `hybrid` the base makes the last steps. `keep` are the positions whose media
    is kept; `on_batch` hears of the number of samples just done. Raises ValueError, before it samples, for a size,
    guidance or hybrid that the pipeline cannot follow.
    """
    check_sizes(policy, prompts)
    if hybrid is not None:
        check_hybrid(policy.own_scheduler, hybrid.share, num_steps)
    guidance = {} if guidance_scale is None else {"guidance_scale": guidance_scale}
    if (guidance_scale or 1) > 1 and guidance_argument(policy.pipeline) is None:
        kind = type(policy.pipeline).__name__
        raise ValueError(f"guidance_scale={guidance_scale} cannot take effect: {kind} has no guidance; set it to 1")
    values = torch.full((len(prompts), len(scorer.names)), torch.nan)
    media: dict[int, Tensor] = {}
    for batch in size_batches(prompts, batch_size):
        mine = [prompts[position] for position in batch]
        generators = [keys.generator("eval", seed, position) for position in batch]
        with conditions(policy, **guidance, **own_size(mine[0])):
            clips = draw(policy, mine, num_steps, generators, hybrid).float().cpu()
        values[batch] = scorer(clips, mine).values
        media.update({position: clips[row].clone() for row, position in enumerate(batch) if position in keep})
        on_batch(len(batch))
    return Evaluation(scorer.names, values, dict(sorted(media.items())))


def evaluate_as_configured(config: RunConfig, policy: Policy, scorer: Scorer, prompts: Sequence[Prompt], *,
                           hybrid: Hybrid | None = None, keep: Collection[int] = (),
                           on_batch: Callable[[int], None] = lambda _: None) -> Evaluation:  # fmt: skip
    """`evaluate` with the settings of a config's evaluation; where these are silent, those of its sampler.

    `hybrid` comes from the caller, who knows which of the two models this is.
    """
    e = config.evaluation
    return evaluate(
        policy, scorer, prompts, num_steps=evaluation_steps(config), batch_size=e.batch_size, seed=e.seed,
        guidance_scale=e.guidance_scale, hybrid=hybrid, keep=keep, on_batch=on_batch,
    )  # fmt: skip


def evaluation_steps(config: RunConfig) -> int:
    """The denoising steps of a config's evaluation."""
    return config.evaluation.num_steps or config.sampler.num_steps


def size_batches(prompts: Sequence[Prompt], batch_size: int) -> Iterator[list[int]]:
    """Positions in batches of prompts of one size, each in the order of the prompts."""
    by_size: dict[tuple[int | None, ...], list[int]] = {}
    for position, prompt in enumerate(prompts):
        by_size.setdefault(tuple(getattr(prompt, name) for name in SIZE_FIELDS), []).append(position)
    for positions in by_size.values():
        for start in range(0, len(positions), batch_size):
            yield positions[start : start + batch_size]


@contextmanager
def conditions(policy: Policy, **changes: Any) -> Iterator[None]:
    """Inside, the policy samples under other conditions, such as another size."""
    own = policy.conditions
    policy.conditions = replace(own, **changes)
    try:
        yield
    finally:
        policy.conditions = own


def own_size(prompt: Prompt) -> dict[str, int]:
    """The sizes that a prompt asks for itself."""
    return {name: value for name in SIZE_FIELDS if (value := getattr(prompt, name)) is not None}


def check_sizes(policy: Policy, prompts: Sequence[Prompt]) -> None:
    """Raise ValueError for the first prompt whose own size the pipeline would round or ignore."""
    taken = inspect.signature(pipeline_call(policy.pipeline)).parameters
    for prompt in prompts:
        for name, value in own_size(prompt).items():
            if name not in taken:
                kind = type(policy.pipeline).__name__
                raise ValueError(f"prompt {prompt.id}: {name}={value} cannot take effect, {kind} has none; remove it")
            try:
                check_size(policy.pipeline, name, value)
            except ValueError as error:
                raise ValueError(f"prompt {prompt.id}: {str(error).removeprefix('sampler.')}") from error


def summary(base: Evaluation, tuned: Evaluation, prompts: Sequence[Prompt], gold: str, *, seed: int = 0) -> dict[str, Any]:
    """What summary.json says of the scores: the rise of gold, of every reward, and of gold by kind of prompt.

    Raises ValueError if the two evaluations do not belong together.
    """
    if base.names != tuned.names or not len(base.values) == len(tuned.values) == len(prompts):
        raise ValueError(
            f"two evaluations of the same rewards and prompts are needed, got {base.names} on {len(base.values)} and "
            f"{tuned.names} on {len(tuned.values)} samples for {len(prompts)} prompts; evaluate both again"
        )
    captions = [prompt.text for prompt in prompts]
    rewards = {n: paired_rise(base.column(n), tuned.column(n), captions, seed=seed).as_json() for n in base.names}
    if gold not in rewards:
        raise ValueError(f"gold={gold!r} must be the name of a reward, one of {list(rewards)}")
    by_kind = rise_by_kind(prompts, base.column(gold), tuned.column(gold), seed=seed)
    return {
        "gold": {"name": gold, **rewards[gold]},
        "rewards": rewards,
        "by_kind": {kind: rise.as_json() for kind, rise in by_kind.items()},
    }
