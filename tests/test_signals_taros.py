"""TaRoS against its printed formula, number by number, and what that formula does."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowgrpo.groups import group_stats
from flowgrpo.signals import SIGNALS, check_signal
from flowgrpo.signals.taros import Taros, sparsity

ONES = torch.ones(2)


def around(mean: float, std: float, count: int = 16) -> torch.Tensor:
    """Scores of exactly this mean and std (over n)."""
    z = torch.linspace(-1, 1, count, dtype=torch.float64)
    return mean + std * z / z.std(correction=0)


def of_example() -> tuple[torch.Tensor, torch.Tensor]:
    """One component at its ceiling, 0.99 +- 0.001, one active, 0.5 +- 0.2, in a group of 16."""
    return torch.stack([around(0.99, 0.001), around(0.5, 0.2)], 1), torch.zeros(16, dtype=torch.long)


def printed(columns: list[list[float]], thresholds: list[float | None], beta: float) -> tuple[list[float], list[float]]:
    """Weights and rewards of one group, components in order, as the equations read."""
    size = len(columns[0])
    sparse = []
    for r in columns:
        one, two = sum(abs(x) for x in r), math.sqrt(sum(x * x for x in r))
        sparse.append((math.sqrt(size) - one / two) / (math.sqrt(size) - 1))
    sparse.append(0.0)
    g = []
    for j, (r, tau) in enumerate(zip(columns, thresholds, strict=True)):
        h = 0.0 if tau is None else 1 / (1 + math.exp(-(sum(r) / size - tau)))
        g.append(h + beta * (sparse[j] - sparse[j + 1]))
    weights = [math.exp(x) / sum(math.exp(y) for y in g) for x in g]
    return weights, [sum(w * r[i] for w, r in zip(weights, columns, strict=True)) for i in range(size)]


@pytest.mark.parametrize("beta", [0.0, 0.3, 5.0])
@pytest.mark.parametrize("last", [0.8, "none"])
def test_taros_is_the_printed_formula_group_by_group(beta, last):
    values = torch.rand(15, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ids = torch.tensor([7, 3, 7, 3, 3, 7, 7, 3, 7, 3, 3, 5, 5, 5, 7])
    signal = Taros(beta=beta, thresholds=(0.7, 0.6), last_threshold=last, order=(2, 0, 1))
    rewards, shares = signal(values, ids, torch.ones(3)), signal.shares(values, ids, torch.ones(3))
    for group in (3, 5, 7):
        rows = (ids == group).nonzero().flatten()
        columns = [values[rows, column].tolist() for column in (2, 0, 1)]
        weights, wanted = printed(columns, [0.7, 0.6, 0.8 if last == 0.8 else None], beta)
        assert torch.allclose(rewards[rows], torch.tensor(wanted).double(), atol=1e-12)
        assert torch.allclose(shares[rows][:, [2, 0, 1]], torch.tensor(weights).double().expand(len(rows), 3), atol=1e-12)


def test_taros_gives_numbers_worked_out_by_hand():
    values = torch.tensor([[1.0, 0.5], [0.0, 0.5], [0.0, 0.5], [0.0, 0.5]]).double()  # S is 1 and 0, the means 1/4 and 1/2
    signal = Taros(beta=0.5, thresholds=(0.25,), last_threshold="none")
    w = math.exp(0.5 + 0.5) / (math.exp(0.5 + 0.5) + 1)  # h(0) = 1/2
    shares = signal.shares(values, torch.zeros(4, dtype=torch.long), ONES)
    assert torch.allclose(shares, torch.tensor([w, 1 - w]).double().expand(4, 2), atol=1e-12)


@pytest.mark.parametrize(
    ("beta", "saturated", "active", "digits"),
    [(0.3, 0.516, 0.484, 5e-4), (5.0, 0.303, 0.697, 5e-4), (20.0, 0.024, 0.976, 5e-4)],
)
def test_a_component_at_its_ceiling_keeps_half_the_weight_unless_beta_is_several_units(beta, saturated, active, digits):
    signal = Taros(beta=beta, thresholds=(0.75,), last_threshold=0.75)
    shares = signal.shares(*of_example(), ONES)[0]
    assert shares.tolist() == pytest.approx([saturated, active], abs=digits)


def test_moving_a_component_to_its_ceiling_raises_its_weight():
    signal, ids = Taros(thresholds=(0.75,), last_threshold=0.75), torch.zeros(16, dtype=torch.long)
    shares = [
        signal.shares(torch.stack([around(m, 0.001), around(0.5, 0.2)], 1), ids, ONES)[0, 0] for m in (0.5, 0.7, 0.9, 0.99)
    ]
    assert shares == sorted(shares)
    assert shares[0] < shares[-1]


@settings(max_examples=100)
@given(r=st.lists(st.just(0.0) | st.floats(1e-6, 1), min_size=2, max_size=24).filter(any))
def test_the_index_is_that_of_hoyer_and_a_function_of_the_coefficient_of_variation(r):
    x = torch.tensor(r, dtype=torch.float64)
    root = math.sqrt(len(r))
    ids = torch.zeros(len(r), dtype=torch.long)
    index = sparsity(group_stats(x[:, None], ids, unbiased=False))[0, 0].item()
    assert index == pytest.approx((root - (x.sum() / x.square().sum().sqrt()).item()) / (root - 1), abs=1e-9)
    variation = (x.std(correction=0) / x.mean()).item()
    assert index == pytest.approx(root / (root - 1) * (1 - (1 + variation**2) ** -0.5), abs=1e-9)
    assert -1e-9 <= index <= 1 + 1e-9


def test_the_index_falls_with_an_offset():
    ids = torch.zeros(16, dtype=torch.long)
    shifted = [(around(0.5, 0.2) + offset)[:, None] for offset in (0, 1, 10)]
    indices = [sparsity(group_stats(r, ids, unbiased=False))[0, 0] for r in shifted]
    assert indices[0] > 7 * indices[1] > 200 * indices[2] > 0


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), beta=st.floats(0, 2))
def test_two_weights_differ_by_no_more_than_the_formula_allows(seed, beta):
    values = torch.rand(8, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).pow(3)
    shares = Taros(beta=beta).shares(values, torch.zeros(8, dtype=torch.long), torch.ones(3))[0]
    assert (shares > 0).all()
    assert shares.sum().item() == pytest.approx(1)
    assert shares.max() / shares.min() <= math.exp(1 + 3 * beta) * (
        1 + 1e-9
    )  # S_j - S_(j+1) lies in [-1, 1], the last in [0, 1]


def test_thresholds_from_the_history_are_running_means_of_group_means():
    first = torch.tensor([[0.2, 0.9], [0.4, 0.9], [0.8, 0.5], [0.8, 0.5], [0.8, 0.5]]).double()
    ids = torch.tensor([0, 0, 1, 1, 1])  # means of groups 0.3 and 0.8, 0.9 and 0.5: each group counts once
    signal = Taros(memory=0.5)
    signal.update(first, ids)
    signal.update(torch.full((5, 2), 0.75).double(), ids)
    explicit = Taros(thresholds=(0.5 * 0.55 + 0.5 * 0.75,), last_threshold=0.5 * 0.7 + 0.5 * 0.75)
    values = torch.rand(5, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert torch.allclose(signal(values, ids, ONES), explicit(values, ids, ONES), atol=1e-12)
    assert not torch.allclose(signal(values, ids, ONES), Taros()(values, ids, ONES), atol=1e-4)


def test_before_any_history_the_table_at_hand_gives_the_thresholds():
    values, ids = torch.rand(6, 2, generator=torch.Generator().manual_seed(2)).double(), torch.tensor([0, 0, 0, 1, 1, 1])
    means = values.view(2, 3, 2).mean((0, 1))
    explicit = Taros(thresholds=(means[0].item(),), last_threshold=means[1].item())
    assert torch.allclose(Taros()(values, ids, ONES), explicit(values, ids, ONES), atol=1e-12)


def test_ranges_map_rewards_to_the_unit_interval_and_history_with_them():
    unit, ids = torch.rand(8, 2, generator=torch.Generator().manual_seed(3)).double(), torch.tensor([0] * 4 + [1] * 4)
    raw = unit * torch.tensor([10.0, 0.5]) + torch.tensor([-4.0, 2.0])
    plain, mapped = Taros(), Taros(ranges=((-4.0, 6.0), (2.0, 2.5)))
    for _ in range(2):
        assert torch.allclose(mapped(raw, ids, ONES), plain(unit, ids, ONES), atol=1e-12)
        plain.update(unit, ids)
        mapped.update(raw, ids)


@pytest.mark.parametrize("bad", [-0.1, 1.1, -3.0, 30.0])
def test_a_reward_outside_the_unit_interval_is_refused_unless_it_is_a_monitor(bad):
    values, ids = torch.full((4, 2), 0.5), torch.zeros(4, dtype=torch.long)
    values[2, 1] = bad
    with pytest.raises(ValueError, match=r"rewards in \[0, 1\] after signal.ranges, got one of"):
        Taros()(values, ids, ONES)
    assert Taros()(values, ids, torch.tensor([1.0, 0.0])).isfinite().all()


def test_unbounded_and_negative_rewards_are_refused_before_a_run():
    for declared in (None, (-1.0, 1.0), (0.0, 10.0)):
        with pytest.raises(ValueError, match=r"taros needs rewards in \[0, 1\], got one of range"):
            check_signal(Taros(), ONES, [(0.0, 1.0), declared])
        check_signal(Taros(), torch.tensor([1.0, 0.0]), [(0.0, 1.0), declared])  # a monitor may have any
        check_signal(Taros(ranges=((0.0, 1.0), (-5.0, 5.0))), ONES, [(0.0, 1.0), declared])
    check_signal(Taros(), ONES, [(0.0, 1.0), (0.2, 0.9)])


@pytest.mark.parametrize(
    ("settings", "weights", "message"),
    [
        ({}, [1.0, 0.5], "weights must be 0 or all the same"),
        ({}, [-1.0, -1.0], "weights must be 0 or all the same"),
        ({"thresholds": (0.7, 0.7)}, [1.0, 1.0], "signal.thresholds must be 1, one for each reward but the last, got 2"),
        ({"order": (1, 2)}, [1.0, 1.0], "signal.order must hold each of 0 to 1 once"),
        ({"ranges": ((0.0, 1.0),)}, [1.0, 1.0], "signal.ranges must be 2, one for each reward of weight above 0, got 1"),
    ],
)
def test_settings_that_do_not_fit_the_rewards_are_refused(settings, weights, message):
    for refused in (
        lambda: Taros(**settings)(torch.rand(4, 2), torch.zeros(4, dtype=torch.long), torch.tensor(weights)),
        lambda: check_signal(Taros(**settings), torch.tensor(weights), [(0.0, 1.0)] * 2),
    ):
        with pytest.raises(ValueError, match=message):
            refused()


@pytest.mark.parametrize(
    "settings", [{"beta": -0.1}, {"beta": math.inf}, {"memory": 1.5}, {"memory": -0.1}, {"ranges": ((1.0, 1.0),)}]
)
def test_settings_without_a_meaning_are_refused(settings):
    with pytest.raises(ValueError, match=f"signal.{next(iter(settings))}"):
        SIGNALS["taros"](**settings)
