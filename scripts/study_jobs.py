"""The runs of a study as processes of their own: what they have in common, which are left to do, and their log.

A script brings its own arguments, `arms` among them (what it compares, a list of `Arm`), and its own report.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import study_report

SETTINGS = (
    "seconds",
    "samples",
    "clock",
    "threads",
    "prompts",
    "watch",
    "marks",
    "diversity_prompts",
    "diversity_samples",
    "set",
)


@dataclass(frozen=True)
class Arm:
    """One of the things that a study compares: a config, and what is set in it beside what the study sets in all."""

    name: str
    path: Path
    overrides: tuple[str, ...] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What every study takes."""
    add = parser.add_argument
    add("--out", type=Path, required=True)
    add("--seeds", type=int, nargs="+", default=[1, 2, 3])
    add("--seconds", type=float, help="budget of a run: seconds of its iterations")
    add("--samples", type=int, help="budget of a run: samples drawn by its iterations")
    add("--clock", choices=["wall", "cpu"], default="wall",
        help="what a second is: of the wall clock, or of this process's CPU time, where other work on the machine does not "
        "count; CPU time adds up over threads, so one thread is meant")  # fmt: skip
    add("--jobs", type=int, default=1, help="runs side by side")
    add("--threads", type=int, default=1, help="threads of each run")
    add("--heldout", type=Path, help="prompt file to evaluate on; default: the config's")
    add("--prompts", type=int, default=1000, help="the first ones of the file, for the evaluation at the end")
    add("--watch", type=int, default=250, help="the first ones of the file, for the marks in between")
    add("--marks", type=int, default=4, help="equal shares of the budget, each followed by an evaluation")
    add("--diversity-prompts", type=int, default=40, help="the first ones of the file")
    add("--diversity-samples", type=int, default=8, help="of each of them; at least 2")
    add("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings for all runs")
    add("--report", action="store_true", help="only write the table, the parquet file and the figure again")
    add("--only", help=argparse.SUPPRESS)


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with a line for what cannot be."""
    if args.report:
        return
    if (args.seconds is None) == (args.samples is None):
        parser.error("give --seconds or --samples, exactly one of the two")
    counts = ("jobs", "threads", "prompts", "watch", "marks", "diversity_prompts")
    low = [name for name in counts if getattr(args, name) < 1] + (["diversity_samples"] if args.diversity_samples < 2 else [])
    low += [name for name in ("seconds", "samples") if (value := getattr(args, name)) is not None and value <= 0]
    if low:
        parser.error(f"--{low[0].replace('_', '-')} is too low, got {getattr(args, low[0])}; raise it")


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What all runs of a study have in common."""
    return {"heldout": args.heldout and str(args.heldout), **{name: getattr(args, name) for name in SETTINGS}}


def read_runs(out: Path) -> list[dict[str, Any]]:
    """The finished runs."""
    log = out / "runs.jsonl"
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.is_file() else []


def todo(args: argparse.Namespace) -> list[tuple[Arm, int]]:
    """The runs that are not finished, all arms with the first seed first. Raises ValueError if the study was another."""
    runs = read_runs(args.out)
    for one in runs:
        other = {name: value for name, value in settings(args).items() if one["study"][name] != value}
        if other:
            got = {name: one["study"][name] for name in other}
            raise ValueError(f"{args.out} holds runs with {got}, not {other}; give the same settings or another --out")
    done = {(one["recipe"], one["seed"]) for one in runs}
    return [(arm, seed) for seed in args.seeds for arm in args.arms if (arm.name, seed) not in done]


def one_run(arm: Arm, seed: int, args: argparse.Namespace) -> None:
    """Train, and append the finished run to the log in one write, which neighbours cannot break into."""
    import torch
    from study_run import run

    torch.set_num_threads(args.threads)
    finished = run(arm, seed, args)
    line = json.dumps({**finished, "study": settings(args)}) + "\n"
    log = os.open(args.out / "runs.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(log, line.encode())
    os.close(log)
    end = finished["points"][-1]
    print(f"{arm.name} seed {seed} finished: {end['seconds']:.0f} s, {end['samples']} samples, rise of gold {end['rise']}")


def run_all(runs: Sequence[tuple[Arm, int]], args: argparse.Namespace, argv: Sequence[str]) -> bool:
    """Each run in a process of its own, `jobs` at a time. Returns whether all finished."""
    import torch
    from study_run import configured, ensure_base

    torch.set_num_threads(args.threads)
    for arm, seed in runs:
        ensure_base(configured(arm, seed, args), args)
    (args.out / "logs").mkdir(exist_ok=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        futures = [pool.submit(in_process, arm, seed, args, argv) for arm, seed in runs]
        try:
            return all(future.result() for future in futures)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def in_process(arm: Arm, seed: int, args: argparse.Namespace, argv: Sequence[str]) -> bool:
    """One run by the script `args.script`; its output goes to a file, and its last lines to the screen if it fails."""
    path = args.out / "logs" / f"{arm.name}-{seed}.txt"
    command = [sys.executable, args.script, *argv, "--only", f"{arm.name}:{seed}"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    with path.open("w", encoding="utf-8") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment).returncode
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    if code:
        last = "\n  ".join(lines[-5:])
        print(f"{arm.name} seed {seed} failed with exit code {code} ({path}):\n  {last}", file=sys.stderr, flush=True)
    else:
        print(lines[-1], flush=True)
    return code == 0


def main(args: argparse.Namespace, argv: Sequence[str], write: Callable[[Sequence[dict[str, Any]], Path], str]) -> int:
    """Do what is left of a study, and `write` what all its finished runs say. `argv`: the words that `args` were read from."""
    study_report.need_pyarrow()
    if args.only is not None:
        name, _, seed = args.only.rpartition(":")
        one_run(next(arm for arm in args.arms if arm.name == name), int(seed), args)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        runs = [] if args.report else todo(args)
        finished = not runs or run_all(runs, args, argv)
        print(write(read_runs(args.out), args.out))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0 if finished else 1
