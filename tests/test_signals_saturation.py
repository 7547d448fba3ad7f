"""Our rule against a loop, its numbers in the example, and its six properties on random groups."""

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowgrpo.advantages import GroupAdvantage
from flowgrpo.signals import SIGNALS, StandardizedSum, check_signal
from flowgrpo.signals.saturation_aware import SaturationAware
from tests.test_signals_taros import around, of_example

GROUPS = 25  # in a table
EXAMPLES = settings(max_examples=40)  # tables: 1,000 groups
ONE_GROUP = torch.zeros(16, dtype=torch.long)


def with_spread(spread: list[float], low: float = 0.0, high: float = 1.0, **changes) -> SaturationAware:
    """A signal whose history has this running spread, and uniform quantiles on [low, high]."""
    signal = SaturationAware(**changes)
    levels = (torch.arange(100) + 0.5) / 100 * (high - low) + low
    quantiles = levels[:, None].expand(100, len(spread)).tolist()
    signal.load_state_dict({"mean": [0.5] * len(spread), "spread": spread, "quantiles": quantiles})
    return signal


def looped(columns, spreads, ranges, a, kappa=0.5, gamma=1.0, u_min=0.25, e_w=0.05, delta=0.1):
    """Weights and signal of one group, a number at a time."""
    means, stds = [statistics.fmean(r) for r in columns], [statistics.pstdev(r) for r in columns]
    parts = []
    for m, s, big, known, prior in zip(means, stds, spreads, ranges, a, strict=True):
        u = 1.0 if known is None else min(1.0, max(0.0, (known[1] - m) / (known[1] - known[0])))
        saturation = 1 - s / (s + kappa * big) * (u_min + (1 - u_min) * u**gamma)
        parts.append(prior * (e_w + (1 - e_w) * (1 - saturation)))
    w = [part / sum(parts) for part in parts]
    z = [[(x - m) / (s + delta * big) for x in r] for r, m, s, big in zip(columns, means, stds, spreads, strict=True)]
    return w, [sum(wj * zj[i] for wj, zj in zip(w, z, strict=True)) for i in range(len(columns[0]))]


@st.composite
def tables(draw):
    """A number of rewards, a seed, and for each reward its usual spread, range and weight."""
    k, seed = draw(st.integers(1, 4)), draw(st.integers(0, 2**31))
    spread = draw(st.lists(st.floats(0.01, 0.5), min_size=k, max_size=k))
    ranges = draw(st.sampled_from([None, "running", tuple([(0.0, 1.0)] * k), tuple([None, (-0.5, 1.2)] * k)[:k]]))
    return k, seed, spread, ranges, draw(st.lists(st.floats(0.1, 3.0), min_size=k, max_size=k))


def built(case):
    """The signal; the scores of groups of all sizes, wide, narrow and tied; group ids; weights."""
    k, seed, spread, ranges, weights = case
    generator = torch.Generator().manual_seed(seed)
    ids = torch.arange(GROUPS).repeat_interleave(torch.randint(1, 13, (GROUPS,), generator=generator))
    values = torch.rand(len(ids), k, generator=generator, dtype=torch.float64)
    squeeze = torch.tensor([1.0, 0.3, 1e-3, 0.0]).double()[torch.randint(0, 4, (GROUPS, k), generator=generator)][ids]
    values = means(values, ids) + squeeze * (values - means(values, ids))
    return with_spread(spread, ranges=ranges), values, ids, torch.tensor(weights).double()


def means(values, ids):
    """The mean of its group beside each row."""
    return torch.stack([values[ids == group].mean(0) for group in ids])


@pytest.mark.parametrize("known", [None, (0.0, 1.0)])
@pytest.mark.parametrize("seed", range(5))
def test_the_rule_is_its_definition_group_by_group(seed, known):
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(14, 3, generator=generator, dtype=torch.float64) * torch.tensor([1.0, 0.1, 0.002])
    ids = torch.randint(0, 3, (14,), generator=generator)
    weights, spreads = torch.tensor([1.0, 2.0, 0.5]), [0.2, 0.1, 0.05]
    signal = with_spread(
        spreads, kappa=0.7, gamma=2.0, least_headroom=0.1, least_weight=0.02, delta=0.3, ranges=(known, None, known)
    )
    result, shares = signal(values, ids, weights), signal.shares(values, ids, weights)
    for group in ids.unique():
        rows = (ids == group).nonzero().flatten()
        a = (weights / weights.sum()).tolist()
        columns = values[rows].T.tolist()
        w, wanted = looped(columns, spreads, (known, None, known), a, 0.7, 2.0, 0.1, 0.02, 0.3)
        assert torch.allclose(shares[rows], torch.tensor(w).double().expand(len(rows), 3), atol=1e-7)
        assert torch.allclose(result[rows], torch.tensor(wanted).double(), atol=1e-6)


def test_the_component_at_its_ceiling_has_a_ninth_of_the_weight_where_taros_gives_it_half():
    signal = with_spread([0.2, 0.2], ranges=((0.0, 1.0), (0.0, 1.0)))
    assert signal.shares(*of_example(), torch.ones(2))[0].tolist() == pytest.approx([0.11, 0.89], abs=5e-3)


@EXAMPLES
@given(tables())
def test_property_1_weights_are_a_simplex_bounded_from_below(case):
    signal, values, ids, weights = built(case)
    shares, a = signal.shares(values, ids, weights), weights / weights.sum()
    assert torch.allclose(shares.sum(1), torch.ones(len(ids)).double(), atol=1e-12)
    assert (shares >= 0.05 * a * (1 - 1e-9)).all()
    assert (shares > 0).all()


@EXAMPLES
@given(tables(), st.lists(st.floats(0.01, 100), min_size=4, max_size=4), st.lists(st.floats(-10, 10), min_size=4, max_size=4))
def test_property_2_units_that_spread_and_range_share_change_nothing(case, scale, shift):
    signal, values, ids, weights = built(case)
    k = values.shape[1]
    a, b = torch.tensor(scale[:k]).double(), torch.tensor(shift[:k]).double()
    state, ranges = signal.state_dict(), signal.ranges
    if isinstance(ranges, tuple):
        ends = [None if one is None else tuple(float(a[j] * end + b[j]) for end in one) for j, one in enumerate(ranges)]
        ranges = tuple(ends)
    changed = SaturationAware(ranges=ranges)
    changed.load_state_dict({
        "mean": state["mean"],
        "spread": (torch.tensor(state["spread"]).double() * a).tolist(),
        "quantiles": (torch.tensor(state["quantiles"]).double() * a + b).tolist(),
    })  # fmt: skip
    assert torch.allclose(changed.shares(a * values + b, ids, weights), signal.shares(values, ids, weights), atol=1e-7)
    assert torch.allclose(changed(a * values + b, ids, weights), signal(values, ids, weights), atol=1e-7)


@EXAMPLES
@given(tables(), st.integers(0, 3), st.floats(0, 1), st.floats(0, 1))
def test_property_3_less_spread_or_less_headroom_never_raises_a_weight(case, column, shrink, towards):
    signal, values, ids, weights = built(case)
    j, mean = column % values.shape[1], means(values, ids)
    before = signal.shares(values, ids, weights)[:, j]
    narrower, higher = values.clone(), values.clone()
    narrower[:, j] = mean[:, j] + shrink * (values[:, j] - mean[:, j])
    higher[:, j] += towards
    assert (signal.shares(narrower, ids, weights)[:, j] <= before + 1e-9).all()
    assert (signal.shares(higher, ids, weights)[:, j] <= before + 1e-9).all()


@EXAMPLES
@given(tables(), st.floats(0.01, 1), st.integers(0, 3))
def test_property_4_the_better_sample_has_the_larger_signal(case, gain, column):
    signal, values, ids, weights = built(case)
    first = (torch.arange(GROUPS)[:, None] == ids).int().argmax(1)
    better = values[first].clone()
    better[:, column % values.shape[1]] += gain  # at least as good as the first in all, better in one
    result = signal(torch.cat([values, better]), torch.cat([ids, ids[first]]), weights)
    assert (result[len(ids) :] > result[first]).all()


@EXAMPLES
@given(tables())
def test_property_4_one_reward_alone_orders_a_group_as_it_does_itself(case):
    _, values, ids, _ = built(case)
    result = with_spread([0.2], ranges="running")(values[:, :1], ids, torch.ones(1))
    higher = values[:, None, 0] > values[:, 0]
    assert (result[:, None] > result)[(ids[:, None] == ids) & higher].all()


@EXAMPLES
@given(st.integers(0, 2**31), st.floats(0.05, 0.5), st.floats(1e-6, 1e-3))
def test_property_5_noise_far_below_the_usual_spread_stays_small(seed, usual, jitter):
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(GROUPS, 8, generator=generator, dtype=torch.float64)
    noise = (noise - noise.mean(1, keepdim=True)) / noise.std(1, correction=0, keepdim=True)
    constant = torch.rand(8 * GROUPS, 2, generator=generator, dtype=torch.float64)
    constant[:, 1] = 0.5
    noisy, ids, ones = constant.clone(), torch.arange(GROUPS).repeat_interleave(8), torch.ones(2)
    noisy[:, 1] += jitter * usual * noise.flatten()

    def moved(signal):
        return (signal(noisy, ids, ones) - signal(constant, ids, ones)).abs().view(GROUPS, 8).amax(1)

    assert (moved(with_spread([usual, usual])) <= 2 * jitter / 0.1).all()
    assert (moved(StandardizedSum()) > 0.4).all()


@EXAMPLES
@given(tables())
def test_property_6_it_degrades_gracefully(case):
    signal, values, ids, weights = built(case)
    tied, advantage = means(values, ids).float().double(), GroupAdvantage(eps=0.05)  # sums of float32 numbers are exact
    assert torch.allclose(signal.shares(tied, ids, weights), (weights / weights.sum()).expand(len(ids), -1), atol=1e-12)
    assert (signal(tied, ids, weights) == 0).all()
    assert (advantage(signal(tied, ids, weights), ids) == 0).all()
    result = signal(values, ids, weights)
    assert advantage(result, ids).isfinite().all()
    alone = (ids[:, None] == ids).sum(1) == 1
    assert (result[alone] == 0).all()
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    assert torch.allclose(signal(values[order], ids[order], weights), result[order], atol=1e-10)


@EXAMPLES
@given(tables(), st.integers(0, 3), st.sampled_from([float("nan"), float("inf")]))
def test_property_6_a_reward_that_the_whole_group_lacks_is_left_out(case, column, bad):
    signal, values, ids, weights = built(case)
    j = column % values.shape[1]
    lacking, without = values.clone(), weights.clone()
    lacking[:, j], without[j] = bad, 0.0
    if not without.any():
        assert signal(lacking, ids, weights).isnan().all()
        return
    ranges = tuple(one for i, one in enumerate(signal.ranges) if i != j) if isinstance(signal.ranges, tuple) else signal.ranges
    fewer = SaturationAware(ranges=ranges)
    fewer.load_state_dict(signal.state_dict())
    assert torch.allclose(signal.shares(lacking, ids, weights), fewer.shares(values, ids, without), atol=1e-12)
    assert torch.allclose(signal(lacking, ids, weights), fewer(values, ids, without), atol=1e-9)


def test_a_sample_that_lacks_what_its_siblings_have_does_not_train_and_leaves_them_alone():
    signal, values = with_spread([0.2, 0.2]), torch.rand(6, 2, generator=torch.Generator().manual_seed(0)).double()
    ids, rest = torch.zeros(6, dtype=torch.long), torch.arange(6) != 3
    values[3] = torch.nan
    result = signal(values, ids, torch.ones(2))
    assert result.isnan().tolist() == (~rest).tolist()
    assert torch.allclose(result[rest], signal(values[rest], ids[rest], torch.ones(2)), atol=1e-12)


@pytest.mark.parametrize("ranges", [None, "running", ((0.0, 1.0), (0.0, 1.0))])
def test_a_saturated_reward_loses_its_weight_for_as_long_as_it_is_saturated_and_gets_it_back(ranges):
    generator, signal, ones = torch.Generator().manual_seed(1), SaturationAware(ranges=ranges), torch.ones(2)
    ids = torch.arange(4).repeat_interleave(8)

    def share_after(iterations: int, mean: float, std: float) -> float:
        """Of the first reward, over groups; the second one is always active."""
        for _ in range(iterations):
            noise = torch.randn(32, 2, generator=generator, dtype=torch.float64)
            values = (torch.tensor([mean, 0.5]) + noise * torch.tensor([std, 0.15])).clamp(0, 1)
            share = signal.shares(values, ids, ones)[:, 0].mean().item()
            signal.update(values, ids)
        return share

    active = share_after(20, 0.5, 0.15)
    assert active == pytest.approx(0.5, abs=0.05)
    for iterations in (1, 300):
        share = share_after(iterations, 0.998, 5e-4)
        assert share / (1 - share) < 0.2 * active / (1 - active)  # its weight beside the other's
        assert share < (0.2 if ranges is None else 0.25) * active  # where the other has lost half its headroom, both lose
    assert share_after(1, 0.5, 0.15) > 0.9 * active


def test_a_reward_saturated_from_the_start_is_only_seen_by_its_range():
    values, ids = of_example()
    blind, told = SaturationAware(), SaturationAware(ranges=((0.0, 1.0), (0.0, 1.0)))
    assert blind.shares(values, ids, torch.ones(2))[0].tolist() == pytest.approx([0.5, 0.5])
    assert told.shares(values, ids, torch.ones(2))[0, 0] < 0.35


def test_the_running_range_is_that_of_the_first_and_last_hundredth():
    signal = with_spread([0.2], low=0.0, high=1.0, ranges="running")
    shares = with_spread([0.2, 0.2], ranges="running").shares(
        torch.stack([around(0.9, 0.1), around(0.5, 0.1)], 1), ONE_GROUP, torch.ones(2)
    )
    explicit = with_spread([0.2, 0.2], ranges=((0.01, 0.99), (0.01, 0.99)))
    wanted = explicit.shares(torch.stack([around(0.9, 0.1), around(0.5, 0.1)], 1), ONE_GROUP, torch.ones(2))
    assert torch.allclose(shares, wanted, atol=1e-6)
    assert signal.shares(around(0.9, 0.1)[:, None], ONE_GROUP, torch.ones(1)).unique().tolist() == [1.0]


def test_weights_and_ranges_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="needs weights of 0 or more"):
        check_signal(SaturationAware(), torch.tensor([1.0, -1.0]), [None, None])
    with pytest.raises(ValueError, match=r"signal.ranges must be 1, one for each reward of weight above 0, got 2"):
        check_signal(SaturationAware(ranges=(None, None)), torch.tensor([1.0, 0.0]), [None, None])


@pytest.mark.parametrize(
    "changes",
    [{"kappa": 0.0}, {"gamma": -1.0}, {"delta": 0.0}, {"least_weight": 0.0}, {"least_headroom": 1.5}, {"falling": 2.0},
     {"ranges": ((1.0, 0.0),)}],
)  # fmt: skip
def test_settings_without_a_meaning_are_refused(changes):
    with pytest.raises(ValueError, match=f"signal.{next(iter(changes))}"):
        SIGNALS["saturation_aware"](**changes)
