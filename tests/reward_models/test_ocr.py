"""Texts in pictures: what is asked for, the distance, and words that are really read."""

import math

import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

from flowgrpo.component import Component
from flowgrpo.data import Prompt
from flowgrpo.media import from_pil
from flowgrpo.scoring import Scorer
from reward_models.ocr import Ocr, agreement, asked_for, levenshtein


@pytest.fixture(scope="module")
def ocr():
    return Ocr(frames=3)


def written(*lines, size=(192, 256)):
    picture = Image.new("RGB", size[::-1], (240, 240, 230))
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(36)
    for i, line in enumerate(lines):
        draw.text((12, 20 + 60 * i), line, (20, 30, 60), font=font)
    return from_pil([picture])


@pytest.mark.parametrize(
    ("lines", "text"), [(("STOP",), "Stop"), (("Hello World",), "hello world"), (("FLOW", "GRPO 2026"), "flow grpo 2026")]
)
def test_words_are_read_exactly(ocr, lines, text):
    score = ocr(written(*lines), [Prompt(f'a sign that says "{text}"', 0)])
    assert score.tolist() == [1.0]


def test_wrong_and_missing_words_score_less(ocr):
    prompt = [Prompt('a sign that says "STOP"', 0)]
    wrong, nothing = ocr(written("SHOP"), prompt).item(), ocr(written(), prompt).item()
    assert wrong == pytest.approx(0.75)
    assert nothing == 0.0
    both = ocr(written("STOP", "EXIT"), [Prompt("signs", 0, meta={"text": ["exit", "stop"]})])
    assert both.tolist() == [1.0]
    half = ocr(written("STOP"), [Prompt("signs", 0, meta={"text": ["stop", "qqqq"]})])
    assert half.tolist() == [0.5]


def test_frames_that_show_nothing_count(ocr):
    film = torch.cat([written("STOP"), written("STOP"), written()], 1)
    assert ocr(film, [Prompt('"stop"', 0)]).item() == pytest.approx(2 / 3)


def test_a_prompt_without_a_text_has_no_score_and_no_say(ocr):
    prompts = [Prompt("a red cat", 0), Prompt('the word "STOP"', 1)]
    assert [ocr.applies(prompt) for prompt in prompts] == [False, True]
    media = written("STOP").repeat(2, 1, 1, 1, 1)
    assert math.isnan(ocr(media, prompts)[0])
    scores = Scorer([Component("ocr", ocr, 1.0)])(media, prompts)
    assert scores.was_asked[:, 0].tolist() == [False, True]
    assert scores.values[1, 0] == 1.0


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        (Prompt('a "b c" and “d” and „e“ and «f»', 0), ["b c", "d", "e", "f"]),
        (Prompt("nothing", 0), []),
        (Prompt('an empty " " one', 0), []),
        (Prompt('a "b"', 0, meta={"text": "c"}), ["c"]),
    ],
)
def test_what_is_asked_for(prompt, texts):
    assert asked_for(prompt) == texts


def test_a_text_that_is_none_is_refused():
    with pytest.raises(ValueError, match="prompt 3: text must be a text or a list of texts, got 7"):
        asked_for(Prompt("x", 3, meta={"text": 7}))
    with pytest.raises(ValueError, match="frames must be at least 1"):
        Ocr(frames=0)


@pytest.mark.parametrize(
    ("read", "text", "wanted"),
    [
        ("STOP", "stop", 1.0), ("please STOP here", "Stop", 1.0), ("SHOP", "stop", 0.75), ("", "stop", 0.0),
        ("something else entirely", "stop", 0.0), ("hello world", "helloworld", 1.0), ("ＳＴＯＰ", "stop", 1.0),
    ],
)  # fmt: skip
def test_the_distance_is_a_share_of_the_text(read, text, wanted):
    assert agreement(read, text) == pytest.approx(wanted)


def test_the_distance_is_levenshteins():
    assert [levenshtein(a, b) for a, b in (("kitten", "sitting"), ("", "abc"), ("abc", ""), ("abc", "abc"), ("ab", "ba"))] == [
        3, 3, 3, 0, 2,
    ]  # fmt: skip
