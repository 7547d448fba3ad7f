"""Compare flowgrpo with vectors that another implementation computed.

    python scripts/golden.py FILE... [--tolerance 1e-5]

A file is a JSON list of records, told apart by the key that only they hold:

- `transition`: from `sigmas`, `step`, `noise_level`, `x`, `velocity` and `noise` to `mean`, `std`, `x_next` and `log_prob`,
  the mean over coordinates; a `log_prob_form` beside it says that the variance is left out.
- `solver`: from `sigmas`, `first_solver_step`, `x_start` and the data's law, `data_mean` and `data_std`, to the `path`,
  which is Euler's before that step.
- `windows`: of each iteration, from `num_steps`, `size`, `interval` and `stride`; exact, until they shrink below `size`.
- `scores`: with `group_ids`, to `flow_grpo_sum_group_std`, `flow_grpo_sum_global_std` and `mixgrpo_standardized_sum`.

Prints the largest difference of each kind. Ends with 1 if one is above the tolerance or not a number.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowgrpo.advantages import GlobalAdvantage, GroupAdvantage
from flowgrpo.signals import StandardizedSum, WeightedSum
from flowgrpo.solvers import SOLVERS, Euler
from flowgrpo.transitions import TRANSITIONS, Gaussian, Prediction, law
from flowgrpo.window import Progressive, When

Record = Mapping[str, Any]
Differences = Iterator[tuple[str, float]]


def difference(ours: Tensor | float, theirs: Any) -> float:
    """The largest absolute one; ours is repeated where their batch is. Infinite for other shapes."""
    expected = torch.as_tensor(theirs)
    try:
        gap = (torch.as_tensor(ours).expand_as(expected) - expected).abs().max().item()
    except RuntimeError:
        return math.inf
    return math.inf if math.isnan(gap) else gap


def transition(record: Record) -> Differences:
    """One step."""
    name, step, sigmas = record["transition"], record["step"], record["sigmas"]
    x, velocity, noise = (torch.tensor(record[part]) for part in ("x", "velocity", "noise"))
    ours = law(TRANSITIONS[name](noise_level=record["noise_level"]), Prediction(x, velocity, sigmas[step]), sigmas, step)
    x_next = torch.tensor(record["x_next"])
    form = "unit" if record.get("log_prob_form") else "exact"
    log_prob = Gaussian(ours.mean.expand_as(x_next), ours.std).log_density(x_next, form=form)
    yield f"{name} mean", difference(ours.mean, record["mean"])
    yield f"{name} std", difference(ours.std, record["std"])
    yield f"{name} x_next", difference(ours.sample(noise), x_next)
    yield f"{name} log_prob ({form})", difference(log_prob, record["log_prob"])


def solver(record: Record) -> Differences:
    """A path through the exact velocity of Gaussian data; the steps before the solver's are Euler's and feed its history."""
    sigmas, solve, euler = record["sigmas"], SOLVERS[record["solver"]](), Euler()
    x, previous, path = torch.tensor(record["x_start"]), None, []
    for step in range(len(sigmas) - 1):
        chosen = solve if step >= record["first_solver_step"] else euler
        predictions = [gaussian_prediction(record, x, sigmas[step])]
        for _ in range(chosen.calls(sigmas, step) - 1):
            trial = chosen.step(predictions, sigmas, step, previous)
            predictions.append(gaussian_prediction(record, trial, sigmas[step + 1]))
        x, previous = chosen.step(predictions, sigmas, step, previous), predictions[0]
        path.append(x)
    yield f"{record['solver']} path", difference(torch.stack(path), record["path"])


def gaussian_prediction(record: Record, x: Tensor, sigma: float) -> Prediction:
    """eps - x0 given x, for data N(mean, std^2)."""
    mean, variance = record["data_mean"], record["data_std"] ** 2
    slope = (sigma - (1 - sigma) * variance) / ((1 - sigma) ** 2 * variance + sigma**2)
    return Prediction(x, slope * (x - (1 - sigma) * mean) - mean, sigma)


def windows(record: Record) -> Differences:
    """The steps of each iteration; the difference is the number of iterations with other steps."""
    window = Progressive(record["size"], record["interval"], record["stride"])
    theirs = list(takewhile(lambda steps: len(steps) == record["size"], record["windows"]))
    whens = [When(iteration, len(theirs), record["num_steps"], seed=0) for iteration in range(len(theirs))]
    wrong = sum(list(window.at(when)) != list(steps) for when, steps in zip(whens, theirs, strict=True))
    yield f"windows ({len(theirs)} of {len(record['windows'])} iterations)", math.inf if wrong or not theirs else 0.0


def advantages(record: Record) -> Differences:
    """From a score table: Flow-GRPO's unit weights, MixGRPO's weights 1/K (which the signal makes of any equal ones)."""
    scores, ids = torch.tensor(record["scores"]), torch.tensor(record["group_ids"])
    weights = torch.ones(scores.shape[1])
    total = WeightedSum()(scores, ids, weights)
    ours = {
        "flow_grpo_sum_group_std": lambda: GroupAdvantage(eps=1e-4, clip=None, unbiased=False)(total, ids),
        "flow_grpo_sum_global_std": lambda: GlobalAdvantage(eps=1e-4, clip=None, unbiased=False)(total, ids),
        "mixgrpo_standardized_sum": lambda: StandardizedSum(eps=1e-8, unbiased=True)(scores, ids, weights),
    }
    if not ours.keys() & record.keys():
        raise ValueError(f"a record of scores must have one of {', '.join(ours)}, got {', '.join(record)}")
    for name in ours.keys() & record.keys():
        yield name, difference(ours[name](), record[name])


KINDS: Mapping[str, Callable[[Record], Differences]] = {
    "transition": transition,
    "solver": solver,
    "windows": windows,
    "scores": advantages,
}


def compare(files: list[Path]) -> dict[str, float]:
    """The largest difference by kind. Raises ValueError for a record of no kind."""
    largest: dict[str, float] = {}
    for file in files:
        for number, record in enumerate(json.loads(file.read_text(encoding="utf-8"))):
            kind = next((name for name in KINDS if name in record), None)
            if kind is None:
                raise ValueError(f"{file}, record {number}: must have one of {', '.join(KINDS)}, got {', '.join(record)}")
            for name, gap in KINDS[kind](record):
                largest[name] = max(largest.get(name, 0.0), gap)
    return largest


def main() -> int:
    """Print a line a kind; 1 if anything differs."""
    parser = argparse.ArgumentParser(description="Compare flowgrpo with another implementation's vectors.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="largest absolute difference allowed")
    options = parser.parse_args()
    largest = compare(options.files)
    if not largest:
        raise ValueError("the files must hold at least one number to compare, got none")
    for name, gap in sorted(largest.items()):
        print(f"{'ok  ' if gap <= options.tolerance else 'FAIL'} {gap:.1e}  {name}")
    return int(max(largest.values()) > options.tolerance)


if __name__ == "__main__":
    sys.exit(main())
