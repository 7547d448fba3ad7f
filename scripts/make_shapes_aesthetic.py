"""Fit an aesthetic head on the tiny CLIP: crisp, clean, saturated pictures score high (one CPU thread, a minute).

    python scripts/make_shapes_aesthetic.py --clip assets/shapes/clip --out assets/shapes/aesthetic --seed 0

The head has the form of LAION's second aesthetic predictor: five linear layers with nothing between them, on the
image's embedding at unit length, giving a rating of 1 to 10.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import open_clip
import torch
import torch.nn.functional as F
from make_shapes_clip import to_model
from safetensors.torch import save_file
from shapes_degrade import draw_spoiled, rating
from torch import Tensor, nn

WIDTHS = (96, 32, 16, 8)


def new_head(width: int) -> nn.ModuleDict:
    """LAION's layout: `layers.0, 2, 4, 6, 7`; the numbers between were dropout."""
    widths = (width, *WIDTHS, 1)
    layers = nn.Sequential(
        nn.Linear(widths[0], widths[1]), nn.Dropout(0.2), nn.Linear(widths[1], widths[2]), nn.Dropout(0.2),
        nn.Linear(widths[2], widths[3]), nn.Dropout(0.1), nn.Linear(widths[3], widths[4]), nn.Linear(widths[4], 1),
    )  # fmt: skip
    return nn.ModuleDict({"layers": layers})


@torch.no_grad()
def embed(net: nn.Module, pictures: np.ndarray) -> Tensor:
    """Unit-length embeddings (n, d)."""
    parts = to_model(pictures).split(500)
    return torch.cat([net.encode_image(part, normalize=True) for part in parts])


def fit(head: nn.ModuleDict, embeddings: Tensor, ratings: Tensor, steps: int) -> None:
    """Squared error, without dropout: there is nothing between the layers that could overfit."""
    head.eval()
    nn.init.constant_(head["layers"][-1].bias, ratings.mean().item())
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(steps):
        rows = torch.randint(len(ratings), (512,))
        loss = F.mse_loss(head["layers"](embeddings[rows])[:, 0], ratings[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clip", type=Path, required=True, help="folder that make_shapes_clip.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    started = time.time()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    net = open_clip.create_model(f"local-dir:{args.clip}", require_pretrained=True).eval()
    pictures, _, severities = draw_spoiled(8000, np.random.default_rng(args.seed + 10))
    embeddings, ratings = embed(net, pictures), torch.from_numpy(rating(severities)).float()
    head = new_head(embeddings.shape[1])
    fit(head, embeddings[:6000], ratings[:6000], args.steps)
    args.out.mkdir(parents=True, exist_ok=True)
    save_file({name: weight.contiguous() for name, weight in head.state_dict().items()}, args.out / "head.safetensors")
    with torch.no_grad():
        scores = head["layers"](embeddings[6000:])[:, 0]
    correlation = torch.corrcoef(torch.stack([scores, ratings[6000:]]))[0, 1].item()
    clean = severities[6000:].max(1) == 0
    print(f"correlation on 2,000 new pictures {correlation:.3f}; flawless {scores[clean].mean():.2f}, "
          f"others {scores[~clean].mean():.2f}; {(time.time() - started) / 60:.2f} minutes")  # fmt: skip


if __name__ == "__main__":
    main()
