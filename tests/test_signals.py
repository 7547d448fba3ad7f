"""Signals against loops over groups, and their invariances."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowgrpo.data import rank_slice
from flowgrpo.groups import group_stats, tied_fraction
from flowgrpo.signals import SIGNALS, Calibrated, StandardizedSum, WeightedSum, check_signal
from flowgrpo.slots import Slot, construct

IDS = torch.tensor([4, 9, 4, 2, 9, 9, 4, 2, 9, 4, 9, 4])  # 5 of 4, 5 of 9, 2 of 2, shuffled
WEIGHTS = torch.tensor([1.0, 0.5, 2.0])
NAN = math.nan
SCALES, SHIFTS = torch.tensor([0.02, 1.0, 30.0]), torch.tensor([0.3, 0.0, 50.0])
UNIT_FREE = sorted(set(SIGNALS) - {"weighted_sum", "taros"})
SETTINGS = {
    "gdpo": {"eps": 1e-6},
    "taros": {"beta": 0.5, "thresholds": [0.75, 0.7], "last_threshold": "none", "order": [2, 0, 1], "ranges": [[0, 2]] * 3},
    "saturation_aware": {"ranges": [[0.0, 1.0], None, [-200, 200]], "falling": 1.0},
    "quantile": {"scale": "uniform"},
    "tournament": {"delta": 0.2},
    "preference_walk": {"anchor": 1, "alpha": 0.5},
}


def table(seed: int = 0, missing: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(12, 3, generator=generator) * SCALES + SHIFTS
    return scores.where(torch.rand(12, 3, generator=generator) >= missing, NAN)


def fit(name: str, values: torch.Tensor, weights: torch.Tensor = WEIGHTS) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and weights that the signal takes: TaRoS wants its rewards in [0, 1] and has weights of its own."""
    return (((values - SHIFTS) / SCALES).sigmoid(), (weights != 0).float()) if name == "taros" else (values, weights)


def calibrated(name: str, **settings):
    """A signal that has seen other scores, if it is one that remembers."""
    signal = SIGNALS[name](**settings)
    if isinstance(signal, Calibrated):
        signal.update(fit(name, table(100))[0], IDS)
    return signal


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


@pytest.mark.parametrize("make", [lambda name: SIGNALS[name](), calibrated], ids=["new", "calibrated"])
@pytest.mark.parametrize("name", SIGNALS)
@pytest.mark.parametrize("missing", [0.0, 0.3])
def test_permuting_the_samples_permutes_the_signal(name, missing, make):
    (values, weights), order = fit(name, table(2, missing)), torch.randperm(12, generator=torch.Generator().manual_seed(1))
    signal = make(name)
    straight, permuted = signal(values, IDS, weights), signal(values[order], IDS[order], weights)
    assert torch.allclose(permuted, straight[order], atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("name", SIGNALS)
def test_only_which_samples_share_an_id_matters(name):
    (values, weights), signal = fit(name, table(3)), SIGNALS[name]()
    assert torch.allclose(signal(values, IDS, weights), signal(values, 1000 - 7 * IDS, weights), atol=1e-6)


@pytest.mark.parametrize("name", SIGNALS)
def test_a_monitor_changes_nothing_even_where_it_failed(name):
    (values, weights), signal = fit(name, table(4), torch.tensor([1.0, 0.0, 2.0])), SIGNALS[name]()
    wanted = signal(values[:, [0, 2]], IDS, weights[[0, 2]])
    values[3:7, 1] = NAN
    assert torch.equal(signal(values, IDS, weights), wanted)


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize("name", SIGNALS)
def test_a_sample_without_a_weighted_score_has_no_signal_and_its_siblings_have_one(name, bad):
    values, weights = fit(name, table(5))
    values[0, 1] = bad
    signal = calibrated(name)(values, IDS, weights)
    assert signal.isnan().tolist() == [True] + [False] * 11
    assert signal[1:].isfinite().all()


@pytest.mark.parametrize("name", SIGNALS)
def test_the_scores_of_a_sample_that_is_masked_in_every_reward_are_as_if_it_were_not_there(name):
    values, weights = fit(name, table(6))
    values[4] = NAN
    rest = [row for row in range(12) if row != 4]
    signal = calibrated(name)
    assert torch.allclose(signal(values, IDS, weights)[rest], signal(values[rest], IDS[rest], weights), atol=1e-6)


@pytest.mark.parametrize("name", SIGNALS)
def test_no_weight_at_all_is_refused(name):
    values, _ = fit(name, table())
    for refused in (
        lambda: SIGNALS[name]()(values, IDS, torch.zeros(3)),
        lambda: check_signal(SIGNALS[name](), torch.zeros(3), []),
    ):
        with pytest.raises(ValueError, match="at least one reward needs a weight other than 0"):
            refused()


@pytest.mark.parametrize("name", sorted(set(SIGNALS) - {"gdpo"}))
def test_a_groups_signal_does_not_depend_on_the_other_groups(name):
    (values, weights), signal = fit(name, table(7, missing=0.2)), calibrated(name)
    whole = signal(values, IDS, weights)
    for group in (2, 4, 9):
        mine = group == IDS
        assert torch.allclose(signal(values[mine], IDS[mine], weights), whole[mine], atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", SIGNALS)
def test_every_signal_is_finite_on_ties_lone_samples_and_extreme_units(name):
    unit = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.0, 1.0], [0.0, 0.0], [1.0, 0.25], [0.7, 0.0], [0.7, 1e-30]])
    ids = torch.tensor([0, 0, 1, 1, 1, 2, 3])
    for values in [unit, torch.zeros(7, 2), torch.ones(7, 2)] + ([] if name == "taros" else [1e20 * unit, 1e-20 * unit - 5]):
        signal = SIGNALS[name]()
        for _ in range(2):
            assert signal(values, ids, torch.ones(2)).isfinite().all()
            if isinstance(signal, Calibrated):
                signal.update(values, ids)


@pytest.mark.parametrize("name", SIGNALS)
def test_a_sample_at_least_as_good_in_every_reward_never_has_the_smaller_signal(name):
    values = torch.rand(60, 5, 3, generator=torch.Generator().manual_seed(10), dtype=torch.float64)
    values[:30] = (4 * values[:30]).round() / 4  # with ties
    values[:, 0] = torch.maximum(values[:, 0], values[:, 1])
    ids = torch.arange(60).repeat_interleave(5)
    signal = calibrated(name)(values.flatten(0, 1), ids, torch.ones(3)).view(60, 5)
    assert (signal[:, 0] >= signal[:, 1] - 1e-12).all()


@pytest.mark.parametrize("name", UNIT_FREE)
def test_units_do_not_change_a_signal_that_is_free_of_them(name):
    factor, shift = torch.tensor([100.0, 0.01, 3.0]).double(), torch.tensor([-5.0, 7.0, 0.0]).double()
    plain, changed = (SIGNALS[name](**({"eps": 0.0} if name == "gdpo" else {})) for _ in range(2))
    for seed in range(3):  # a signal that remembers has the past in the same units
        values = table(seed).double()
        other = values * factor + shift
        assert torch.allclose(changed(other, IDS, WEIGHTS), plain(values, IDS, WEIGHTS), atol=1e-8)
        for signal, scores in ((plain, values), (changed, other)):
            if isinstance(signal, Calibrated):
                signal.update(scores, IDS)


@pytest.mark.parametrize("name", UNIT_FREE)
def test_rewards_to_1_and_to_100_have_equal_say_at_equal_weight(name):
    one = torch.rand(12, 1, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    other = one[torch.randperm(12, generator=torch.Generator().manual_seed(9))]
    signal = SIGNALS[name](**({"eps": 0.0} if name == "gdpo" else {}))
    hundred = signal(torch.cat([one, 100 * other], 1), IDS, torch.ones(2))
    assert torch.allclose(hundred, signal(torch.cat([100 * one, other], 1), IDS, torch.ones(2)), atol=1e-6)
    assert torch.allclose(hundred, signal(torch.cat([other, 100 * one], 1), IDS, torch.ones(2)), atol=1e-6)


@pytest.mark.parametrize("name", SIGNALS)
def test_two_processes_have_the_signal_and_the_state_of_one(name):
    alone, ranks = SIGNALS[name](), [SIGNALS[name](), SIGNALS[name]()]
    for seed in range(3):
        values, weights = fit(name, table(seed, missing=0.1))
        parts = [rank_slice(12, rank, 2) for rank in (0, 1)]  # a group may be cut
        gathered = torch.cat([values[part.start : part.stop] for part in parts])
        wanted = alone(values, IDS, weights)
        for rank, part in zip(ranks, parts, strict=True):
            mine = rank(gathered, IDS, weights)[part.start : part.stop]
            assert torch.equal(mine.nan_to_num(nan=99.0), wanted[part.start : part.stop].nan_to_num(nan=99.0))
        for signal in (alone, *ranks):
            if isinstance(signal, Calibrated):
                signal.update(gathered, IDS)
    states = [signal.state_dict() for signal in (alone, *ranks) if isinstance(signal, Calibrated)]
    assert all(state == states[0] for state in states)


@pytest.mark.parametrize("name", SIGNALS)
def test_every_signal_is_built_from_a_config_and_its_settings_take_effect(name):
    slot = Slot.model_validate({"use": name, **SETTINGS.get(name, {})})
    built, plain = construct(slot, SIGNALS, "signal"), SIGNALS[name]()
    values, weights = fit(name, table(11))
    for setting in SETTINGS.get(name, {}):
        assert getattr(built, setting) != getattr(plain, setting)
    changed = not torch.allclose(built(values, IDS, weights), plain(values, IDS, weights), atol=1e-7)
    assert changed == (name in SETTINGS)


def test_gdpo_is_its_definition():
    values = table(12).double()
    total = [0.0] * 12
    for column, weight in enumerate(WEIGHTS.tolist()):
        for row in range(12):
            group = [float(v) for v, g in zip(values[:, column], IDS, strict=True) if g == IDS[row]]
            total[row] += weight * (float(values[row, column]) - statistics.fmean(group)) / (statistics.stdev(group) + 1e-4)
    wanted = [(one - statistics.fmean(total)) / (statistics.stdev(total) + 1e-4) for one in total]
    assert torch.allclose(SIGNALS["gdpo"]()(values, IDS, WEIGHTS), torch.tensor(wanted).double(), atol=1e-10)


def test_other_groups_change_gdpo_by_one_common_factor_only():
    values, signal = table(13).double(), SIGNALS["gdpo"]()
    mine = IDS == 4
    ratio = signal(values, IDS, WEIGHTS)[mine] / signal(values[mine], IDS[mine], WEIGHTS)
    assert torch.allclose(ratio, ratio[0].expand(5), rtol=1e-9)
    assert ratio[0] != 1


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
