"""CLIP and SigLIP as transformers has them, and the preference models that are a CLIP with weights of their own: PickScore."""

import warnings
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from flowgrpo.data import Prompt
from flowgrpo.media import to_uint8

Output = Literal["cosine", "logit", "probability"]
FRAMES_AT_ONCE = 64


class HfClip:
    """How well a picture fits its prompt, the mean over frames.

        cosine       cos(image(x_f), text(prompt)), in [-1, 1]
        logit        exp(logit_scale) cos, plus the bias of a SigLIP; no fixed range
        probability  sigmoid of a SigLIP's logit, in [0, 1]

    `model` is a hub id or a folder of transformers' CLIPModel, SiglipModel or another with image and text features; `processor`
    another that holds its tokenizer and how pictures are prepared, where they are not beside the weights (PickScore:
    yuvalkirstain/PickScore_v1 and laion/CLIP-ViT-H-14-laion2B-s32B-b79K, with output: logit). A prompt longer than the
    context is cut before its end token; the first are warned about, all their ids are in `cut_prompts`. Raises OSError for what
    cannot be loaded, ValueError for a model without these features or an output that it does not have.

    Source: PickScore, 2305.01569; SigLIP, 2303.15343.
    """

    takes = "media"
    needs_motion = False

    def __init__(self, model: str, processor: str | None = None, output: Output = "cosine", device: str = "cpu") -> None:
        from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

        if output not in get_args(Output):
            raise ValueError(f"output must be one of {', '.join(get_args(Output))}, got {output!r}; choose one")
        self.net: Any = AutoModel.from_pretrained(model, dtype=torch.float32)
        if not (hasattr(self.net, "get_image_features") and hasattr(self.net, "get_text_features")):
            raise ValueError(
                f"{model} must have image and text features, as CLIP and SigLIP have, got a {type(self.net).__name__}"
            )
        if output == "probability" and not hasattr(self.net, "logit_bias"):
            raise ValueError(f"output='probability' is a SigLIP's, {model} is a {type(self.net).__name__}; use cosine or logit")
        self.net.eval().requires_grad_(False).to(device)
        self.images: Any = AutoImageProcessor.from_pretrained(processor or model)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(processor or model)
        self.device, self.output = torch.device(device), output
        self.unit: str = {"cosine": "cosine similarity", "logit": "logit", "probability": "probability"}[output]
        ranges: dict[str, tuple[float, float] | None] = {"cosine": (-1.0, 1.0), "logit": None, "probability": (0.0, 1.0)}
        self.range = ranges[output]
        self.cut_prompts: set[int] = set()

    @torch.no_grad()
    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Scores (b,) of media (b, f, 3, h, w) in [0, 1]."""
        cosine = (self.embed_frames(media) * self.embed_prompts(prompts)[:, None]).sum(-1)
        if self.output == "cosine":
            return cosine.mean(1)
        logit = cosine * self.net.logit_scale.exp() + getattr(self.net, "logit_bias", 0.0)
        return (logit if self.output == "logit" else logit.sigmoid()).mean(1)

    def embed_frames(self, media: Tensor) -> Tensor:
        """Media (b, f, 3, h, w) in [0, 1] to unit vectors (b, f, d)."""
        pixels = to_uint8(media.flatten(0, 1)).movedim(-1, -3)
        vectors = []
        for part in pixels.split(FRAMES_AT_ONCE):
            given = self.images(images=list(part), return_tensors="pt", input_data_format="channels_first")
            vectors.append(_unit(self.net.get_image_features(pixel_values=given["pixel_values"].to(self.device).float())))
        return torch.cat(vectors).unflatten(0, media.shape[:2])

    def embed_prompts(self, prompts: Sequence[Prompt]) -> Tensor:
        """Prompts to unit vectors (b, d); equal texts are embedded once."""
        texts = list(dict.fromkeys(prompt.text for prompt in prompts))
        length = self.net.config.text_config.max_position_embeddings
        padding = "max_length" if hasattr(self.net, "logit_bias") else True  # SigLIP was trained on padded texts
        tokens = self.tokenizer(texts, padding=padding, truncation=True, max_length=length, return_tensors="pt").to(self.device)
        asked = {name: tokens[name] for name in ("input_ids", "attention_mask") if name in tokens}
        self._note_cuts(prompts, {text: len(self.tokenizer(text)["input_ids"]) > length for text in texts})
        vectors = _unit(self.net.get_text_features(**asked))
        return vectors[[texts.index(prompt.text) for prompt in prompts]]

    def _note_cuts(self, prompts: Sequence[Prompt], is_cut: dict[str, bool]) -> None:
        cut = {prompt.id for prompt in prompts if is_cut[prompt.text]}
        if cut and not self.cut_prompts:
            shown = ", ".join(map(str, sorted(cut)[:5]))
            warnings.warn(f"prompts {shown} are longer than the text encoder's context and are cut; shorten them", stacklevel=3)
        self.cut_prompts |= cut


def _unit(features: Any) -> Tensor:
    vectors = features if isinstance(features, Tensor) else features.pooler_output
    return torch.nn.functional.normalize(vectors.float(), dim=-1)
