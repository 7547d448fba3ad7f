"""ImageReward against its networks written out, on a small file of the published layout."""

import pytest
import torch
import transformers
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention

from flowgrpo.data import Prompt
from reward_models.image_reward import MEAN, STD, WORDS, ImageReward

WIDTH, DEPTH, PATCH, SIZE, VOCAB = 128, 2, 8, 32, 40
PROMPTS = [Prompt("a red cat", 0), Prompt("dogs", 1)]


def random_state():
    """A state dict with the published names."""
    g = torch.Generator().manual_seed(0)

    def rand(*shape, scale=0.1):
        return scale * torch.randn(*shape, generator=g)

    state = {}

    def layer(name, out, into):
        state.update({f"{name}.weight": rand(out, into), f"{name}.bias": rand(out)})

    def norm(name):
        state.update({f"{name}.weight": 1 + rand(WIDTH), f"{name}.bias": rand(WIDTH)})

    eye, told = "blip.visual_encoder.", "blip.text_encoder."
    state |= {f"{eye}cls_token": rand(1, 1, WIDTH), f"{eye}pos_embed": rand(1, 1 + (SIZE // PATCH) ** 2, WIDTH)}
    state |= {f"{eye}patch_embed.proj.weight": rand(WIDTH, 3, PATCH, PATCH), f"{eye}patch_embed.proj.bias": rand(WIDTH)}
    norm(f"{eye}norm")
    for i in range(DEPTH):
        block = f"{eye}blocks.{i}."
        for name in ("norm1", "norm2"):
            norm(block + name)
        for name, out, into in (("attn.qkv", 3, 1), ("attn.proj", 1, 1), ("mlp.fc1", 2, 1), ("mlp.fc2", 1, 2)):
            layer(block + name, out * WIDTH, into * WIDTH)
    state[f"{told}embeddings.word_embeddings.weight"] = rand(VOCAB, WIDTH)
    state[f"{told}embeddings.position_embeddings.weight"] = rand(64, WIDTH)
    state[f"{told}embeddings.position_ids"] = torch.arange(64)[None]
    norm(f"{told}embeddings.LayerNorm")
    for i in range(DEPTH):
        block = f"{told}encoder.layer.{i}."
        for part in ("attention", "crossattention"):
            for name in ("self.query", "self.key", "self.value", "output.dense"):
                layer(f"{block}{part}.{name}", WIDTH, WIDTH)
            norm(f"{block}{part}.output.LayerNorm")
        layer(f"{block}intermediate.dense", 2 * WIDTH, WIDTH)
        layer(f"{block}output.dense", WIDTH, 2 * WIDTH)
        norm(f"{block}output.LayerNorm")
    for number, (out, into) in zip((0, 2, 4), ((16, WIDTH), (8, 16), (1, 8)), strict=True):
        layer(f"mlp.layers.{number}", out, into)
    return state


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("image_reward")
    torch.save(random_state(), folder / "ImageReward.pt")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "cat", "dogs", *(f"w{i}" for i in range(31))]
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(vocab=str(folder / "vocab.txt")).save_pretrained(folder / "words")
    return str(folder / "ImageReward.pt"), str(folder / "words")


def heads(x):
    return x.unflatten(-1, (-1, 64)).transpose(1, 2)


def attend(q, k, v, mask=None):
    return scaled_dot_product_attention(heads(q), heads(k), heads(v), attn_mask=mask).transpose(1, 2).flatten(2)


def written_out(state, pixels, ids, mask):
    """The score of prepared pictures and tokens, network by network as its authors' code has them."""

    def apply(name, x):
        return linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    def norm(name, x, eps):
        return layer_norm(x, (WIDTH,), state[f"{name}.weight"], state[f"{name}.bias"], eps)

    eye, told = "blip.visual_encoder.", "blip.text_encoder."
    proj = state[f"{eye}patch_embed.proj.weight"], state[f"{eye}patch_embed.proj.bias"]
    x = torch.nn.functional.conv2d(pixels, *proj, stride=PATCH).flatten(2).transpose(1, 2)
    x = torch.cat([state[f"{eye}cls_token"].expand(len(x), -1, -1), x], 1) + state[f"{eye}pos_embed"]
    for i in range(DEPTH):
        block = f"{eye}blocks.{i}."
        x = x + apply(block + "attn.proj", attend(*apply(block + "attn.qkv", norm(block + "norm1", x, 1e-6)).chunk(3, -1)))
        x = x + apply(block + "mlp.fc2", gelu(apply(block + "mlp.fc1", norm(block + "norm2", x, 1e-6))))
    seen = norm(f"{eye}norm", x, 1e-6)
    h = (
        state[f"{told}embeddings.word_embeddings.weight"][ids]
        + state[f"{told}embeddings.position_embeddings.weight"][: ids.shape[1]]
    )
    h = norm(f"{told}embeddings.LayerNorm", h, 1e-12)
    keep = mask[:, None, None].bool()
    for i in range(DEPTH):
        for part, source, allowed in (("attention", None, keep), ("crossattention", seen, None)):
            block = f"{told}encoder.layer.{i}.{part}."
            other = h if source is None else source
            out = attend(
                apply(block + "self.query", h), apply(block + "self.key", other), apply(block + "self.value", other), allowed
            )
            h = norm(block + "output.LayerNorm", h + apply(block + "output.dense", out), 1e-12)
        block = f"{told}encoder.layer.{i}."
        h = norm(
            block + "output.LayerNorm", h + apply(block + "output.dense", gelu(apply(block + "intermediate.dense", h))), 1e-12
        )
    s = h[:, 0]
    for number in (0, 2, 4):
        s = apply(f"mlp.layers.{number}", s)
    return (s[:, 0] - MEAN) / STD


def test_the_score_is_that_of_its_networks_written_out(files):
    model = ImageReward(*files)
    media = (torch.rand(2, 2, 3, 40, 56, generator=torch.Generator().manual_seed(1)) * 255).round() / 255
    words = transformers.AutoTokenizer.from_pretrained(files[1])
    told = words([p.text for p in PROMPTS], padding="max_length", max_length=WORDS, return_tensors="pt")
    rows = [written_out(random_state(), model.prepare(media[:, i]), told["input_ids"], told["attention_mask"]) for i in (0, 1)]
    torch.testing.assert_close(model(media, PROMPTS), torch.stack(rows).mean(0), atol=1e-4, rtol=1e-4)
    assert rows[0].std() > 0.01
    assert model.prepare(media[:, 0]).shape == (2, 3, SIZE, SIZE)


def test_pictures_are_prepared_as_pil_would(files):
    from PIL import Image
    from torchvision import transforms

    frame = (torch.rand(3, 48, 64, generator=torch.Generator().manual_seed(2)) * 255).round() / 255
    picture = Image.fromarray((frame * 255).byte().movedim(0, -1).numpy())
    steps = [transforms.Resize(SIZE, transforms.InterpolationMode.BICUBIC), transforms.CenterCrop(SIZE), transforms.ToTensor()]
    wanted = transforms.Compose(steps)(picture)
    mean, std = (
        torch.tensor(x).view(3, 1, 1) for x in ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
    )
    torch.testing.assert_close(ImageReward(*files).prepare(frame[None])[0] * std + mean, wanted, atol=1.5 / 255, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("blip.visual_encoder.norm.bias"), r"1 weights of BlipVisionModel are missing.*post_layernorm.bias"),
        (lambda s: s.pop("blip.text_encoder.encoder.layer.1.output.dense.weight"), "weights of BlipTextModel are missing"),
        (lambda s: s.pop("mlp.layers.2.bias"), "the head must have a weight and a bias"),
        (lambda s: s.update(extra=torch.zeros(1)), r"has \['extra'\] besides"),
        (lambda s: s.pop("blip.visual_encoder.pos_embed"), "lacks weights that tell its sizes: 'pos_embed'"),
        (lambda s: [s.pop(k) for k in list(s) if k.startswith("mlp.")], r"it lacks \['mlp.layers.'\]"),
        (lambda s: s.update({"blip.visual_encoder.norm.bias": torch.zeros(3)}), "of another shape"),
    ],
)
def test_a_wrong_or_half_filled_file_is_refused_naming_what_is_missing(files, tmp_path, change, message):
    state = random_state()
    change(state)
    torch.save(state, tmp_path / "bad.pt")
    with pytest.raises(ValueError, match=message):
        ImageReward(str(tmp_path / "bad.pt"), files[1])
    with pytest.raises(FileNotFoundError, match=r"must be the file ImageReward.pt"):
        ImageReward("nowhere.pt", files[1])
