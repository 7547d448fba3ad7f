"""ImageReward: how much people would prefer a picture for its prompt, by a BLIP that was taught comparisons."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowgrpo.data import Prompt
from flowgrpo.media import to_uint8

MEAN, STD = 0.16717362830052426, 1.0333394966054072  # of its scores on its own data, as published
PIXELS = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))  # CLIP's mean and std
WORDS = 35  # tokens of a prompt
HEAD_WIDTH = 64
VISION, TEXT, HEAD = "blip.visual_encoder.", "blip.text_encoder.", "mlp.layers."
RENAMED = {  # the published names of the picture encoder, and transformers'
    r"^cls_token$": "embeddings.class_embedding", r"^pos_embed$": "embeddings.position_embedding",
    r"^patch_embed\.proj\.": "embeddings.patch_embedding.", r"^norm\.": "post_layernorm.",
    r"^blocks\.(\d+)\.norm": r"encoder.layers.\1.layer_norm",
    r"^blocks\.(\d+)\.attn\.qkv\.": r"encoder.layers.\1.self_attn.qkv.",
    r"^blocks\.(\d+)\.attn\.proj\.": r"encoder.layers.\1.self_attn.projection.", r"^blocks\.(\d+)\.": r"encoder.layers.\1.",
}  # fmt: skip
IDLE = ("embeddings.position_ids",)


class ImageReward:
    """The score of a BLIP whose text encoder sees the picture, standardised; the mean over frames. Good pictures have 0 to 2.

    `weights` is the published ImageReward.pt, or a file of its layout; `tokenizer` BERT's, by hub id or folder. Pictures are
    resized so that the shorter side fits (bicubic), cropped to the middle square and normalised as CLIP's; prompts are cut
    after 35 tokens. Raises FileNotFoundError without the file, ValueError for one that lacks weights or has others.

    Source: ImageReward, 2304.05977, released code (layout of the file, preparation, mean and std).
    """

    unit: str = "standard deviations"
    range: tuple[float, float] | None = None
    takes = "media"
    needs_motion = False

    def __init__(self, weights: str, tokenizer: str = "bert-base-uncased", device: str = "cpu") -> None:
        from transformers import AutoTokenizer

        if not Path(weights).is_file():
            raise FileNotFoundError(f"weights={weights!r} must be the file ImageReward.pt, found no such file")
        state = torch.load(weights, map_location="cpu", weights_only=True)
        networks = [net.eval().requires_grad_(False).to(device) for net in build(state, weights)]
        self.vision, self.text, self.head = networks
        self.size: int = self.vision.config.image_size
        self.tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer)
        self.device = torch.device(device)

    @torch.no_grad()
    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Scores (b,) of media (b, f, 3, h, w) in [0, 1]."""
        frames = media.shape[1]
        texts = [prompt.text for prompt in prompts for _ in range(frames)]
        options = {"padding": "max_length", "truncation": True, "max_length": WORDS, "return_tensors": "pt"}
        words = self.tokenizer(texts, **options).to(self.device)
        seen = self.vision(pixel_values=self.prepare(media.flatten(0, 1))).last_hidden_state
        told = self.text(
            input_ids=words["input_ids"], attention_mask=words["attention_mask"], encoder_hidden_states=seen, is_decoder=False
        )
        scores = (self.head(told.last_hidden_state[:, 0])[:, 0].float() - MEAN) / STD
        return scores.view(len(media), frames).mean(1)

    def prepare(self, frames: Tensor) -> Tensor:
        """Frames (n, 3, h, w) in [0, 1] to the network's input."""
        from torchvision.transforms.v2 import functional as tv

        pixels = to_uint8(frames).movedim(-1, -3)
        pixels = tv.center_crop(tv.resize(pixels, [self.size], tv.InterpolationMode.BICUBIC, antialias=True), [self.size])
        mean, std = map(list, PIXELS)
        return tv.normalize(pixels.float() / 255, mean, std).to(self.device)


def build(state: Mapping[str, Tensor], source: str) -> list[Any]:
    """The picture encoder, the text encoder and the head of a state dict, whose sizes it tells."""
    from transformers import BlipTextConfig, BlipVisionConfig, BlipVisionModel
    from transformers.models.blip.modeling_blip_text import BlipTextModel

    own = {
        name: {key.removeprefix(name): value for key, value in state.items() if key.startswith(name)}
        for name in (VISION, TEXT, HEAD)
    }
    missing = [name for name, part in own.items() if not part]
    if missing or sum(map(len, own.values())) != len(state):
        rest = sorted(key for key in state if not key.startswith((VISION, TEXT, HEAD)))
        raise ValueError(f"{source} must hold {VISION}*, {TEXT}* and {HEAD}*, it lacks {missing} and has {rest[:3]} besides")
    try:
        position, patch = own[VISION]["pos_embed"], own[VISION]["patch_embed.proj.weight"]
        words, places = own[TEXT]["embeddings.word_embeddings.weight"], own[TEXT]["embeddings.position_embeddings.weight"]
        depths = [
            1 + max(int(found[1]) for key in part if (found := re.search(r"\.(\d+)\.", key)))
            for part in (own[VISION], own[TEXT])
        ]
        inner = own[VISION]["blocks.0.mlp.fc1.weight"], own[TEXT]["encoder.layer.0.intermediate.dense.weight"]
    except (KeyError, ValueError) as error:
        raise ValueError(f"{source} lacks weights that tell its sizes: {error}; is it ImageReward.pt?") from error
    vision = BlipVisionModel(
        BlipVisionConfig(
            hidden_size=position.shape[2], num_attention_heads=position.shape[2] // HEAD_WIDTH, patch_size=patch.shape[2],
            image_size=round((position.shape[1] - 1) ** 0.5) * patch.shape[2], num_hidden_layers=depths[0],
            intermediate_size=inner[0].shape[0], layer_norm_eps=1e-6,
        )
    )  # fmt: skip
    text = BlipTextModel(
        BlipTextConfig(
            vocab_size=words.shape[0], hidden_size=words.shape[1], num_attention_heads=words.shape[1] // HEAD_WIDTH,
            max_position_embeddings=places.shape[0], num_hidden_layers=depths[1], intermediate_size=inner[1].shape[0],
            encoder_hidden_size=position.shape[2], bos_token_id=None, sep_token_id=None,
        ),
        add_pooling_layer=False,
    )  # fmt: skip
    _fill(vision, {_renamed(key): value for key, value in own[VISION].items()}, source)
    _fill(text, {key: value for key, value in own[TEXT].items() if key not in IDLE}, source)
    return [vision, text, _head(own[HEAD], source)]


def _renamed(key: str) -> str:
    for pattern, name in RENAMED.items():
        if re.search(pattern, key):
            return re.sub(pattern, name, key)
    return key


def _fill(network: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    wanted = network.state_dict()
    lost = sorted(wanted.keys() ^ state.keys()) or [key for key in wanted if wanted[key].shape != state[key].shape]
    if lost:
        raise ValueError(
            f"{source}: {len(lost)} weights of {type(network).__name__} are missing, unknown or of another shape: {lost[:3]}"
        )
    network.load_state_dict(dict(state))


def _head(state: Mapping[str, Tensor], source: str) -> nn.Sequential:
    """Linear layers one after the other: what stands between them drops out, in training only."""
    numbers = sorted({int(key.partition(".")[0]) for key in state})
    if len(state) != 2 * len(numbers) or any(f"{n}.{kind}" not in state for n in numbers for kind in ("weight", "bias")):
        raise ValueError(f"{source}: the head must have a weight and a bias for each layer, got {sorted(state)}")
    layers = []
    for number in numbers:
        weight = state[f"{number}.weight"]
        layer = nn.Linear(weight.shape[1], weight.shape[0])
        layer.load_state_dict({"weight": weight, "bias": state[f"{number}.bias"]})
        layers.append(layer)
    return nn.Sequential(*layers)
