"""Write the prompt sets of the shapes world: train, validation and held-out, disjoint (one second).

    python scripts/make_shapes_prompts.py --out assets/shapes/prompts --seed 0

All captions of a meaning go to the same set ("a circle left of a square" and "an image of one square right of one
circle" mean the same). A quarter of each kind's meanings is held out, a tenth serves to choose settings, the rest is
for training; where a kind has captions with and without colours, each part is split by itself. Single objects have only
three meanings: there the captions of each meaning are shared out instead. In all three, position and color_attr come
less often than the other kinds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from reward_models.shapes_world import KINDS, Meaning, captions, meanings

ROWS = {
    "train": dict(zip(KINDS, (250, 250, 400, 400, 100, 100), strict=True)),
    "validation": dict(zip(KINDS, (120, 90, 150, 150, 45, 45), strict=True)),
    "heldout": dict(zip(KINDS, (200, 150, 250, 250, 75, 75), strict=True)),
}
UNCOLORED_POSITIONS = 0.6
"""Share of position prompts that name no colours, though most position meanings do."""


def split(choices: Sequence[Any], seed: int) -> dict[str, list[Any]]:
    """Shared out in the order of a hash; every set gets one at least."""
    ordered = sorted(choices, key=lambda choice: hashlib.sha256(f"{seed} {choice}".encode()).hexdigest())
    held, chosen = max(1, round(0.25 * len(ordered))), max(1, round(0.1 * len(ordered)))
    return {"heldout": ordered[:held], "validation": ordered[held : held + chosen], "train": ordered[held + chosen :]}


def parts(kind: str) -> list[list[Meaning]]:
    """The meanings without any colour and those with one, empty parts left out."""
    plain = [meaning for meaning in meanings(kind) if not any(thing.color for thing in meaning.things)]
    colored = [meaning for meaning in meanings(kind) if meaning not in plain]
    return [part for part in (plain, colored) if part]


def caption_pools(name: str, kind: str, seed: int) -> list[list[Sequence[str]]]:
    """For each part of a kind, the captions of one set, meaning by meaning."""
    if kind == "single_object":
        return [[split(captions(meaning), seed)[name] for meaning in part] for part in parts(kind)]
    return [[captions(meaning) for meaning in split(part, seed)[name]] for part in parts(kind)]


def shuffled_captions(pools: Sequence[Sequence[str]], rng: np.random.Generator) -> Iterator[str]:
    """Captions for ever, meaning by meaning in turn; a caption comes again when its meaning has no new one left."""
    rolls = [cycle(rng.permutation(list(pools[i])).tolist()) for i in rng.permutation(len(pools))]
    for roll in cycle(rolls):
        yield next(roll)


def rows(name: str, kind: str, seed: int, rng: np.random.Generator) -> Iterator[dict[str, str]]:
    """The rows of one kind in one set."""
    sets = caption_pools(name, kind, seed)
    count = ROWS[name][kind]
    share = UNCOLORED_POSITIONS if kind == "position" else len(sets[0]) / sum(map(len, sets))
    plain = round(share * count)
    for pools, number in zip(sets, (plain, count - plain), strict=False):
        for _, caption in zip(range(number), shuffled_captions(pools, rng), strict=False):
            yield {"prompt": caption, "kind": kind}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the three .jsonl files")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    started = time.time()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in ROWS:
        rng = np.random.default_rng(args.seed)
        lines = [row for kind in KINDS for row in rows(name, kind, args.seed, rng)]
        lines = [lines[i] for i in rng.permutation(len(lines))]
        (args.out / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        print(f"{name}: {len(lines)} rows, {len({line['prompt'] for line in lines})} distinct captions")
    print(f"{(time.time() - started) / 60:.2f} minutes")


if __name__ == "__main__":
    main()
