"""A judge behind chat completions: what it is asked, and what its answers become."""

import base64
import io
import json
import math
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image

from flowgrpo.component import Component
from flowgrpo.data import Prompt
from flowgrpo.scoring import Scorer
from reward_models.vlm_judge import VlmJudge, preference

PROMPTS = [Prompt('a sign that says "{0}"', 0), Prompt("a red cat", 0)]


class Model(BaseHTTPRequestHandler):
    """Answers by how red what it is shown is, the last picture for a pair; notes what it was asked."""

    asked: ClassVar[list[dict[str, Any]]] = []
    headers_seen: ClassVar[list[str]] = []
    busy: ClassVar[list[int]] = [0, 0]
    lock: ClassVar[Any] = threading.Lock()
    text: ClassVar[str] = ""
    delay: ClassVar[float] = 0.0

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.lock:
            self.busy[0] += 1
            self.busy[1] = max(self.busy)
            self.asked.append(asked)
            self.headers_seen.append(self.headers.get("authorization", ""))
        time.sleep(type(self).delay)
        assert self.path == "/v1/chat/completions"
        reds = [picture(part)[..., 0].mean() / 255 for part in asked["messages"][0]["content"] if part["type"] == "image_url"]
        yes = reds[0] if len(reds) == 1 else 0.5 + (reds[0] - reds[-1]) / 2
        words = ("Yes", " no") if "yes or no" in asked["messages"][0]["content"][-1]["text"] else ("A", "B")
        chances = {words[0]: yes / 2, words[1]: (1 - yes) / 2, "It": 0.5}
        likely = [{"token": token, "logprob": math.log(max(p, 1e-9))} for token, p in chances.items()]
        answer = {
            "choices": [{"message": {"content": self.text}, "logprobs": {"content": [{"top_logprobs": likely}]}}],
            "usage": {"prompt_tokens": 100, "completion_tokens": 2},
        }
        body = json.dumps(answer).encode()
        with self.lock:
            self.busy[0] -= 1
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format, *args):
        pass


def picture(part):
    data = part["image_url"]["url"].removeprefix("data:image/png;base64,")
    return np.array(Image.open(io.BytesIO(base64.b64decode(data))))


@pytest.fixture
def url():
    Model.asked, Model.headers_seen, Model.busy, Model.text, Model.delay = [], [], [0, 0], "", 0.0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    server.server_close()


def media(*reds, frames=1):
    colours = torch.tensor(reds).view(-1, 1, 1, 1, 1) * torch.tensor([1.0, 0, 0]).view(1, 1, 3, 1, 1)
    return ((colours * 255).round() / 255).expand(len(reds), frames, 3, 6, 8).clone()


def test_the_share_of_yes_among_yes_and_no(url, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "a key")
    judge = VlmJudge(url, "some-vlm")
    scores = judge(media(0.2, 0.8), PROMPTS)
    torch.testing.assert_close(scores, torch.tensor([0.2, 0.8]), atol=1e-5, rtol=0)
    asked = sorted(Model.asked, key=lambda one: one["messages"][0]["content"][-1]["text"])
    assert 'a sign that says "{0}"' in asked[1]["messages"][0]["content"][-1]["text"]
    assert [asked[0][name] for name in ("model", "max_tokens", "temperature", "logprobs")] == ["some-vlm", 1, 0, True]
    assert Model.headers_seen == ["Bearer a key"] * 2
    assert [judge.usage[name] for name in ("requests", "prompt_tokens", "completion_tokens")] == [2, 200, 4]
    assert judge.usage["seconds"] > 0
    assert picture(asked[0]["messages"][0]["content"][0]).shape == (6, 8, 3)


def test_of_a_film_frames_are_shown_in_order(url):
    clip = torch.cat([media(level) for level in (0.0, 0.2, 0.4, 0.6, 0.8)], 1)
    VlmJudge(url, "m", frames=3)(clip, PROMPTS[:1])
    parts = Model.asked[0]["messages"][0]["content"][:-1]
    assert [round(picture(part)[0, 0, 0] / 255, 1) for part in parts] == [0.0, 0.4, 0.8]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("It fits.\nScore: 4", 0.75), ("**Score: 1**", 0.0), ("score - 5.\n\n", 1.0), ("Score: 6", math.nan), ("4", math.nan),
        ("Score: 4 of 5", math.nan), ("Score: 3\nbut", math.nan), ("", math.nan), ("Score: 4.5", math.nan),
    ],
)  # fmt: skip
def test_a_scale_is_read_strictly(url, text, wanted):
    Model.text = text
    score = VlmJudge(url, "m", "scale")(media(0.5), PROMPTS[:1])
    assert Model.asked[0]["max_tokens"] > 100
    assert "logprobs" not in Model.asked[0]
    assert score.item() == pytest.approx(wanted, nan_ok=True)


def test_pairs_are_a_judges(url):
    judge = VlmJudge(url, "m", "better")
    scores = Scorer([Component("judge", judge, 1.0)])(media(0.2, 0.8, 0.5), [PROMPTS[1]] * 3)
    assert scores.values[:, 0].argsort().tolist() == [0, 2, 1]
    assert scores.judged is not None
    assert scores.judged[1, 0, 0].item() == pytest.approx(0.8, abs=1e-4)
    assert scores.judged[0, 1, 0].item() == pytest.approx(0.2, abs=1e-4)
    texts = [part["text"] for part in Model.asked[0]["messages"][0]["content"] if part["type"] == "text"]
    assert texts[:2] == ["A:", "B:"]


def test_requests_under_way_are_bounded(url):
    Model.delay = 0.05
    VlmJudge(url, "m", concurrency=3)(media(*[0.5] * 12), PROMPTS * 6)
    assert 2 <= Model.busy[1] <= 3


def test_the_words_are_found_however_they_are_written():
    likely = [
        {"token": token, "logprob": math.log(p)} for token, p in (("Yes", 0.3), (" yes", 0.1), ("NO.", 0.1), ("maybe", 0.5))
    ]
    assert preference(likely, "yes", "no") == pytest.approx(0.8)
    assert math.isnan(preference(likely[3:], "yes", "no"))


def test_an_answer_of_another_kind_raises_and_settings_without_sense_are_refused(url, monkeypatch):
    judge = VlmJudge(url, "m")
    with pytest.raises(ValueError, match="m must answer as chat completions do"):
        judge._score({"error": "out of memory"})
    with pytest.raises(ValueError, match="answer must be one of yes, scale, better"):
        VlmJudge(url, "m", "maybe")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="question must say where the prompt stands"):
        VlmJudge(url, "m", question="Is it good?")
    with pytest.raises(ValueError, match="frames and concurrency must be at least 1"):
        VlmJudge(url, "m", frames=0)
    monkeypatch.setitem(__import__("sys").modules, "httpx", None)
    with pytest.raises(ImportError, match=r"needs httpx: pip install 'flowgrpo\[serve\]'"):
        VlmJudge(url, "m")
