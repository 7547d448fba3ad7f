"""transformers' CLIP and SigLIP as rewards: against the model's own logits on the pictures as a file shows them."""

import pytest
import torch
import transformers
from PIL import Image

from flowgrpo.data import Prompt
from flowgrpo.media import to_uint8
from reward_models.hf_clip import HfClip

PROMPTS = [Prompt("a red cat", 0), Prompt("two dogs", 1), Prompt("a red cat", 2)]
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32,
          "patch_size": 8}  # fmt: skip
TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


def tokenizer(length):
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    pieces = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    return transformers.CLIPTokenizer(vocab=vocab, merges=[], model_max_length=length), len(pieces)


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    words, size = tokenizer(20)
    ids = {"bos_token_id": size - 2, "eos_token_id": size - 1, "pad_token_id": size - 1}
    text = {**TEXT, "vocab_size": size, "max_position_embeddings": 20, **ids}
    torch.manual_seed(0)
    config = transformers.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=24)
    transformers.CLIPModel(config).save_pretrained(folder)
    words.save_pretrained(folder)
    square = {"height": 32, "width": 32}
    transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=square).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def siglip(tmp_path_factory):
    folder = tmp_path_factory.mktemp("siglip")
    words, size = tokenizer(20)
    text = {**TEXT, "vocab_size": size, "max_position_embeddings": 20, "projection_size": 32}
    torch.manual_seed(0)
    transformers.SiglipModel(transformers.SiglipConfig(text_config=text, vision_config=VISION)).save_pretrained(folder)
    words.save_pretrained(folder)
    transformers.SiglipImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return str(folder)


def media(frames=2, height=40, width=48):
    clips = torch.rand(3, frames, 3, height, width, generator=torch.Generator().manual_seed(1))
    return (clips * 255).round() / 255


def own_logits(folder, clips, texts, padding):
    """What the model itself says of each frame (b, f), pictures and texts prepared as its documentation does."""
    net = transformers.AutoModel.from_pretrained(folder).eval()
    images = transformers.AutoImageProcessor.from_pretrained(folder)
    words = transformers.AutoTokenizer.from_pretrained(folder)
    rows = []
    for clip, text in zip(clips, texts, strict=True):
        shown = [Image.fromarray(frame.numpy()) for frame in to_uint8(clip)]
        given = {**words([text], padding=padding, max_length=20, truncation=True, return_tensors="pt"),
                 **images(images=shown, return_tensors="pt")}  # fmt: skip
        given = {name: given[name] for name in ("input_ids", "attention_mask", "pixel_values") if name in given}
        with torch.no_grad():
            rows.append(net(**given).logits_per_image[:, 0])
    return torch.stack(rows), net


def test_clip_is_the_models_own_logit_averaged_over_frames(clip):
    logits, net = own_logits(clip, media(), [prompt.text for prompt in PROMPTS], True)
    torch.testing.assert_close(HfClip(clip, output="logit")(media(), PROMPTS), logits.mean(1), atol=2e-3, rtol=1e-3)
    cosine = HfClip(clip)(media(), PROMPTS)
    torch.testing.assert_close(cosine, (logits / net.logit_scale.exp()).mean(1), atol=1e-3, rtol=1e-3)


def test_siglip_is_the_sigmoid_of_its_logit(siglip):
    logits, _ = own_logits(siglip, media(), [prompt.text for prompt in PROMPTS], "max_length")
    torch.testing.assert_close(HfClip(siglip, output="logit")(media(), PROMPTS), logits.mean(1), atol=2e-3, rtol=1e-3)
    model = HfClip(siglip, output="probability")
    torch.testing.assert_close(model(media(), PROMPTS), logits.sigmoid().mean(1), atol=1e-3, rtol=1e-3)
    assert (model.unit, model.range) == ("probability", (0.0, 1.0))


def test_long_prompts_keep_their_end_token_and_are_counted(clip):
    model = HfClip(clip)
    long = [Prompt("abcdefghijklmnopqrstuvwxyz", 7), PROMPTS[0]]
    with pytest.warns(UserWarning, match="prompts 7 are longer than the text encoder's context"):
        vectors = model.embed_prompts(long)
    assert model.cut_prompts == {7}
    ids = model.tokenizer([long[0].text], truncation=True, max_length=20)["input_ids"][0]
    assert (len(ids), ids[-1]) == (20, model.tokenizer.eos_token_id)
    torch.testing.assert_close(vectors[0], model.embed_prompts([Prompt(long[0].text[:-1], 0)])[0])
    torch.testing.assert_close(vectors[1], model.embed_prompts(PROMPTS)[2], atol=1e-5, rtol=0)


def test_a_processor_may_lie_elsewhere_and_what_is_missing_is_said(clip, tmp_path):
    transformers.AutoModel.from_pretrained(clip).save_pretrained(tmp_path / "weights")
    with pytest.raises((OSError, ValueError)):
        HfClip(str(tmp_path / "weights"))
    apart = HfClip(str(tmp_path / "weights"), processor=clip)
    assert torch.equal(apart(media(), PROMPTS), HfClip(clip)(media(), PROMPTS))
    with pytest.raises(ValueError, match="output='probability' is a SigLIP's"):
        HfClip(clip, output="probability")
    with pytest.raises(ValueError, match="output must be one of cosine, logit, probability"):
        HfClip(clip, output="score")  # pyright: ignore[reportArgumentType]
    config = transformers.CLIPTextConfig(**{**TEXT, "vocab_size": 60})
    transformers.CLIPTextModel(config).save_pretrained(tmp_path / "text")
    with pytest.raises(ValueError, match="must have image and text features"):
        HfClip(str(tmp_path / "text"))
