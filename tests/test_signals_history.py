"""What the signals that remember remember, and quantiles by it."""

import json
import math

import numpy
import pytest
import torch

from flowgrpo.signals import SIGNALS, Calibrated, Calibration
from flowgrpo.signals.quantile import Quantile, shares_below

IDS = torch.tensor([1, 0, 1, 0, 1, 3])
NAN = math.nan
REMEMBERING = [name for name, factory in SIGNALS.items() if isinstance(factory(), Calibrated)]


def unit_scores(seed: int) -> torch.Tensor:
    return torch.rand(6, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_those_that_remember_are_known():
    assert REMEMBERING == ["taros", "saturation_aware", "quantile"]


def test_a_table_is_summed_up_group_by_group():
    values = torch.tensor([[1.0, NAN], [4.0, 2.0], [3.0, NAN], [8.0, NAN], [NAN, math.inf], [9.0, NAN]]).double()
    seen = Calibration.of(values, IDS)
    assert seen.mean.tolist() == pytest.approx([(2 + 6 + 9) / 3, 2.0])
    assert seen.spread[0].item() == pytest.approx((1 + 2) / 2)  # the group of one has no spread
    assert seen.spread[1].isnan()
    assert seen.quantiles[:, 1].tolist() == pytest.approx([2.0] * 100)
    assert seen.quantiles[:, 0].tolist() == pytest.approx(numpy.quantile([1, 4, 3, 8, 9], (numpy.arange(100) + 0.5) / 100))


def test_the_memory_is_the_share_that_stays_and_a_falling_spread_has_its_own():
    first, second = (Calibration.of(scale * unit_scores(0), IDS) for scale in (1.0, 0.5))
    down, up = first.moved(second, memory=0.6, falling=0.9), second.moved(first, memory=0.6, falling=0.9)
    assert torch.allclose(down.mean, 0.6 * first.mean + 0.4 * second.mean)
    assert torch.allclose(down.quantiles, 0.6 * first.quantiles + 0.4 * second.quantiles)
    assert torch.allclose(down.spread, 0.9 * first.spread + 0.1 * second.spread)
    assert torch.allclose(up.spread, 0.6 * second.spread + 0.4 * first.spread)


def test_a_reward_that_was_not_seen_changes_nothing_remembered():
    values = unit_scores(1)
    seen, gone = Calibration.of(values, IDS), values.clone()
    gone[:, 1] = NAN
    moved = seen.moved(Calibration.of(gone, IDS), memory=0.5, falling=0.5)
    assert torch.equal(moved.mean, seen.mean)
    assert torch.equal(moved.spread, seen.spread)
    assert torch.equal(moved.quantiles, seen.quantiles)


@pytest.mark.parametrize("name", REMEMBERING)
def test_calling_a_signal_does_not_change_what_it_remembers_and_updating_does(name):
    signal, ones = SIGNALS[name](), torch.ones(2)
    signal.update(unit_scores(0), IDS)
    before = signal.state_dict()
    first = signal(unit_scores(1), IDS, ones)
    assert torch.equal(signal(unit_scores(1), IDS, ones), first)
    assert signal.state_dict() == before
    signal.update(unit_scores(2), IDS)
    assert signal.state_dict() != before
    assert not torch.allclose(signal(unit_scores(1), IDS, ones), first, atol=1e-9)


@pytest.mark.parametrize("name", REMEMBERING)
def test_a_signal_resumed_from_its_state_in_json_goes_on_as_if_nothing_had_been(name):
    through, before = SIGNALS[name](), SIGNALS[name]()
    values = unit_scores(3)
    values[:, 1] = NAN  # not seen yet
    for signal in (through, before):
        signal.update(values, IDS)
    resumed = SIGNALS[name]()
    resumed.load_state_dict(json.loads(json.dumps(before.state_dict(), allow_nan=False)))
    for signal in (through, resumed):
        signal.update(unit_scores(4), IDS)
    assert resumed.state_dict() == through.state_dict()
    assert torch.equal(resumed(unit_scores(5), IDS, torch.ones(2)), through(unit_scores(5), IDS, torch.ones(2)))


@pytest.mark.parametrize("name", REMEMBERING)
def test_a_state_from_before_the_first_update_is_empty_and_one_of_other_rewards_is_refused(name):
    signal = SIGNALS[name]()
    assert signal.state_dict() == {}
    signal.load_state_dict({})
    assert signal.state_dict() == {}
    signal.update(unit_scores(0)[:, :1], IDS)
    with pytest.raises(ValueError, match="must be of the 2 rewards of this run, got one of 1; fit it anew"):
        signal(unit_scores(0), IDS, torch.ones(2))
    with pytest.raises(ValueError, match="a calibration must have mean, spread, quantiles, got spread"):
        signal.load_state_dict({"spread": [1.0]})


@pytest.mark.parametrize("name", REMEMBERING)
def test_with_memory_1_what_was_seen_first_stays(name):
    signal = SIGNALS[name](memory=1.0, **({"falling": 1.0} if name == "saturation_aware" else {}))
    signal.update(unit_scores(0), IDS)
    before = signal.state_dict()
    signal.update(unit_scores(1), IDS)
    assert signal.state_dict() == before


def test_a_share_is_the_place_between_quantiles():
    quantiles = torch.tensor([0.0, 1.0, 1.0, 1.0, 3.0]).double()  # levels 0.1, 0.3, 0.5, 0.7, 0.9
    asked = torch.tensor([-1.0, 0.0, 0.5, 1.0, 2.0, 3.0, 4.0, NAN]).double()
    shares = shares_below(asked, quantiles)
    assert shares[:-1].tolist() == pytest.approx([0.1, 0.1, 0.2, 0.5, 0.8, 0.9, 0.9])
    assert shares[-1].isnan()


def test_against_a_long_history_the_quantile_signal_is_the_standard_normal_score():
    generator = torch.Generator().manual_seed(0)
    past = 7 + 3 * torch.randn(20000, 1, generator=generator, dtype=torch.float64)
    signal = Quantile()
    signal.update(past, torch.arange(20000) // 10)
    z = torch.tensor([-2.0, -1.0, 0.0, 0.5, 2.0]).double()
    result = signal(7 + 3 * z[:, None], torch.zeros(5, dtype=torch.long), torch.ones(1))
    assert torch.allclose(result, z, atol=0.1)
    uniform = Quantile(scale="uniform")
    uniform.load_state_dict(signal.state_dict())
    wanted = torch.special.ndtr(z)
    assert torch.allclose(uniform(7 + 3 * z[:, None], torch.zeros(5, dtype=torch.long), torch.ones(1)), wanted, atol=0.02)


def test_the_quantile_signal_is_the_weighted_mean_over_rewards():
    signal, values = Quantile(), unit_scores(6)
    signal.update(unit_scores(7), IDS)
    both = signal(values, IDS, torch.tensor([1.0, 3.0]))
    alone = [signal(values, IDS, torch.tensor(weights)) for weights in ([1.0, 0.0], [0.0, 1.0])]
    assert torch.allclose(both, (alone[0] + 3 * alone[1]) / 4, atol=1e-12)
