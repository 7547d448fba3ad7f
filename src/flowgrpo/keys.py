"""Randomness by key: the same parts give the same numbers, whatever the batch, the process or the order of calls."""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

__all__ = ["generator", "key", "normal"]


def key(*parts: int | str) -> int:
    """A 63-bit integer from the parts; equal on every machine, process and Python version.

    Each part is written with its type and length before it: `("ab", "c")` is not `("a", "bc")`, nor `(1,)` `("1",)`.
    Raises TypeError for a part that is neither an integer nor text: their text forms are not stable.
    """
    digest = hashlib.sha256(b"".join(map(_encoded, parts))).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """A CPU generator seeded by the key of the parts.

    torch keeps only 32 bits of a CPU seed, so among some 100,000 keys two are likely to share a stream: draw noise with
    `normal`, which uses all 63.
    """
    return torch.Generator(device="cpu").manual_seed(key(*parts))


def normal(shape: Sequence[int], *parts: int | str) -> Tensor:
    """Standard normal noise of this shape, float32 on the CPU; a function of the shape and the parts alone."""
    source = np.random.Generator(np.random.Philox(key=key(*parts)))
    return torch.from_numpy(source.standard_normal(tuple(shape), dtype=np.float32))


def _encoded(part: int | str) -> bytes:
    if isinstance(part, int):
        tag, body = b"i", b"%d" % part
    elif isinstance(part, str):
        tag, body = b"s", part.encode("utf-8", "surrogatepass")
    else:
        raise TypeError(f"a key is made of integers and text, got {part!r} ({type(part).__name__}); convert it first")
    return b"%s%d:%s" % (tag, len(body), body)
