"""Signals against loops over groups, and their invariances."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowgrpo.groups import group_stats, tied_fraction
from flowgrpo.signals import SIGNALS, StandardizedSum, WeightedSum

IDS = torch.tensor([4, 9, 4, 2, 9, 9, 4, 2, 9, 4, 9, 4])  # 5 of 4, 5 of 9, 2 of 2, shuffled
WEIGHTS = torch.tensor([1.0, 0.5, 2.0])
NAN = math.nan


def table(seed: int = 0, missing: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(12, 3, generator=generator) * torch.tensor([0.02, 1.0, 30.0]) + torch.tensor([0.3, 0.0, 50.0])
    return scores.where(torch.rand(12, 3, generator=generator) >= missing, NAN)


def looped_standardized_sum(values, group_ids, weights, eps=1e-8, unbiased=True):
    """The definition, one number at a time."""
    result = []
    for row in range(len(values)):
        total = 0.0
        for column, weight in enumerate(weights.tolist()):
            if weight == 0:
                continue
            column_values = values[:, column].tolist()
            mine = [v for v, g in zip(column_values, group_ids.tolist(), strict=True) if g == group_ids[row]]
            group = [v for v in mine if not math.isnan(v)]
            if math.isnan(column_values[row]):
                total = NAN
            elif len(group) > 1:
                std = statistics.stdev(group) if unbiased else statistics.pstdev(group)
                total += weight * (column_values[row] - statistics.fmean(group)) / (std + eps)
        result.append(total / sum(abs(weight) for weight in weights.tolist()))
    return torch.tensor(result)


@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("missing", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("seed", range(3))
def test_the_standardized_sum_is_its_definition(seed, missing, unbiased):
    values = table(seed, missing)
    result = StandardizedSum(unbiased=unbiased)(values, IDS, WEIGHTS)
    wanted = looped_standardized_sum(values, IDS, WEIGHTS, unbiased=unbiased)
    assert torch.allclose(result, wanted, atol=1e-5, equal_nan=True)


def test_the_standardized_sum_gives_numbers_worked_out_by_hand():
    values = torch.tensor([[1.0, 10.0], [2.0, 40.0], [3.0, 10.0]])
    result = StandardizedSum(eps=0.0)(values, torch.tensor([0, 0, 0]), torch.tensor([1.0, 3.0]))
    b = 1 / math.sqrt(3)  # 10, 40, 10: mean 20, std sqrt(300), so z = -b, 2 b, -b
    assert torch.allclose(result, torch.tensor([(-1 - 3 * b) / 4, 6 * b / 4, (1 - 3 * b) / 4]), atol=1e-6)


def test_the_weighted_sum_is_its_definition():
    values = table(1)
    wanted = [sum(w * v for w, v in zip(WEIGHTS.tolist(), row, strict=True)) for row in values.tolist()]
    assert torch.allclose(WeightedSum()(values, IDS, WEIGHTS), torch.tensor(wanted), rtol=1e-6)


@pytest.mark.parametrize("name", SIGNALS)
@pytest.mark.parametrize("missing", [0.0, 0.3])
def test_permuting_the_samples_permutes_the_signal(name, missing):
    values, order = table(2, missing), torch.randperm(12, generator=torch.Generator().manual_seed(1))
    signal = SIGNALS[name]()
    straight, permuted = signal(values, IDS, WEIGHTS), signal(values[order], IDS[order], WEIGHTS)
    assert torch.allclose(permuted, straight[order], atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", SIGNALS)
def test_only_which_samples_share_an_id_matters(name):
    values, signal = table(3), SIGNALS[name]()
    assert torch.equal(signal(values, IDS, WEIGHTS), signal(values, 1000 - 7 * IDS, WEIGHTS))


@pytest.mark.parametrize("name", SIGNALS)
def test_a_monitor_changes_nothing_even_where_it_failed(name):
    values, signal = table(4), SIGNALS[name]()
    weights = torch.tensor([1.0, 0.0, 2.0])
    wanted = signal(values[:, [0, 2]], IDS, weights[[0, 2]])
    values[3:7, 1] = NAN
    assert torch.equal(signal(values, IDS, weights), wanted)


@pytest.mark.parametrize("name", SIGNALS)
def test_a_sample_without_a_weighted_score_has_no_signal_and_its_siblings_have_one(name):
    values = table(5)
    values[0, 1] = NAN
    signal = SIGNALS[name]()(values, IDS, WEIGHTS)
    assert signal.isnan().tolist() == [True] + [False] * 11


@pytest.mark.parametrize("name", SIGNALS)
def test_no_weight_at_all_is_refused(name):
    with pytest.raises(ValueError, match="at least one reward needs a weight other than 0"):
        SIGNALS[name]()(table(), IDS, torch.zeros(3))


def test_the_missing_sample_counts_in_the_columns_that_it_has():
    values = torch.tensor([[NAN, 0.0], [1.0, 1.0], [3.0, 5.0]])
    signal = StandardizedSum(eps=0.0)(values, torch.tensor([7, 7, 7]), torch.tensor([1.0, 1.0]))
    first = 1 / math.sqrt(2)  # of 1 and 3: z = -first, first
    second = math.sqrt(7)  # std of 0, 1, 5, whose mean is 2
    assert signal[0].isnan()
    assert torch.allclose(signal[1:], torch.tensor([(-first - 1 / second) / 2, (first + 3 / second) / 2]))


@settings(max_examples=30, deadline=None)
@given(
    scale=st.lists(st.floats(0.01, 100), min_size=3, max_size=3),
    shift=st.lists(st.floats(-10, 10), min_size=3, max_size=3),
    factor=st.floats(0.01, 100),
)
def test_units_and_common_weight_factors_do_not_change_the_standardized_sum(scale, shift, factor):
    values, signal = table(6).double(), StandardizedSum(eps=0.0)
    changed = values * torch.tensor(scale).double() + torch.tensor(shift).double()
    assert torch.allclose(signal(changed, IDS, factor * WEIGHTS), signal(values, IDS, WEIGHTS), atol=1e-6)


def test_rewards_of_different_scale_have_equal_say_at_equal_weight():
    a, b = table(7)[:, 0], table(7)[:, 2]
    signal = StandardizedSum()(torch.stack([a, b], 1), IDS, torch.ones(2))
    alone = [StandardizedSum()(column[:, None], IDS, torch.ones(1)) for column in (a, b)]
    assert torch.allclose(signal, (alone[0] + alone[1]) / 2, atol=1e-6)
    assert alone[0].std() == pytest.approx(alone[1].std().item(), rel=1e-4)


def test_no_spread_or_one_valid_score_gives_exactly_zero():
    values = torch.tensor([[0.1], [0.1], [0.1], [NAN], [0.7], [NAN], [NAN], [0.3]])
    signal = StandardizedSum()(values, torch.tensor([0, 0, 0, 1, 1, 1, 2, 2]), torch.ones(1))
    assert signal[[0, 1, 2, 4, 7]].tolist() == [0.0] * 5
    assert signal[[3, 5, 6]].isnan().all()


def test_group_statistics_of_a_group_without_valid_values_are_zero():
    stats = group_stats(torch.tensor([NAN, NAN, 2.0, 4.0]), torch.tensor([1, 1, 0, 0]), unbiased=False)
    assert stats.count.tolist() == [0, 0, 2, 2]
    assert stats.mean.tolist() == [0, 0, 3, 3]
    assert stats.std.tolist() == [0, 0, 1, 1]


def test_tied_groups_and_groups_with_one_valid_member_are_counted():
    signal = torch.tensor([0.5, 0.5, 0.5, NAN, 1.0, NAN, 1.0, 2.0])
    assert tied_fraction(signal, torch.tensor([3, 3, 3, 8, 8, 8, 5, 5])) == pytest.approx(2 / 3)
