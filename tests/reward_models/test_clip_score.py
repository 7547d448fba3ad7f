"""The CLIP score against open_clip's own transform and towers, and its refusals."""

import builtins
import json
import warnings
from copy import copy

import open_clip
import pytest
import torch
from PIL import Image

from flowgrpo.data import Prompt
from flowgrpo.media import to_uint8
from flowgrpo.scoring import Component, Scorer
from reward_models._open_clip import OpenClip
from reward_models.clip_score import ClipScore
from tests.reward_models.tiny_clip import CONTEXT, PREPROCESS, save_tiny_clip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_clip(tmp_path_factory.mktemp("clip") / "tiny", PREPROCESS)


@pytest.fixture(scope="module")
def loaded(folder):
    return OpenClip(str(folder), None, "cpu")


@pytest.fixture
def clip_score(loaded, monkeypatch):
    """A new reward around a network that was read once."""
    monkeypatch.setattr("reward_models.clip_score.OpenClip", lambda *args: copy(loaded))
    reward = ClipScore("tiny")
    reward.clip.cut_prompts = set()
    return reward


def prompts(*texts: str) -> list[Prompt]:
    return [Prompt(text=text, id=number) for number, text in enumerate(texts)]


def smooth_media(b: int, f: int, h: int, w: int) -> torch.Tensor:
    coarse = torch.rand(b * f, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    fine = torch.nn.functional.interpolate(coarse, size=(h, w), mode="bilinear")
    return ((fine * 255).round() / 255).unflatten(0, (b, f))


def reference_score(folder, clip, texts) -> torch.Tensor:
    """One clip's score by open_clip's own functions, on 8-bit pictures."""
    net, _, transform = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    net.eval()
    tokens = open_clip.get_tokenizer(f"local-dir:{folder}")(texts)
    pictures = torch.stack([transform(Image.fromarray(frame)) for frame in to_uint8(clip).numpy()])
    with torch.no_grad():
        return (net.encode_image(pictures, normalize=True) @ net.encode_text(tokens, normalize=True).T).mean(0)


def test_the_score_is_the_mean_cosine_that_open_clip_gives(folder, clip_score):
    media, texts = smooth_media(3, 2, 41, 53), ["a red circle", "two blue squares", "a red circle"]
    scores = clip_score(media, prompts(*texts))
    wanted = torch.stack([reference_score(folder, media[i], texts)[i] for i in range(3)])
    assert scores.shape == (3,)
    assert torch.allclose(scores, wanted, atol=2e-3)
    assert scores.std() > 0


@pytest.mark.parametrize(("interpolation", "resize_mode"), [("bicubic", "shortest"), ("bilinear", "squash")])
def test_tensors_are_prepared_as_open_clip_prepares_pictures(tmp_path, interpolation, resize_mode):
    config = PREPROCESS | {"interpolation": interpolation, "resize_mode": resize_mode}
    folder = save_tiny_clip(tmp_path / "clip", config)
    transform = open_clip.create_model_and_transforms(f"local-dir:{folder}")[2]
    clip = OpenClip(str(folder), None, "cpu")
    one_grey_level = 1 / 255 / min(PREPROCESS["std"])
    for size in [(41, 53), (64, 32), (20, 27), (32, 32)]:
        frames = smooth_media(3, 1, *size)[:, 0]
        wanted = torch.stack([transform(Image.fromarray(frame)) for frame in to_uint8(frames).numpy()])
        prepared = clip.preprocess(frames)
        assert prepared.shape == wanted.shape
        assert (prepared - wanted).abs().max() < 1.5 * one_grey_level


def test_mean_and_std_come_from_the_config_beside_the_weights(tmp_path):
    folder = save_tiny_clip(tmp_path / "clip", {"mean": [0.5, 0.25, 0.0], "std": [0.5, 0.5, 2.0]})
    grey = OpenClip(str(folder), None, "cpu").preprocess(torch.full((1, 3, 32, 32), 0.5))
    assert torch.allclose(grey[0, :, 0, 0], torch.tensor([0.0, 0.5, 0.25]))


def test_an_equal_picture_and_text_direction_gives_the_whole_scale(clip_score):
    reward = ClipScore("tiny", scale=100.0)
    reward.clip.embed_frames = lambda media: torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    reward.clip.embed_prompts = lambda texts: torch.tensor([[1.0, 0.0], [0.0, -1.0]])
    assert reward(torch.rand(2, 1, 3, 4, 4), prompts("a", "b")).tolist() == [100.0, -100.0]
    assert reward.range == (-100.0, 100.0)


def test_frames_are_averaged(clip_score):
    media = smooth_media(2, 3, 33, 47)
    alone = torch.stack([clip_score(media[:, [frame]], prompts("x", "y")) for frame in range(3)])
    assert torch.allclose(clip_score(media, prompts("x", "y")), alone.mean(0), atol=1e-6)


def test_batches_and_order_change_nothing(clip_score):
    media, texts = smooth_media(5, 2, 33, 40), prompts("a", "b", "a", "c", "d")
    whole = clip_score(media, texts)
    order = [3, 0, 4, 2, 1]
    assert torch.allclose(clip_score(media[order], [texts[i] for i in order]), whole[order], atol=1e-6)
    parts = Scorer([Component("clip", clip_score, 1.0, batch_size=2)])(media, texts)
    assert torch.allclose(parts.column("clip"), whole, atol=1e-6)


def test_each_different_text_is_embedded_once(clip_score, monkeypatch):
    sizes, encode = [], clip_score.clip.net.encode_text

    def recording(tokens, **options):
        sizes.append(len(tokens))
        return encode(tokens, **options)

    monkeypatch.setattr(clip_score.clip.net, "encode_text", recording)
    vectors = clip_score.clip.embed_prompts(prompts("a", "b", "a", "a"))
    assert sizes == [2]
    assert torch.equal(vectors[0], vectors[3])


@pytest.mark.parametrize("count", [CONTEXT - 3, CONTEXT - 2, CONTEXT - 1, CONTEXT, 400])
def test_a_long_prompt_keeps_its_end_token_and_is_counted(clip_score, count):
    clip = clip_score.clip
    text = " ".join("x" * count)
    is_longer = count > CONTEXT - 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        clip.embed_prompts(prompts("short", text))
        clip.embed_prompts(prompts("short", text))
    tokens = clip.tokenizer([text])[0]
    end = clip.tokenizer.eot_token_id
    assert tokens[min(count + 1, CONTEXT - 1)] == end
    assert clip.cut_prompts == ({1} if is_longer else set())
    wanted = "1 of 2 prompts are longer than CLIP's context of 20 tokens (first: prompt 1)"
    assert [str(one.message)[: len(wanted)] for one in caught] == [wanted] * is_longer


def test_there_is_no_cliff_at_the_limit(clip_score):
    media = smooth_media(1, 1, 32, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scores = [clip_score(media, prompts(" ".join(["circle"] * n))).item() for n in (CONTEXT - 2, CONTEXT - 1, 400)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-6)
    assert scores[1] == pytest.approx(scores[2], abs=1e-6)


def test_long_prompts_that_agree_where_they_are_read_stay_two_prompts(clip_score):
    begin = "circle " * CONTEXT
    with pytest.warns(RuntimeWarning, match="2 of 2 prompts"):
        clip_score(smooth_media(2, 1, 32, 32), prompts(begin + "red", begin + "blue"))
    assert clip_score.cut_prompts == {0, 1}


def test_a_folder_that_is_not_there_is_one_clear_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="an open_clip name, hf-hub:org/name or a folder, found no such"):
        ClipScore(str(tmp_path / "nowhere"))


def test_a_folder_without_weights_or_config_is_refused(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"must hold open_clip_model.safetensors"):
        ClipScore(str(tmp_path / "empty"))
    (tmp_path / "empty" / "model.safetensors").write_bytes((folder / "open_clip_model.safetensors").read_bytes())
    with pytest.raises(FileNotFoundError, match=r"open_clip_config.json must say how pictures are preprocessed"):
        ClipScore(str(tmp_path / "empty"))


@pytest.mark.parametrize(
    ("preprocess", "missing"),
    [(None, "no mean and no std"), ({"mean": [0, 0, 0]}, "no std"), ({"std": [1, 1, 1]}, "no mean")],
)
def test_weights_without_a_preprocessing_config_are_refused(tmp_path, preprocess, missing):
    folder = save_tiny_clip(tmp_path / "clip", preprocess)
    with pytest.raises(ValueError, match=f"must give mean and std in preprocess_cfg, got {missing}"):
        ClipScore(str(folder))


def test_a_way_of_resizing_that_tensors_cannot_take_is_refused(tmp_path):
    folder = save_tiny_clip(tmp_path / "clip", PREPROCESS | {"resize_mode": "longest"})
    with pytest.raises(ValueError, match="got resize_mode='longest'"):
        ClipScore(str(folder))


def test_settings_without_effect_or_sense_are_refused(folder):
    with pytest.raises(ValueError, match="pretrained='openai' has no effect"):
        ClipScore(str(folder), pretrained="openai")
    with pytest.raises(ValueError, match="must be a file of weights or a tag of ViT-B-32: openai"):
        ClipScore("ViT-B-32")
    with pytest.raises(ValueError, match=r"scale=-1.0 must be above 0"):
        ClipScore(str(folder), scale=-1.0)


def test_a_named_model_takes_a_file_of_weights_with_a_config_beside_it(tmp_path, folder, monkeypatch):
    config = json.loads((folder / "open_clip_config.json").read_text())["model_cfg"]
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "tiny-for-test", config)
    with pytest.raises(ValueError, match="tag of tiny-for-test: none"):
        ClipScore("tiny-for-test", pretrained=str(tmp_path / "no.safetensors"))
    weights = str(folder / "open_clip_model.safetensors")
    by_name, by_folder = ClipScore("tiny-for-test", pretrained=weights), ClipScore(str(folder))
    media = smooth_media(2, 1, 40, 40)
    assert torch.equal(by_name(media, prompts("a", "b")), by_folder(media, prompts("a", "b")))


def test_a_missing_open_clip_says_what_to_install(folder, monkeypatch):
    real = builtins.__import__

    def without_open_clip(name, *args, **kwargs):
        if name == "open_clip":
            raise ModuleNotFoundError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_open_clip)
    with pytest.raises(ImportError, match="pip install open-clip-torch"):
        ClipScore(str(folder))
