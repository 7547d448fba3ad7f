"""Signals side by side on proxies that can be hacked: what each keeps of gold, and whether a warning comes in time.

    python scripts/study_signals.py --seeds 1 2 3 --samples 9600 --jobs 2 --out runs/hacking
    python scripts/study_signals.py --report --out runs/hacking

configs/shapes/hacking.yaml has five proxies and gold, the exact checker. Every arm trains on the same config with another
signal of the proxies, one on gold itself and one on a single proxy, with equal samples, so that the speed of the machine does
not matter. At every mark gold, all rewards and the canaries are measured on the first `--watch` held-out prompts, at the end
on `--prompts`; the run's health (`flowgrpo.health`) is asked after each iteration, as in any training.

Runs, files and the other settings are those of scripts/study.py. Writes OUT/runs.parquet, OUT/study.md and OUT/study.png.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import study_jobs
import study_report
from study_jobs import Arm
from study_report import Run, first_canary, first_warning

CONFIG = Path(__file__).parent.parent / "configs" / "shapes" / "hacking.yaml"
LOSS = 0.05  # of gold, from its best, that a canary is to come before

# One for each proxy: foreground, colourfulness, aesthetic, coverage, clip.
DECLARED = "[[0, 1], [0, 298], [1, 10], [0, 1], [-1, 1]]"  # what the reward models say of themselves
REACHABLE = "[[0, 1], [0, 298], [-15, 22], [0, 1], [-1, 1]]"  # taros refuses a score outside: the ends of the aesthetic head
# What is enough: the mean of right pictures, drawn for the training captions. Of clip, which reads the caption, never enough.
ENOUGH = "[[0, 0.96], [0, 65], [1, 9.3], [0, 0.25], null]"

SIGNALS: dict[str, tuple[str, ...]] = {
    "gold": ("rewards.0.weight=1", *(f"rewards.{k}.weight=0" for k in range(1, 6))),
    "clip_alone": tuple(f"rewards.{k}.weight=0" for k in range(1, 5)),  # what the other proxies add, and cost
    "weighted_sum": (),  # the naive user's: raw scores, weight 1 each
    "standardized_sum": ("signal=standardized_sum",),
    "taros": (f"signal={{use: taros, last_threshold: none, ranges: {REACHABLE}}}",),
    "saturation_aware": (
        f"signal={{use: saturation_aware, ranges: {DECLARED}}}",
        "advantage={use: group, eps: 0.05}",
    ),
    "saturation_calibrated": (
        f"signal={{use: saturation_aware, ranges: {ENOUGH}, least_headroom: 0.02, least_weight: 0.02}}",
        "advantage={use: group, eps: 0.05}",
    ),
}


def table(runs: Sequence[Run]) -> str:
    """Of each signal: gold's rise, what share that is of the rise of training on gold, when it fell and who said so before."""
    arms = study_report.by_recipe(runs)
    whole = mean(_ends(arms["gold"], "rise")) if "gold" in arms else float("nan")
    header = ["signal", "rise of gold", "kept of the rise on gold itself", "best rise at a mark", "last",
              "gold 5 points below its best", "first canary", "first warning", "a canary in time"]  # fmt: skip
    lines = [
        [
            name,
            f"{mean(_ends(some, 'rise')):+.3f} ({min(_ends(some, 'rise_low')):+.3f} to {max(_ends(some, 'rise_high')):+.3f})",
            _kept(some, whole),
            _each(some, lambda one: f"{max(0, *_rises(one)):+.3f}"),
            _each(some, lambda one: f"{_rises(one)[-1]:+.3f}"),
            _each(some, lambda one: "never" if (when := lost(one)) is None else f"{when[0]} to {when[1]}"),
            _each(some, lambda one: first_canary(one) or "never"),
            _each(some, lambda one: first_warning(one) or "never"),
            _each(some, in_time),
        ]
        for name, some in arms.items()
    ]
    return study_report.markdown_table(header, lines)


def above(runs: Sequence[Run]) -> str:
    """The table of signals and what its words mean."""
    return (
        f"{table(runs)}\n\nIn brackets the lowest and the highest end of the seeds' 95 % intervals over captions; kept is the "
        "rise divided by the mean rise of training on gold, whose own spread is not in it. Cells with commas have a seed each. "
        f"Gold was {100 * LOSS:.0f} points below its best between the two iterations, marks on {runs[0]['study']['watch']} "
        "prompts (the last on all); a canary is in time if it spoke by the first of them. Warnings are those of health, of "
        "anything.\n\n"
    )


def lost(one: Run) -> tuple[int, int] | None:
    """Iterations of the mark at which gold was first `LOSS` below its best so far, the base included, and of the one before."""
    best, before = 0.0, 0
    for point, rise in zip(one["points"], _rises(one), strict=True):
        if rise < best - LOSS:
            return before, point["iterations"]
        best, before = max(best, rise), point["iterations"]
    return None


def in_time(one: Run) -> str:
    """Whether a canary spoke before gold was lost; "between" if in the same share of the run, "-" if gold was not lost."""
    loss, canary = lost(one), first_canary(one)
    if loss is None:
        return "-"
    if canary is None or canary > loss[1]:
        return "no"
    return "yes" if canary <= loss[0] else "between"


def _kept(some: Sequence[Run], whole: float) -> str:
    if not whole > 0:
        return "-"
    parts = mean(_ends(some, "rise")), min(_ends(some, "rise_low")), max(_ends(some, "rise_high"))
    rise, low, high = (f"{100 * part / whole:.0f}" for part in parts)
    return f"{rise} % ({low} to {high})"


def _ends(some: Sequence[Run], name: str) -> list[float]:
    return [study_report.or_nan(one["points"][-1][name]) for one in some]


def _rises(one: Run) -> list[float]:
    return [study_report.or_nan(point["rise"]) for point in one["points"]]


def _each(some: Sequence[Run], say: Callable[[Run], Any]) -> str:
    return ", ".join(str(say(one)) for one in some)


def parsed(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--signals", nargs="+", choices=SIGNALS, default=list(SIGNALS))
    study_jobs.add_arguments(parser)
    parser.set_defaults(samples=9600, marks=20, watch=400)
    args = parser.parse_args(argv)
    args.script, args.arms = __file__, [Arm(name, CONFIG, SIGNALS[name]) for name in args.signals]
    study_jobs.check(parser, args)
    return args


def main(argv: list[str]) -> int:
    return study_jobs.main(parsed(argv), argv, partial(study_report.write, above=above))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
