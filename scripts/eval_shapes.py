"""How often the embedded pipeline draws what it was asked for, through the stock pipeline call.

    python scripts/eval_shapes.py --pipeline assets/shapes/pipeline --prompts assets/shapes/prompts/validation.jsonl

Prints the share of pictures that pass the exact checker, by kind, and the share in which every blob is a clean shape.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from diffusers import StableDiffusion3Pipeline
from PIL import Image

from reward_models.shapes import judge, read
from reward_models.shapes_world import parse


def draw(pipe: StableDiffusion3Pipeline, prompts: list[str], args: argparse.Namespace) -> np.ndarray:
    """Pictures (n, 32, 32, 3) in [0, 1]; prompt i starts from noise of seed `args.seed + i`."""
    parts = []
    for start in range(0, len(prompts), args.batch):
        some = prompts[start : start + args.batch]
        parts.append(
            pipe(
                some,
                num_inference_steps=args.steps,
                guidance_scale=args.guidance,
                max_sequence_length=args.max_sequence_length,
                generator=[torch.Generator().manual_seed(args.seed + start + i) for i in range(len(some))],
                output_type="np",
            ).images
        )
    return np.concatenate(parts)


def summary(rows: list[dict[str, str]], pictures: np.ndarray) -> dict[str, float]:
    """Means over all rows and by kind."""
    blobs = read(pictures)
    passed, values = defaultdict(list), defaultdict(list)
    for row, seen in zip(rows, blobs, strict=True):
        verdict = judge(seen, parse(row["prompt"]))
        passed[row["kind"]].append(verdict.passed)
        values["passed"].append(verdict.passed)
        values["graded"].append(verdict.fraction)
        values["well formed"].append(bool(seen) and all(blob.is_clean for blob in seen))
    return {name: round(float(np.mean(some)), 3) for name, some in (*values.items(), *sorted(passed.items()))}


def save_sheet(pictures: np.ndarray, path: Path, columns: int = 12) -> None:
    """The first 72 pictures side by side, three times enlarged."""
    shown = pictures[: 72 // columns * columns]
    rows = [np.concatenate(list(shown[i : i + columns]), axis=1) for i in range(0, len(shown), columns)]
    sheet = Image.fromarray(np.rint(np.concatenate(rows) * 255).astype(np.uint8))
    sheet.resize((3 * sheet.width, 3 * sheet.height), Image.Resampling.NEAREST).save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipeline", type=Path, default=Path("assets/shapes/pipeline"))
    parser.add_argument("--prompts", type=Path, default=Path("assets/shapes/prompts/validation.jsonl"))
    parser.add_argument("--rows", type=int, help="only the first rows")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--guidance", type=float, default=1.0)
    parser.add_argument("--max-sequence-length", type=int, default=1, help="256 is the pipeline's own default")
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sheet", type=Path, help="save a contact sheet of the first 72 pictures here (PNG)")
    args = parser.parse_args()
    started = time.time()
    rows = [json.loads(line) for line in args.prompts.read_text().splitlines()][: args.rows]
    pipe = StableDiffusion3Pipeline.from_pretrained(args.pipeline, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    pictures = draw(pipe, [row["prompt"] for row in rows], args)
    if args.sheet:
        save_sheet(pictures, args.sheet)
    print(json.dumps(summary(rows, pictures)), f"{(time.time() - started) / 60:.2f} minutes")


if __name__ == "__main__":
    main()
