"""A tiny CLIP with random weights, saved as open_clip saves its models."""

import json
from pathlib import Path
from typing import Any

import open_clip
import torch
from safetensors.torch import save_file

WIDTH, CONTEXT, SIZE = 24, 20, 32
PREPROCESS = {
    "size": [SIZE, SIZE],
    "mode": "RGB",
    "mean": [0.48, 0.46, 0.41],
    "std": [0.27, 0.26, 0.28],
    "interpolation": "bicubic",
    "resize_mode": "shortest",
}


def save_tiny_clip(folder: Path, preprocess: dict[str, Any] | None = None, width: int = WIDTH) -> Path:
    """Write open_clip_config.json and open_clip_model.safetensors; `preprocess` None leaves that part out."""
    folder.mkdir(parents=True)
    towers = {
        "embed_dim": width,
        "vision_cfg": {"image_size": SIZE, "layers": 1, "width": 32, "patch_size": 8, "head_width": 16},
        "text_cfg": {"context_length": CONTEXT, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = open_clip.CLIP(**towers)
    config = {"model_cfg": towers} if preprocess is None else {"model_cfg": towers, "preprocess_cfg": preprocess}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    save_file(net.state_dict(), folder / "open_clip_model.safetensors")
    return folder
