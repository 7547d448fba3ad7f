"""Policies for missing scores, against a loop over groups; what signals and advantages then see."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowgrpo.advantages import ADVANTAGES
from flowgrpo.data import Prompt
from flowgrpo.missing import RewardError, settle, signal_of, silent_groups
from flowgrpo.scoring import Component, Scorer
from flowgrpo.signals import SIGNALS, StandardizedSum, WeightedSum
from flowgrpo.signals.saturation_aware import SaturationAware
from flowgrpo.signals.taros import Taros

NAN = math.nan
IDS = torch.tensor([7, 7, 7, 7, 2, 2, 2, 2])
WEIGHTS = torch.tensor([1.0, 0.5])
GOOD = [[0.1, 1.0], [0.2, 4.0], [0.4, 2.0], [0.8, 3.0], [0.3, 9.0], [0.1, 5.0], [0.7, 6.0], [0.9, 7.0]]
ASKED = torch.ones(8, 2, dtype=torch.bool)


def table(*gaps):
    """Two rewards' scores of two groups of four, without those at the (row, column) given."""
    values = torch.tensor(GOOD)
    for row, column in gaps:
        values[row, column] = NAN
    return values


def settled(values, a="mask", b="mask", asked=ASKED, weights=WEIGHTS):
    return settle(values, asked, IDS, weights, {"a": a, "b": b})


def looped(values, asked, ids, weights, policies):
    """The definition, one group and one gap at a time; None where nothing counts."""
    kept = [[None if math.isnan(v) else v for v in row] for row in values.tolist()]
    columns = [k for k, weight in enumerate(weights.tolist()) if weight != 0]
    for group in set(ids.tolist()):
        members = [i for i, own in enumerate(ids.tolist()) if own == group]
        gaps = [(i, k) for i in members for k in columns if kept[i][k] is None and bool(asked[i, k])]
        nobody = {k for k in columns if all(kept[i][k] is None for i in members)}
        if any(policies[k] == "skip" or (policies[k] == "mask" and k in nobody) for _, k in gaps):
            erase = set(columns)
        else:
            resting = {i for i, k in gaps if policies[k] == "mask"}
            erase = {k for i, k in gaps if policies[k] == "drop" and i not in resting}
        for i in members:
            for k in erase:
                kept[i][k] = None
    return torch.tensor([[NAN if v is None else v for v in row] for row in kept])


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    gaps=st.floats(0, 0.9),
    policies=st.lists(st.sampled_from(["mask", "drop", "skip"]), min_size=3, max_size=3),
)
def test_settling_is_its_definition_whatever_is_missing(seed, gaps, policies):
    generator = torch.Generator().manual_seed(seed)
    values, ids = torch.randn(9, 3, generator=generator), torch.randint(0, 3, (9,), generator=generator)
    asked = torch.rand(9, 3, generator=generator) < 0.8
    values[(torch.rand(9, 3, generator=generator) < gaps) | ~asked] = NAN
    weights = torch.tensor([1.0, 0.0, 2.0])
    result = settle(values, asked, ids, weights, dict(zip("abc", policies, strict=True)))
    assert torch.equal(result.nan_to_num(99), looped(values, asked, ids, weights, policies).nan_to_num(99))
    assert torch.equal(result[~result.isnan()], values[~result.isnan()])  # no number is put in or changed
    assert torch.equal(result[:, 1].nan_to_num(99), values[:, 1].nan_to_num(99))  # nor is a monitor touched
    order = torch.randperm(9, generator=generator)
    again = settle(values[order], asked[order], ids[order], weights, dict(zip("abc", policies, strict=True)))
    assert torch.equal(again.nan_to_num(99), result[order].nan_to_num(99))


def weights_for(name):
    """Taros takes equal weights only."""
    return torch.ones(2) if name == "taros" else WEIGHTS


def signal_for(name):
    """And bounded scores."""
    return SIGNALS[name](**({"ranges": ((0.0, 10.0), (0.0, 10.0))} if name == "taros" else {}))


@pytest.mark.parametrize("name", SIGNALS)
def test_a_masked_sample_does_not_train_and_its_siblings_stay_as_they_were(name):
    values, weights = table((1, 0)), weights_for(name)
    signal = signal_of(signal_for(name), settled(values), IDS, weights)
    assert signal.isnan().tolist() == [False, True] + [False] * 6
    assert torch.equal(signal.nan_to_num(9), signal_for(name)(values, IDS, weights).nan_to_num(9))
    advantages = ADVANTAGES["none"]()(signal, IDS)
    assert advantages[1] == 0
    assert (advantages[[0, 3]] != 0).all()  # the one between may be average
    assert advantages[[0, 2, 3]].sum().item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("gaps", [[(1, 0)], [(0, 0), (1, 0), (2, 0), (3, 0)]])
def test_a_dropped_reward_has_no_say_in_its_group_and_the_others_decide(gaps):
    signal = signal_of(StandardizedSum(), settled(table(*gaps), a="drop"), IDS, WEIGHTS)
    alone = StandardizedSum()(table()[:4, 1:], IDS[:4], torch.ones(1))
    assert torch.allclose(signal[:4], alone)
    assert torch.equal(signal[4:], StandardizedSum()(table(), IDS, WEIGHTS)[4:])


def test_a_raw_sum_without_a_dropped_reward_is_that_of_the_others():
    signal = signal_of(WeightedSum(), settled(table((2, 1)), b="drop"), IDS, WEIGHTS)
    assert torch.allclose(signal[:4], torch.tensor([0.1, 0.2, 0.4, 0.8]))
    assert torch.allclose(signal[4:], WeightedSum()(table(), IDS, WEIGHTS)[4:])


def test_a_skipped_group_has_no_signal_and_the_other_group_is_untouched():
    signal = signal_of(StandardizedSum(), settled(table((6, 1)), b="skip"), IDS, WEIGHTS)
    assert signal.isnan().tolist() == [False] * 4 + [True] * 4
    assert torch.equal(signal[:4], StandardizedSum()(table(), IDS, WEIGHTS)[:4])


def test_stop_names_the_reward_how_many_samples_and_their_prompts_and_what_to_do():
    message = r"reward 'b' has no score for 2 of 8 samples \(of prompt 2, 7\), and its policy is to stop; mend it.*--resume"
    with pytest.raises(RewardError, match=message):
        settled(table((6, 1), (0, 1), (3, 0)), b="stop")
    assert settled(table((3, 0)), b="stop")[3].isnan().tolist() == [True, False]


def test_a_mask_on_a_whole_group_skips_it_and_never_leaves_the_other_reward_alone_with_it():
    values = settled(table((4, 0), (5, 0), (6, 0), (7, 0)))
    assert values[4:].isnan().all()
    assert torch.equal(values[:4], table()[:4])


def test_a_sample_that_is_masked_anyway_drops_no_reward():
    values = settled(table((0, 0), (0, 1)), a="mask", b="drop")
    assert values[0].isnan().all()
    assert torch.equal(values[1:], table()[1:])


@pytest.mark.parametrize(("policy", "trains"), [("mask", False), ("skip", False), ("drop", True)])
def test_a_reward_missing_for_a_whole_batch_leaves_what_its_policy_says(policy, trains):
    gaps = [(row, 0) for row in range(8)]
    signal = signal_of(StandardizedSum(), settled(table(*gaps), a=policy), IDS, WEIGHTS)
    assert signal.isfinite().all() if trains else signal.isnan().all()


def test_no_reward_left_in_a_group_is_no_signal_and_not_zero():
    signal = signal_of(StandardizedSum(), settled(table((0, 0), (1, 1)), a="drop", b="drop"), IDS, WEIGHTS)
    assert signal.isnan().tolist() == [True] * 4 + [False] * 4


@pytest.mark.parametrize("policy", ["mask", "drop", "skip", "stop"])
def test_samples_that_are_not_finite_and_prompts_where_a_reward_does_not_apply_call_no_policy(policy):
    asked, values = ASKED.clone(), table((1, 0), (1, 1), (4, 0), (5, 0), (6, 0), (7, 0))
    asked[1], asked[4:, 0] = False, False  # a bad picture in group 7; reward a says nothing of prompt 2
    kept = settled(values, policy, policy, asked)
    assert torch.equal(kept.nan_to_num(99), values.nan_to_num(99))
    signal = signal_of(StandardizedSum(), kept, IDS, WEIGHTS)
    assert signal.isnan().nonzero().flatten().tolist() == [1]
    assert torch.allclose(signal[4:], StandardizedSum()(table()[4:, 1:], IDS[4:], torch.ones(1)))


def test_a_monitor_has_no_policy():
    values = table((0, 1), (1, 1))
    kept = settled(values, b="stop", weights=torch.tensor([1.0, 0.0]))
    assert torch.equal(kept.nan_to_num(99), values.nan_to_num(99))
    assert signal_of(WeightedSum(), kept, IDS, torch.tensor([1.0, 0.0])).isfinite().all()


@pytest.mark.parametrize("name", SIGNALS)
def test_where_all_rewards_speak_the_signal_is_asked_once_with_the_table_as_it_is(name):
    seen = []

    def recorder(values, ids, weights):
        seen.append((values, ids, weights))
        return signal_for(name)(values, ids, weights)

    values, own = table((3, 1)), weights_for(name)
    signal = signal_of(recorder, values, IDS, own)
    assert torch.equal(signal.nan_to_num(9), signal_for(name)(values, IDS, own).nan_to_num(9))
    ((values_seen, ids_seen, weights_seen),) = seen
    assert torch.equal(values_seen.nan_to_num(9), values.nan_to_num(9))
    assert torch.equal(ids_seen, IDS)
    assert torch.equal(weights_seen, own)


def test_groups_in_which_a_reward_is_silent_are_counted():
    assert silent_groups(table((0, 0), (4, 1), (5, 1), (6, 1), (7, 1)), IDS).tolist() == [0, 1]
    assert silent_groups(torch.full((8, 2), NAN), IDS).tolist() == [2, 2]


class Quoted:
    """Speaks only of prompts with a quoted word."""

    def __init__(self):
        self.seen = []

    def applies(self, prompt):
        return '"' in prompt.text

    def __call__(self, samples, prompts):
        self.seen += [prompt.text for prompt in prompts]
        return samples.mean((1, 2, 3, 4))


def test_a_reward_is_asked_only_of_prompts_to_which_it_applies_and_that_is_not_missing():
    model = Quoted()
    prompts = [Prompt('a sign "stop"', 7)] * 4 + [Prompt("a cat", 2)] * 4
    media = torch.tensor(GOOD)[:, 0].view(8, 1, 1, 1, 1).expand(8, 1, 3, 2, 3).clone()
    components = [Component("ocr", model, 1.0, missing="stop"), Component("b", lambda m, p: m.mean((1, 2, 3, 4)), 1.0)]
    scorer = Scorer(components)
    scores = scorer(media, prompts)
    assert model.seen == ['a sign "stop"'] * 4
    assert scores.was_asked.tolist() == [[True, True]] * 4 + [[False, True]] * 4
    assert scores.values.isnan().tolist() == [[False, False]] * 4 + [[True, False]] * 4
    assert scorer.missing == {"ocr": 0, "b": 0}
    kept = scorer.settle(scores.values, scores.was_asked, IDS)
    assert signal_of(StandardizedSum(), kept, IDS, scorer.weights).isfinite().all()


@pytest.mark.parametrize("answer", [1, None, "yes"])
def test_an_applies_that_does_not_say_yes_or_no_is_a_failure_of_its_reward(answer):
    model = Quoted()
    model.applies = lambda prompt: answer
    scorer = Scorer([Component("ocr", model, 1.0)])
    with pytest.warns(RuntimeWarning, match=r"reward 'ocr' failed.*applies must return True or False, got"):
        scores = scorer(torch.rand(8, 1, 3, 2, 3), [Prompt("a", 0)] * 8)
    assert scores.values.isnan().all()
    assert scores.was_asked.all()
    assert model.seen == []


def test_the_scorer_adds_why_it_stops():
    def offline(samples, prompts):
        raise OSError("no connection")

    scorer = Scorer([Component("judge", offline, 1.0, missing="stop"), Component("watch", offline, 0.0)])
    with pytest.warns(RuntimeWarning, match="the run stops"):
        scores = scorer(torch.rand(8, 1, 3, 2, 3), [Prompt("a", 0)] * 8)
    with pytest.raises(
        RewardError, match=r"'judge' has no score for 8 of 8.*this process: reward 'judge' failed.*OSError"
    ) as caught:
        scorer.settle(scores.values, scores.was_asked, IDS)
    assert "watch" not in str(caught.value)
    assert scorer.account(scores.values, scores.was_asked).startswith(
        "judge 8 of 8, watch 8 of 8; last failure in this process"
    )


@pytest.mark.parametrize("silent", [0, 1, 2])
def test_settings_for_each_reward_are_those_of_the_rewards_that_speak(silent):
    """Three rewards with settings of their own, one of them silent in a group: there the rule is that of the other two."""
    generator = torch.Generator().manual_seed(0)
    values, ids, weights = torch.rand(8, 3, generator=generator), torch.arange(8) // 4, torch.ones(3)
    values[:4, silent] = NAN
    others = [k for k in range(3) if k != silent]
    ranges, order, taus = ((0.0, 1.0), (0.0, 2.0), (0.0, 4.0)), (2, 0, 1), {2: 0.1, 0: 0.5, 1: 0.9}
    left = [k for k in order if k != silent]
    taros = Taros(thresholds=(0.1, 0.5), last_threshold=0.9, order=order, ranges=ranges)
    part = Taros(
        thresholds=(taus[left[0]],), last_threshold=taus[left[1]], order=tuple(others.index(k) for k in left),
        ranges=tuple(ranges[k] for k in others),
    )  # fmt: skip
    aware, aware_part = (SaturationAware(ranges=tuple(ranges[k] for k in some)) for some in (range(3), others))
    for whole, alone in ((taros, part), (aware, aware_part)):
        signal = signal_of(whole, values, ids, weights)
        torch.testing.assert_close(signal[:4], alone(values[:4][:, others], ids[:4], torch.ones(2)))
        torch.testing.assert_close(signal[4:], whole(values[4:], ids[4:], weights))


def test_a_history_without_its_last_reward_has_the_history_of_the_one_before():
    values, ids = torch.rand(8, 3, generator=torch.Generator().manual_seed(1)), torch.arange(8) // 4
    values[:4, 2] = NAN
    signal = signal_of(Taros(last_threshold=0.9), values, ids, torch.ones(3))
    alone = Taros()(values[:4, :2], ids[:4], torch.ones(2))
    torch.testing.assert_close(signal[:4], alone)
