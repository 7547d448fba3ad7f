"""Paired evaluation: same noise for both, whole captions resampled, nothing hidden."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flowgrpo import evaluate as module
from flowgrpo.data import Prompt
from flowgrpo.evaluate import Evaluation, evaluate, summary
from flowgrpo.paired import Rise, paired_rise, rise_by_kind
from flowgrpo.policy import Conditions, Policy
from flowgrpo.scoring import Component, Scorer

CALL = {"max_sequence_length": 32}


def brightness(media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
    return media.mean((1, 2, 3, 4))


def width(media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
    return torch.full((len(media),), float(media.shape[-1]))


def scorer() -> Scorer:
    return Scorer([Component("brightness", brightness, 1.0), Component("width", width, 0.0)])


def prompts_of(*texts: str, **options: Any) -> list[Prompt]:
    return [Prompt(text, i, **options) for i, text in enumerate(texts)]


def brute_force(differences: np.ndarray, clusters: Sequence[int | str], seed: int, resamples: int) -> tuple[float, float]:
    names = list(dict.fromkeys(clusters))
    members = [[d for d, c in zip(differences, clusters, strict=True) if c == name] for name in names]
    drawn = np.random.default_rng(seed).integers(len(names), size=(resamples, len(names)))
    means = [np.mean([d for cluster in row for d in members[cluster]]) for row in drawn]
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))


def test_the_interval_is_that_of_a_loop_over_resampled_captions() -> None:
    rng = np.random.default_rng(1)
    base, tuned = (torch.tensor(rng.standard_normal(17), dtype=torch.float32) for _ in range(2))
    clusters: list[int | str] = [int(c) if c < 3 else f"caption {c}" for c in rng.integers(6, size=17)]
    rise = paired_rise(base, tuned, clusters, seed=5, resamples=300)
    low, high = brute_force((tuned.double() - base.double()).numpy(), clusters, 5, 300)
    assert (rise.low, rise.high) == pytest.approx((low, high), abs=1e-12)
    assert rise.rise == pytest.approx(rise.tuned - rise.base)
    assert (rise.num_prompts, rise.num_captions, rise.num_dropped) == (17, len(set(clusters)), 0)


def test_resampling_in_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    base, tuned = torch.zeros(7), torch.arange(7.0)
    whole = paired_rise(base, tuned, range(7), resamples=100)
    monkeypatch.setattr("flowgrpo.paired.CELLS", 21)
    assert paired_rise(base, tuned, range(7), resamples=100) == whole


def test_without_repeated_captions_the_interval_is_the_normal_one() -> None:
    difference = torch.randn(800, generator=torch.Generator().manual_seed(0))
    rise = paired_rise(torch.zeros(800), difference, range(800))
    half = 1.96 * float(difference.std(correction=0)) / 800**0.5
    assert (rise.low, rise.high) == pytest.approx((rise.rise - half, rise.rise + half), abs=0.06 * half)


def test_repeating_every_caption_does_not_narrow_the_interval() -> None:
    difference = torch.randn(60, generator=torch.Generator().manual_seed(0))
    once = paired_rise(torch.zeros(60), difference, range(60))
    often = paired_rise(torch.zeros(300), difference.repeat(5), list(range(60)) * 5)
    naive = paired_rise(torch.zeros(300), difference.repeat(5), range(300))
    assert (often.low, often.high) == pytest.approx((once.low, once.high), abs=1e-6)
    assert naive.high - naive.low < 0.6 * (often.high - often.low)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    clusters = np.repeat(np.arange(40), 3)
    hits = 0
    for trial in range(200):
        difference = 0.3 + rng.standard_normal(40)[clusters] + rng.standard_normal(120)
        rise = paired_rise(torch.zeros(120), torch.tensor(difference, dtype=torch.float32), clusters.tolist(),
                           seed=trial, resamples=400)  # fmt: skip
        hits += rise.low <= 0.3 <= rise.high
    assert 0.88 <= hits / 200 <= 0.99


def test_pairs_with_a_missing_score_are_left_out_and_counted() -> None:
    nan = float("nan")
    base, tuned = torch.tensor([0.0, nan, 1.0, 0.0]), torch.tensor([1.0, 1.0, nan, 0.0])
    rise = paired_rise(base, tuned, ["a", "b", "c", "d"])
    assert (rise.base, rise.tuned, rise.rise) == (0.0, 0.5, 0.5)
    assert (rise.num_prompts, rise.num_captions, rise.num_dropped) == (2, 2, 2)


def test_one_caption_has_no_interval_and_no_pair_no_numbers() -> None:
    one = paired_rise(torch.zeros(3), torch.ones(3), ["a", "a", "a"])
    assert one.rise == 1
    assert one.as_json()["rise_low"] is None
    none = paired_rise(torch.tensor([float("nan")]), torch.ones(1), ["a"]).as_json()
    assert none == {"base": None, "tuned": None, "rise": None, "rise_low": None, "rise_high": None, "num_prompts": 0,
                    "num_captions": 0, "num_dropped": 1}  # fmt: skip


def test_pairs_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match="2 and 3 clusters"):
        paired_rise(torch.zeros(2), torch.zeros(2), [1, 2, 3])


def test_each_kind_of_prompt_has_its_own_rise() -> None:
    prompts = [Prompt(str(i), i, meta={"kind": kind}) for i, kind in enumerate(["x", "y", "x"])] + prompts_of("plain")
    rises = rise_by_kind(prompts, torch.zeros(4), torch.tensor([1.0, 0.0, 0.5, 9.0]))
    assert list(rises) == ["x", "y"]
    assert (rises["x"].rise, rises["x"].num_prompts) == (0.75, 2)


def test_a_summary_holds_gold_every_reward_and_the_kinds() -> None:
    prompts = [Prompt(text, i, meta={"kind": "k"}) for i, text in enumerate("aab")]
    base = Evaluation(("one", "two"), torch.tensor([[0.0, 5.0], [0.0, 5.0], [1.0, 5.0]]), {})
    tuned = Evaluation(("one", "two"), torch.tensor([[1.0, 5.0], [0.0, 5.0], [1.0, 5.0]]), {})
    result = summary(base, tuned, prompts, "one")
    assert result["gold"]["name"] == "one"
    assert result["gold"]["rise"] == pytest.approx(1 / 3)
    assert (result["gold"]["num_prompts"], result["gold"]["num_captions"]) == (3, 2)
    assert result["rewards"]["two"]["rise"] == 0
    assert result["by_kind"]["k"]["rise"] == pytest.approx(1 / 3)
    assert {"base", "tuned", "rise", "rise_low", "rise_high"} < result["gold"].keys()


def test_evaluations_that_do_not_belong_together_are_refused() -> None:
    one, two = (Evaluation((name,), torch.zeros(2, 1), {}) for name in ("a", "b"))
    with pytest.raises(ValueError, match="evaluate both again"):
        summary(one, two, prompts_of("x", "y"), "a")
    with pytest.raises(ValueError, match="must be the name of a reward"):
        summary(one, one, prompts_of("x", "y"), "gold")


def test_a_score_does_not_depend_on_the_batch_size(sd3: Any) -> None:
    policy = Policy(sd3, Conditions(height=16, width=24, call=CALL))
    prompts = prompts_of("a cube", "a ball", "a cube", "", "b")
    seen: list[int] = []
    options = {"num_steps": 2, "seed": 3, "keep": {1, 4}}
    alone = evaluate(policy, scorer(), prompts, batch_size=1, **options)
    threes = evaluate(policy, scorer(), prompts, batch_size=3, on_batch=seen.append, **options)
    torch.testing.assert_close(alone.values, threes.values, atol=1e-6, rtol=0)
    assert (seen, list(threes.media)) == ([3, 2], [1, 4])
    assert threes.media[4].shape == (1, 3, 16, 24)
    torch.testing.assert_close(alone.media[4], threes.media[4], atol=1e-6, rtol=0)
    assert alone.values[0, 0] != alone.values[2, 0], "equal captions at two positions have two start noises"
    other = evaluate(policy, scorer(), prompts, batch_size=3, num_steps=2, seed=4)
    assert (other.values[:, 0] != alone.values[:, 0]).all()


def test_prompts_with_sizes_of_their_own_get_them(sd3: Any) -> None:
    policy = Policy(sd3, Conditions(height=16, width=24, call=CALL))
    prompts = [Prompt("a", 0, width=16), Prompt("b", 1), Prompt("c", 2, height=24, width=16)]
    result = evaluate(policy, scorer(), prompts, num_steps=1, batch_size=8, seed=0, keep=range(3))
    assert result.values[:, 1].tolist() == [16, 24, 16]
    assert [tuple(clip.shape[-2:]) for clip in result.media.values()] == [(16, 16), (16, 24), (24, 16)]
    assert policy.conditions == Conditions(height=16, width=24, call=CALL)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ({"width": 18}, "prompt 0: width=18 must be a multiple of 4"),
        ({"num_frames": 5}, "prompt 0: num_frames=5 cannot take effect"),
    ],
)
def test_an_illegal_size_is_refused_before_anything_is_sampled(sd3: Any, size: dict[str, int], message: str) -> None:
    policy = Policy(sd3, Conditions(height=16, width=24, call=CALL))
    with pytest.raises(ValueError, match=message):
        evaluate(policy, scorer(), [Prompt("a", 0, **size)], num_steps=1, batch_size=8, seed=0)


def test_guidance_of_the_evaluation_is_used_and_given_back(sd3: Any) -> None:
    policy = Policy(sd3, Conditions(height=16, width=24, call=CALL))
    options = {"num_steps": 2, "batch_size": 2, "seed": 0}
    plain = evaluate(policy, scorer(), prompts_of("a", "b"), **options)
    guided = evaluate(policy, scorer(), prompts_of("a", "b"), guidance_scale=7.0, **options)
    assert (plain.values[:, 0] != guided.values[:, 0]).all()
    assert policy.conditions.guidance_scale == 1


def test_a_saved_evaluation_is_read_back_whole(tmp_path: Any) -> None:
    values = torch.tensor([[1.0, float("nan")], [0.25, 2.0]])
    media = {1: torch.rand(1, 3, 2, 5), 12: torch.rand(3, 3, 7, 2)}
    module.save(Evaluation(("a", "ü"), values, media), tmp_path / "base")
    module.save(Evaluation(("a", "ü"), values, media), tmp_path / "base")
    back = module.load(tmp_path / "base")
    assert back.names == ("a", "ü")
    torch.testing.assert_close(back.values, values, equal_nan=True, atol=0, rtol=0)
    assert list(back.media) == [1, 12]
    assert all(torch.equal(back.media[i], media[i]) for i in media)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
    with pytest.raises(ValueError, match="must be a saved evaluation"):
        module.load(tmp_path)


def test_an_evaluation_without_kept_media_can_be_saved(tmp_path: Any) -> None:
    module.save(Evaluation(("a",), torch.zeros(2, 1), {}), tmp_path / "base")
    assert module.load(tmp_path / "base").media == {}


def test_a_rise_says_which_fields_it_has() -> None:
    assert Rise(0.1, 0.2, 0.1, 0.05, 0.15, 9, 8).as_json()["rise_high"] == 0.15
