"""Recipes side by side on the embedded world: what they learn for equal time or equal samples, and what it costs elsewhere.

    python scripts/study.py configs/shapes/{flow_grpo,mixgrpo,mixgrpo_flash}.yaml --seeds 1 2 3 --seconds 100 --out runs/study
    python scripts/study.py configs/shapes/{awm,mixgrpo}.yaml --samples 20000 --jobs 2 --out runs/study
    python scripts/study.py --report --out runs/study

Every run has its config's settings, its learning rate falling with the share of the budget that is spent, and stops when its
iterations have taken the seconds, or drawn the samples; evaluation never counts.
At the end gold, the other rewards and the canaries are measured on `--prompts` held-out prompts, on the same pictures' noise
before and after, and the diversity on several samples of a few prompts: mean cosine distance of CLIP embeddings, mean
standard deviation of a pixel. After the equal shares of the budget in between, all but the diversity, on the first `--watch`
prompts.

Every run is a process of its own; its output is in OUT/logs. A finished run is one JSON line in OUT/runs.jsonl and is not
repeated. Writes OUT/runs.parquet, OUT/study.md and OUT/study.png. Time on the wall clock wants a quiet machine.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import study_jobs
import study_report
from study_jobs import Arm


def parsed(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", type=Path, nargs="*")
    study_jobs.add_arguments(parser)
    args = parser.parse_args(argv)
    args.script, args.arms = __file__, [Arm(path.stem, path) for path in args.configs]
    names = [arm.name for arm in args.arms]
    if len(set(names)) < len(names):
        parser.error(f"configs need different names, got {names}; rename one")
    if not names and not args.report:
        parser.error("give at least one config, or --report")
    study_jobs.check(parser, args)
    return args


def main(argv: list[str]) -> int:
    return study_jobs.main(parsed(argv), argv, study_report.write)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
