"""Spoiled pictures of coloured shapes, and how much anyone should like them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reward_models.shapes_world import KINDS, SIZE, Meaning, meanings, render, sample_scene

FLAWS = ("noisy", "blurry", "faded", "uneven")


def sample_flaws(rng: np.random.Generator) -> np.ndarray:
    """Severities (4,) in [0, 1] in the order of `FLAWS`: none in three pictures of ten, else one to three flaws."""
    severities = np.zeros(len(FLAWS))
    if rng.random() < 0.7:
        some = rng.permutation(len(FLAWS))[: rng.integers(1, 4)]
        severities[some] = rng.random(len(some))
    return severities


def spoil(picture: np.ndarray, severities: Sequence[float], rng: np.random.Generator) -> np.ndarray:
    """The picture (32, 32, 3) with noise, blur, faded colours and an uneven background added, in [0, 1]."""
    noisy, blurry, faded, uneven = severities
    grey = picture.mean(-1, keepdims=True)
    picture = picture + 0.75 * faded * (0.4 * grey + 0.5 - picture)
    ramp = np.linspace(-0.5, 0.5, SIZE)[:, None]
    slope = ramp[:, None] * rng.normal() + ramp * rng.normal()
    picture = picture + 0.25 * uneven * (slope - 0.5)
    for _ in range(3):
        picture = picture + blurry * (_smooth(picture) - picture)
    picture = picture + 0.15 * noisy * rng.normal(size=picture.shape)
    return np.clip(picture, 0, 1).astype(np.float32)


def _smooth(picture: np.ndarray) -> np.ndarray:
    """A binomial blur of one pixel each way."""
    padded = np.pad(picture, ((1, 1), (1, 1), (0, 0)), mode="edge")
    tall = (padded[:-2] + 2 * padded[1:-1] + padded[2:]) / 4
    return (tall[:, :-2] + 2 * tall[:, 1:-1] + tall[:, 2:]) / 4


def rating(severities: np.ndarray) -> np.ndarray:
    """From 1 to 10 for severities (..., 4): 10 for a flawless picture, each flaw takes its share of what is left."""
    return 1 + 9 * np.prod(1 - 0.8 * severities, axis=-1)


def draw_spoiled(count: int, rng: np.random.Generator) -> tuple[np.ndarray, list[Meaning], np.ndarray]:
    """Pictures (n, 32, 32, 3) of random meanings (kinds in equal shares), what they show, and severities (n, 4)."""
    pictures, shown, severities = np.empty((count, SIZE, SIZE, 3), np.float32), [], np.empty((count, len(FLAWS)))
    for i in range(count):
        choices = meanings(KINDS[i % len(KINDS)])
        shown.append(choices[rng.integers(len(choices))])
        severities[i] = sample_flaws(rng)
        pictures[i] = spoil(render(sample_scene(shown[-1], rng)), severities[i], rng)
    return pictures, shown, severities
