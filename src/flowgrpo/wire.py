"""How samples travel to a reward server and scores come back: safetensors there, JSON back, nothing that runs code."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from flowgrpo.data import Prompt
from flowgrpo.media import from_uint8, to_uint8

__all__ = ["CONTENT_TYPE", "packed", "scores_as_json", "scores_from_json", "unpacked"]

CONTENT_TYPE = "application/x-safetensors"
NOTE = "flowgrpo"  # the key of what goes beside the media


def packed(media: Float[Tensor, "b f 3 h w"], prompts: Sequence[Prompt], rewards: Sequence[str]) -> bytes:
    """A request: media as 8 bits, which is what reward models see, prompts with their meta, and the rewards asked for.

    Raises ValueError for pixels that are not finite and for a meta that is not JSON.
    """
    said = [{"text": prompt.text, "id": prompt.id, "meta": dict(prompt.meta)} for prompt in prompts]
    try:
        note = json.dumps({"prompts": said, "rewards": list(rewards)}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"a prompt's meta must be JSON to travel, got {error}; leave what is not out of the prompt file"
        ) from error
    return save({"media": to_uint8(media).movedim(-1, -3).contiguous()}, metadata={NOTE: note})


def unpacked(body: bytes) -> tuple[Float[Tensor, "b f 3 h w"], list[Prompt], list[str]]:
    """What was packed. Raises ValueError for anything else."""
    try:
        tensors, note = load(body), json.loads(_metadata(body)[NOTE])
        prompts = [Prompt(str(one["text"]), int(one["id"]), meta=dict(one["meta"])) for one in note["prompts"]]
        rewards = [str(name) for name in note["rewards"]]
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ValueError(f"a request must be what flowgrpo.wire packs, got {type(error).__name__}: {error}") from error
    media = tensors.get("media")
    if media is None or media.dtype != torch.uint8 or media.ndim != 5 or not media.numel():
        got = "none" if media is None else f"{media.dtype} of shape {tuple(media.shape)}"
        raise ValueError(f"a request needs media, uint8 (b, f, 3, h, w), got {got}")
    if len(media) != len(prompts):
        raise ValueError(f"every sample needs its own prompt, got {len(media)} samples and {len(prompts)} prompts")
    return from_uint8(media), prompts, rewards


def scores_as_json(names: Sequence[str], values: Float[Tensor, "b k"]) -> dict[str, Any]:
    """An answer: a list of scores for each reward, null where there is none."""
    columns = zip(names, values.T.tolist(), strict=True)
    return {"scores": {name: [score if math.isfinite(score) else None for score in column] for name, column in columns}}


def scores_from_json(answer: Any, name: str, count: int) -> Float[Tensor, " b"]:
    """The scores of one reward, NaN for null. Raises ValueError unless it is one number or null a sample."""
    scores = answer.get("scores") if isinstance(answer, Mapping) else None
    column = scores.get(name) if isinstance(scores, Mapping) else None
    numbers = isinstance(column, list) and all(one is None or (isinstance(one, int | float) and one == one) for one in column)
    if not isinstance(column, list) or not numbers or any(isinstance(one, bool) for one in column) or len(column) != count:
        raise ValueError(
            f'a reward server must answer {{"scores": {{{name!r}: [{count} numbers or null]}}}}, got {json.dumps(answer)[:200]}'
        )
    return torch.tensor([math.nan if one is None else float(one) for one in column])


def _metadata(body: bytes) -> Mapping[str, str]:
    size = int.from_bytes(body[:8], "little")
    return json.loads(body[8 : 8 + size])["__metadata__"]
