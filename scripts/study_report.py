"""What a study says: its finished runs as a table in Markdown, as a parquet file, and as curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

Run = dict[str, Any]


def need_pyarrow() -> None:
    """Raise SystemExit with one line if it is not installed."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise SystemExit("a study needs pyarrow for its parquet file: pip install 'flowgrpo[study]'") from error


def write(runs: Sequence[Run], out: Path, above: Callable[[Sequence[Run]], str] = lambda _: "") -> str:
    """Write runs.parquet, study.md and study.png into `out`; returns the text, which begins with what a study adds.

    Raises ValueError without a finished run.
    """
    if not runs:
        raise ValueError(f"{out}: must hold at least one finished run in runs.jsonl, found none; run the study first")
    text = above(runs) + markdown(runs)
    parquet(runs, out / "runs.parquet")
    (out / "study.md").write_text(text, encoding="utf-8")
    plot(runs, out / "study.png")
    return text


def rows(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """One row a run and mark; the columns of what is measured at the end only are None before.

    `calls` are the network's denoising steps of rollout, replay and probe, summed over samples. `first_warning` and
    `first_canary` are the iterations after which health first spoke, of anything and of a canary. Names such as
    ``reward/clip/before`` hold means over the mark's prompts; ``/low`` and ``/high`` bound the rise, with 95 %.
    """
    found = []
    for one in runs:
        about = {"recipe": one["recipe"], "seed": one["seed"], "commit": one["commit"], "gold": one["gold"]}
        about |= {name: one["study"][name] for name in ("clock", "threads")}
        about |= {"first_warning": first_warning(one), "first_canary": first_canary(one)}
        for point in one["points"]:
            measured = one["end"] if point is one["points"][-1] else point.get("measured", {})
            row = {**about, **point, **_columns(measured)}
            found.append({name: value for name, value in row.items() if name != "measured"})
    columns = dict.fromkeys(name for row in found for name in row)
    return [{name: row.get(name) for name in columns} for row in found]


def _columns(measured: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    parts = {"before": "base", "after": "tuned", "low": "rise_low", "high": "rise_high"}
    return {
        f"{kind}/{name}/{part}": change[key]
        for kind, changes in measured.items()
        for name, change in changes.items()
        for part, key in parts.items()
    }


def first_warning(one: Run, beginnings: tuple[str, ...] = ("",)) -> int | None:
    """After how many iterations health first said something that begins so; None if never."""
    signs = [iteration + 1 for iteration, sign in one.get("signs", []) if sign.startswith(beginnings)]
    return min(signs, default=None)


def first_canary(one: Run) -> int | None:
    """After how many iterations health first said that a canary has changed, tau and diversity among them; None if never."""
    from flowgrpo.canaries import CANARIES

    others = ("training works against", "the samples of a prompt differ")
    return first_warning(one, (*others, *(f"{name.replace('_', ' ')} of the samples" for name in CANARIES)))


def parquet(runs: Sequence[Run], path: Path) -> None:
    """`rows` as a file."""
    import pyarrow
    from pyarrow.parquet import write_table

    write_table(pyarrow.Table.from_pylist(rows(runs)), path)


def markdown(runs: Sequence[Run]) -> str:
    """Both tables, and what they were measured on."""
    study, end = runs[0]["study"], runs[0]["points"][-1]
    seconds = "CPU seconds" if study["clock"] == "cpu" else "seconds"
    budget = f"{study['seconds']:g} {seconds}" if study["samples"] is None else f"{study['samples']} samples"
    return (
        f"{table(runs)}\n\nAll rewards, mean of seeds:\n\n{rewards(runs)}\n\n"
        f"Budget of a run: {budget} of iterations, {study['threads']} thread(s). Measured on "
        f"{end['num_prompts']} held-out prompts ({end['num_captions']} captions) after the last iteration; diversity is that "
        f"of {study['diversity_samples']} samples of {study['diversity_prompts']} prompts. The lowest bound is that of the "
        f"worst seed's 95 % interval. Commit: {', '.join(sorted({one['commit'] for one in runs}))}.\n"
    )


def by_recipe(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """The runs of each recipe by seed; the recipe whose gold rose most comes first."""
    found: dict[str, list[Run]] = {}
    for one in sorted(runs, key=lambda one: one["seed"]):
        found.setdefault(one["recipe"], []).append(one)
    return dict(sorted(found.items(), key=lambda item: -mean(or_nan(one["points"][-1]["rise"]) for one in item[1])))


def table(runs: Sequence[Run]) -> str:
    """Gold: mean over seeds, the spread between them, the worst seed's interval; then what it was paid with."""
    diversities, canaries = (list(runs[0]["end"][kind]) for kind in ("diversity", "canary"))
    header = [
        "recipe",
        "iterations",
        "samples",
        "rise of gold, mean of seeds",
        "between seeds (sd)",
        "each seed",
        "lowest 95 % bound",
    ]
    header += [f"{name}, after / before" for name in diversities] + [f"{name}, change" for name in canaries]
    lines = []
    for recipe, some in by_recipe(runs).items():
        ends = [one["points"][-1] for one in some]
        rises = [or_nan(end["rise"]) for end in ends]
        ratios = [_ratio(some, "diversity", name) for name in diversities]
        changes = [_ratio(some, "canary", name) - 1 for name in canaries]
        lines.append([
            recipe, f"{mean(end['iterations'] for end in ends):.0f}", f"{mean(end['samples'] for end in ends):.0f}",
            f"{mean(rises):+.3f}", f"{stdev(rises):.3f}" if len(rises) > 1 else "-", ", ".join(f"{r:+.3f}" for r in rises),
            f"{min(or_nan(end['rise_low']) for end in ends):+.3f}",
            *(f"{ratio:.2f}" for ratio in ratios), *("-" if math.isnan(c) else f"{100 * c:+.0f} %" for c in changes),
        ])  # fmt: skip
    return markdown_table(header, lines)


def rewards(runs: Sequence[Run]) -> str:
    """Every reward before and after."""
    lines = []
    for recipe, some in by_recipe(runs).items():
        for name in some[0]["end"]["reward"]:
            changes = [one["end"]["reward"][name] for one in some]
            before, after, rise = (mean(or_nan(change[key]) for change in changes) for key in ("base", "tuned", "rise"))
            each = ", ".join(f"{or_nan(change['rise']):+.3f}" for change in changes)
            lines.append([recipe, name, f"{before:.3f}", f"{after:.3f}", f"{rise:+.3f}", each])
    return markdown_table(["recipe", "reward", "before", "after", "rise", "each seed"], lines)


def plot(runs: Sequence[Run], path: Path) -> None:
    """Gold's rise against the budget: a line for the mean of the seeds, a band from the lowest to the highest."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), facecolor="white")
    FigureCanvasAgg(figure)
    axes, study = figure.subplots(), runs[0]["study"]
    unit = "seconds" if study["samples"] is None else "samples"
    for recipe, some in by_recipe(runs).items():
        marks = list(zip(*(one["points"] for one in some), strict=True))
        spent = [0.0, *(mean(point[unit] for point in mark) for mark in marks)]
        rises = [[0.0], *([or_nan(point["rise"]) for point in mark] for mark in marks)]
        (line,) = axes.plot(spent, [mean(r) for r in rises], marker="o", label=recipe)
        axes.fill_between(spent, [min(r) for r in rises], [max(r) for r in rises], alpha=0.12, color=line.get_color())
    cpu = "CPU " if study["clock"] == "cpu" and unit == "seconds" else ""
    axes.set(xlabel=f"{cpu}{unit} of iterations", ylabel="rise of gold on held-out prompts")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def _ratio(some: Sequence[Run], kind: str, name: str) -> float:
    """After divided by before, the mean over seeds; NaN where there was nothing before."""
    changes = [one["end"][kind][name] for one in some]
    return mean(or_nan(change["tuned"]) / base if (base := change["base"]) else math.nan for change in changes)


def or_nan(value: float | None) -> float:
    """NaN for what JSON has as null."""
    return math.nan if value is None else value


def markdown_table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Rows of cells as a table in Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, ["---"] * len(header), *lines])
