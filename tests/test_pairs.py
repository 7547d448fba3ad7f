"""Every pair of choices from different slots trains, or is refused with the reason when the config is read.

Pairs that are accepted are packed into few runs, each with as many choices that are new to one another as go together.
"""

import copy
from itertools import combinations
from typing import Any

import pytest

from flowgrpo import build as building
from flowgrpo.choices import check_groups, choose
from flowgrpo.config import parse_config
from flowgrpo.data import check_geometry
from flowgrpo.metrics import Metrics
from flowgrpo.objectives import OBJECTIVES
from flowgrpo.trainer import Trainer
from flowgrpo.transitions import TRANSITIONS
from tests.tiny_pipelines import build as tiny_pipeline
from tests.toys import raw_config

EXPLICIT = {"use": "explicit", "levels": [1.0, 0.8, 0.6, 0.4, 0.2, 0.0]}
Choice = tuple[str, int]  # a slot and the number of one of its options

SLOTS: dict[str, list[Any]] = {
    "sampler.window": [
        {"use": "random", "size": 2}, {"use": "progressive", "size": 2}, {"use": "linear_decay", "size": 2},
        {"use": "exponential_decay", "size": 2}, {"use": "coverage", "size": 2}, {"use": "frozen", "size": 2},
        "one_step", "all", "none", {"use": "variance", "size": 2},
    ],
    "sampler.transition": ["flow_sde", *(name for name in TRANSITIONS if name != "flow_sde")],
    "sampler.solver": ["euler", "heun"],
    "sampler.tail": [None, {"solver": "euler", "num_steps": 2}, {"solver": "heun"}, {"solver": "dpmpp_2m", "rate": 0.5}],
    "sampler.group_noise": ["shared", "distinct", {"use": "tree", "splits": [0, 1]}],
    "sampler.schedule": ["pipeline", {"use": "shifted", "shift": 2.0}, EXPLICIT],
    "signal": [
        "standardized_sum", "weighted_sum", "gdpo", {"use": "taros", "ranges": [[0, 1]]}, "saturation_aware", "quantile",
        "win_rate", "tournament", "preference_walk",
    ],
    "advantage": ["none", "group", "global"],
    "objective": [
        *OBJECTIVES,
        {"use": "clipped_ratio", "kl": 0.1}, {"use": "awm", "kl": 0.1}, {"use": "nft", "old_decay": 0.5},
        {"use": "guard", "stop_negatives": 0.5}, {"use": "nft", "kl": 0.1, "kl_from": 0.5, "kl_gate": 0.5},
    ],
    "step_weights": ["none", "equal", "noise", "step_size"],
    "levels": ["stratified", "uniform", "logit_normal", {"use": "grid", "count": 3}],
    "reference": ["start", "average", {"use": "reset", "every": 2}],
    "samples": ["all", "extremes"],
    "ema.decay": [None, 0.9],
}  # fmt: skip
BASES: list[dict[str, int]] = [  # where a pair is tried, by the number of each option that is not the first
    {},
    {"sampler.window": 8, "sampler.group_noise": 1, "objective": list(OBJECTIVES).index("awm")},
    {"sampler.window": 8, "sampler.group_noise": 1, "objective": len(OBJECTIVES) + 1},
    {"sampler.window": 7, "sampler.group_noise": 2},
    {"objective": len(OBJECTIVES)},
    {"objective": list(OBJECTIVES).index("awm")},
]


def raw(folder, options: dict[str, int]) -> dict[str, Any]:
    changes = {slot.replace(".", "__"): SLOTS[slot][number] for slot, number in options.items() if number}
    return raw_config(folder, **{"sampler__num_steps": 5, "iterations": 3, "optimizer__micro_batch_size": 4, **changes})


def refusal(folder, options: dict[str, int], seen: dict[frozenset, str | None]) -> str | None:
    """What a config is told when it is read; None if it is accepted."""
    key = frozenset((slot, number) for slot, number in options.items() if number)
    if key not in seen:
        try:
            settings = parse_config(raw(folder, options))
            check_groups(settings, choose(settings), check_geometry(2, 4, 1, settings.optimizer.updates_per_iteration))
            seen[key] = None
        except ValueError as error:
            seen[key] = str(error)
    return seen[key]


def pairs_of(options: dict[str, int]) -> set[frozenset[Choice]]:
    whole = dict.fromkeys(SLOTS, 0) | options
    return {frozenset(pair) for pair in combinations(whole.items(), 2)}


def packed(pairs: dict[frozenset[Choice], dict[str, int]], accepted) -> list[dict[str, int]]:
    """Configs that hold all these pairs, each grown from a pair's own one by what brings the most that are still missing."""
    missing, rows = set(pairs), []
    for pair, options in pairs.items():
        if pair not in missing:
            continue
        row = dict(options)
        for slot in SLOTS:
            if any(slot == held for held, _ in pair):
                continue
            tries = sorted(
                ({**row, slot: number} for number in range(len(SLOTS[slot]))), key=lambda one: -len(pairs_of(one) & missing)
            )
            row = next(
                (one for one in tries if len(pairs_of(one) & missing) > len(pairs_of(row) & missing) and accepted(one)), row
            )
        missing -= pairs_of(row)
        rows.append(row)
    return rows


@pytest.mark.timeout(1800)  # some two hundred runs
def test_every_pair_of_choices_trains_or_is_refused_with_the_reason(tmp_path, monkeypatch):
    raw_config(tmp_path)  # writes the pipeline and the prompts
    seen: dict[frozenset, str | None] = {}
    accepted, refused = {}, {}
    for first, second in combinations([(slot, i) for slot in SLOTS for i in range(len(SLOTS[slot]))], 2):
        if first[0] == second[0]:
            continue
        told: list[str] = []
        for base in BASES:
            options = {**base, **dict((first, second))}
            message = refusal(tmp_path, options, seen)
            if message is None:
                accepted[frozenset((first, second))] = options
                break
            told.append(message)
        else:
            refused[frozenset((first, second))] = told
    for told in refused.values():
        for message in told:
            assert "\n" not in message
            assert any(slot.split(".")[-1].removesuffix("s") in message for slot in SLOTS), message
    rows = packed(accepted, lambda options: refusal(tmp_path, options, seen) is None)
    model = tiny_pipeline("sd3")
    monkeypatch.setattr(building, "load_pipeline", lambda _: copy.deepcopy(model))
    for options in rows:
        trainer = Trainer(building.build(parse_config(raw(tmp_path, options))), Metrics(tmp_path / "metrics.jsonl"))
        chosen = {slot: SLOTS[slot][number] for slot, number in options.items() if number}
        for k in range(3):
            values = trainer.iteration(k)
            trainer.next_iteration += 1
            numbers = {n: v for n, v in values.items() if not abs(v) < float("inf")}
            assert not numbers, (chosen, k, numbers)
            assert values.get("ratio/max_gap", 0.0) < 1e-6 or k > 0, chosen
            assert all(parameter.isfinite().all() for parameter in trainer.parts.trained.values()), chosen
    assert len(accepted) > 5 * len(refused)
    print(f"{len(accepted)} pairs in {len(rows)} runs, {len(refused)} refused")


@pytest.mark.parametrize("slot", SLOTS)
def test_every_choice_is_accepted_by_itself_or_beside_one_of_the_bases(tmp_path, slot):
    raw_config(tmp_path)
    for number in range(len(SLOTS[slot])):
        told = [refusal(tmp_path, {**base, slot: number}, {}) for base in BASES]
        assert None in told, (SLOTS[slot][number], told)
