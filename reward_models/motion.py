"""How much, how smoothly and where to things move in a film, the camera told from the objects."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from flowgrpo.data import Prompt
from flowgrpo.media import luma

Measure = Literal["amount", "objects", "camera", "smoothness", "direction"]
TOP = 0.05  # the share of pixels that move most, which stand for the film
FITS = 10  # reweighted least squares for the camera
MARGIN = 0.05  # of the shorter side: what comes in or leaves there spoils the flow beside it
DIS_SIZE = 256  # pixels of the shorter side, to which smaller films are enlarged: its patches are some 8 wide
RAFT_SIZE = 128  # pixels; RAFT needs as many, in multiples of 8


class Motion:
    """Dense optical flow between neighbouring frames, in picture diagonals a second, so that neither size nor frame rate count.

    The camera's part is the affine motion that most pixels agree on, fitted by least squares that outliers lose weight in;
    what is left is the objects'. A part's amount is the mean length of its flow over the 5 % of pixels that move most, the mean
    over steps. `measure`:

        amount      of all that moves (dynamic degree)
        objects     of what moves otherwise than the camera; 0 for a pan over a still scene
        camera      of the camera's motion
        smoothness  1 - |v' - v| / (|v'| + |v|) of the flows v, v' of successive steps at a pixel, weighed by |v'| + |v|;
                    in [0, 1], 1 also for a still film: give it weight beside an amount
        direction   amount towards `towards`, (right, down); negative for the other way

    Pixels that leave the picture in a step, or come to its edge, do not count there. `fps`: frames a second, where a prompt's
    meta has no "fps". `backend`: "dis", OpenCV's DIS on the CPU, or "raft", torchvision's small RAFT with `weights`, its state
    dict in a file. Raises ImportError without the library, ValueError for a setting.

    Source: the 5 % are those of VBench's dynamic degree (2311.17982); the rest is ours.
    """

    unit: str = "diagonals a second"
    takes = "media"
    needs_motion = True

    def __init__(self, measure: Measure = "amount", fps: float = 16.0, towards: Sequence[float] | None = None,
                 backend: Literal["dis", "raft"] = "dis", weights: str | None = None, device: str = "cpu") -> None:  # fmt: skip
        if measure not in get_args(Measure):
            raise ValueError(f"measure must be one of {', '.join(get_args(Measure))}, got {measure!r}; choose one")
        if (towards is not None) != (measure == "direction"):
            raise ValueError("towards=[right, down] belongs to measure='direction', and it to it; give both or none")
        if towards is not None and (len(towards) != 2 or not any(towards)):
            raise ValueError(f"towards must be [right, down], not both 0, got {list(towards)}")
        if not fps > 0:
            raise ValueError(f"fps must be above 0, got {fps}")
        self.measure, self.fps = measure, fps
        self.towards = None if towards is None else torch.nn.functional.normalize(torch.tensor(towards).float(), dim=0)
        self.flow = _dis() if backend == "dis" else _raft(weights, device)
        smooth = measure == "smoothness"
        self.unit = "share of steady motion" if smooth else Motion.unit
        self.range: tuple[float, float] | None = (0.0, 1.0) if smooth else None

    @torch.no_grad()
    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Scores (b,) of media (b, f, 3, h, w) in [0, 1]."""
        return torch.tensor([self._score(clip, prompt) for clip, prompt in zip(media, prompts, strict=True)])

    def _score(self, clip: Tensor, prompt: Prompt) -> float:
        if len(clip) < 2:
            raise ValueError("motion needs films of at least 2 frames, got 1")
        found = movement(clip, self.flow)
        if self.measure == "smoothness":
            return smoothness(found.flow)
        part = {"objects": found.flow - found.camera, "camera": found.camera}.get(self.measure, found.flow)
        fast = torch.stack([fastest(step, here) for step, here in zip(part, found.stays, strict=True)])
        pixels = fast[:, 1:].mean(0) @ self.towards if self.towards is not None else fast[:, 0].mean()
        diagonal = (clip.shape[-2] ** 2 + clip.shape[-1] ** 2) ** 0.5
        return float(pixels * prompt.meta.get("fps", self.fps) / diagonal)


@dataclass(frozen=True)
class Movement:
    """Velocities of pixels (f - 1, h, w, 2), to the right and down, in pixels a frame: all of it, and the camera's part; and
    which pixels stay away from the edge (f - 1, h, w)."""

    flow: Tensor
    camera: Tensor
    stays: Tensor


def movement(clip: Tensor, flow: Callable[[Tensor], Tensor]) -> Movement:
    """What moves in a clip (f, 3, h, w) in [0, 1]."""
    found = flow(clip)
    height, width = found.shape[1:3]
    down, right = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    x, y = right + found[..., 0], down + found[..., 1]
    m = MARGIN * min(height, width)
    stays = (x >= m) & (x <= width - 1 - m) & (y >= m) & (y <= height - 1 - m)
    return Movement(found, torch.stack([camera_of(*step) for step in zip(found, stays, strict=True)]), stays)


def camera_of(flow: Tensor, stays: Tensor) -> Tensor:
    """The affine motion (h, w, 2) that most of a flow (h, w, 2) agrees with: shift, turn, zoom and shear."""
    height, width = flow.shape[:2]
    down, right = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
    places = torch.stack([torch.ones_like(down), down, right], -1).flatten(0, 1).double()
    seen, counts = flow.flatten(0, 1).double(), stays.flatten().double()
    fitted = seen.median(0).values.expand_as(seen)
    for _ in range(FITS):
        error = (seen - fitted).norm(dim=1)
        weight = counts / (1 + (error / (1.5 * error.median()).clamp(min=0.02)) ** 2) ** 2
        matrix = places.T @ (weight[:, None] * places)
        fitted = places @ torch.linalg.solve(matrix, places.T @ (weight[:, None] * seen))
    return fitted.view_as(flow).to(flow.dtype)


def fastest(part: Tensor, stays: Tensor) -> Tensor:
    """Of the pixels that move most in a step (h, w, 2): mean speed, and mean velocity to the right and down; (3,)."""
    pixels = part[stays] if stays.any() else part.flatten(0, 1)
    speeds, rows = pixels.norm(dim=-1).topk(max(1, round(TOP * len(pixels))))
    return torch.cat([speeds.mean()[None], pixels[rows].mean(0)])


def smoothness(flow: Tensor) -> float:
    """How little velocities change from step to step (f - 1, h, w, 2), in [0, 1]; 1 for one step and for none that moves."""
    before, after = flow[:-1], flow[1:]
    speed = (before.norm(dim=-1) + after.norm(dim=-1)).sum()
    return float(1 - (after - before).norm(dim=-1).sum() / speed) if speed > 0 else 1.0


def _dis() -> Callable[[Tensor], Tensor]:
    try:
        import cv2
    except ImportError as error:
        raise ImportError("motion needs OpenCV: pip install 'flowgrpo[video]'") from error

    def flow(clip: Tensor) -> Tensor:
        solver = cv2.DISOpticalFlow_create(cv2.DISOPTICAL_FLOW_PRESET_MEDIUM)  # pyright: ignore[reportAttributeAccessIssue]
        size = list(clip.shape[-2:])
        factor = max(1.0, DIS_SIZE / min(size))
        larger = [round(factor * side) for side in size]
        grey = luma(clip.float().cpu()).clamp(0, 1)
        grey = torch.nn.functional.interpolate(grey[:, None], size=larger, mode="bilinear")[:, 0]
        frames = list((grey * 255).round().byte().numpy())
        found = [solver.calc(*pair, None) for pair in pairwise(frames)]  # type: ignore[call-overload]
        return _resized(torch.stack([torch.from_numpy(step) for step in found]).movedim(-1, 1), size)

    return flow


def _raft(weights: str | None, device: str) -> Callable[[Tensor], Tensor]:
    if weights is None or not Path(weights).is_file():
        raise ValueError(f"backend='raft' needs weights, a state dict of torchvision's raft_small in a file, got {weights!r}")
    from torchvision.models.optical_flow import raft_small

    network: Any = raft_small(weights=None)
    network.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    network.eval().requires_grad_(False).to(device)

    def flow(clip: Tensor) -> Tensor:
        height, width = clip.shape[-2:]
        size = [max(RAFT_SIZE, -(-side // 8) * 8) for side in (height, width)]
        frames = 2 * torch.nn.functional.interpolate(clip.float(), size=size, mode="bilinear").to(device) - 1
        found = torch.cat([network(one[None], other[None])[-1] for one, other in pairwise(frames)])
        return _resized(found.cpu(), [height, width])

    return flow


def _resized(flow: Tensor, size: list[int]) -> Tensor:
    """A flow (n, 2, h, w) at another size, in its pixels: (n, *size, 2)."""
    height, width = flow.shape[-2:]
    resized = torch.nn.functional.interpolate(flow, size=size, mode="area")
    return resized.movedim(1, -1) * torch.tensor([size[1] / width, size[0] / height])
