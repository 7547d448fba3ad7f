"""Advantages against loops over groups, their invariances, and the published recipes in small."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowgrpo.advantages import ADVANTAGES, Advantage
from flowgrpo.signals import StandardizedSum, WeightedSum

IDS = torch.tensor([4, 9, 4, 2, 9, 9, 4, 2, 9, 4, 9, 4])
NAN = math.nan
KINDS = ["group", "global", "none"]


def random_signal(seed: int = 0, missing: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    signal = torch.randn(12, generator=generator) + IDS
    return signal.where(torch.rand(12, generator=generator) >= missing, NAN)


def looped_advantage(signal, group_ids, std, eps, clip, unbiased):
    """The definition, one sample at a time."""

    def spread(values):
        if len(values) < 2:
            return 0.0
        return statistics.stdev(values) if unbiased else statistics.pstdev(values)

    signal, group_ids, result = signal.tolist(), group_ids.tolist(), []
    everyone = [value for value in signal if not math.isnan(value)]
    for value, mine in zip(signal, group_ids, strict=True):
        group = [v for v, g in zip(signal, group_ids, strict=True) if g == mine and not math.isnan(v)]
        if math.isnan(value) or len(set(group)) < 2:
            result.append(0.0)
            continue
        scale = {"group": spread(group) + eps, "global": spread(everyone) + eps, "none": 1.0}[std]
        advantage = (value - statistics.fmean(group)) / scale
        result.append(advantage if clip is None else max(-clip, min(clip, advantage)))
    return torch.tensor(result)


@pytest.mark.parametrize("std", KINDS)
@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("missing", [0.0, 0.3, 0.9])
def test_an_advantage_is_its_definition(std, unbiased, clip, missing):
    for seed in range(2):
        signal = random_signal(seed, missing)
        result = Advantage(std=std, eps=1e-4, clip=clip, unbiased=unbiased)(signal, IDS)
        assert torch.allclose(result, looped_advantage(signal, IDS, std, 1e-4, clip, unbiased), atol=1e-5)


def test_a_sum_of_rewards_with_group_or_global_std_gives_numbers_worked_out_by_hand():
    scores = torch.tensor([[1.0, 0.0], [2.0, 1.0], [4.0, 0.0], [5.0, 1.0]])  # sums 1, 3, 4, 6
    ids = torch.tensor([8, 3, 3, 8])  # group 8: 1, 6; group 3: 3, 4
    signal = WeightedSum()(scores, ids, torch.ones(2))
    by_group = ADVANTAGES["group"](eps=0.0)(signal, ids)
    assert torch.allclose(by_group, torch.tensor([-1.0, -1.0, 1.0, 1.0]))
    by_all = ADVANTAGES["global"](eps=0.0)(signal, ids)
    assert torch.allclose(by_all, torch.tensor([-2.5, -0.5, 0.5, 2.5]) / math.sqrt(3.25))


def test_standardised_rewards_pass_through_the_centred_advantage_unchanged():
    scores = torch.randn(12, 2, generator=torch.Generator().manual_seed(3))
    signal = StandardizedSum()(scores, IDS, torch.ones(2))
    assert torch.allclose(ADVANTAGES["none"]()(signal, IDS), signal, atol=1e-6)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_permuting_the_samples_permutes_the_advantages(name):
    signal, order = random_signal(1, missing=0.2), torch.randperm(12, generator=torch.Generator().manual_seed(5))
    advantage = ADVANTAGES[name]()
    assert torch.allclose(advantage(signal[order], IDS[order]), advantage(signal, IDS)[order], atol=1e-6)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_of_a_group_add_up_to_zero(name):
    advantage = ADVANTAGES[name](clip=None)(random_signal(2), IDS)
    for group in (2, 4, 9):
        assert advantage[group == IDS].sum().abs() < 1e-5


@settings(max_examples=30, deadline=None)
@given(shifts=st.lists(st.floats(-50, 50), min_size=3, max_size=3))
def test_a_shift_of_each_group_changes_nothing(shifts):
    signal = random_signal(3).double()
    shift = torch.tensor([dict(zip((2, 4, 9), shifts, strict=True))[group] for group in IDS.tolist()]).double()
    for std in ("group", "none"):
        advantage = Advantage(std=std)
        assert torch.allclose(advantage(signal + shift, IDS), advantage(signal, IDS), atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(scale=st.floats(1e-3, 1e3), shift=st.floats(-50, 50))
def test_the_unit_of_the_signal_does_not_matter_where_it_is_divided_by_a_spread(scale, shift):
    signal = random_signal(4).double()
    for std in ("group", "global"):
        advantage = Advantage(std=std, eps=0.0)
        assert torch.allclose(advantage(scale * signal + shift, IDS), advantage(signal, IDS), atol=1e-6)


@pytest.mark.parametrize("name", ["group", "none"])
def test_groups_scored_apart_or_together_get_the_same_advantages(name):
    signal, advantage = random_signal(5, missing=0.2), ADVANTAGES[name]()
    together = advantage(signal, IDS)
    for group in (2, 4, 9):
        rows = group == IDS
        assert torch.allclose(advantage(signal[rows], IDS[rows]), together[rows], atol=1e-6)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_sample_without_a_score_gets_exactly_zero_and_leaves_its_siblings_alone(name):
    advantage = ADVANTAGES[name]()
    signal = torch.tensor([1.0, 4.0, NAN, 2.0, 0.0, 0.0])
    ids = torch.tensor([1, 1, 1, 1, 0, 0])
    result = advantage(signal, ids)
    present = torch.tensor([True, True, False, True, True, True])
    assert result[2] == 0
    assert torch.equal(result[present], advantage(signal[present], ids[present]))


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("value", [0.5, 0.1, 1 / 3, -1e6, 1e-30])
def test_a_group_without_spread_gets_exactly_zero(name, value):
    signal = torch.tensor([value] * 4 + [1.0, 2.0, 3.0, 7.0])
    result = ADVANTAGES[name](clip=None)(signal, torch.tensor([0] * 4 + [1] * 4))
    assert result[:4].tolist() == [0.0] * 4
    assert (result[4:] != 0).all()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_all_constant_batch_and_groups_of_one_get_exactly_zero(name):
    advantage = ADVANTAGES[name]()
    assert advantage(torch.full((12,), 0.3), IDS).tolist() == [0.0] * 12
    assert advantage(torch.rand(5), torch.arange(5)).tolist() == [0.0] * 5
    assert advantage(torch.tensor([NAN, 0.2, NAN, NAN]), torch.zeros(4, dtype=torch.long)).tolist() == [0.0] * 4
    assert advantage(torch.full((4,), NAN), torch.zeros(4, dtype=torch.long)).tolist() == [0.0] * 4


def test_no_spread_is_zero_even_without_eps():
    result = Advantage(eps=0.0)(torch.tensor([0.1, 0.1, 1.0, 2.0]), torch.tensor([0, 0, 1, 1]))
    assert result.tolist() == [0.0, 0.0, -1.0, 1.0]


def test_one_huge_score_is_clipped_on_both_sides():
    signal = torch.zeros(40).index_fill(0, torch.tensor([0]), 1.0)
    ids = torch.zeros(40, dtype=torch.long)
    assert Advantage(clip=5.0)(signal, ids).max() == 5
    assert Advantage(clip=5.0)(-signal, ids).min() == -5
    assert Advantage(clip=None)(signal, ids).max() > 6


@pytest.mark.parametrize("wrong", [{"std": "batch"}, {"eps": -1.0}, {"clip": 0.0}])
def test_settings_that_mean_nothing_are_refused(wrong):
    with pytest.raises((ValueError, TypeError), match=next(iter(wrong))):
        Advantage(**wrong)


def test_a_named_advantage_offers_only_the_settings_that_take_effect():
    assert ADVANTAGES["group"](clip=1.0).std == "group"
    with pytest.raises(TypeError, match="std"):
        ADVANTAGES["group"](std="none")
    with pytest.raises(TypeError, match="eps"):
        ADVANTAGES["none"](eps=1e-4)
