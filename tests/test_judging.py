"""Judges of pairs: whom they compare, what their word becomes, and where they cannot be asked."""

import math

import pytest
import torch

from flowgrpo.build import build
from flowgrpo.component import Component
from flowgrpo.data import Prompt
from flowgrpo.judging import blocks, pairs_of
from flowgrpo.missing import signal_of
from flowgrpo.score_cache import ScoreCache
from flowgrpo.scoring import Scorer
from flowgrpo.signals.win_rate import WinRate
from tests.reward_faults import Redder
from tests.toys import config

IDS = torch.tensor([7, 3, 7, 7, 3, 7, 9])
RED = torch.tensor([0.1, 0.5, 0.4, 0.4, 0.6, 0.2, 0.9])
PROMPTS = [Prompt(f"prompt {i}", i) for i in IDS.tolist()]
MEDIA = RED.view(7, 1, 1, 1, 1).expand(7, 1, 3, 2, 2).clone()
JUDGE = {"name": "judge", "use": "tests.reward_faults:Redder"}
SINGLE = {"name": "red", "use": "tests.toys:redness"}


def meetings(pairs):
    counts = torch.zeros(int(pairs.max()) + 1)
    return counts.index_add_(0, pairs.flatten(), torch.ones(pairs.numel())).tolist()


def test_all_pairs_of_a_group_in_both_orders_or_in_one():
    there = torch.ones(7, dtype=torch.bool)
    both, one = (pairs_of(IDS, there, both_orders=both).tolist() for both in (True, False))
    wanted = [[i, j] for i in range(7) for j in range(7) if i != j and IDS[i] == IDS[j]]
    assert sorted(both) == sorted(wanted)
    assert sorted(map(sorted, one)) == sorted([i, j] for i, j in wanted if i < j)
    there[[2, 6]] = False
    assert sorted(pairs_of(IDS, there).tolist()) == [[i, j] for i, j in sorted(wanted) if 2 not in (i, j)]
    assert pairs_of(IDS, torch.zeros(7, dtype=torch.bool)).shape == (0, 2)


@pytest.mark.parametrize(("size", "opponents", "each"), [(12, 2, 2), (12, 3, 4), (7, 4, 4), (6, 5, 5), (2, 4, 1), (5, 9, 4)])
def test_a_ring_lets_every_sample_meet_as_many(size, opponents, each):
    pairs = pairs_of(torch.zeros(size, dtype=torch.long), torch.ones(size, dtype=torch.bool), opponents, both_orders=False)
    assert meetings(pairs) == [each] * size
    assert len({frozenset(pair) for pair in pairs.tolist()}) == len(pairs)


@pytest.mark.parametrize("batch_size", [1, 5, 64])
def test_a_judges_score_is_the_win_rate_and_its_word_is_kept(batch_size):
    scores = Scorer([Component("judge", Redder(), 1.0, batch_size)])(MEDIA, PROMPTS)
    assert torch.allclose(scores.values[:6, 0], torch.tensor([0, 0, 2.5, 2.5, 3, 1]) / 3)
    assert scores.values[6].isnan()
    assert scores.was_asked[:, 0].tolist() == [True] * 6 + [False]  # the last is alone
    assert scores.judged is not None
    assert scores.judged[2, 3, 0] == 0.5
    assert scores.judged[0, 2, 0] == 0
    assert scores.judged[2, 0, 0] == 1
    assert scores.judged[:, :, 0].isfinite().sum() == 4 * 3 + 2


def test_a_judge_beside_a_score_and_a_sample_that_failed():
    media = MEDIA.clone()
    media[2, 0, 0, 0, 0] = math.nan
    scorer = Scorer([Component("red", lambda s, p: s[:, 0, 0].mean((1, 2)), 1.0), Component("judge", Redder(), 1.0)])
    scores = scorer(media, PROMPTS)
    assert torch.allclose(scores.values[[0, 3, 5], 1], torch.tensor([0, 1, 0.5]))
    assert (scores.not_finite, scores.was_asked[2].tolist()) == (1, [False, False])
    assert scores.judged is not None
    assert scores.judged[:, :, 0].isnan().all()
    signal = signal_of(WinRate(), scores.values, IDS, scorer.weights, scores.judged)
    assert torch.allclose(signal[[0, 3, 5]], torch.tensor([0, 1, 0.5]))
    assert signal[[2]].isnan().all()


class Loud(Redder):
    """Says more than it may."""

    def __call__(self, pairs, prompts):
        return 3 * super().__call__(pairs, prompts)


class Away(Redder):
    """Does not answer the second batch."""

    calls = 0

    def __call__(self, pairs, prompts):
        self.calls += 1
        if self.calls == 2:
            raise OSError("no connection")
        return super().__call__(pairs, prompts)


def test_an_answer_outside_0_and_1_is_no_judgement_and_a_lost_batch_leaves_the_others():
    with pytest.warns(RuntimeWarning, match=r"scores of reward 'loud' should lie in \[0.0, 1.0\], got .* 3"):
        scores = Scorer([Component("loud", Loud(), 1.0)])(MEDIA, PROMPTS)
    assert scores.judged is not None
    assert scores.judged.nan_to_num(0).max() == 0
    with pytest.warns(RuntimeWarning, match=r"'away' failed on samples \[.*OSError: no connection"):
        scores = Scorer([Component("away", Away(), 1.0, batch_size=12)])(MEDIA, PROMPTS)
    assert scores.values[:, 0].isnan().tolist() == [False] * 6 + [True]
    assert scores.judged is not None
    assert scores.judged.isfinite().sum() == 12


def test_what_was_said_of_samples_that_do_not_count_is_not_heard():
    judged = torch.full((4, 4, 1), math.nan)
    judged[0, 1] = judged[0, 2] = judged[1, 2] = 1.0
    values, ids = torch.tensor([[1.0], [0.5], [0.0], [math.nan]]), torch.zeros(4, dtype=torch.long)
    whole = signal_of(WinRate(), values, ids, torch.ones(1), judged)
    assert whole[:3].tolist() == [1.0, 0.5, 0.0]
    values[0] = math.nan
    assert signal_of(WinRate(), values, ids, torch.ones(1), judged)[1:3].tolist() == [1.0, 0.0]


def test_pairs_are_kept_by_content_in_their_order():
    cache = ScoreCache()
    scorer = Scorer([Component("judge", Redder(), 1.0, identity="redder")], cache)
    first = scorer(MEDIA, PROMPTS).values
    assert len(cache) == 9  # two samples are the same picture
    assert torch.equal(scorer(MEDIA, PROMPTS).values[:6], first[:6])
    assert cache.hits == 14


def test_tables_are_put_together_without_a_word_between_them():
    table = blocks([torch.ones(2, 2, 3), torch.zeros(1, 1, 3)])
    assert table.shape == (3, 3, 3)
    assert table[:2, :2].eq(1).all()
    assert table[2, 2].eq(0).all()
    assert table[2, :2].isnan().all()
    assert table[:2, 2].isnan().all()


def test_a_config_with_a_judge_trains_and_what_cannot_work_is_refused(tmp_path):
    parts = build(config(tmp_path, rewards=[{**JUDGE, "opponents": 2, "both_orders": False}], signal="win_rate"))
    assert (parts.scorer.components[0].opponents, parts.scorer.components[0].both_orders) == (2, False)
    with pytest.raises(ValueError, match=r"rewards.red: opponents and both_orders are for judges of pairs"):
        build(config(tmp_path, rewards=[{**SINGLE, "opponents": 2}]))
    heldout = {"prompts__heldout": str(tmp_path / "prompts.txt")}
    with pytest.raises(ValueError, match=r"evaluation.gold: 'judge' compares samples.*name a reward that scores single ones"):
        build(config(tmp_path, rewards=[JUDGE, SINGLE], **heldout))
    parts = build(config(tmp_path, rewards=[JUDGE, SINGLE], evaluation__gold="red", **heldout))
    assert parts.scorer.pointwise().names == ("red",)
    with pytest.raises(ValueError, match="need a reward that scores single samples, all are judges"):
        Scorer([Component("judge", Redder(), 1.0)]).pointwise()
    with pytest.raises(ValueError, match="opponents must be at least 1, got 0"):
        Component("judge", Redder(), 1.0, opponents=0)
