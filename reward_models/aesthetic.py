"""How much people would like a picture, whatever its prompt: the LAION aesthetic predictor."""

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from flowgrpo.data import Prompt
from reward_models._open_clip import OpenClip

FORMS = ([""], ["layers.0", "layers.2", "layers.4", "layers.6", "layers.7"])


class Aesthetic:
    """A small head on CLIP's image embedding, the mean over frames.

    s = mean_f head(e_f / |e_f|)

    The head was fitted to unit-length embeddings of one CLIP (ViT-L/14 of OpenAI for the known one): raw embeddings
    give scores of 20 or 30. Its ratings were 1 to 10; a score outside is an extrapolation, not a triumph.

    `clip` and `pretrained`: see `OpenClip`. `head` is a .safetensors or .pth file with either one linear layer (weight,
    bias) or the five of the published one (layers.0, 2, 4, 6, 7; nothing between them), any prefix. Raises
    FileNotFoundError without that file, ValueError for other layers or for a width that is not the CLIP's.

    Source: LAION's aesthetic-predictor and improved-aesthetic-predictor (weights and their layout).
    """

    unit: str = "rating"
    range: tuple[float, float] | None = (1.0, 10.0)
    takes = "media"
    needs_motion = False

    def __init__(self, clip: str, head: str, pretrained: str | None = None, device: str = "cpu") -> None:
        state = _read(Path(head).expanduser())
        self.clip = OpenClip(clip, pretrained, device)
        self.head = _build(state, head).to(device)
        wanted = self.head[0].in_features
        if wanted != self.clip.width:
            raise ValueError(
                f"the head {head} takes embeddings of width {wanted}, but the CLIP {clip} gives {self.clip.width}; "
                "use the CLIP that the head was trained on"
            )

    @torch.no_grad()
    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Scores (b,) of media (b, f, 3, h, w) in [0, 1]; the prompts are not used."""
        return self.head(self.clip.embed_frames(media)).squeeze(-1).mean(1)


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise FileNotFoundError(f"head={str(path)!r} must be a .safetensors or .pth file, found no such file")
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)


def _build(state: dict[str, Tensor], source: str) -> nn.Sequential:
    """The linear layers of a state dict, one after the other, in float32."""
    names = sorted({key.rpartition(".")[0] for key in state}, key=lambda name: [int(n) for n in re.findall("[0-9]+", name)])
    prefix = re.sub(r"layers\.\d+$", "", names[0]) if len(names) > 1 else names[0]
    if [name.removeprefix(prefix) for name in names] not in FORMS or len(state) != 2 * len(names):
        raise ValueError(
            f"{source} must hold one linear layer (weight, bias) or layers.0, 2, 4, 6, 7 with weight and bias, "
            f"got {sorted(state)}; convert it, or write a reward model for this head"
        )
    layers = []
    for weight, bias in [(state[_key(name, "weight")], state[_key(name, "bias")]) for name in names]:
        layer = nn.Linear(weight.shape[1], weight.shape[0])
        layer.load_state_dict({"weight": weight, "bias": bias})
        layers.append(layer)
    return nn.Sequential(*layers).eval().requires_grad_(False)


def _key(name: str, kind: str) -> str:
    return f"{name}.{kind}" if name else kind
