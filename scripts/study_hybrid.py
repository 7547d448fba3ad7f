"""What hybrid inference keeps of a reward and gives back of diversity, in the embedded world.

    python scripts/study_hybrid.py --tuned runs/shapes-mixgrpo --output runs/study-hybrid

The tuned model makes the first share of the steps, its base the rest. Every share sees the same held-out prompts, several
samples of each, and the same start noise. Measured at each share:

- gold: share of pictures that pass the exact checker, strictly, and its rise over share 0, the base, with a 95 % interval
  that resamples whole captions;
- aesthetic: mean of the aesthetic head;
- pixel distance of two samples of one prompt: sqrt(mean over pixels and channels of (x - y)^2), pixels in [0, 1];
- bin distance of two samples of one prompt: the checker reads each picture as a multiset of (shape, colour, third of the
  width, third of the height), one entry a blob, with a bin of its own for a shape or colour that is not a clean one;

      d(A, B) = 1 - |A and B| / max(|A|, |B|), 0 for two empty pictures.

Both distances are means over the pairs of a prompt's samples, then over the prompts; both definitions are ours. Writes
study.json, study.md and study.png.
"""

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

from flowgrpo.data import load_prompts
from flowgrpo.evaluate import Evaluation, evaluate
from flowgrpo.generate import hybrid_from, policy_from
from flowgrpo.hybrid import tuned_steps
from flowgrpo.paired import paired_rise
from flowgrpo.scoring import Component, Scorer
from reward_models.aesthetic import Aesthetic
from reward_models.shapes import Blob, Shapes, read
from reward_models.shapes_world import SIZE

ASSETS = Path(__file__).parent.parent / "assets" / "shapes"
HEADER = """| share | tuned steps | gold | rise over the base, 95 % | aesthetic | pixel distance | bin distance |
| --- | --- | --- | --- | --- | --- | --- |
"""
PANELS = {
    "gold": "strict pass",
    "aesthetic": "aesthetic rating",
    "pixel_distance": "pixel distance",
    "bin_distance": "bin distance",
}


def pixel_distance(one: np.ndarray, two: np.ndarray) -> float:
    """Root of the mean squared difference of two pictures (h, w, 3)."""
    return float(np.sqrt(np.mean((one - two) ** 2)))


def bins(blobs: Sequence[Blob]) -> Counter:
    """What a picture shows, coarsely."""
    return Counter((blob.shape, blob.color, int(3 * blob.x / SIZE), int(3 * blob.y / SIZE)) for blob in blobs)


def bin_distance(one: Counter, two: Counter) -> float:
    """1 minus the share of blobs that two pictures have in common."""
    most = max(one.total(), two.total())
    return 1 - (one & two).total() / most if most else 0.0


def diversity(items: Sequence[Any], samples: int, distance: Callable[[Any, Any], float]) -> float:
    """Mean distance of two samples of one prompt, whose samples lie together."""
    groups = [items[start : start + samples] for start in range(0, len(items), samples)]
    return float(np.mean([distance(a, b) for group in groups for a, b in combinations(group, 2)]))


def measure(result: Evaluation, base: Evaluation, captions: Sequence[str], samples: int) -> dict[str, Any]:
    """The row of one share, given the evaluation of share 0."""
    rise = paired_rise(base.column("gold"), result.column("gold"), captions)
    pictures = torch.cat([result.media[i] for i in range(len(captions))]).permute(0, 2, 3, 1).numpy()
    return {
        "gold": rise.tuned,
        "rise": rise.as_json(),
        "aesthetic": float(result.column("aesthetic").nanmean()),
        "pixel_distance": diversity(list(pictures), samples, pixel_distance),
        "bin_distance": diversity([bins(blobs) for blobs in read(pictures)], samples, bin_distance),
    }


def study(args: argparse.Namespace) -> dict[str, Any]:
    """All shares, and what they were measured on."""
    policy, num_steps, origin = policy_from(
        str(args.base), args.tuned, num_steps=args.steps, guidance_scale=1.0, call={"max_sequence_length": 1}
    )
    aesthetic = Aesthetic(str(ASSETS / "clip"), str(ASSETS / "aesthetic" / "head.safetensors"))
    scorer = Scorer([Component("gold", Shapes("strict"), 1.0), Component("aesthetic", aesthetic, 1.0)])
    chosen = load_prompts(args.prompts).prompts[: args.num_prompts]
    prompts = [prompt for prompt in chosen for _ in range(args.samples)]
    captions, rows, base = [prompt.text for prompt in prompts], [], None
    cuts = [tuned_steps(share, num_steps) for share in args.shares]
    hybrid = hybrid_from(policy, origin, num_steps, 0.0)
    for share, cut in zip(args.shares, cuts, strict=True):
        result = evaluate(
            policy, scorer, prompts, num_steps=num_steps, batch_size=args.batch, seed=args.seed, keep=range(len(prompts)),
            hybrid=replace(hybrid, share=share),
        )  # fmt: skip
        base = base or result
        rows.append({"share": share, "tuned_steps": cut, **measure(result, base, captions, args.samples)})
        print(line(rows[-1]), flush=True)
    about = {"prompts": len(chosen), "captions": len(set(captions)), "samples": args.samples, "num_steps": num_steps}
    return {"origin": origin, **about, "seed": args.seed, "rows": rows}


def line(row: dict[str, Any]) -> str:
    """One line of the table."""
    r = {name: math.nan if value is None else value for name, value in row["rise"].items()}
    return (
        f"| {row['share']:g} | {row['tuned_steps']} | {row['gold']:.3f} | {r['rise']:+.3f} "
        f"({r['rise_low']:+.3f} to {r['rise_high']:+.3f}) | {row['aesthetic']:.2f} | {row['pixel_distance']:.4f} "
        f"| {row['bin_distance']:.3f} |"
    )


def markdown(result: dict[str, Any]) -> str:
    """The table, and what it was measured on."""
    return (
        HEADER
        + "\n".join(line(row) for row in result["rows"])
        + f"\n\n{result['prompts']} held-out prompts ({result['captions']} captions), {result['samples']} samples each, "
        f"{result['num_steps']} steps, the same start noise at every share; `scripts/study_hybrid.py` defines the columns.\n"
    )


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """One panel a measure, over the share of steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.2), facecolor="white")
    FigureCanvasAgg(figure)
    shares = [row["share"] for row in rows]
    for axes, (name, title) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        axes.plot(shares, [row[name] for row in rows], marker="o", color="#1a7f37")
        axes.set_title(title, loc="left", color="#1f2328")
        axes.set_xlabel("share of steps: tuned model")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def shares_of(text: str) -> list[float]:
    """Shares that rise from 0, the base that the others are compared with."""
    shares = [float(part) for part in text.split(",")]
    if shares[0] != 0 or not all(a < b <= 1 for a, b in pairwise(shares)):
        raise argparse.ArgumentTypeError(f"shares must begin with 0 and rise up to at most 1, got {text}")
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tuned", type=Path, required=True, help="run folder, adapter or exported pipeline")
    parser.add_argument("--output", type=Path, required=True, help="folder for study.json, study.md and study.png")
    parser.add_argument("--base", type=Path, default=ASSETS / "pipeline")
    parser.add_argument("--prompts", type=Path, default=ASSETS / "prompts" / "heldout.jsonl")
    parser.add_argument("--num-prompts", type=int, default=400, help="the first ones of the file")
    parser.add_argument("--samples", type=int, default=4, help="of each prompt; at least 2")
    parser.add_argument("--shares", type=shares_of, default=[0.0, 0.2, 0.4, 0.6, 0.8, 1.0], help="0,0.5,1")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--seed", type=int, default=20260)
    args = parser.parse_args()
    if args.samples < 2:
        parser.error("--samples must be at least 2: diversity is a distance of two samples")
    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    print(HEADER, end="")
    result = study(args)
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "study.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.output / "study.md").write_text(markdown(result))
    plot(result["rows"], args.output / "study.png")
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
