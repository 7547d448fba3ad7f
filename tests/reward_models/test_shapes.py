"""The exact checker of the shapes world, and the pipeline it judges."""

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from reward_models.shapes import Shapes, judge, label, read
from reward_models.shapes_world import KINDS, SHAPES, Meaning, captions, meanings, neighbours, parse, render, sample_scene

SHAPES_FOLDER = Path(__file__).parents[2] / "assets" / "shapes"


@cache
def clean() -> tuple[np.ndarray, tuple[Meaning, ...]]:
    """2,000 pictures (n, 32, 32, 3), kinds in turn, and what each shows."""
    rng = np.random.default_rng(0)
    shown = []
    for i in range(2000):
        choices = meanings(KINDS[i % len(KINDS)])
        shown.append(choices[rng.integers(len(choices))])
    return np.stack([render(sample_scene(meaning, rng)) for meaning in shown]), tuple(shown)


def pass_rate(pictures: np.ndarray, meant: tuple[Meaning, ...] | list[Meaning]) -> float:
    return float(np.mean([judge(blobs, meaning).passed for blobs, meaning in zip(read(pictures), meant, strict=True)]))


def smooth(pictures: np.ndarray, weight: float) -> np.ndarray:
    """Each pixel gives `weight` of itself to each neighbour in the row, then in the column."""
    for axis in (1, 2):
        ends = [(0, 0)] * 4
        ends[axis] = (1, 1)
        padded = np.moveaxis(np.pad(pictures, ends, mode="edge"), axis, 0)
        pictures = np.moveaxis(weight * (padded[:-2] + padded[2:]) + (1 - 2 * weight) * padded[1:-1], 0, axis)
    return pictures


def media_of(pictures: np.ndarray) -> Tensor:
    return torch.from_numpy(pictures).permute(0, 3, 1, 2)[:, None]


def prompts_of(meant: tuple[Meaning, ...] | list[Meaning]) -> list[SimpleNamespace]:
    return [SimpleNamespace(text=captions(meaning)[-1]) for meaning in meant]


def test_clean_renders_pass_with_their_own_caption() -> None:
    assert pass_rate(*clean()) >= 0.99


def test_captions_with_one_thing_wrong_do_not_pass_but_earn_a_part() -> None:
    pictures, shown = clean()
    rng = np.random.default_rng(1)
    wrong = [neighbours(meaning)[rng.integers(len(neighbours(meaning)))] for meaning in shown]
    verdicts = [judge(blobs, meaning) for blobs, meaning in zip(read(pictures), wrong, strict=True)]
    assert np.mean([verdict.passed for verdict in verdicts]) < 0.01
    assert 0.3 < np.mean([verdict.fraction for verdict in verdicts]) < 0.8


@pytest.mark.parametrize("noise", [0.03, 0.06])
@pytest.mark.parametrize("weight", [0.0, 0.15])
def test_the_verdict_survives_the_noise_and_blur_of_a_sampler(noise: float, weight: float) -> None:
    pictures, shown = clean()
    some = smooth(pictures[:600], weight)
    some = some + noise * np.random.default_rng(2).normal(size=some.shape).astype(np.float32)
    assert pass_rate(np.clip(some, 0, 1), shown[:600]) >= 0.98


def test_pictures_of_nothing_of_noise_and_of_a_blob_earn_little() -> None:
    rng = np.random.default_rng(3)
    pictures = np.stack([np.full((32, 32, 3), 0.95), rng.random((32, 32, 3)), np.full((32, 32, 3), 0.1)])
    for kind in KINDS:
        meaning = meanings(kind)[0]
        for blobs in read(pictures.astype(np.float32)):
            verdict = judge(blobs, meaning)
            assert not verdict.passed
            assert verdict.fraction <= 0.5


def test_an_extra_shape_costs_the_pass_and_part_of_the_fraction() -> None:
    rng = np.random.default_rng(4)
    two, one = parse("two red circles"), parse("a red circle")
    (blobs,) = read(render(sample_scene(two, rng))[None])
    verdict = judge(blobs, one)
    assert not verdict.passed
    assert 0.4 < verdict.fraction < 1


def test_two_shapes_with_each_others_colour_fail_only_in_the_binding() -> None:
    rng = np.random.default_rng(5)
    (blobs,) = read(render(sample_scene(parse("a red circle and a blue square"), rng))[None])
    verdict = judge(blobs, parse("a blue circle and a red square"))
    assert not verdict.passed
    assert verdict.fraction == pytest.approx(3 / 4)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_that_mixes_two_colours_is_not_clean(shape: str) -> None:
    rng = np.random.default_rng(6)
    scene = sample_scene(parse(f"a red {shape}"), rng)
    red, blue = render(scene), render((scene[0].__class__(shape, "blue", scene[0].x, scene[0].y, scene[0].size),))
    (blobs,) = read(((red + blue) / 2)[None])
    assert all(blob.color is None for blob in blobs)


def test_components_are_labelled_as_by_a_flood_fill() -> None:
    masks = np.random.default_rng(7).random((5, 9, 11)) < 0.5
    for mask, ids in zip(masks, label(masks), strict=True):
        assert np.array_equal(ids > 0, mask)
        todo, count = {tuple(place) for place in np.argwhere(mask)}, 0
        while todo:
            count += 1
            stack, number = [todo.pop()], set()
            while stack:
                y, x = stack.pop()
                number.add(ids[y, x])
                near = {(y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)} & todo
                todo -= near
                stack += near
            assert len(number) == 1
        assert len(np.unique(ids[mask])) == count


def test_scores_are_float32_in_range_and_the_mean_lies_halfway() -> None:
    pictures, shown = clean()
    rng = np.random.default_rng(8)
    meant = [meaning if i % 2 else shown[rng.integers(len(shown))] for i, meaning in enumerate(shown[:200])]
    graded, strict, mean = (
        Shapes(score)(media_of(pictures[:200]), prompts_of(meant)) for score in ("graded", "strict", "mean")
    )
    for scores in (graded, strict, mean):
        assert scores.shape == (200,)
        assert scores.dtype == torch.float32
        assert scores.min() >= 0
        assert scores.max() <= 1
    assert set(strict.tolist()) == {0.0, 1.0}
    assert (graded[strict == 1] == 1).all()
    torch.testing.assert_close(mean, (graded + strict) / 2)


def test_scores_do_not_depend_on_the_neighbours_in_the_batch() -> None:
    pictures, shown = clean()
    model, media, prompts = Shapes(), media_of(pictures[:20]), prompts_of(shown[1:21])
    alone = torch.cat([model(media[i : i + 1], prompts[i : i + 1]) for i in range(20)])
    assert torch.equal(model(media, prompts), alone)


def test_films_other_sizes_and_missing_prompts_are_refused() -> None:
    prompt = SimpleNamespace(text="a circle")
    for shape in ((1, 2, 3, 32, 32), (1, 1, 3, 64, 64), (2, 1, 3, 32, 32)):
        with pytest.raises(ValueError, match="media must be"):
            Shapes()(torch.zeros(shape), [prompt])
    with pytest.raises(ValueError, match="score must be"):
        Shapes("median")  # type: ignore[arg-type]


def test_the_embedded_pipeline_obeys_a_quarter_to_a_half_of_the_validation_prompts() -> None:
    from diffusers import StableDiffusion3Pipeline

    pipe = StableDiffusion3Pipeline.from_pretrained(SHAPES_FOLDER / "pipeline", torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    lines = (SHAPES_FOLDER / "prompts" / "validation.jsonl").read_text().splitlines()[:300]
    texts = [json.loads(line)["prompt"] for line in lines]
    generator = torch.Generator().manual_seed(0)
    kwargs = {"num_inference_steps": 10, "guidance_scale": 1.0, "max_sequence_length": 1, "output_type": "np"}
    parts = [pipe(texts[i : i + 50], generator=generator, **kwargs).images for i in range(0, 300, 50)]
    assert 0.25 <= pass_rate(np.concatenate(parts), [parse(text) for text in texts]) <= 0.5
