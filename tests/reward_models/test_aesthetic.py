"""The aesthetic head: its two layouts, unit-length embeddings, and its refusals."""

from copy import deepcopy
from functools import cache

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from flowgrpo.data import Prompt
from reward_models._open_clip import OpenClip
from reward_models.aesthetic import Aesthetic
from tests.reward_models.tiny_clip import PREPROCESS, WIDTH, save_tiny_clip

WIDTHS = {"layers.0": (WIDTH, 12), "layers.2": (12, 8), "layers.4": (8, 6), "layers.6": (6, 4), "layers.7": (4, 1)}
PROMPTS = [Prompt(text="not used", id=i) for i in range(3)]


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return str(save_tiny_clip(tmp_path_factory.mktemp("clip") / "tiny", PREPROCESS))


@pytest.fixture(autouse=True)
def read_once(clip, monkeypatch):
    """The network is read from disk once for all tests, and every reward has its own copy."""
    monkeypatch.setattr("reward_models.aesthetic.OpenClip", lambda *args: deepcopy(_loaded(*args)))


@cache
def _loaded(*args):
    return OpenClip(*args)


def head_state(layers: dict[str, tuple[int, int]], prefix: str = "") -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    state = {}
    for name, (width_in, width_out) in layers.items():
        layer = nn.Linear(width_in, width_out)
        state |= {f"{prefix}{name}.weight": layer.weight.detach(), f"{prefix}{name}.bias": layer.bias.detach()}
    return state


def saved(state, path) -> str:
    save_file(state, path) if path.suffix == ".safetensors" else torch.save(state, path)
    return str(path)


def media(frames: int = 1) -> torch.Tensor:
    return torch.rand(3, frames, 3, 40, 33, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("prefix", ["", "model.", "head2."])
def test_the_published_head_is_five_linear_maps_one_after_the_other(tmp_path, clip, suffix, prefix):
    state = head_state(WIDTHS, prefix)
    reward = Aesthetic(clip, saved(state, tmp_path / f"head{suffix}"))
    x = reward.clip.embed_frames(media())[:, 0]
    for name in WIDTHS:
        x = x @ state[f"{prefix}{name}.weight"].T + state[f"{prefix}{name}.bias"]
    scores = reward(media(), PROMPTS)
    assert scores.shape == (3,)
    assert torch.allclose(scores, x[:, 0], atol=1e-5)


@pytest.mark.parametrize("prefix", ["", "linear."])
def test_a_linear_head_is_one_dot_product(tmp_path, clip, prefix):
    weight, bias = torch.randn(1, WIDTH), torch.randn(1)
    reward = Aesthetic(clip, saved({f"{prefix}weight": weight, f"{prefix}bias": bias}, tmp_path / "head.safetensors"))
    wanted = reward.clip.embed_frames(media(2)) @ weight[0] + bias
    assert torch.allclose(reward(media(2), PROMPTS), wanted.mean(1), atol=1e-5)


def test_the_length_of_the_embedding_does_not_matter(tmp_path, clip, monkeypatch):
    reward = Aesthetic(clip, saved(head_state(WIDTHS), tmp_path / "head.safetensors"))
    before = reward(media(), PROMPTS)
    with torch.no_grad():
        reward.clip.net.visual.proj.mul_(10)
    assert torch.allclose(reward(media(), PROMPTS), before, atol=1e-5)
    assert torch.allclose(reward.clip.embed_frames(media()).norm(dim=-1), torch.ones(3, 1))


def test_a_head_of_another_width_is_refused_with_both_numbers(tmp_path, clip):
    path = saved({"weight": torch.randn(1, 768), "bias": torch.zeros(1)}, tmp_path / "head.safetensors")
    with pytest.raises(ValueError, match=f"takes embeddings of width 768, but the CLIP .* gives {WIDTH}"):
        Aesthetic(clip, path)


@pytest.mark.parametrize("drop", ["layers.7.bias", "layers.2.weight"])
def test_a_head_with_other_layers_is_refused(tmp_path, clip, drop):
    state = head_state(WIDTHS)
    del state[drop]
    with pytest.raises(ValueError, match=r"must hold one linear layer .*convert it"):
        Aesthetic(clip, saved(state, tmp_path / "head.safetensors"))
    path = saved(head_state({"layers.0": (WIDTH, 1), "layers.1": (1, 1)}), tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"layers.0, 2, 4, 6, 7.*got \['layers.0.bias'"):
        Aesthetic(clip, path)


def test_a_head_that_is_not_there_is_one_clear_error(tmp_path, clip):
    with pytest.raises(FileNotFoundError, match=r"must be a .safetensors or .pth file, found no such file"):
        Aesthetic(clip, str(tmp_path / "head.pth"))


def test_a_head_that_would_run_code_when_read_is_not_read(tmp_path, clip):
    torch.save({"weight": print}, tmp_path / "head.pth")
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        Aesthetic(clip, str(tmp_path / "head.pth"))
