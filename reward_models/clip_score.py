"""How well a picture fits its prompt, as CLIP sees it."""

from collections.abc import Sequence

from torch import Tensor

from flowgrpo.data import Prompt
from reward_models._open_clip import OpenClip


class ClipScore:
    """Cosine similarity of picture and prompt, the mean over frames, times `scale`.

    s = scale * mean_f cos(image(x_f), text(prompt))

    In [-scale, scale]; with OpenAI's weights and scale 1, good pictures reach some 0.3. Preference models of CLIP form,
    such as HPSv2 and PickScore, are this score with their own weights. `model` and `pretrained`: see `OpenClip`.
    """

    unit: str = "cosine similarity"
    takes = "media"
    needs_motion = False

    def __init__(self, model: str, pretrained: str | None = None, device: str = "cpu", scale: float = 1.0) -> None:
        if scale <= 0:
            raise ValueError(f"scale={scale} must be above 0: a negative one would reward pictures that do not fit")
        self.clip = OpenClip(model, pretrained, device)
        self.scale = scale
        self.range: tuple[float, float] | None = (-scale, scale)

    @property
    def cut_prompts(self) -> set[int]:
        """Ids of the prompts so far that were longer than CLIP's context."""
        return self.clip.cut_prompts

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Scores (b,) of media (b, f, 3, h, w) in [0, 1]."""
        texts = self.clip.embed_prompts(prompts)
        return self.scale * (self.clip.embed_frames(media) * texts[:, None]).sum(-1).mean(1)
