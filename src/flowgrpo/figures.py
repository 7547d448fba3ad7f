"""Pictures for people: samples before and after training side by side, and the curves of a run."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from flowgrpo.data import Prompt
from flowgrpo.evaluate import Evaluation
from flowgrpo.media import to_uint8
from flowgrpo.paired import Rise, paired_rise

__all__ = ["before_after", "before_after_of", "curves"]

INK, PALE, GREEN, PALE_GREEN, RED, BLUE, ORANGE = (
    "#1f2328",
    "#8c959f",
    "#1a7f37",
    "#c6e0cd",
    "#cf222e",
    "#0969da",
    "#d4762c",
)
COLUMNS = 4
PICTURE_GAP, PAIR_GAP, CAPTION, MARGIN = 0.05, 0.24, 0.46, 0.34  # in widths of a picture
RIGHT, CENTRE = {"ha": "right", "va": "center"}, {"ha": "center", "va": "center"}
SMOOTHING = 25  # the smooth line averages over this share of the run


def before_after_of(path: Path, prompts: Sequence[Prompt], base: Evaluation, tuned: Evaluation, gold: str) -> None:
    """`before_after` of the kept media of two evaluations, with the gold scores and how they rose over all prompts."""
    before, after = base.column(gold), tuned.column(gold)
    scores = {position: (float(before[position]), float(after[position])) for position in base.media}
    rise = paired_rise(before, after, [prompt.text for prompt in prompts])
    before_after(path, prompts, base.media, tuned.media, scores=scores, title=_title(gold, rise))


def _title(gold: str, rise: Rise) -> str:
    return (
        f"{gold} on {rise.num_prompts} held-out prompts: {rise.base:.4g} before, {rise.tuned:.4g} after  "
        f"({rise.rise:+.3g}, 95 % interval {rise.low:+.3g} to {rise.high:+.3g})"
    )


def before_after(path: Path, prompts: Sequence[Prompt], base: Mapping[int, Tensor], tuned: Mapping[int, Tensor], *,
                 scores: Mapping[int, tuple[float, float]] | None = None, title: str = "") -> None:  # fmt: skip
    """Pairs of the same prompt and start noise, before | after, captions above; a row has prompts of one kind.

    `base` and `tuned` hold clips (f, 3, h, w) by position in `prompts`; of a film the middle frame is shown.
    Scores that are all 0 or 1 become crosses and ticks, others are written out.
    """
    if not base or base.keys() != tuned.keys():
        raise ValueError(f"a figure needs pairs of pictures, got {sorted(base)} before and {sorted(tuned)} after")
    rows = _rows(prompts, sorted(base))
    pictures = {position: (_picture(base[position]), _picture(tuned[position])) for position in base}
    height = max(one.shape[0] / one.shape[1] for pair in pictures.values() for one in pair)
    figure, axes = _canvas(len(rows), max(len(positions) for _, positions in rows), height)
    is_binary = scores is not None and {score for pair in scores.values() for score in pair} <= {0.0, 1.0}
    for number, (kind, positions) in enumerate(rows):
        top = number * (height + CAPTION)
        axes.text(-0.08, top + height / 2, kind, rotation=90, color=PALE, size=11, weight="bold", **RIGHT)
        for column, position in enumerate(positions):
            left = column * (2 + PICTURE_GAP + PAIR_GAP)
            _pair(axes, left, top, prompts[position].text, pictures[position])
            if scores is not None:
                _marks(axes, left, top, pictures[position], scores[position], is_binary)
    axes.set_title(title, size=13, color=INK, loc="left", pad=26)
    _save(figure, path)


def _rows(prompts: Sequence[Prompt], positions: Sequence[int]) -> list[tuple[str, list[int]]]:
    """Rows of at most `COLUMNS` positions, each of one kind."""
    kinds: dict[str, list[int]] = {}
    for position in positions:
        kinds.setdefault(str(prompts[position].meta.get("kind", "")), []).append(position)
    return [
        (kind.replace("_", " "), members[start : start + COLUMNS])
        for kind, members in kinds.items()
        for start in range(0, len(members), COLUMNS)
    ]


def _picture(clip: Float[Tensor, " f 3 h w"]) -> np.ndarray:
    """The middle frame (h, w, 3) in 8 bits; pixels that are not finite are grey."""
    return to_uint8(clip[len(clip) // 2].nan_to_num(0.5, 0.5, 0.5)).numpy()


def _canvas(num_rows: int, num_columns: int, height: float) -> tuple[Any, Any]:
    """A figure with one axis counted in picture widths, y downwards from the top of the first row of pictures."""
    right = num_columns * (2 + PICTURE_GAP + PAIR_GAP) - PAIR_GAP
    bottom = num_rows * (height + CAPTION) - CAPTION
    scale = 13 / (COLUMNS * (2 + PICTURE_GAP + PAIR_GAP) + MARGIN)
    size = ((right + MARGIN) * scale, (bottom + CAPTION) * scale + 0.8)
    figure, axes = _plots(figsize=size)
    axes.set(xlim=(-MARGIN, right + 0.02), ylim=(bottom + 0.02, -CAPTION), aspect="equal", autoscale_on=False)
    axes.axis("off")
    for column in range(num_columns):
        left = column * (2 + PICTURE_GAP + PAIR_GAP)
        for offset, word in ((0.5, "before"), (1.5 + PICTURE_GAP, "after")):
            axes.text(left + offset, -CAPTION, word, ha="center", va="bottom", size=10.5, color=PALE)
    return figure, axes


def _pair(axes: Any, left: float, top: float, caption: str, pictures: tuple[np.ndarray, np.ndarray]) -> None:
    lines = textwrap.wrap(" ".join(caption.split()), 30) or [""]
    text = "\n".join(lines[:2]) + (" …" if len(lines) > 2 else "")
    axes.text(left, top - 0.1, text, va="baseline", size=10.5, color=INK, linespacing=1.05, parse_math=False)
    for picture, x in zip(pictures, (left, left + 1 + PICTURE_GAP), strict=True):
        bottom = top + picture.shape[0] / picture.shape[1]
        smooth = "nearest" if picture.shape[1] <= 128 else "antialiased"
        axes.imshow(picture, extent=(x, x + 1, bottom, top), interpolation=smooth, zorder=1)
        axes.plot([x, x + 1, x + 1, x, x], [top, top, bottom, bottom, top], color=PALE, lw=0.6, zorder=2)


def _marks(axes: Any, left: float, top: float, pictures: tuple[np.ndarray, np.ndarray], scores: tuple[float, float],
           is_binary: bool) -> None:  # fmt: skip
    for picture, score, x in zip(pictures, scores, (left, left + 1 + PICTURE_GAP), strict=True):
        bottom = top + picture.shape[0] / picture.shape[1]
        if is_binary:
            color, sign = (GREEN, "✓") if score else (RED, "✗")
            axes.plot(x + 0.93, bottom - 0.07, "o", color=color, ms=11, mec="white", mew=0.8, zorder=3)
            axes.text(x + 0.93, bottom - 0.075, sign, color="white", size=8.5, weight="bold", zorder=4, **CENTRE)
        else:
            box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1.5}
            axes.text(x + 0.97, bottom - 0.04, f"{score:.2f}", size=9, ha="right", va="bottom", bbox=box, zorder=4)


def curves(path: Path, rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any] | None = None) -> None:
    """A run over its iterations: rewards in training and on held-out prompts, the window, clipping and the gradient.

    `rows` are those of metrics.jsonl; held-out means are in ``eval/<name>/mean`` and, before and after, in `summary`.
    Raises ValueError when nothing was logged.
    """
    if not rows:
        raise ValueError("curves need at least one iteration, metrics.jsonl has none; train first")
    summary = summary or {}
    gold = summary.get("gold", {}).get("name")
    names = [key.split("/")[1] for key in rows[0] if key.startswith("score/") and key.endswith("/mean")]
    names.sort(key=lambda name: name != gold)
    figure, grid = _plots(-(-(len(names) + 2) // 2), 2, figsize=(13, 3.6 * -(-(len(names) + 2) // 2)), squeeze=False)
    panels = list(grid.flat)
    for panel, name in zip(panels, names, strict=False):
        _reward_panel(panel, rows, name, summary.get("rewards", {}).get(name, {}), is_gold=name == gold)
    _window_panel(panels[len(names)], rows)
    _update_panel(panels[len(names) + 1], rows)
    for panel in panels[len(names) + 2 :]:
        panel.axis("off")
    for panel in grid[-1]:
        panel.set_xlabel("iteration")
    figure.tight_layout(w_pad=3, h_pad=2)
    _save(figure, path)


def _reward_panel(panel: Any, rows: Sequence[Mapping[str, Any]], name: str, rise: Mapping[str, Any], *, is_gold: bool) -> None:
    x, y = _series(rows, f"score/{name}/mean")
    _line(panel, x, y, BLUE, label="training samples")
    x, y = _series(rows, f"eval/{name}/mean")
    points = list(zip(x + 1, y, strict=True))
    if rise.get("base") is not None and rise.get("tuned") is not None:
        points = [(0, rise["base"]), *points, (rows[-1]["iteration"] + 1, rise["tuned"])]
    if points:
        panel.plot(*zip(*points, strict=True), "o--", color=ORANGE, ms=6, lw=1.2, label="held-out prompts")
        _annotate(panel, points[0], (8, -16), "left")
        _annotate(panel, points[-1], (0, 9), "right")
    panel.margins(y=0.15)
    panel.legend(frameon=False, loc="best")
    _finish(panel, f"{name} (gold)" if is_gold else name)


def _line(panel: Any, x: np.ndarray, y: np.ndarray, color: str, label: str | None = None) -> None:
    panel.plot(x, y, color=color, alpha=0.25, lw=1)
    panel.plot(x, _smooth(y), color=color, lw=2, marker="." if len(x) < 10 else None, label=label)


def _annotate(panel: Any, point: tuple[float | int, float | int], shift: tuple[int, int], side: str) -> None:
    from matplotlib.patheffects import withStroke

    text = panel.annotate(f"{point[1]:.4g}", point, shift, textcoords="offset points", ha=side, color=ORANGE, weight="bold")
    text.set_path_effects([withStroke(linewidth=3, foreground="white")])


def _window_panel(panel: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    x, first = _series(rows, "window/first")
    _, last = _series(rows, "window/last")
    panel.bar(x, last - first + 1, bottom=first - 0.5, width=1, color=PALE_GREEN)
    panel.plot(x, first, color=GREEN, lw=1.5, drawstyle="steps-mid")
    panel.set_ylabel("denoising step")
    panel.yaxis.get_major_locator().set_params(integer=True)
    _finish(panel, "window: the stochastic, trained steps")


def _update_panel(panel: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    x, low = _series(rows, "clip_fraction/low")
    _, high = _series(rows, "clip_fraction/high")
    if len(low) == len(high) > 0:
        _line(panel, x, low + high, BLUE)
    panel.set_ylabel("clipped share", color=BLUE)
    panel.set_ylim(bottom=0)
    other = panel.twinx()
    x, norm = _series(rows, "grad_norm")
    _line(other, x, norm, ORANGE)
    other.set_ylabel("gradient norm", color=ORANGE)
    other.set_ylim(bottom=0)
    other.spines[["top"]].set_visible(False)
    _finish(panel, "clipping and gradient")


def _series(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Iterations and values of a metric where it was logged and is a number."""
    pairs = [(row["iteration"], row[name]) for row in rows if name in row and row[name] == row[name]]
    return np.array([k for k, _ in pairs]), np.array([value for _, value in pairs], dtype=float)


def _smooth(values: np.ndarray) -> np.ndarray:
    """The mean over a centred window, which shrinks at the ends."""
    half = len(values) // (2 * SMOOTHING)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    centre = np.arange(len(values))
    left, right = np.maximum(0, centre - half), np.minimum(len(values), centre + half + 1)
    return (sums[right] - sums[left]) / (right - left)


def _finish(panel: Any, title: str) -> None:
    panel.set_title(title, loc="left", size=13, color=INK)
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(alpha=0.25)
    panel.set_axisbelow(True)
    panel.xaxis.get_major_locator().set_params(integer=True)


def _plots(*args: Any, **options: Any) -> tuple[Any, Any]:
    """`subplots` of a figure that no window system and no other figure knows of."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    size = options.pop("figsize")
    figure = Figure(figsize=size, facecolor="white")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(*args, **options)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, bbox_inches="tight", pad_inches=0.15)
