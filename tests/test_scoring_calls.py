"""Calls of reward models that fail: growing waits, hanging calls, devices and types, latents; the cache of scores."""

import json
import threading
import time

import pytest
import torch

from flowgrpo import calling
from flowgrpo.build import build_scorer
from flowgrpo.calling import Caller
from flowgrpo.component import Component
from flowgrpo.config import RewardConfig, RunConfig, parse_config
from flowgrpo.data import Prompt
from flowgrpo.missing import EFFECTS
from flowgrpo.score_cache import ScoreCache, content_key
from flowgrpo.scoring import Scorer
from tests.toys import raw_config

PROMPTS = [Prompt(f"prompt {i}", i) for i in range(6)]
LEVELS = torch.arange(6) * 25 / 255  # 8 bits hold them
MEDIA = LEVELS.view(6, 1, 1, 1, 1).expand(6, 1, 3, 2, 3).clone()


def mean(samples, prompts):
    return samples.mean((1, 2, 3, 4))


def test_waits_between_tries_double_and_end_at_a_minute(monkeypatch):
    waits = []
    monkeypatch.setattr(calling.time, "sleep", waits.append)

    def failing(samples, prompts):
        raise OSError("no connection")

    with pytest.raises(OSError, match="no connection"):
        Caller(Component("mine", failing, 1.0, retries=8, retry_wait_s=0.5))(MEDIA, PROMPTS)
    assert waits == [0.5, 1, 2, 4, 8, 16, 32, 60]


def test_a_reward_that_raises_on_every_fifth_call_loses_that_batch_alone_and_none_if_it_is_tried_again():
    calls = []

    def every_fifth(samples, prompts):
        calls.append(len(prompts))
        if len(calls) % 5 == 0:
            raise RuntimeError("the fifth call")
        return mean(samples, prompts)

    scorer = Scorer([Component("shaky", every_fifth, 1.0, batch_size=1)])
    with pytest.warns(
        RuntimeWarning, match=r"reward 'shaky' failed on samples 4 \(prompt 4 'prompt 4'\): RuntimeError: the fifth"
    ):
        scores = scorer(MEDIA, PROMPTS)
    assert scores.values[:, 0].isnan().tolist() == [False] * 4 + [True, False]
    assert scorer.missing == {"shaky": 1}
    calls.clear()
    again = Scorer([Component("shaky", every_fifth, 1.0, batch_size=1, retries=1, retry_wait_s=0.0)])(MEDIA, PROMPTS)
    assert torch.allclose(again.values[:, 0], LEVELS)
    assert len(calls) == 7


def test_a_reward_that_sleeps_for_ever_is_not_called_any_more_once_enough_calls_hang():
    release, calls = threading.Event(), []

    def sleeper(samples, prompts):
        calls.append(1)
        release.wait(60)
        return mean(samples, prompts)

    caller = Caller(Component("sleeper", sleeper, 1.0, timeout_s=0.01))
    for _ in range(calling.MAX_HANGING):
        with pytest.raises(TimeoutError, match=r"no answer within 0.01 seconds; raise timeout_s or lower batch_size"):
            caller(MEDIA, PROMPTS)
    for _ in range(3):
        with pytest.raises(TimeoutError, match="8 earlier calls still hang, so it is not called"):
            caller(MEDIA, PROMPTS)
    assert len(calls) == calling.MAX_HANGING
    release.set()
    deadline = time.monotonic() + 60
    while any(not call.done() for call in caller._left) and time.monotonic() < deadline:
        time.sleep(0.01)
    patient = Caller(Component("sleeper", sleeper, 1.0, timeout_s=60.0))
    patient._left = caller._left
    assert torch.allclose(patient(MEDIA, PROMPTS), LEVELS)


@pytest.mark.parametrize(
    "answer", [{"other": torch.ones(6)}, [None] * 6, ["0.5"] * 6, torch.ones(5), torch.ones(6, 1), torch.tensor(1.0)]
)
def test_a_wrong_answer_is_not_tried_again(answer):
    calls = []

    def wrong(samples, prompts):
        calls.append(1)
        return answer

    with pytest.raises(ValueError, match=r"must return a float tensor of shape \(6,\), one score a sample, got"):
        Caller(Component("mine", wrong, 1.0, retries=5))(MEDIA, PROMPTS)
    assert calls == [1]


def test_a_reward_that_reads_a_key_that_is_not_there_fails_with_that_key():
    def keyed(samples, prompts):
        return {"other": mean(samples, prompts)}["score"]

    scorer = Scorer([Component("keyed", keyed, 1.0)])
    with pytest.warns(RuntimeWarning, match="reward 'keyed' failed.*KeyError: 'score'"):
        assert scorer(MEDIA, PROMPTS).values.isnan().all()


@pytest.mark.parametrize("timeout_s", [None, 60.0])
def test_a_network_computes_in_the_declared_type_and_its_scores_are_float32(timeout_s):
    seen = []

    def network(samples, prompts):
        out = samples.flatten(1) @ torch.ones(18, 1)
        seen.append((samples.dtype, out.dtype, out.requires_grad))
        return out[:, 0] / 18

    for dtype in (torch.float32, torch.bfloat16):
        scores = Caller(Component("net", network, 1.0, dtype=dtype, timeout_s=timeout_s))(MEDIA, PROMPTS)
        assert scores.dtype == torch.float32
        assert torch.allclose(scores, LEVELS, atol=4e-3)
    assert seen == [(torch.float32, torch.float32, False), (torch.float32, torch.bfloat16, False)]


class Placed:
    """Notes where it was put."""

    def __init__(self, device: str = "nowhere") -> None:
        self.device = device

    def __call__(self, samples, prompts):
        return mean(samples, prompts)


class Module(torch.nn.Module):
    """A network without a device argument."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, samples, prompts):
        return mean(samples, prompts)


def component(**settings):
    config = RewardConfig.model_validate({"name": "r", "use": "tests.test_scoring_calls:Placed", **settings})
    return build_scorer([config], "policy's").components[0]


def test_a_declared_device_is_the_models_and_its_samples():
    assert (component().model.device, component().device) == ("policy's", None)
    assert (component(device="cpu").model.device, component(device="cpu").device) == ("cpu", "cpu")
    assert component(args={"device": "mine"}).model.device == "mine"
    with pytest.raises(ValueError, match=r"rewards.r: device and args.device say the same twice"):
        component(args={"device": "mine"}, device="cpu")
    moved = component(use="tests.test_scoring_calls:Module", device="meta")
    assert moved.model.weight.device.type == "meta"
    where = []
    one = Component("m", lambda s, p: where.append(s.device.type) or torch.zeros(6), 1.0, device="meta")
    Caller(one)(MEDIA, PROMPTS)
    assert where == ["meta"]


def test_the_config_says_policy_type_and_waits_and_refuses_a_policy_without_effect():
    one = component(missing="drop", dtype="bfloat16", retries=2, retry_wait_s=0.25, timeout_s=3.0)
    assert (one.missing, one.dtype, one.retries, one.retry_wait_s, one.timeout_s) == ("drop", torch.bfloat16, 2, 0.25, 3.0)
    assert component().missing == component(weight=0).missing == "mask"
    assert set(EFFECTS) == {component(missing=policy).missing for policy in EFFECTS}
    with pytest.raises(ValueError, match=r"missing=drop has no effect on a monitor \(weight 0\); remove it"):
        component(weight=0, missing="drop")
    with pytest.raises(ValueError, match="mask"):
        component(missing="zero")


def test_a_config_with_policies_reads_back_as_written(tmp_path):
    raw = raw_config(tmp_path, rewards=[{"name": "red", "use": "tests.toys:redness", "missing": "skip"}])
    config = parse_config(raw)
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config


class OnLatents:
    """Sees clean latents only."""

    takes = "latents"

    def __call__(self, samples, prompts):
        return samples.flatten(1).mean(1)


def test_latents_that_are_not_finite_reach_no_model_and_other_models_see_media():
    latents = torch.rand(6, 4, 5)
    latents[2, 1, 1] = torch.nan
    scorer = Scorer([Component("latent", OnLatents(), 1.0), Component("mean", mean, 1.0)])
    scores = scorer(MEDIA, PROMPTS, latents=latents)
    assert scores.values.isnan().any(1).tolist() == [False, False, True, False, False, False]
    assert scores.was_asked[2].tolist() == [False, False]
    assert scores.not_finite == 1
    keep = [0, 1, 3, 4, 5]
    assert torch.allclose(scores.column("latent")[keep], latents.flatten(1).mean(1)[keep])
    assert torch.allclose(scores.column("mean")[keep], LEVELS[keep])


def test_what_a_model_takes_must_be_media_or_latents():
    class Wrong(OnLatents):
        takes = "latent"

    with pytest.raises(ValueError, match="takes must be 'media' or 'latents', got 'latent'"):
        Scorer([Component("wrong", Wrong(), 1.0)])


def counted(calls, identity="mean"):
    def model(samples, prompts):
        calls.append(len(prompts))
        return mean(samples, prompts)

    return Component("mine", model, 1.0, batch_size=4, identity=identity)


@pytest.mark.parametrize("on_disk", [False, True])
def test_the_same_samples_are_scored_once_and_others_anew(tmp_path, on_disk):
    calls = []
    cache = ScoreCache(tmp_path) if on_disk else ScoreCache()
    first = Scorer([counted(calls)], cache)(MEDIA, PROMPTS).values
    cache = ScoreCache(tmp_path) if on_disk else cache
    assert torch.equal(Scorer([counted(calls)], cache)(MEDIA, PROMPTS).values, first)
    assert (calls, cache.hits) == ([4, 2], 6)
    changed = MEDIA.clone()
    changed[5] += 0.01
    values = Scorer([counted(calls)], cache)(changed, PROMPTS).values
    assert torch.equal(values[:5], first[:5])
    assert values[5] != first[5]
    assert calls == [4, 2, 1]
    Scorer([counted(calls, identity="another")], cache)(MEDIA, PROMPTS)
    Scorer([counted(calls)], cache)(MEDIA, [Prompt("another", i) for i in range(6)])
    assert calls[3:] == [4, 2, 4, 2]


def test_without_an_identity_or_a_cache_every_sample_is_scored():
    calls = []
    for scorer in (Scorer([counted(calls, identity="")], ScoreCache()), Scorer([counted(calls)])):
        scorer(MEDIA, PROMPTS)
        scorer(MEDIA, PROMPTS)
    assert calls == [4, 2] * 4


def test_a_missing_score_is_not_kept_and_is_asked_for_again():
    answers = [torch.nan, torch.inf, 0.5]
    cache = ScoreCache()
    scorer = Scorer([Component("mine", lambda s, p: torch.tensor([answers.pop(0)]), 0.0, identity="x")], cache)
    with pytest.warns(RuntimeWarning, match="no finite score"):
        got = [scorer(MEDIA[:1], PROMPTS[:1]).values.item() for _ in range(4)]
    assert [str(value) for value in got] == ["nan", "nan", "0.5", "0.5"]
    assert len(cache) == 1


def test_a_line_cut_off_by_a_killed_run_spoils_no_other_line(tmp_path):
    cache = ScoreCache(tmp_path)
    cache.put("a", 0.25)
    file = tmp_path / "scores.jsonl"
    file.write_text(file.read_text() + "\n" + json.dumps({"key": "b", "score": 0.75})[:-4])
    ScoreCache(tmp_path).put("c", 0.5)
    again = ScoreCache(tmp_path)
    assert [again.get(key) for key in "abc"] == [0.25, None, 0.5]


def test_a_key_tells_text_meta_type_shape_and_numbers_apart():
    sample, prompt = torch.zeros(1, 3, 2, 4), Prompt("a", 0)
    others = [
        content_key("x", sample, Prompt("b", 0)),
        content_key("x", sample, Prompt("a", 0, meta={"word": "stop"})),
        content_key("x", sample.bfloat16(), prompt),
        content_key("x", sample.view(1, 3, 4, 2), prompt),
        content_key("x", sample + 1e-7, prompt),
        content_key("y", sample, prompt),
    ]
    assert len({content_key("x", sample, prompt), *others}) == 7
    assert content_key("x", sample.clone(), Prompt("a", 9)) == content_key("x", sample, prompt)
