r"""Train the embedded text-to-image pipeline on pictures of coloured shapes (an hour and a half of a busy CPU).

Run from the repository root, one stage after the other; each reads what the stage before it saved:

    python scripts/make_shapes_base.py vae   --out assets/shapes/pipeline --seed 0
    python scripts/make_shapes_base.py clean --out assets/shapes/pipeline --seed 0
    python scripts/make_shapes_base.py noisy --out assets/shapes/pipeline --seed 0
    python scripts/make_shapes_base.py noisy --out assets/shapes/pipeline --seed 1 --wrong 0.4 --steps 7000 --rate 1.2e-3
    python scripts/make_shapes_base.py clean --out assets/shapes/pipeline --seed 10 --steps 14000 --flat 0.5 --scenes 24000
    python scripts/make_shapes_base.py noisy --out assets/shapes/pipeline --seed 11 --wrong 0.4 --steps 2500 --rate 1e-3 \
        --scenes 24000

`vae` fits the autoencoder. `clean` teaches the transformer and both text encoders with right captions; the long second one
is what the pipeline can do. `noisy` goes on with captions of which a part has one attribute wrong, as web captions do: the
pipeline then obeys in a third of its pictures, which leaves reinforcement learning something to bring back. The first
`clean` stage had a flat learning rate (--flat 0.999).
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, StableDiffusion3Pipeline
from shapes_models import MAX_TOKENS, SHIFT, BiasedJointAttention, new_pipeline, new_vae
from torch import Tensor
from transformers import CLIPTokenizer

from reward_models.shapes_world import KINDS, Meaning, captions, meanings, neighbours, render, sample_scene

ZERO_TOKENS = 256
"""How many zero tokens the silent T5 appends by default (the pipeline's max_sequence_length)."""
MIX = {
    "single_object": 0.07,
    "colors": 0.12,
    "counting": 0.20,
    "two_object": 0.18,
    "position": 0.23,
    "color_attr": 0.20,
}


def draw_meaning(rng: np.random.Generator) -> Meaning:
    """A meaning from the mixture of kinds; two of three positions name no colours, or they would hardly be seen."""
    kind = KINDS[rng.choice(len(KINDS), p=[MIX[kind] for kind in KINDS])]
    choices = meanings(kind)
    if kind == "position":
        colored = rng.random() < 0.35
        choices = tuple(meaning for meaning in choices if (meaning.things[0].color is not None) == colored)
    return choices[rng.integers(len(choices))]


def draw_pictures(count: int, seed: int) -> tuple[Tensor, list[Meaning]]:
    """`count` pictures (n, 3, 32, 32) uint8, and what each shows."""
    rng = np.random.default_rng(seed)
    pictures, shown = torch.empty(count, 3, 32, 32, dtype=torch.uint8), []
    for i in range(count):
        shown.append(draw_meaning(rng))
        picture = render(sample_scene(shown[-1], rng))
        pictures[i] = torch.from_numpy(np.rint(picture * 255).astype(np.uint8)).permute(2, 0, 1)
    return pictures, shown


def to_model(pictures: Tensor) -> Tensor:
    """uint8 pictures as the autoencoder wants them, float32 in [-1, 1]."""
    return pictures.float() / 127.5 - 1


# The autoencoder


def vae_loss(vae: AutoencoderKL, pictures: Tensor) -> Tensor:
    """Reconstruction from latents with noise on them: the sampler's latents will not be exact either."""
    posterior = vae.encode(pictures).latent_dist
    latents = posterior.mean + 0.15 * torch.randn_like(posterior.mean)
    error = vae.decode(latents).sample - pictures
    return error.abs().mean() + error.square().mean() + 0.01 * posterior.mean.square().mean()


def train_vae(args: argparse.Namespace) -> None:
    """Fit the autoencoder, set its scaling to the latents' spread, save an untrained pipeline around it."""
    torch.manual_seed(args.seed)
    pictures, _ = draw_pictures(args.scenes, args.seed)
    vae = new_vae()
    optimizer = torch.optim.AdamW(vae.parameters(), lr=3e-3, weight_decay=1e-4)
    for step in range(args.steps):
        set_rate(optimizer, 3e-3 * min(1, step / 100) * (0.5 + 0.5 * math.cos(math.pi * step / args.steps)))
        loss = vae_loss(vae, to_model(pictures[torch.randint(len(pictures), (16,))]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 200 == 0:
            report(args, step, f"vae loss {loss.item():.4f}")
    with torch.no_grad():
        latents = vae.encode(to_model(pictures[:2000])).latent_dist.mean
    vae.register_to_config(scaling_factor=1 / latents.std().item(), shift_factor=latents.mean().item())
    torch.manual_seed(args.seed)
    new_pipeline(vae).save_pretrained(args.out)


# Training


@dataclass(frozen=True)
class Captions:
    """Every caption as token ids (c, tokens), and which rows belong to each meaning."""

    ids: Tensor
    first: Tensor
    count: Tensor
    wrong: list[Tensor]

    def draw(self, shown: Tensor, wrong: Tensor) -> Tensor:
        """Token ids (b, tokens) for meanings (b,); where `wrong` (b, bool), those of a neighbouring meaning."""
        said = shown.clone()
        for i in wrong.nonzero().flatten().tolist():
            options = self.wrong[int(shown[i])]
            said[i] = options[torch.randint(len(options), ())]
        rows = self.first[said] + (torch.rand(len(said)) * self.count[said]).long()
        return self.ids[rows]


def index_captions(tokenizer: CLIPTokenizer) -> tuple[Captions, dict[Meaning, int]]:
    """All captions tokenised once, and the number of each meaning."""
    every = [meaning for kind in KINDS for meaning in meanings(kind)]
    number = {meaning: i for i, meaning in enumerate(every)}
    texts = [captions(meaning) for meaning in every]
    count = torch.tensor([len(group) for group in texts])
    ids = tokenize(tokenizer, [text for group in texts for text in group])
    wrong = [torch.tensor([number[other] for other in neighbours(meaning)]) for meaning in every]
    return Captions(ids, count.cumsum(0) - count, count, wrong), number


def tokenize(tokenizer: CLIPTokenizer, texts: list[str]) -> Tensor:
    kwargs = {"padding": "max_length", "max_length": MAX_TOKENS, "truncation": True, "return_tensors": "pt"}
    return tokenizer(texts, **kwargs).input_ids


class Denoiser(torch.nn.Module):
    """Both text encoders and the transformer as one network, joined the way the pipeline joins them."""

    def __init__(self, pipe: StableDiffusion3Pipeline) -> None:
        super().__init__()
        self.encoders = torch.nn.ModuleList([pipe.text_encoder, pipe.text_encoder_2])
        self.transformer = pipe.transformer

    def forward(self, x: Tensor, sigma: Tensor, ids: Tensor, key_bias: Tensor) -> Tensor:
        """The velocity at noisy latents x (b, 4, 8, 8), levels sigma (b,) and token ids (b, tokens)."""
        outs = [encoder(ids, output_hidden_states=True) for encoder in self.encoders]
        tokens = torch.cat([out.hidden_states[-2] for out in outs], dim=-1)
        pooled = torch.cat([out.text_embeds for out in outs], dim=-1)
        return self.transformer(
            hidden_states=x,
            encoder_hidden_states=F.pad(tokens, (0, 0, 0, 1)),
            pooled_projections=pooled,
            timestep=sigma * 1000,
            joint_attention_kwargs={"key_bias": key_bias},
            return_dict=False,
        )[0]


def draw_levels(count: int) -> Tensor:
    """Stratified noise levels (n,), spread like the sampler's own: uniform, then shifted."""
    uniform = (torch.arange(count) + torch.rand(count)) / count
    return SHIFT * uniform / (1 + (SHIFT - 1) * uniform)


def draw_key_bias(count: int, image_tokens: int = 16) -> Tensor:
    """(b, 1, 1, keys): the zero token stands for 1 or for 256, half of the batch each."""
    bias = torch.zeros(count, 1, 1, image_tokens + MAX_TOKENS + 1)
    bias[torch.rand(count) < 0.5, ..., -1] = math.log(ZERO_TOKENS)
    return bias


def batches(args: argparse.Namespace, pipe: StableDiffusion3Pipeline) -> Iterator[tuple[Tensor, Tensor]]:
    """Latents (b, 4, 8, 8) and token ids (b, tokens), for ever."""
    pictures, shown = draw_pictures(args.scenes, args.seed + 1 + 2 * (args.stage == "noisy"))
    latents = encode(pipe.vae, pictures)
    table, number = index_captions(pipe.tokenizer)
    meaning = torch.tensor([number[one] for one in shown])
    empty = tokenize(pipe.tokenizer, [""])
    while True:
        for rows in torch.randperm(len(latents)).split(args.batch)[: len(latents) // args.batch]:
            ids = table.draw(meaning[rows], torch.rand(args.batch) < args.wrong)
            ids[torch.rand(args.batch) < 0.03] = empty
            yield latents[rows], ids


@torch.no_grad()
def encode(vae: AutoencoderKL, pictures: Tensor) -> Tensor:
    """Latents as the transformer sees them, scaled to unit spread."""
    means = torch.cat([vae.encode(to_model(part)).latent_dist.mean for part in pictures.split(500)])
    return (means - vae.config.shift_factor) * vae.config.scaling_factor


def train_denoiser(args: argparse.Namespace) -> None:
    """Rectified flow on latents; saves the moving average of the weights."""
    pipe = StableDiffusion3Pipeline.from_pretrained(args.start, dtype=torch.float32)
    shipped = copy.deepcopy(pipe)
    torch.manual_seed(args.seed + 2)
    pipe.transformer.set_attn_processor(BiasedJointAttention())
    average = list(Denoiser(shipped).requires_grad_(False).parameters())
    model = Denoiser(pipe).train()
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights, lr=args.rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    losses = []
    for step, (x0, ids) in zip(range(1, args.steps + 1), batches(args, pipe), strict=False):
        set_rate(optimizer, args.rate * rate_factor(args, step))
        noise, sigma = torch.randn_like(x0), draw_levels(len(x0))
        x = torch.lerp(x0, noise, sigma[:, None, None, None])
        loss = F.mse_loss(model(x, sigma, ids, draw_key_bias(len(x0))), noise - x0)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_lerp_(average, weights, 1 - min(0.999, step / (step + 20)))
        losses.append(loss.item())
        if step % 250 == 0:
            report(args, step, f"loss {np.mean(losses[-250:]):.4f}")
        if step % args.save_every == 0 or step == args.steps:
            shipped.save_pretrained(args.out)
            report(args, step, "saved")


def rate_factor(args: argparse.Namespace, step: int) -> float:
    """Warm-up, flat for a share of the updates, then down to zero along a cosine."""
    falling = max(0.0, (step / args.steps - args.flat) / (1 - args.flat))
    return min(1.0, step / 200) * (0.5 + 0.5 * math.cos(math.pi * falling))


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def report(args: argparse.Namespace, step: int, text: str) -> None:
    print(f"{args.stage} step {step}, {(time.time() - args.started) / 60:.2f} min: {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("vae", "clean", "noisy"))
    parser.add_argument("--out", type=Path, required=True, help="folder of the pipeline")
    parser.add_argument("--start", type=Path, help="folder to go on from; --out if not given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="updates; vae 1300, clean 5000, noisy 5200 if not given")
    parser.add_argument("--scenes", type=int, help="distinct pictures; vae 8,000, clean and noisy 16,000 if not given")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=1.5e-3, help="peak learning rate of clean and noisy")
    parser.add_argument("--flat", type=float, default=0.0, help="share of the updates at the peak rate, below 1")
    parser.add_argument("--wrong", type=float, default=0.2, help="share of wrong captions in the noisy stage")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save-every", type=int, default=1000)
    args = parser.parse_args()
    args.started, args.start = time.time(), args.start or args.out
    args.wrong *= args.stage == "noisy"
    args.steps = args.steps or {"vae": 1300, "clean": 5000, "noisy": 5200}[args.stage]
    args.scenes = args.scenes or {"vae": 8000, "clean": 16_000, "noisy": 16_000}[args.stage]
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    train_vae(args) if args.stage == "vae" else train_denoiser(args)


if __name__ == "__main__":
    main()
