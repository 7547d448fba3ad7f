"""Train a tiny CLIP on pictures of coloured shapes (one CPU thread, about five minutes).

    python scripts/make_shapes_clip.py --out assets/shapes/clip --seed 0

The result is an open_clip folder: `open_clip.create_model_and_transforms("local-dir:assets/shapes/clip")`. Captions
sometimes name a flaw ("a blurry picture of a red circle"), as captions in the wild do, and a linear readout of the
flaws, thrown away afterwards, sees to it that the embedding of a picture tells of its quality too.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import open_clip
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from shapes_degrade import FLAWS, draw_spoiled, rating
from torch import Tensor

from reward_models.shapes_world import Meaning, captions, neighbours

CONFIG = {
    "model_cfg": {
        "embed_dim": 64,
        "vision_cfg": {"image_size": 32, "layers": 4, "width": 96, "head_width": 32, "patch_size": 8},
        "text_cfg": {"context_length": 24, "vocab_size": 49408, "width": 64, "heads": 4, "layers": 2},
    },
    "preprocess_cfg": {
        "mean": [0.5, 0.5, 0.5],
        "std": [0.5, 0.5, 0.5],
        "interpolation": "bicubic",
        "resize_mode": "shortest",
    },
}


def describe(meaning: Meaning, severities: np.ndarray, rng: np.random.Generator) -> str:
    """A caption, which names the worst flaw or its absence in four of ten cases."""
    choices = captions(meaning)
    if rng.random() >= 0.4:
        return choices[rng.integers(len(choices))]
    body = choices[rng.integers(len(choices) // 6)]  # the first sixth are the bare ones
    word = FLAWS[severities.argmax()] if severities.max() > 0.2 else "clean"
    return f"a {word} picture of {body}"


def to_model(pictures: np.ndarray) -> Tensor:
    """Pictures (b, 32, 32, 3) in [0, 1] as the network wants them: (b, 3, 32, 32) in [-1, 1]."""
    return torch.from_numpy(pictures).permute(0, 3, 1, 2) * 2 - 1


def contrast(images: Tensor, texts: Tensor, scale: Tensor, same: Tensor) -> Tensor:
    """The symmetric contrastive loss of unit vectors (b, d); rows of equal meaning, `same` (b, b), are no negatives."""
    logits = (scale * images @ texts.T).masked_fill(same & ~torch.eye(len(same), dtype=torch.bool), float("-inf"))
    target = torch.arange(len(logits))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def train(net: torch.nn.Module, args: argparse.Namespace) -> None:
    """Fits the network in place."""
    rng = np.random.default_rng(args.seed)
    pictures, shown, severities = draw_spoiled(args.scenes, rng)
    number = {meaning: i for i, meaning in enumerate(dict.fromkeys(shown))}
    meaning_ids = torch.tensor([number[meaning] for meaning in shown])
    tokenizer = open_clip.SimpleTokenizer(context_length=CONFIG["model_cfg"]["text_cfg"]["context_length"])
    readout = torch.nn.Linear(CONFIG["model_cfg"]["embed_dim"], len(FLAWS) + 1)
    flaws = torch.from_numpy(np.column_stack([severities, rating(severities) / 10])).float()
    weights = [*net.parameters(), *readout.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=2e-3, betas=(0.9, 0.98), weight_decay=0.02, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=args.steps, pct_start=0.1)
    for step in range(args.steps):
        rows = rng.integers(len(pictures), size=args.batch)
        ids = tokenizer([describe(shown[i], severities[i], rng) for i in rows])
        images = net.encode_image(to_model(pictures[rows]), normalize=True)
        texts = net.encode_text(ids, normalize=True)
        same = meaning_ids[rows][:, None] == meaning_ids[rows]
        loss = contrast(images, texts, net.logit_scale.exp().clamp(max=100), same)
        loss = loss + 10 * F.mse_loss(readout(images), flaws[rows])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step}, {(time.time() - args.started) / 60:.2f} min: loss {loss.item():.3f}", flush=True)


@torch.no_grad()
def retrieval(net: torch.nn.Module, seed: int) -> dict[str, float]:
    """On 1,500 new pictures: how often the right caption is first of 32 others', and beats one with one thing wrong."""
    rng = np.random.default_rng(seed + 1)
    pictures, shown, _ = draw_spoiled(1500, rng)
    tokenizer = open_clip.SimpleTokenizer(context_length=CONFIG["model_cfg"]["text_cfg"]["context_length"])
    wrong = [neighbours(meaning)[rng.integers(len(neighbours(meaning)))] for meaning in shown]
    images = net.encode_image(to_model(pictures), normalize=True)
    right, near = (
        net.encode_text(tokenizer([captions(meaning)[0] for meaning in some]), normalize=True) for some in (shown, wrong)
    )
    first = []
    for i in range(len(shown)):
        others = [j for j in rng.permutation(len(shown)) if shown[j] != shown[i]][:32]
        first.append(bool((images[i] @ right[others].T).max() < images[i] @ right[i]))
    beats = (images * right).sum(1) > (images * near).sum(1)
    return {"first of 33": float(np.mean(first)), "beats one thing wrong": beats.float().mean().item()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--scenes", type=int, default=12_000)
    args = parser.parse_args()
    args.started = time.time()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "open_clip_config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    net = open_clip.create_model(f"local-dir:{args.out}", load_weights=False)
    train(net.train(), args)
    weights = {name: weight.half().contiguous() for name, weight in net.state_dict().items()}
    save_file(weights, args.out / "open_clip_model.safetensors", metadata={"format": "pt"})
    print(json.dumps(retrieval(net.eval(), args.seed)), f"{(time.time() - args.started) / 60:.2f} minutes")


if __name__ == "__main__":
    main()
