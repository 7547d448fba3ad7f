"""The scorer: pairing, batches, refused answers, missing scores, failing and hanging models."""

import re
import threading
import time
import warnings

import pytest
import torch

from flowgrpo.data import Prompt
from flowgrpo.scoring import Component, Scorer, Scores, Traits

B, F, H, W = 7, 2, 3, 5
LEVELS = torch.arange(7) * 25 / 255  # 8 bits hold them
PROMPTS = [Prompt(text=f"prompt {i // 3}", id=i // 3) for i in range(B)]


def media(frames: int = F) -> torch.Tensor:
    """Each sample has its own mean, 25 i / 255."""
    return LEVELS.view(B, 1, 1, 1, 1).expand(B, frames, 3, H, W).clone()


def mean(samples, prompts):
    return samples.mean((1, 2, 3, 4))


def prompt_ids(samples, prompts):
    return torch.tensor([float(prompt.id) for prompt in prompts])


def failing(samples, prompts):
    raise OSError("no connection")


def scorer_of(model, weight: float = 1.0, **options) -> Scorer:
    return Scorer([Component("mine", model, weight, **options)])


def test_a_table_of_scores_has_a_row_a_sample_and_a_named_column_a_model():
    scores = Scorer([Component("mean", mean, 1.0), Component("id", prompt_ids, 0.5)])(media(), PROMPTS)
    assert scores.names == ("mean", "id")
    assert scores.values.shape == (B, 2)
    assert scores.values.dtype == torch.float32
    assert torch.allclose(scores.column("mean"), LEVELS)
    assert scores.column("id").tolist() == [0, 0, 0, 1, 1, 1, 2]
    with pytest.raises(ValueError, match="no reward is named 'x'; there are mean, id"):
        scores.column("x")


@pytest.mark.parametrize("batch_size", [1, 2, 3, 64])
def test_every_sample_meets_its_own_prompt_once_and_in_order(batch_size):
    seen = []

    def recorder(samples, prompts):
        seen.extend(zip((samples.mean((1, 2, 3, 4)) * 255 / 25).round().int().tolist(), prompts, strict=True))
        return mean(samples, prompts)

    scores = scorer_of(recorder, batch_size=batch_size)(media(), PROMPTS)
    assert seen == list(enumerate(PROMPTS))
    assert torch.allclose(scores.column("mine"), LEVELS)


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        (torch.rand(B - 1), r"torch.float32 of shape \(6,\)"),
        (torch.rand(B, 1), r"torch.float32 of shape \(7, 1\)"),
        (torch.tensor(0.5), r"torch.float32 of shape \(\)"),
        (torch.ones(B, dtype=torch.long), r"torch.int64 of shape \(7,\)"),
        (torch.ones(B, dtype=torch.bool), r"torch.bool of shape \(7,\)"),
        (0.5, "got float$"),
        (None, "got NoneType$"),
        ([0.5] * B, "list of length 7"),
        (["0.5"] * B, "list of length 7"),
        ({"score": torch.rand(B)}, "dict of length 1"),
        ("0.5", "str of length 3"),
    ],
)
def test_a_wrong_answer_is_refused_with_the_reward_and_both_shapes_and_never_broadcast(answer, got):
    scorer = scorer_of(lambda samples, prompts: answer, retries=3)
    with pytest.warns(RuntimeWarning, match="reward 'mine' failed"):
        scores = scorer(media(), PROMPTS)
    assert scores.values.isnan().all()
    assert re.search(r"reward 'mine'.*must return a float tensor of shape \(7,\).*" + got, scorer.failures["mine"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_float_type_is_accepted_and_no_graph_is_kept(dtype):
    weight = torch.ones((), requires_grad=True)
    scores = scorer_of(lambda samples, prompts: (weight * mean(samples, prompts)).to(dtype))(media(), PROMPTS)
    assert scores.values.dtype == torch.float32
    assert not scores.values.requires_grad


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_score_that_is_not_finite_is_missing_and_counted_and_never_zero(bad):
    def partly(samples, prompts):
        return mean(samples, prompts).index_fill(0, torch.tensor([2, 4]), bad)

    scorer = Scorer([Component("a", partly, 1.0), Component("b", mean, 1.0)])
    with pytest.warns(RuntimeWarning, match="reward 'a' gave no finite score for 2 of 7 samples; these samples do not train"):
        scores = scorer(media(), PROMPTS)
    assert scores.column("a").isnan().nonzero().flatten().tolist() == [2, 4]
    assert not scores.column("b").isnan().any()
    assert scorer.missing == {"a": 2, "b": 0}


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_non_finite_pixels_never_reach_a_model(batch_size):
    clips = media()
    clips[1, 0, 0, 0, 0] = torch.nan
    clips[6, 1, 2, 2, 4] = torch.inf
    seen = []

    def strict(samples, prompts):
        assert samples.isfinite().all()
        seen.extend(prompt.id for prompt in prompts)
        return mean(samples, prompts)

    scorer = scorer_of(strict, batch_size=batch_size)
    column = scorer(clips, PROMPTS).column("mine")
    assert seen == [0, 0, 1, 1, 1]
    assert column.isnan().nonzero().flatten().tolist() == [1, 6]
    assert torch.allclose(column[[0, 2, 3, 4, 5]], LEVELS[[0, 2, 3, 4, 5]])
    assert (scorer.bad_media, scorer.missing) == (2, {"mine": 0})


def test_a_batch_without_one_finite_sample_asks_no_model():
    scores = scorer_of(failing)(media() * torch.nan, PROMPTS)
    assert scores.values.isnan().all()


def test_a_failing_weighted_reward_leaves_gaps_and_says_its_name_its_samples_and_its_prompts():
    message = r"'mine' failed on samples 3, 4, 5 \(prompt 1 'prompt 1'\): OSError: no connection"

    def on_prompt_one(samples, prompts):
        return failing(samples, prompts) if prompts[0].id == 1 else mean(samples, prompts)

    scorer = scorer_of(on_prompt_one, batch_size=3)
    with pytest.warns(RuntimeWarning, match=message):
        scores = scorer(media(), PROMPTS)
    assert scores.values[:, 0].isnan().nonzero().flatten().tolist() == [3, 4, 5]
    assert scores.was_asked.all()
    assert scorer.missing == {"mine": 3}


@pytest.mark.parametrize("model", [failing, lambda samples, prompts: 0.5])
def test_a_failing_monitor_warns_once_and_scores_nothing(model):
    scorer = Scorer([Component("watch", model, 0.0), Component("mean", mean, 1.0)])
    with pytest.warns(RuntimeWarning) as caught:
        scores, _ = [scorer(media(), PROMPTS) for _ in range(2)]
    failure, missing = [str(one.message) for one in caught]
    assert failure.startswith("reward 'watch' failed on samples 0, 1, 2, 3, 4, 5, 6 (prompt 0 'prompt 0', 1")
    assert missing == "reward 'watch' gave no finite score for 7 of 7 samples; its weight is 0, so nothing else changes"
    assert scores.column("watch").isnan().all()
    assert torch.allclose(scores.column("mean"), LEVELS)
    assert scorer.missing == {"watch": 2 * B, "mean": 0}


def test_a_reward_that_fails_now_and_then_is_asked_again_as_often_as_allowed():
    calls = []

    def every_second_call_fails(samples, prompts):
        calls.append(len(prompts))
        return failing(samples, prompts) if len(calls) % 2 else mean(samples, prompts)

    scores = scorer_of(every_second_call_fails, retries=1, retry_wait_s=0.0, batch_size=4)(media(), PROMPTS)
    assert calls == [4, 4, 3, 3]
    assert not scores.values.isnan().any()


def test_a_hanging_reward_is_left_after_its_timeout():
    release = threading.Event()

    def hanging(samples, prompts):
        release.wait(30)
        return mean(samples, prompts)

    start = time.perf_counter()
    with pytest.warns(RuntimeWarning, match=r"'mine' failed.*TimeoutError: no answer within 0.05 seconds"):
        scores = scorer_of(hanging, timeout_s=0.05, retries=1, retry_wait_s=0.0)(media(), PROMPTS)
    assert time.perf_counter() - start < 15
    assert scores.values.isnan().all()
    release.set()


def test_a_reward_within_its_timeout_answers_as_without_one_and_its_own_errors_come_through():
    assert torch.allclose(scorer_of(mean, timeout_s=30.0)(media(), PROMPTS).values[:, 0], LEVELS)
    with pytest.warns(RuntimeWarning, match="OSError: no connection"):
        scorer_of(failing, timeout_s=30.0)(media(), PROMPTS)


class Speed:
    unit = "pixels a second"
    range = (0.0, 0.45)
    takes = "media"
    needs_motion = True

    def __call__(self, samples, prompts):
        return mean(samples, prompts)


def test_a_motion_reward_refuses_single_frames():
    assert scorer_of(Speed())(media(2) / 2, PROMPTS).values.shape == (B, 1)
    with pytest.raises(ValueError, match="reward 'mine' measures motion and needs at least 2 frames, got 1"):
        scorer_of(Speed())(media(1), PROMPTS)


def test_scores_outside_the_declared_range_are_kept_counted_and_warned_about_once():
    scorer = scorer_of(Speed())
    message = r"'mine' should lie in \[0.0, 0.45\], got 2 of 7 from 0.4902 to 0.5882; check its inputs"
    with pytest.warns(RuntimeWarning, match=message) as caught:
        scores, _ = [scorer(media(), PROMPTS) for _ in range(2)]
    assert len(caught) == 1
    assert scorer.outside == {"mine": 4}
    assert scores.values.max() == pytest.approx(150 / 255)


def test_a_plain_function_is_a_reward_model_with_the_default_traits():
    assert Component("f", mean, 1.0).traits == Traits("score", None, "media", False)
    assert Component("s", Speed(), 1.0).traits == Traits("pixels a second", (0.0, 0.45), "media", True)


def test_a_model_of_latents_gets_the_latents_and_then_no_media_are_needed():
    class OnLatents:
        takes = "latents"

        def __call__(self, latents, prompts):
            return latents.flatten(1).sum(1)

    scorer, latents = scorer_of(OnLatents()), torch.rand(B, 4, 2, 3)
    assert scorer.takes == {"latents"}
    scores = scorer(None, PROMPTS, latents=latents)
    assert torch.allclose(scores.column("mine"), latents.flatten(1).sum(1))
    with pytest.raises(ValueError, match="reward 'mine' takes latents, got none; pass latents to the scorer"):
        scorer(media(), PROMPTS)
    with pytest.raises(ValueError, match="reward 'mine' takes media, got none"):
        scorer_of(mean)(None, PROMPTS)


def test_media_out_of_contract_and_a_wrong_number_of_prompts_are_refused():
    with pytest.raises(ValueError, match=r"media must lie in \[0, 1\]"):
        scorer_of(mean)(media() * 255, PROMPTS)
    with pytest.raises(ValueError, match="got 7 samples and 2 prompts; repeat the prompt"):
        scorer_of(mean)(media(), PROMPTS[:2])
    with pytest.raises(ValueError, match="got 7 samples and 0 prompts"):
        scorer_of(mean)(media(), [])


def test_rewards_need_names_of_their_own():
    with pytest.raises(ValueError, match="each with its own name"):
        Scorer([Component("a", mean, 1.0), Component("a", prompt_ids, 1.0)])
    with pytest.raises(ValueError, match="there must be rewards"):
        Scorer([])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight": float("nan")}, "weight must be finite"),
        ({"weight": 1.0, "batch_size": 0}, "batch_size must be at least 1"),
        ({"weight": 1.0, "retries": -1}, "retries at least 0"),
        ({"weight": 1.0, "timeout_s": 0.0}, "timeout_s must be above 0"),
        ({"weight": 1.0, "retry_wait_s": -1.0}, "retry_wait_s must be 0 or more"),
        ({"weight": 1.0, "dtype": torch.int32}, "dtype must be one of torch.float32"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_the_name_of_the_reward(options, message):
    with pytest.raises(ValueError, match=f"reward 'mine'.*{message}"):
        Component("mine", mean, **options)


def test_the_time_of_each_reward_is_kept_until_reset():
    def slow(samples, prompts):
        time.sleep(0.02)
        return mean(samples, prompts)

    scorer = Scorer([Component("slow", slow, 1.0, batch_size=3), Component("fast", mean, 1.0)])
    scorer(media(), PROMPTS)
    assert scorer.seconds["slow"] >= 0.06 > scorer.seconds["fast"]
    scorer.reset()
    assert scorer.seconds == {"slow": 0.0, "fast": 0.0}


def test_a_healthy_call_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scores = scorer_of(mean)(media(), PROMPTS)
    assert isinstance(scores, Scores)
