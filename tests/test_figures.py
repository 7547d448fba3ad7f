"""Figures are drawn from what runs leave behind, whatever is missing in it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flowgrpo.data import Prompt
from flowgrpo.evaluate import Evaluation
from flowgrpo.figures import _rows, _smooth, before_after, before_after_of, curves


def size(path: Path) -> tuple[int, int]:
    with Image.open(path) as picture:
        return picture.size


def colours(path: Path) -> set[tuple[int, ...]]:
    with Image.open(path) as picture:
        return set(map(tuple, np.array(picture.convert("RGB")).reshape(-1, 3).tolist()))


def solid(*rgb: float, frames: int = 1, height: int = 6, width: int = 6) -> torch.Tensor:
    return torch.tensor(rgb).view(1, 3, 1, 1).expand(frames, 3, height, width)


def test_pictures_before_and_after_are_shown_as_they_are(tmp_path: Path) -> None:
    prompts = [Prompt("a red circle " * 9, 0, meta={"kind": "x"}), Prompt("$1 & <b>", 1, meta={"kind": "y_z"})]
    base = {0: solid(0.2, 0.4, 0.6), 1: solid(0.0, 0.0, 1.0)}
    tuned = {0: solid(0.6, 0.2, 0.2), 1: torch.full((1, 3, 6, 6), torch.nan)}
    before_after(tmp_path / "sub" / "pairs.png", prompts, base, tuned, scores={0: (0.0, 1.0), 1: (1.0, 1.0)}, title="t")
    assert {(51, 102, 153), (153, 51, 51), (0, 0, 255), (128, 128, 128)} <= colours(tmp_path / "sub" / "pairs.png")


def test_a_picture_needs_its_partner(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"got \[0\] before and \[\] after"):
        before_after(tmp_path / "x.png", [Prompt("a", 0)], {0: solid(1, 1, 1)}, {})


def test_a_row_holds_one_kind_and_at_most_four_pairs() -> None:
    prompts = [Prompt("", i, meta={"kind": "a_b" if i < 6 else "c"}) for i in range(8)]
    assert _rows(prompts, range(8)) == [("a b", [0, 1, 2, 3]), ("a b", [4, 5]), ("c", [6, 7])]
    assert _rows([Prompt("", 0)], [0]) == [("", [0])]


def test_two_evaluations_make_a_figure_also_of_films_and_graded_scores(tmp_path: Path) -> None:
    prompts = [Prompt("one", 0), Prompt("two", 1)]
    clips = {i: solid(0.5, 0.5, 0.5, frames=5, height=4, width=7) for i in range(2)}
    base, tuned = (Evaluation(("gold",), torch.tensor([[v], [torch.nan]]), clips) for v in (0.25, 0.5))
    before_after_of(tmp_path / "films.png", prompts, base, tuned, "gold")
    assert size(tmp_path / "films.png")[0] > 400


def rows_of(n: int, **more: Any) -> list[dict[str, Any]]:
    return [{"iteration": k, "score/one/mean": k / n, "score/two/mean": float("nan"), "window/first": k // 3,
             "window/last": k // 3 + 1, "grad_norm": 0.1, **more} for k in range(n)]  # fmt: skip


def test_curves_are_drawn_with_and_without_held_out_points(tmp_path: Path) -> None:
    rows = rows_of(9, **{"clip_fraction/low": 0.1, "clip_fraction/high": 0.0})
    rows[4]["eval/one/mean"] = 0.4
    rise = {"one": {"base": 0.1, "tuned": 0.9}, "two": {"base": None, "tuned": None}}
    curves(tmp_path / "a.png", rows, {"gold": {"name": "one"}, "rewards": rise})
    curves(tmp_path / "b.png", rows_of(1))
    assert all(size(tmp_path / name)[0] > 1200 for name in ("a.png", "b.png"))
    with pytest.raises(ValueError, match="at least one iteration"):
        curves(tmp_path / "c.png", [])


@pytest.mark.parametrize("n", [1, 2, 49, 50, 120])
def test_smoothing_is_the_mean_over_what_is_near(n: int) -> None:
    values = np.random.default_rng(0).standard_normal(n)
    half = n // 50
    wanted = [values[max(0, k - half) : k + half + 1].mean() for k in range(n)]
    np.testing.assert_allclose(_smooth(values), wanted, atol=1e-12)


def test_no_figure_is_left_open_in_pyplot(tmp_path: Path) -> None:
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    curves(tmp_path / "a.png", rows_of(3))
    assert plt.get_fignums() == before
