"""Encode pictures with a pipeline's VAE into the file that `data.latents` of a config names.

    python scripts/encode_data.py --pipeline assets/shapes/pipeline --manifest pictures.jsonl --out data.safetensors

The manifest has a line {"file": "a.png", "prompt": "..."} a picture, paths beside the manifest. For pipelines whose latents are
those of an image VAE, scaled and shifted as its config says (SD3, SD 1.5, SDXL and their like). Pipelines that pack
latents (FLUX, Qwen-Image) or have films need their own: any file with the tensor "latents" (n, *s), as the pipeline has them
before it decodes, and the metadata "prompts", a JSON list, will do.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from diffusers import AutoencoderKL, DiffusionPipeline
from PIL import Image
from safetensors.torch import save_file
from torchvision.transforms.functional import pil_to_tensor


def encoded(vae: AutoencoderKL, pictures: torch.Tensor) -> torch.Tensor:
    """Latents of pictures (n, 3, h, w) in [0, 1], in the unit of the sampler."""
    with torch.no_grad():
        modes = vae.encode(2 * pictures - 1).latent_dist.mode()
    return (modes - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipeline", required=True)
    parser.add_argument("--manifest", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=16)
    args = parser.parse_args()
    pipeline = DiffusionPipeline.from_pretrained(args.pipeline)
    vae = getattr(pipeline, "vae", None)
    if not isinstance(vae, AutoencoderKL) or hasattr(pipeline, "_pack_latents"):
        parser.error(f"{type(pipeline).__name__} has no plain image VAE; encode its latents with code of its own")
    rows = [json.loads(line) for line in args.manifest.read_text(encoding="utf-8").splitlines() if line.strip()]
    parts = []
    for start in range(0, len(rows), args.batch):
        pictures = [Image.open(args.manifest.parent / row["file"]).convert("RGB") for row in rows[start : start + args.batch]]
        parts.append(encoded(vae, torch.stack([pil_to_tensor(picture) for picture in pictures]) / 255))
    latents = torch.cat(parts).contiguous()
    save_file({"latents": latents}, args.out, {"prompts": json.dumps([row["prompt"] for row in rows])})
    print(f"{len(latents)} latents of shape {tuple(latents.shape[1:])} in {args.out}")


if __name__ == "__main__":
    main()
