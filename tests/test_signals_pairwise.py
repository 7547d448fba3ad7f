"""Signals from comparisons in pairs: by scores, by a judge, and by one who contradicts himself."""

import math

import pytest
import torch

from flowgrpo.advantages import CentredAdvantage
from flowgrpo.signals import SIGNALS, PairwiseSignal, check_signal
from flowgrpo.signals.pairs import compare
from flowgrpo.signals.preference_walk import PreferenceWalk, walk
from flowgrpo.signals.tournament import Tournament
from flowgrpo.signals.win_rate import WinRate

IDS = torch.tensor([4, 9, 4, 2, 9, 9, 4, 2, 9, 4])
ONE = torch.ones(1)
NAN = math.nan
PAIRWISE = ["win_rate", "tournament", "preference_walk"]


def scores(seed: int = 0, columns: int = 2) -> torch.Tensor:
    """With ties."""
    return (5 * torch.rand(10, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).round()


def judge_of(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The judgements of one who goes by the scores."""
    judged = torch.full((len(ids), len(ids), values.shape[1]), NAN, dtype=torch.float64)
    for i in range(len(ids)):
        for other in range(len(ids)):
            if i != other and ids[i] == ids[other]:
                judged[i, other] = 0.5 + 0.5 * (values[i] - values[other]).sign()
    return judged


def looped_win_rate(column: list[float], ids: list[int]) -> list[float]:
    rates = []
    for i, mine in enumerate(column):
        others = [x for j, x in enumerate(column) if j != i and ids[j] == ids[i] and not math.isnan(x)]
        won = sum(1.0 if mine > x else 0.5 if mine == x else 0.0 for x in others)
        rates.append(NAN if math.isnan(mine) else won / len(others) if others else 0.5)
    return rates


@pytest.mark.parametrize("seed", range(3))
def test_the_win_rate_of_scores_is_its_definition(seed):
    values = scores(seed)
    values[2, 0] = NAN
    wanted = [torch.tensor(looped_win_rate(values[:, k].tolist(), IDS.tolist())).double() for k in (0, 1)]
    result = WinRate()(values, IDS, torch.tensor([1.0, 3.0]))
    assert torch.allclose(result, (wanted[0] + 3 * wanted[1]) / 4, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("name", PAIRWISE)
def test_a_judge_who_goes_by_the_scores_gives_the_signal_of_the_scores(name):
    signal, values = SIGNALS[name](), scores(3)
    assert isinstance(signal, PairwiseSignal)
    judged, weights = judge_of(values, IDS), torch.tensor([1.0, 2.0])
    wanted = signal(values, IDS, weights)
    assert torch.allclose(signal(values, IDS, weights, judged), wanted, atol=1e-9)
    one_judge = judged.clone()
    one_judge[:, :, 0] = NAN  # the other reward has scores only
    hidden = values.clone()
    hidden[:, 1] = NAN  # a judge needs no scores
    assert torch.allclose(signal(hidden, IDS, weights, one_judge), wanted, atol=1e-9)


@pytest.mark.parametrize("name", PAIRWISE)
def test_only_the_order_of_scores_counts(name):
    signal, values = SIGNALS[name](), scores(4)
    assert torch.allclose(signal(values.exp(), IDS, torch.ones(2)), signal(values, IDS, torch.ones(2)), atol=1e-12)


def test_both_orders_of_a_judge_are_averaged_and_their_agreement_is_the_reliability():
    judged = torch.full((3, 3, 1), NAN).double()
    judged[0, 1], judged[1, 0] = 0.9, 0.3  # 0 wins by 0.9 shown first, by 0.7 shown second
    judged[0, 2] = 1.0  # one order only
    pairs = compare(torch.zeros(3, 1), torch.zeros(3, dtype=torch.long), judged, one_order=0.4)
    assert pairs.preference[0, 1, 0].item() == pytest.approx(0.8)
    assert pairs.preference[1, 0, 0].item() == pytest.approx(0.2)
    assert pairs.reliability[0, 1, 0].item() == pytest.approx(0.8)
    assert pairs.preference[2, 0, 0].item() == 0.0
    assert pairs.reliability[2, 0, 0].item() == pytest.approx(0.4)
    assert pairs.preference[1, 2, 0].isnan()
    assert pairs.win_rate[:, 0].tolist() == pytest.approx([0.9, 0.2, 0.0])


@pytest.mark.parametrize("name", PAIRWISE)
def test_a_sample_that_the_judge_never_saw_does_not_train(name):
    judged = judge_of(scores(5, 1), IDS)
    judged[4], judged[:, 4] = NAN, NAN
    rest = [row for row in range(10) if row != 4]
    result = SIGNALS[name]()(torch.zeros(10, 1).double(), IDS, ONE, judged)
    assert result.isnan().tolist() == [row == 4 for row in range(10)]
    alone = SIGNALS[name]()(torch.zeros(9, 1).double(), IDS[rest], ONE, judged[rest][:, rest])
    assert torch.allclose(result[rest], alone, atol=1e-12)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ((0, 2), 1.5, r"judgements must lie in \[0, 1\]"),
        ((0, 1), 0.5, "two samples of one group"),
        ((3, 3), 0.5, "two samples"),
    ],
)
def test_judgements_that_are_none_are_refused(place, value, message):
    judged = judge_of(scores(6, 1), IDS)
    judged[place] = value
    with pytest.raises(ValueError, match=message):
        WinRate()(scores(6, 1), IDS, ONE, judged)


def test_the_tournament_is_the_win_rate_against_a_half_over_its_spread():
    values = torch.tensor([[3.0], [1.0], [2.0]]).double()  # win rates 1, 0, 1/2, whose std is sqrt(1 / 6)
    result = Tournament(delta=0.2)(values, torch.zeros(3, dtype=torch.long), ONE)
    unit = 0.5 / (math.sqrt(1 / 6) + 0.2)
    assert result.tolist() == pytest.approx([unit, -unit, 0.0])


def test_a_complete_tournament_is_centred_already_and_the_centred_advantage_leaves_it_so():
    signal = Tournament()(scores(7), IDS, torch.tensor([1.0, 2.0]))
    for group in IDS.unique():
        assert signal[group == IDS].mean().item() == pytest.approx(0, abs=1e-12)
    assert torch.allclose(CentredAdvantage()(signal, IDS), signal, atol=1e-12)


def test_a_tournament_of_near_ties_stays_one():
    ids, judged = torch.zeros(4, dtype=torch.long), torch.full((4, 4, 1), NAN).double()
    for i in range(4):
        for other in range(4):
            if i != other:
                judged[i, other] = 0.5 + 0.002 * (other - i)  # a judge who hardly cares
    near = Tournament()(torch.zeros(4, 1).double(), ids, ONE, judged)
    clear = Tournament()(-torch.arange(4.0)[:, None].double(), ids, ONE)
    assert torch.equal(near.argsort(), clear.argsort())
    assert near.abs().max() < 0.1 * clear.abs().max()


def test_the_walk_is_stationary_and_where_long_walks_end():
    generator = torch.Generator().manual_seed(8)
    steps = torch.rand(6, 6, generator=generator, dtype=torch.float64).fill_diagonal_(0)
    steps = 0.8 * steps / steps.sum(1, keepdim=True)
    anchor = torch.rand(6, generator=generator, dtype=torch.float64)
    anchor = anchor / anchor.sum()
    found, iterated = walk(steps, anchor, 0.85), anchor
    for _ in range(500):
        carried = 0.85 * steps.T @ iterated
        iterated = carried + (1 - carried.sum()) * anchor
    assert torch.allclose(found, iterated, atol=1e-12)
    assert found.sum().item() == pytest.approx(1)


def test_the_walk_in_a_group_of_three_by_hand():
    values, alpha = torch.tensor([[2.0], [1.0], [0.0]]).double(), 0.5
    # the last goes to both others, the middle to the best, the best to the anchor: pi is in proportion to
    visits = torch.tensor([1 + alpha + alpha / 2 + alpha**2 / 2, 1 + alpha / 2, 1.0]).double()
    result = PreferenceWalk(alpha=alpha)(values, torch.zeros(3, dtype=torch.long), ONE)
    assert torch.allclose(result, (3 * visits / visits.sum()).log(), atol=1e-12)


def test_a_cycle_is_a_tie_and_what_all_of_it_beat_is_below():
    ids, judged = torch.zeros(4, dtype=torch.long), torch.full((4, 4, 1), NAN).double()
    for winner, loser in [(0, 1), (1, 2), (2, 0), (0, 3), (1, 3), (2, 3)]:
        judged[winner, loser], judged[loser, winner] = 1.0, 0.0
    result = PreferenceWalk()(torch.zeros(4, 1).double(), ids, ONE, judged)
    assert torch.allclose(result[:3], result[0].expand(3), atol=1e-9)
    assert result[3] < result[0] - 0.5


def test_a_judge_who_only_goes_by_the_order_of_showing_leaves_the_walk_at_its_anchor():
    ids, judged = torch.zeros(4, dtype=torch.long), torch.ones(4, 4, 1).double()  # the first shown always wins
    judged[range(4), range(4)] = NAN
    trusted = torch.tensor([[0.0, 3.0], [0.0, 1.0], [0.0, 2.0], [0.0, 2.0]]).double()
    judged = torch.cat([judged, torch.full((4, 4, 1), NAN).double()], 2)
    result = PreferenceWalk(anchor=1, sharpness=0.7)(trusted, ids, torch.tensor([1.0, 0.0]), judged)
    z = (trusted[:, 1] - 2) / trusted[:, 1].std(correction=0)
    assert torch.allclose(result, (4 * (0.7 * z).softmax(0)).log(), atol=1e-9)
    uniform = PreferenceWalk()(trusted, ids, torch.tensor([1.0, 0.0]), judged)
    assert torch.allclose(uniform, torch.zeros(4).double(), atol=1e-9)


def test_an_anchor_breaks_ties_and_a_sample_without_its_score_does_not_train():
    ids, values = torch.zeros(4, dtype=torch.long), torch.tensor([[1.0, 5.0], [1.0, 7.0], [1.0, 6.0], [1.0, NAN]]).double()
    result = PreferenceWalk(anchor=1)(values, ids, torch.tensor([1.0, 0.0]))
    assert result[3].isnan()
    assert result[1] > result[2] > result[0]
    with pytest.raises(ValueError, match=r"signal.anchor must be the number of a reward, 0 to 1, got 2"):
        check_signal(PreferenceWalk(anchor=2), torch.ones(2), [None, None])


@pytest.mark.parametrize(
    ("name", "changes"),
    [("tournament", {"delta": 0.0}), ("preference_walk", {"alpha": 1.0}), ("preference_walk", {"sharpness": 0.0}),
     ("preference_walk", {"one_order": 2.0}), ("gdpo", {"eps": -1.0})],
)  # fmt: skip
def test_settings_without_a_meaning_are_refused(name, changes):
    with pytest.raises(ValueError, match=f"signal.{next(iter(changes))}"):
        SIGNALS[name](**changes)
