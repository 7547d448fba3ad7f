"""Canaries against their definitions, pixel by pixel, and on pictures whose answer is known."""

import cmath
import math
import statistics
from collections import Counter
from itertools import combinations, product

import pytest
import torch

from flowgrpo.canaries import CANARIES, group_diversity, high_frequency, kendall_tau

B, F, H, W = 2, 3, 5, 7
NAMES = sorted(CANARIES)


def luminance(frame: torch.Tensor) -> list[list[float]]:
    red, green, blue = frame.double().tolist()
    return [[0.299 * red[y][x] + 0.587 * green[y][x] + 0.114 * blue[y][x] for x in range(W)] for y in range(H)]


def slow_contrast(frame: torch.Tensor) -> float:
    return statistics.pstdev(value for row in luminance(frame) for value in row)


def slow_colour_saturation(frame: torch.Tensor) -> float:
    return statistics.fmean(max(pixel) - min(pixel) for pixel in frame.double().flatten(1).T.tolist())


def slow_colour_entropy(frame: torch.Tensor) -> float:
    bins = Counter(tuple(min(7, int(8 * value)) for value in pixel) for pixel in frame.double().flatten(1).T.tolist())
    return sum(n / (H * W) * math.log2(H * W / n) for n in bins.values())


def slow_edge_density(frame: torch.Tensor) -> float:
    y, places = luminance(frame), list(product(range(H), range(W)))
    pairs = [(a, b) for a, b in combinations(places, 2) if abs(a[0] - b[0]) + abs(a[1] - b[1]) == 1]
    return statistics.fmean(abs(y[a][b] - y[c][d]) > 0.1 for (a, b), (c, d) in pairs)


def slow_high_frequency(frame: torch.Tensor) -> float:
    y, energy = luminance(frame), {}
    for k, m in product(range(H), range(W)):
        wave = sum(y[a][b] * cmath.exp(-2j * cmath.pi * (k * a / H + m * b / W)) for a, b in product(range(H), range(W)))
        energy[min(k, H - k) / H, min(m, W - m) / W, k, m] = abs(wave) ** 2
    total = sum(value for key, value in energy.items() if key[2:] != (0, 0))
    return sum(value for key, value in energy.items() if math.hypot(*key[:2]) > 0.25) / total


def solid(*colour: float, size: int = 8) -> torch.Tensor:
    return torch.tensor(colour).view(1, 1, 3, 1, 1).repeat(1, 1, 1, size, size)


def checkerboard(size: int = 8) -> torch.Tensor:
    where = torch.arange(size)
    return ((where[:, None] + where) % 2).float().expand(1, 1, 3, size, size)


@pytest.mark.parametrize("name", NAMES)
def test_a_canary_is_its_definition_averaged_over_frames(name: str) -> None:
    media = torch.rand(B, F, 3, H, W, generator=torch.Generator().manual_seed(0))
    wanted = [statistics.fmean(globals()[f"slow_{name}"](frame) for frame in clip) for clip in media]
    assert CANARIES[name](media).tolist() == pytest.approx(wanted, rel=1e-5)


FLAT = dict.fromkeys(CANARIES, 0.0)


@pytest.mark.parametrize(
    ("media", "wanted"),
    [
        (solid(0.3, 0.3, 0.3, size=7), FLAT),
        (solid(0.0, 0.0, 0.0), FLAT),
        (solid(1.0, 1.0, 1.0), FLAT),
        (solid(1.0, 0.0, 0.0), FLAT | {"colour_saturation": 1.0}),
        (solid(0.2, 0.9, 0.4, size=1), FLAT | {"colour_saturation": 0.7}),
        (checkerboard(), FLAT | {"contrast": 0.5, "colour_entropy": 1.0, "edge_density": 1.0, "high_frequency": 1.0}),
    ],
)
def test_known_pictures_have_known_values(media: torch.Tensor, wanted: dict[str, float]) -> None:
    assert {name: canary(media).item() for name, canary in CANARIES.items()} == pytest.approx(wanted, abs=1e-6)


def test_every_colour_bin_alike_has_nine_bits() -> None:
    corners = (torch.arange(8) + 0.5) / 8
    media = torch.cartesian_prod(corners, corners, corners).T.reshape(1, 1, 3, 16, 32)
    assert CANARIES["colour_entropy"](media).item() == pytest.approx(9, abs=1e-5)


@pytest.mark.parametrize(("cycles", "wanted"), [(1, 0), (4, 0), (5, 1), (8, 1)])
def test_a_wave_is_high_when_its_frequency_is_above_half_of_nyquist(cycles: int, wanted: int) -> None:
    wave = 0.5 + 0.4 * torch.cos(2 * torch.pi * cycles * torch.arange(16) / 16)
    for media in (wave.expand(1, 1, 3, 16, 16), wave[:, None].expand(1, 1, 3, 16, 16)):
        assert high_frequency(media).item() == pytest.approx(wanted, abs=1e-6)


def test_white_noise_has_the_share_that_lies_outside_the_circle() -> None:
    media = torch.rand(4, 1, 1, 64, 64, generator=torch.Generator().manual_seed(1)).expand(4, 1, 3, 64, 64)
    assert high_frequency(media).mean().item() == pytest.approx(1 - math.pi / 16, abs=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_a_failed_sample_has_no_value_and_its_neighbours_keep_theirs(name: str) -> None:
    media = torch.rand(3, F, 3, H, W)
    alone = CANARIES[name](media[[0, 2]])
    media[1, 2, 0, 1, 1] = torch.nan
    together = CANARIES[name](media)
    assert together.isnan().tolist() == [False, True, False]
    assert torch.equal(together[[0, 2]], alone)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_media_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"media must lie in \[0, 1\]"):
        CANARIES[name](torch.full((1, 1, 3, H, W), 255.0))


def test_diversity_is_the_mean_over_pairs_of_a_group() -> None:
    features, ids = torch.randn(9, 5), torch.tensor([7, 2, 7, 2, 2, 7, 0, 0, 7])
    wanted = []
    for group in (0, 2, 7):
        rows = [features[i].double() for i in range(9) if ids[i] == group]
        wanted.append(statistics.fmean(float(1 - a @ b / (a.norm() * b.norm())) for a, b in combinations(rows, 2)))
    assert group_diversity(features, ids).tolist() == pytest.approx(wanted, rel=1e-5)


def test_diversity_of_equal_orthogonal_and_opposite_features() -> None:
    features = torch.tensor([[1.0, 0], [3, 0], [1, 0], [0, 2], [1, 1], [-1, -1]])
    assert group_diversity(features, torch.tensor([0, 0, 1, 1, 2, 2])).tolist() == pytest.approx([0, 1, 2], abs=1e-6)


@pytest.mark.parametrize(
    ("features", "ids", "message"),
    [
        (torch.ones(3, 2), [0, 0, 5], "two samples to be diverse, group 5 has one"),
        (torch.tensor([[1.0, 0], [0, 0]]), [0, 0], "not zero"),
        (torch.tensor([[1.0, 0], [torch.nan, 1]]), [0, 0], "finite"),
    ],
)
def test_what_has_no_diversity_is_refused(features: torch.Tensor, ids: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group_diversity(features, torch.tensor(ids))


def slow_tau(a, b):
    concordant = ties_a = ties_b = pairs = 0
    for i in range(len(a)):
        for j in range(i):
            x, y = a[i] - a[j], b[i] - b[j]
            pairs, ties_a, ties_b = pairs + 1, ties_a + (x == 0), ties_b + (y == 0)
            concordant += (x * y > 0) - (x * y < 0)
    return concordant / ((pairs - ties_a) * (pairs - ties_b)) ** 0.5


def test_kendalls_tau_is_the_mean_over_groups_of_all_pairs_ties_apart():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(0, 5, (30,), generator=generator).float() for _ in range(2))
    ids = torch.arange(30) % 3
    b[ids == 2] = 1.0  # says nothing there
    a[3], b[4] = torch.nan, torch.nan
    kept = [[i for i in range(30) if ids[i] == g and i not in (3, 4)] for g in (0, 1)]
    expected = sum(slow_tau(a[rows].tolist(), b[rows].tolist()) for rows in kept) / 2
    assert kendall_tau(a, b, ids) == pytest.approx(expected)
    assert kendall_tau(a, a, torch.zeros(30, dtype=torch.long)) == pytest.approx(1.0)
    assert math.isnan(kendall_tau(a, torch.zeros(30), ids))
