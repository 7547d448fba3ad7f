"""Recipes side by side on the embedded world: what they learn for equal time or equal samples, and what it costs elsewhere.

    python scripts/study.py configs/shapes/{flow_grpo,mixgrpo,mixgrpo_flash}.yaml --seeds 1 2 3 --seconds 100 --out runs/study
    python scripts/study.py configs/shapes/{awm,mixgrpo}.yaml --samples 20000 --jobs 2 --out runs/study
    python scripts/study.py --report --out runs/study

Every run has its config's settings, its learning rate falling with the share of the budget that is spent, and stops when its
iterations have taken the seconds, or drawn the samples; evaluation never counts.
At the end gold, the other rewards and the canaries are measured on `--prompts` held-out prompts, on the same pictures' noise
before and after, and the diversity on several samples of a few prompts: mean cosine distance of CLIP embeddings, mean
standard deviation of a pixel. After the equal shares of the budget in between, gold alone, on the first `--watch` prompts.

Every run is a process of its own; its output is in OUT/logs. A finished run is one JSON line in OUT/runs.jsonl and is not
repeated. Writes OUT/runs.parquet, OUT/study.md and OUT/study.png. Time on the wall clock wants a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
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


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What all runs of a study have in common."""
    return {"heldout": args.heldout and str(args.heldout), **{name: getattr(args, name) for name in SETTINGS}}


def read_runs(out: Path) -> list[dict[str, Any]]:
    """The finished runs."""
    log = out / "runs.jsonl"
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.is_file() else []


def todo(args: argparse.Namespace) -> list[tuple[Path, int]]:
    """The runs that are not finished, all recipes with the first seed first. Raises ValueError if the study was another."""
    runs = read_runs(args.out)
    for one in runs:
        other = {name: value for name, value in settings(args).items() if one["study"][name] != value}
        if other:
            got = {name: one["study"][name] for name in other}
            raise ValueError(f"{args.out} holds runs with {got}, not {other}; give the same settings or another --out")
    done = {(one["recipe"], one["seed"]) for one in runs}
    return [(path, seed) for seed in args.seeds for path in args.configs if (path.stem, seed) not in done]


def one_run(path: Path, seed: int, args: argparse.Namespace) -> None:
    """Train, and append the finished run to the log in one write, which neighbours cannot break into."""
    import torch
    from study_run import run

    torch.set_num_threads(args.threads)
    finished = run(path, seed, args)
    line = json.dumps({**finished, "study": settings(args)}) + "\n"
    log = os.open(args.out / "runs.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(log, line.encode())
    os.close(log)
    end = finished["points"][-1]
    print(f"{path.stem} seed {seed} finished: {end['seconds']:.0f} s, {end['samples']} samples, rise of gold {end['rise']}")


def run_all(runs: list[tuple[Path, int]], args: argparse.Namespace, argv: list[str]) -> bool:
    """Each run in a process of its own, `jobs` at a time. Returns whether all finished."""
    import torch
    from study_run import configured, ensure_base

    torch.set_num_threads(args.threads)
    for path, seed in runs:
        ensure_base(configured(path, seed, args), args)
    (args.out / "logs").mkdir(exist_ok=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        futures = [pool.submit(_in_process, path.stem, seed, args, argv) for path, seed in runs]
        try:
            return all(future.result() for future in futures)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _in_process(recipe: str, seed: int, args: argparse.Namespace, argv: list[str]) -> bool:
    path = args.out / "logs" / f"{recipe}-{seed}.txt"
    command = [sys.executable, __file__, *argv, "--only", f"{recipe}:{seed}"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    with path.open("w", encoding="utf-8") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment).returncode
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    if code:
        last = "\n  ".join(lines[-5:])
        print(f"{recipe} seed {seed} failed with exit code {code} ({path}):\n  {last}", file=sys.stderr, flush=True)
    else:
        print(lines[-1], flush=True)
    return code == 0


def parsed(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("configs", type=Path, nargs="*")
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
    add("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings for all recipes")
    add("--report", action="store_true", help="only write the table, the parquet file and the figure again")
    add("--only", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    _check(parser, args)
    return args


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    recipes = [path.stem for path in args.configs]
    if len(set(recipes)) < len(recipes):
        parser.error(f"configs need different names, got {recipes}; rename one")
    if args.report:
        return
    if not recipes:
        parser.error("give at least one config, or --report")
    if (args.seconds is None) == (args.samples is None):
        parser.error("give --seconds or --samples, exactly one of the two")
    counts = ("jobs", "threads", "prompts", "watch", "marks", "diversity_prompts")
    low = [name for name in counts if getattr(args, name) < 1] + (["diversity_samples"] if args.diversity_samples < 2 else [])
    low += [name for name in ("seconds", "samples") if (value := getattr(args, name)) is not None and value <= 0]
    if low:
        parser.error(f"--{low[0].replace('_', '-')} is too low, got {getattr(args, low[0])}; raise it")


def main(argv: list[str]) -> int:
    args = parsed(argv)
    study_report.need_pyarrow()
    if args.only is not None:
        recipe, _, seed = args.only.rpartition(":")
        one_run(next(path for path in args.configs if path.stem == recipe), int(seed), args)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        runs = [] if args.report else todo(args)
        finished = not runs or run_all(runs, args, argv)
        print(study_report.write(read_runs(args.out), args.out))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0 if finished else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
