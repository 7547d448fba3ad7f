"""Motion measured on films whose motion is known."""

import math

import pytest
import torch

from flowgrpo.data import Prompt
from reward_models.motion import Motion, camera_of, movement, smoothness

PROMPT = [Prompt("a film", 0)]
SIZE = 64
DIAGONAL = math.hypot(SIZE, SIZE)


def scene(seed=0, size=SIZE + 64):
    """A smooth random picture (3, size, size) in [0, 1]."""
    coarse = torch.rand(1, 3, size // 6, size // 6, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.interpolate(coarse, size=(size, size), mode="bicubic").clamp(0, 1)[0]


def shifted(picture, right, down):
    """The picture's middle after it has moved by so many pixels, which need not be whole."""
    size = picture.shape[-1]
    steps = torch.arange(SIZE) + (size - SIZE) / 2
    y, x = torch.meshgrid(2 * (steps - down) / (size - 1) - 1, 2 * (steps - right) / (size - 1) - 1, indexing="ij")
    return torch.nn.functional.grid_sample(picture[None], torch.stack([x, y], -1)[None], mode="bicubic", align_corners=True)[0]


def pan(step, frames=5, angle=0.0):
    moves = [(i * step * math.cos(angle), i * step * math.sin(angle)) for i in range(frames)]
    return torch.stack([shifted(scene(), *move) for move in moves]).clamp(0, 1)


def ball(step, frames=5, camera=0.0):
    """A disc that crosses a scene, which itself may move."""
    clip = pan(camera, frames)
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    texture = scene(7)[:, :SIZE, :SIZE]
    for i, frame in enumerate(clip):
        inside = (x - 20 - i * step) ** 2 + (y - 32) ** 2 < 100
        moved = texture.roll(round(i * step), 2)
        frame[:, inside] = moved[:, inside]
    return clip


def score(clip, measure="amount", fps=8.0, **options):
    return float(Motion(measure, fps, **options)(clip[None], PROMPT))


@pytest.mark.parametrize("step", [1, 2, 4])
@pytest.mark.parametrize("angle", [0.0, 2.2])
def test_a_shift_is_measured_in_pixels_a_frame(step, angle):
    clip = pan(step, angle=angle)
    for measure in ("amount", "camera"):
        assert score(clip, measure) * DIAGONAL / 8 == pytest.approx(step, abs=0.1)
    assert score(clip, "objects") * DIAGONAL / 8 < 0.15 * step
    towards = [math.cos(angle), math.sin(angle)]
    assert score(clip, "direction", towards=towards) * DIAGONAL / 8 == pytest.approx(step, abs=0.1)
    across = [-math.sin(angle), math.cos(angle)]
    assert score(clip, "direction", towards=across) * DIAGONAL / 8 == pytest.approx(0, abs=0.1)


def test_the_frame_rate_does_not_count():
    slow, fast = pan(3, 5), pan(1, 13)
    for measure in ("amount", "camera"):
        assert score(fast, measure, fps=24) == pytest.approx(score(slow, measure, fps=8), rel=0.05)
    own = [Prompt("a film", 0, meta={"fps": 24})]
    assert float(Motion("amount", 8)(fast[None], own)) == pytest.approx(score(slow), rel=0.05)


def test_a_still_clip_scores_lowest_and_faster_is_more():
    amounts = [score(pan(step)) for step in (0, 0.25, 1, 3)]
    assert amounts[0] == pytest.approx(0, abs=1e-6)
    assert amounts == sorted(amounts)


def test_a_pan_is_told_from_a_moving_object():
    moving, panned, both = ball(3), pan(3), ball(3, camera=-1)
    assert score(moving, "objects") > 5 * score(panned, "objects")
    assert score(panned, "camera") > 5 * score(moving, "camera")
    assert score(moving, "objects") * DIAGONAL / 8 == pytest.approx(3, abs=0.5)
    assert score(both, "camera") * DIAGONAL / 8 == pytest.approx(1, abs=0.15)
    assert score(both, "objects") * DIAGONAL / 8 == pytest.approx(4, abs=0.7)


def test_reversed_frames_change_the_direction_and_not_the_amount():
    clip = ball(3)
    for measure in ("amount", "objects"):
        assert score(clip.flip(0), measure) == pytest.approx(score(clip, measure), rel=0.1)
    there, back = (score(film, "direction", towards=[1, 0]) for film in (clip, clip.flip(0)))
    assert there > 0.5 * score(clip)
    assert back == pytest.approx(-there, rel=0.1)


def test_smooth_motion_is_told_from_jerks():
    steady, jerky = pan(2, 7), torch.stack([shifted(scene(), move, 0) for move in (0, 4, 4, 8, 8, 12, 12)]).clamp(0, 1)
    assert score(steady, "smoothness") > 0.9
    assert score(jerky, "smoothness") < 0.2
    assert score(pan(0), "smoothness") == 1
    velocities = torch.tensor([1.0, 3.0, 3.0]).view(3, 1, 1, 1).expand(3, 2, 2, 2)
    assert smoothness(velocities) == pytest.approx(1 - (2 + 0) / (4 + 6))


def test_a_turning_and_zooming_camera_is_a_camera():
    down, right = torch.meshgrid(torch.linspace(-1, 1, 20), torch.linspace(-1, 1, 30), indexing="ij")
    flow = torch.stack([0.5 + 0.2 * right - 0.1 * down, -1.0 + 0.3 * down], -1)
    seen = flow.clone()
    seen[4:9, 5:12] += torch.tensor([3.0, -2.0])
    stays = torch.ones(20, 30, dtype=torch.bool)
    torch.testing.assert_close(camera_of(seen, stays), flow, atol=0.02, rtol=0)


def test_a_file_of_weights_makes_raft(tmp_path):
    from torchvision.models.optical_flow import raft_small

    torch.manual_seed(0)
    torch.save(raft_small(weights=None).state_dict(), tmp_path / "raft.pth")
    found = movement(pan(1, 3), Motion("amount", backend="raft", weights=str(tmp_path / "raft.pth")).flow)
    assert found.flow.shape == (2, SIZE, SIZE, 2)
    assert found.flow.isfinite().all()
    with pytest.raises(ValueError, match="backend='raft' needs weights, a state dict of"):
        Motion(backend="raft")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"measure": "speed"}, "measure must be one of amount, objects, camera, smoothness, direction"),
        ({"measure": "direction"}, "belongs to measure='direction'"),
        ({"towards": [1.0, 0.0]}, "belongs to measure='direction'"),
        ({"measure": "direction", "towards": [0.0, 0.0]}, "not both 0"),
        ({"fps": 0.0}, "fps must be above 0"),
    ],
)
def test_settings_without_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Motion(**options)


def test_what_is_missing_is_one_line(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cv2", None)
    with pytest.raises(ImportError, match=r"motion needs OpenCV: pip install 'flowgrpo\[video\]'"):
        Motion()
