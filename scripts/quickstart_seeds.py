"""Run the quickstart with several seeds, one after the other, and print what each gained (15 minutes on two cores).

    python scripts/quickstart_seeds.py --seeds 1 2 3 [key=value ...]

A seed sets the training prompts, noise and windows; base and held-out evaluation are the same in all. Finished runs are
not repeated, so it can be stopped and started again.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).parent.parent / "configs" / "shapes" / "mixgrpo.yaml"


def run(seed: int, overrides: list[str]) -> dict[str, Any]:
    """The summary of one seed's run."""
    name = f"shapes-mixgrpo-seed{seed}"
    summary = Path("runs") / name / "summary.json"
    if not summary.is_file():
        command = [sys.executable, "-m", "flowgrpo.cli", "train", str(CONFIG), "--overwrite", f"name={name}", f"seed={seed}"]
        subprocess.run([*command, *overrides], check=True)
    return json.loads(summary.read_text())


def row(seed: int, summary: dict[str, Any]) -> str:
    """One line of the table."""
    gold, kinds = summary["gold"], summary["by_kind"]
    rises = ", ".join(f"{kind} {rise['rise']:+.2f}" for kind, rise in kinds.items())
    return (
        f"| {seed} | {gold['base']:.3f} | {gold['tuned']:.3f} | {gold['rise']:+.3f} "
        f"| {gold['rise_low']:+.3f} to {gold['rise_high']:+.3f} | {summary['seconds']:.0f} | {rises} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args()
    summaries = {seed: run(seed, args.overrides) for seed in args.seeds}
    some = next(iter(summaries.values()))["gold"]
    print(f"strict pass on {some['num_prompts']} held-out prompts, {some['num_captions']} distinct captions")
    print("| seed | base | tuned | rise | 95 % | seconds | rise by kind |\n| --- | --- | --- | --- | --- | --- | --- |")
    for seed, summary in summaries.items():
        print(row(seed, summary))


if __name__ == "__main__":
    main()
