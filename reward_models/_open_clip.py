"""Loads a CLIP through open_clip and embeds frames and texts; what `clip_score` and `aesthetic` share."""

import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowgrpo.data import Prompt

HUB, FOLDER = "hf-hub:", "local-dir:"
CONFIG = "open_clip_config.json"
FRAMES_AT_ONCE = 64


class OpenClip:
    """A frozen CLIP in float32: unit-length embeddings of media and of prompts.

    `model` is an open_clip name (then `pretrained` is one of its tags or a file of weights), ``hf-hub:org/name``, or a
    folder with open_clip_config.json and open_clip_model.safetensors. How pictures are resized and normalised comes
    with the tag, or is read from the config beside the weights. Raises ImportError without open_clip, FileNotFoundError
    for a folder or file that is not there, ValueError without a preprocessing config or for a choice without effect.
    """

    def __init__(self, model: str, pretrained: str | None, device: str) -> None:
        open_clip = _import_open_clip()
        source, preprocess = _resolve(open_clip, model, pretrained)
        self.device = torch.device(device)
        self.net = open_clip.create_model(
            source, pretrained, device=device, force_preprocess_cfg=preprocess, require_pretrained=True
        )
        self.net.eval().requires_grad_(False)
        self.width: int = open_clip.get_model_config(source)["embed_dim"]
        self.tokenizer = open_clip.get_tokenizer(source)
        self.transforms = _tensor_transforms(open_clip.get_model_preprocess_cfg(self.net))
        self.cut_prompts: set[int] = set()

    @torch.no_grad()
    def embed_frames(self, media: Tensor) -> Tensor:
        """Media (b, f, 3, h, w) in [0, 1] to unit vectors (b, f, d)."""
        chunks = media.flatten(0, 1).split(FRAMES_AT_ONCE)
        vectors = [self.net.encode_image(self.preprocess(frames.to(self.device)), normalize=True) for frames in chunks]
        return torch.cat(vectors).unflatten(0, media.shape[:2])

    @torch.no_grad()
    def embed_prompts(self, prompts: Sequence[Prompt]) -> Tensor:
        """Prompts to unit vectors (b, d); equal texts are embedded once.

        A prompt longer than the context is cut before its end token. The first such prompts are warned about; all their
        ids are kept in `cut_prompts`.
        """
        texts = list(dict.fromkeys(prompt.text for prompt in prompts))
        tokens = self.tokenizer(texts)
        self._note_cuts(prompts, dict(zip(texts, self._is_cut(texts, tokens).tolist(), strict=True)))
        vectors = self.net.encode_text(tokens.to(self.device), normalize=True)
        return vectors[[texts.index(prompt.text) for prompt in prompts]]

    def preprocess(self, frames: Tensor) -> Tensor:
        """Frames (n, 3, h, w) in [0, 1] to the network's input: resized with antialias, cropped, normalised."""
        *resize, normalise = self.transforms
        for transform in resize:
            frames = transform(frames)
        return normalise(frames.clamp(0, 1))  # bicubic overshoots; 8-bit pictures are clipped there too

    def _is_cut(self, texts: list[str], tokens: Tensor) -> Tensor:
        """Whether each text loses tokens: with one place more, its last place no longer holds the end token."""
        length = tokens.shape[1]
        longer = self.tokenizer(texts, context_length=length + 1)
        return (longer[:, :length] != tokens).any(dim=1)

    def _note_cuts(self, prompts: Sequence[Prompt], is_cut: dict[str, bool]) -> None:
        ids = {prompt.id for prompt in prompts if is_cut[prompt.text]}
        if ids and not self.cut_prompts:
            warnings.warn(
                f"{len(ids)} of {len({prompt.id for prompt in prompts})} prompts are longer than CLIP's context of "
                f"{self.tokenizer.context_length} tokens (first: prompt {min(ids)}): CLIP reads only their beginning; "
                "later ones are counted in cut_prompts",
                RuntimeWarning,
                stacklevel=3,
            )
        self.cut_prompts |= ids


def _import_open_clip() -> Any:
    try:
        import open_clip
    except ImportError as error:
        raise ImportError("CLIP rewards need open_clip, one of flowgrpo's own needs: pip install open-clip-torch") from error
    return open_clip


def _resolve(open_clip: Any, model: str, pretrained: str | None) -> tuple[str, dict[str, Any] | None]:
    """The model as open_clip spells it, and the preprocessing config beside its weights (None for a known tag)."""
    if model in open_clip.list_models():
        return model, _beside_weights(open_clip, model, pretrained)
    if pretrained is not None:
        raise ValueError(f"pretrained={pretrained!r} has no effect: {model!r} brings its weights; remove pretrained")
    if model.startswith(HUB):
        from huggingface_hub import hf_hub_download

        return model, _read_config(Path(hf_hub_download(model.removeprefix(HUB), CONFIG)))
    folder = Path(model.removeprefix(FOLDER)).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(
            f"model={model!r} must be an open_clip name, hf-hub:org/name or a folder, found no such folder; check it"
        )
    if not any(path.suffix in (".safetensors", ".bin", ".pth") for path in folder.iterdir()):
        raise FileNotFoundError(f"{folder} must hold open_clip_model.safetensors, found no weights; save them there")
    return f"{FOLDER}{folder}", _read_config(folder / CONFIG)


def _beside_weights(open_clip: Any, model: str, pretrained: str | None) -> dict[str, Any] | None:
    tags = open_clip.list_pretrained_tags_by_model(model)
    if pretrained in tags:
        return None
    if pretrained is None or not Path(pretrained).is_file():
        raise ValueError(
            f"pretrained={pretrained!r} must be a file of weights or a tag of {model}: {', '.join(tags) or 'none'}"
        )
    return _read_config(Path(pretrained).parent / CONFIG)


def _read_config(path: Path) -> dict[str, Any]:
    """The preprocessing config in a file; its mean and std must be there, for a wrong one changes every score."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} must say how pictures are preprocessed (preprocess_cfg), found no such file")
    config = json.loads(path.read_text(encoding="utf-8")).get("preprocess_cfg") or {}
    missing = [name for name in ("mean", "std") if not config.get(name)]
    if missing:
        raise ValueError(f"{path} must give mean and std in preprocess_cfg, got no {' and no '.join(missing)}; add them")
    return config


def _tensor_transforms(config: dict[str, Any]) -> list[Callable[[Tensor], Tensor]]:
    """open_clip's own transform as steps, the last of which normalises; those for squares also work on tensors."""
    from open_clip.transform import PreprocessCfg, image_transform_v2

    size = config["size"]
    is_square = isinstance(size, int) or size[0] == size[1]
    if config["resize_mode"] == "longest" or (config["resize_mode"] == "shortest" and not is_square):
        raise ValueError(
            f"a CLIP must take squares, or squash pictures, got resize_mode={config['resize_mode']!r} and size {size}; "
            "use another CLIP"
        )
    transform: Any = image_transform_v2(PreprocessCfg(**config), is_train=False)
    return transform.transforms
