"""Canaries: cheap measures of pictures that no reward asks for, whose drift shows what a reward was paid with.

Pure functions of media (b, f, 3, h, w) in [0, 1]: one number a sample (b), the mean over its frames, finite for every
picture. A sample with NaN or infinite pixels, which marks a failed one, gets NaN. `group_diversity` watches whether the
samples of a prompt become one. Definitions are ours where no source is given.
"""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowgrpo.media import check_media, luma

BINS = 8  # a channel in the colour histogram
EDGE = 0.1  # luminance step between neighbours that counts as an edge
FLAT = 1e-24  # luminance variance that rounding leaves in a flat picture


def contrast(media: Float[Tensor, " b f 3 h w"]) -> Float[Tensor, " b"]:
    """Standard deviation of luminance over the pixels, in [0, 0.5]; 0 for a flat picture."""
    return _mean_over_frames(media, lambda frames: luma(frames).std((-2, -1), correction=0))


def colour_saturation(media: Float[Tensor, " b f 3 h w"]) -> Float[Tensor, " b"]:
    """Mean over pixels of the largest channel minus the smallest, in [0, 1]: 0 for grey, 1 for pure colours."""
    return _mean_over_frames(media, lambda frames: (frames.amax(1) - frames.amin(1)).mean((-2, -1)))


def colour_entropy(media: Float[Tensor, " b f 3 h w"]) -> Float[Tensor, " b"]:
    """Entropy in bits of the joint RGB histogram of a frame, 8 equal bins a channel, 512 in all.

    H = -sum_c p_c log2 p_c

    In [0, 9], and at most log2 of the number of pixels; 0 if all pixels fall into one bin.
    """
    return _mean_over_frames(media, _colour_entropy)


def edge_density(media: Float[Tensor, " b f 3 h w"]) -> Float[Tensor, " b"]:
    """Share of neighbouring pixels, across and down, whose luminance differs by more than 0.1; in [0, 1].

    0 for a flat picture and for a single pixel, 1 for a checkerboard of single pixels.
    """
    return _mean_over_frames(media, _edge_density)


def high_frequency(media: Float[Tensor, " b f 3 h w"]) -> Float[Tensor, " b"]:
    """Share of the luminance's spectral energy above half the Nyquist frequency, the mean excluded; in [0, 1].

    sum_{|k| > 1/4} |Y_k|^2 / sum_{k != 0} |Y_k|^2,    |k| = sqrt(k_y^2 + k_x^2) in cycles a pixel, Nyquist is 1/2

    0 for a flat picture; some 0.8 for white noise, as that much of the square of frequencies lies outside the circle.
    """
    return _mean_over_frames(media, _high_frequency)


CANARIES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "contrast": contrast,
    "colour_saturation": colour_saturation,
    "colour_entropy": colour_entropy,
    "edge_density": edge_density,
    "high_frequency": high_frequency,
}


def group_diversity(features: Float[Tensor, " b d"], group_ids: Int[Tensor, " b"]) -> Float[Tensor, " groups"]:
    """Mean cosine distance of two different samples of each group, in [0, 2]; groups in rising order of their ids.

    mean_{i < j} (1 - cos(f_i, f_j))

    Cosine because embeddings such as CLIP's are trained and compared by direction, where length says nothing of the
    picture. Raises ValueError for a group of one and for a feature that is zero or not finite and so has no direction.
    """
    if not bool((features.isfinite().all(1) & (features != 0).any(1)).all()):
        raise ValueError("features must be finite and not zero to have a direction; leave failed samples out")
    ids, counts = group_ids.unique(return_counts=True)
    if bool((counts < 2).any()):
        raise ValueError(f"a group needs two samples to be diverse, group {int(ids[counts < 2][0])} has one; leave it out")
    return torch.stack([_mean_distance(features[group_ids == group]) for group in ids]).to(features.dtype)


def kendall_tau(a: Float[Tensor, " b"], b: Float[Tensor, " b"], group_ids: Int[Tensor, " b"]) -> float:
    """How far two numbers order the samples of a group alike, in [-1, 1]: the mean of Kendall's tau-b over groups.

    tau_b = (concordant - discordant) / sqrt(pairs not tied in a x pairs not tied in b)

    Samples where either is NaN, and groups in which either is tied throughout, are left out; NaN if none remains. Source:
    Kendall's correction for ties, as in scipy's kendalltau.
    """
    found = []
    for group in group_ids.unique():
        here = (group_ids == group) & ~a.isnan() & ~b.isnan()
        signs = [(x[here][:, None] - x[here][None]).sign().double() for x in (a, b)]
        untied = [sign.abs().sum() for sign in signs]
        if untied[0] > 0 and untied[1] > 0:
            found.append((signs[0] * signs[1]).sum() / (untied[0] * untied[1]).sqrt())
    return float(torch.stack(found).mean()) if found else float("nan")


def _mean_distance(features: Tensor) -> Tensor:
    unit = torch.nn.functional.normalize(features.double(), dim=1)
    rows, columns = torch.triu_indices(len(unit), len(unit), offset=1)
    return (1 - (unit @ unit.T)[rows, columns]).mean()


def _mean_over_frames(media: Tensor, measure: Callable[[Tensor], Tensor]) -> Tensor:
    """`measure` takes frames (n, 3, h, w) in float64 to (n,)."""
    check_media(media)
    failed = ~media.isfinite().flatten(1).all(1)
    frames = media.double().nan_to_num(0, 0, 0).clamp(0, 1)
    values = measure(frames.flatten(0, 1)).unflatten(0, media.shape[:2]).mean(1)
    return values.masked_fill(failed, torch.nan).to(media.dtype)


def _colour_entropy(frames: Tensor) -> Tensor:
    red, green, blue = (frames * BINS).long().clamp(max=BINS - 1).flatten(-2).unbind(1)
    colours = (red * BINS + green) * BINS + blue
    ones = torch.ones_like(colours, dtype=frames.dtype)
    p = frames.new_zeros(len(frames), BINS**3).scatter_add_(1, colours, ones) / colours.shape[1]
    return -torch.xlogy(p, p).sum(1) / torch.log(frames.new_tensor(2.0))


def _edge_density(frames: Tensor) -> Tensor:
    y = luma(frames)
    steps = torch.cat([y.diff(dim=1).flatten(1), y.diff(dim=2).flatten(1)], 1).abs()
    return (steps > EDGE).double().sum(1) / max(1, steps.shape[1])


def _high_frequency(frames: Tensor) -> Tensor:
    y = luma(frames)
    energy = torch.fft.fft2(y - y.mean((-2, -1), keepdim=True), norm="ortho").abs().square()
    energy[:, 0, 0] = 0
    down, across = (torch.fft.fftfreq(n, dtype=y.dtype, device=y.device) for n in y.shape[-2:])
    high = torch.hypot(down[:, None], across[None]) > 0.25
    total = energy.sum((-2, -1))
    share = energy[:, high].sum(1) / total.clamp(min=FLAT)
    return torch.where(total / (y.shape[1] * y.shape[2]) > FLAT, share, 0)
