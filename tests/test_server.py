"""A reward server and its client: what is refused, what is survived, and that no score is ever made up."""

import json
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import httpx
import pytest
import torch
import uvicorn
from typer.testing import CliRunner

from flowgrpo import cli
from flowgrpo.component import Component
from flowgrpo.data import Prompt
from flowgrpo.scoring import Scorer
from flowgrpo.server import Limits, app_of
from flowgrpo.wire import CONTENT_TYPE, packed, scores_from_json, unpacked
from reward_models.remote import Remote
from tests.toys import brightness, redness

PROMPTS = [Prompt(f"prompt {i}", 7 + i, meta={"word": "stop", "n": [1, 2]}) for i in range(3)]
MEDIA = (torch.arange(3 * 2 * 3 * 4 * 5).view(3, 2, 3, 4, 5) % 256) / 255
TOKEN = "a secret"


def echo_id(media, prompts):
    return torch.tensor([float(prompt.id) for prompt in prompts])


@contextmanager
def serving(*models, token=None, limits=None):
    scorer = Scorer([Component(model.__name__, model, 0.0, batch_size=1000) for model in models])
    config = uvicorn.Config(app_of(scorer, token, limits), port=0, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)


@pytest.fixture(scope="module")
def url():
    with serving(redness, brightness, echo_id, token=TOKEN, limits=Limits(max_bytes=2**20)) as address:
        yield address


def post(url, body=None, token=TOKEN, kind=CONTENT_TYPE):
    headers = {"content-type": kind} | ({"authorization": f"Bearer {token}"} if token else {})
    return httpx.post(f"{url}/score", content=packed(MEDIA, PROMPTS, []) if body is None else body, headers=headers)


def test_what_is_packed_comes_out():
    media, prompts, rewards = unpacked(packed(MEDIA, PROMPTS, ["a"]))
    assert torch.equal(media, MEDIA)
    assert prompts == PROMPTS
    assert prompts[0].meta == PROMPTS[0].meta
    assert rewards == ["a"]
    with pytest.raises(ValueError, match="meta must be JSON to travel"):
        packed(MEDIA, [Prompt("x", 0, meta={"bad": object()})] * 3, [])
    with pytest.raises(ValueError, match="pixels must be finite"):
        packed(MEDIA * math.nan, PROMPTS, [])


def test_a_server_answers_as_its_models_do(url):
    answer = post(url).json()
    assert list(answer["scores"]) == ["redness", "brightness", "echo_id"]
    assert answer["scores"]["redness"] == pytest.approx(redness(MEDIA, PROMPTS).tolist())
    assert answer["scores"]["echo_id"] == [7, 8, 9]
    health = httpx.get(f"{url}/health").json()
    assert health["status"] == "ok"
    assert health["rewards"]["redness"] == {"unit": "score", "range": None}


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"token": None}, 401, "a bearer token must come with the request"),
        ({"token": "another"}, 401, "a bearer token"),
        ({"kind": "application/json"}, 415, "the content type must be application/x-safetensors, got 'application/json'"),
        ({"kind": "application/octet-stream", "body": b"\x80\x04"}, 415, "the content type must be"),
        ({"body": b"\0" * (2**20 + 1)}, 413, "may have 1048576 bytes"),
        ({"body": b"no tensors"}, 422, "must be what flowgrpo.wire packs"),
        ({"body": b""}, 422, "must be what flowgrpo.wire packs"),
        ({"body": packed(MEDIA, PROMPTS[:2], [])}, 422, "got 3 samples and 2 prompts"),
        ({"body": packed(MEDIA, PROMPTS, ["nothing"])}, 422, "there are redness, brightness, echo_id"),
        ({"body": packed(MEDIA, PROMPTS, [])[:-7]}, 422, "must be what flowgrpo.wire packs"),
    ],
)
def test_a_bad_request_is_refused_with_a_clear_status_and_the_server_goes_on(url, change, status, message):
    response = post(url, **change)
    assert response.status_code == status
    assert message in response.json()["error"]
    assert post(url).status_code == 200


def test_an_oversized_body_without_a_length_is_cut_off(url):
    def endless():
        for _ in range(64):
            yield b"\0" * 2**16

    assert post(url, body=endless()).status_code == 413


def test_metrics_count(url):
    assert httpx.get(f"{url}/metrics").status_code == 401
    post(url)
    text = httpx.get(f"{url}/metrics", headers={"authorization": f"Bearer {TOKEN}"}).text
    counts = dict(line.rsplit(" ", 1) for line in text.splitlines())
    assert int(counts['flowgrpo_requests_total{path="/score",status="200"}']) >= 1
    assert int(counts["flowgrpo_samples_total"]) % 3 == 0
    assert float(counts['flowgrpo_reward_seconds_total{reward="redness"}']) >= 0


def test_requests_of_several_clients_are_scored_together_and_none_is_lost_or_mixed_up():
    sizes = []

    def slow(media, prompts):
        sizes.append(len(prompts))
        time.sleep(0.002)
        return media.mean((1, 2, 3, 4))

    def ask(client, number):
        model = clients[client]
        level = (number % 256) / 255
        return float(model(torch.full((1, 1, 3, 8, 8 + 8 * (client % 2)), level), PROMPTS[:1])), level

    with serving(slow) as address:
        clients = [Remote(address, "slow", retries=0) for _ in range(8)]
        with ThreadPoolExecutor(8) as pool:
            pairs = list(pool.map(lambda i: ask(i % 8, i), range(1000)))
    assert max(abs(got - wanted) for got, wanted in pairs) < 1e-6
    assert sum(sizes) == 1000
    assert len(sizes) < 1000


def test_a_model_that_fails_there_is_a_gap_here():
    def broken(media, prompts):
        raise OSError("no weights")

    with serving(broken, redness) as address:
        with pytest.warns(RuntimeWarning, match="no weights"):
            scores = Remote(address, "broken")(MEDIA, PROMPTS)
        assert scores.isnan().all()
        torch.testing.assert_close(Remote(address, "redness")(MEDIA, PROMPTS), redness(MEDIA, PROMPTS))


class Moves:
    needs_motion = True
    __name__ = "moves"

    def __call__(self, media, prompts):
        return redness(media, prompts)


def test_samples_that_a_model_cannot_take_are_refused_and_not_asked_for_again():
    with serving(Moves()) as address:
        with pytest.raises(ValueError, match="status 422 reward 'moves' measures motion and needs at least 2 frames"):
            Remote(address, "moves", retries=3, wait_s=30.0)(MEDIA[:, :1], PROMPTS)
        torch.testing.assert_close(Remote(address, "moves")(MEDIA, PROMPTS), redness(MEDIA, PROMPTS))


class Odd(BaseHTTPRequestHandler):
    """Answers each request with the next of `answers`: status, headers, body; None hangs for a second."""

    answers: ClassVar[list[Any]] = []

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        answer = type(self).answers.pop(0)
        if answer is None:
            time.sleep(1.0)
            return
        status, headers, body = answer
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format, *args):
        pass


@pytest.fixture
def odd():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Odd)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def said(body, status=200, **headers):
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return status, headers, text


GOOD = said({"scores": {"r": [0.0, 1, None]}})


def ask(url, answers, retries=3, **options):
    Odd.answers = list(answers)
    return Remote(url, "r", retries=retries, wait_s=0.01, timeout_s=0.3, **options)(MEDIA, PROMPTS)


@pytest.mark.parametrize(
    "answers",
    [[GOOD], [said({}, 500), GOOD], [said({}, 429), GOOD], [said({}, 408), said({}, 503), GOOD], [None, GOOD]],
)
def test_a_score_of_zero_is_a_score_and_what_passes_is_tried_again(odd, answers):
    assert [str(score) for score in ask(odd, answers).tolist()] == ["0.0", "1.0", "nan"]
    assert Odd.answers == []


@pytest.mark.parametrize(
    "body",
    [
        {"error": "out of memory"}, {"scores": {"r": []}}, {"scores": {"r": [0.5, 0.5]}}, {"scores": {"r": "nan"}},
        {"scores": {"r": ["nan", 0.5, 0.5]}}, {"scores": {"other": [0.5, 0.5, 0.5]}}, [0.5, 0.5, 0.5], "nan",
        {"scores": {"r": [True, 0.5, 0.5]}}, {"scores": {"r": [[0.5], [0.5], [0.5]]}},
    ],
)  # fmt: skip
def test_an_answer_that_is_none_is_an_error_at_once(odd, body):
    with pytest.raises(ValueError, match=r"a reward server must answer .*3 numbers or null"):
        ask(odd, [said(body), GOOD])
    assert Odd.answers == [GOOD]


def test_json_that_is_cut_off_nan_and_refusals_are_errors_at_once(odd):
    with pytest.raises(ValueError, match="its answer is not JSON"):
        ask(odd, [said(b'{"scores": {"r": [0.5, 0.')])
    with pytest.raises(ValueError, match="3 numbers or null"):
        ask(odd, [said(b'{"scores": {"r": [NaN, 0.5, 0.5]}}')])
    for status in (400, 401, 404, 413, 422):
        with pytest.raises(ValueError, match=f"reward 'r' is refused by http://.*: status {status} too much"):
            ask(odd, [said({"error": "too much"}, status), GOOD])
    with pytest.raises(ValueError, match="3 numbers"):
        scores_from_json({"scores": {"r": [1.0]}}, "r", 3)


def test_silence_and_a_closed_port_end_as_one_error_that_names_them(odd):
    with pytest.raises(OSError, match=r"no server has answered reward 'r' in 2 tries: .*ReadTimeout.*; .*ReadTimeout"):
        ask(odd, [None, None], retries=1)
    with pytest.raises(OSError, match=r"no server has answered reward 'r' in 2 tries: http://127.0.0.1:1: ConnectError"):
        Remote("http://127.0.0.1:1", "r", retries=1, wait_s=0.0)(MEDIA, PROMPTS)
    start = time.monotonic()
    with pytest.raises(OSError, match="status 429"):
        ask(odd, [said({}, 429, **{"retry-after": "1"}), said({}, 429)], retries=1)
    assert time.monotonic() - start >= 1


def test_the_loss_of_a_server_is_survived_and_load_is_spread(odd):
    with serving(redness) as address:
        Odd.answers = []
        model = Remote(["http://127.0.0.1:1", address], "redness", wait_s=0.01)
        for _ in range(4):
            torch.testing.assert_close(model(MEDIA, PROMPTS), redness(MEDIA, PROMPTS))
    Odd.answers = [said({"scores": {"r": [1, 1, 1]}})] * 4
    with serving(redness):
        model = Remote([odd, odd + "/"], "r")
        assert [next(model.servers._turn) for _ in range(3)] == [0, 1, 2]


def test_a_server_that_is_away_and_comes_back_leaves_gaps_and_no_score_is_made_up():
    with serving(redness) as address:
        scorer = Scorer([Component("red", Remote(address, "redness", retries=0), 1.0)])
        before = scorer(MEDIA, PROMPTS).values
    with pytest.warns(RuntimeWarning, match="no server has answered reward 'redness'"):
        assert scorer(MEDIA, PROMPTS).values.isnan().all()
    port = int(address.rsplit(":", 1)[1])
    app = app_of(Scorer([Component("redness", redness, 0.0)]), None)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    assert torch.equal(scorer(MEDIA, PROMPTS).values, before)
    server.should_exit = True
    thread.join(30)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"urls": []}, "urls must be addresses such as"),
        ({"urls": "host:8000"}, "urls must be addresses such as"),
        ({"urls": "http://h", "retries": -1}, "retries and wait_s must be 0 or more"),
    ],
)
def test_settings_without_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Remote(**{"reward": "r", **options})


def test_others_are_not_served_without_a_token(monkeypatch):
    monkeypatch.delenv("FLOWGRPO_TOKEN", raising=False)
    result = CliRunner().invoke(cli.app, ["serve", "tests.toys:redness", "--host", "0.0.0.0"])
    assert result.exit_code == 2
    assert "requests need a token" in " ".join(result.output.split())
    with pytest.raises(ValueError, match="limits must be at least 1 byte"):
        Limits(max_batch=0)
