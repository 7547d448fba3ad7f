"""How much the frames of a film are of one thing, as CLIP sees it."""

from collections.abc import Sequence

from torch import Tensor

from flowgrpo.data import Prompt
from reward_models._open_clip import OpenClip


class TemporalConsistency:
    """Mean cosine similarity of CLIP embeddings of neighbouring frames, and with `first` of each frame and the first too.

    s = mean_t cos(e_t, e_{t+1}),    with first: mean_t (cos(e_t, e_{t+1}) + cos(e_1, e_{t+1})) / 2

    In [-1, 1]; 1 for a still film, so measure motion beside it. With `first` slow drift counts as well. `model` and
    `pretrained`: see `OpenClip`.

    Source: the similarity of neighbouring frames and of each with the first is that of VBench's subject consistency
    (2311.17982), there with DINO.
    """

    unit: str = "cosine similarity"
    range: tuple[float, float] | None = (-1.0, 1.0)
    takes = "media"
    needs_motion = True

    def __init__(self, model: str, pretrained: str | None = None, device: str = "cpu", first: bool = True) -> None:
        self.clip, self.first = OpenClip(model, pretrained, device), first

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Scores (b,) of media (b, f, 3, h, w) in [0, 1]; the prompts are not used."""
        e = self.clip.embed_frames(media)
        neighbours = (e[:, :-1] * e[:, 1:]).sum(-1)
        if not self.first:
            return neighbours.mean(1)
        return ((neighbours + (e[:, :1] * e[:, 1:]).sum(-1)) / 2).mean(1)
