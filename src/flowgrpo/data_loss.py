"""Flow matching on given data beside the objective, so that what the model knew is not paid for the reward."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxtyping import Float
from safetensors import safe_open
from torch import Tensor

from flowgrpo import keys
from flowgrpo.build import Parts
from flowgrpo.choices import when
from flowgrpo.data import Prompt
from flowgrpo.metrics import Metrics
from flowgrpo.transitions import reduce_coordinates


@dataclass(frozen=True)
class DataSet:
    """Clean latents as the pipeline has them before it decodes, and the prompt of each."""

    latents: Float[Tensor, " n *s"]
    prompts: tuple[Prompt, ...]


def load_data(path: str | Path) -> DataSet:
    """Read a .safetensors file: the tensor "latents" (n, *s), and in its metadata "prompts", a JSON list of n texts.

    Raises ValueError that says what the file lacks. `scripts/encode_data.py` writes one from pictures.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"data.latents: {path} must be a .safetensors file, there is none; scripts/encode_data.py makes one")
    with safe_open(path, framework="pt") as file:
        names, metadata = list(file.keys()), file.metadata() or {}
        if "latents" not in names or "prompts" not in metadata:
            raise ValueError(
                f"data.latents: {path} must hold the tensor latents and metadata prompts, got {names} and {sorted(metadata)}"
            )
        latents, texts = file.get_tensor("latents").float(), json.loads(metadata["prompts"])
    if len(latents) != len(texts) or not len(texts):
        raise ValueError(f"data.latents: {path} must hold a prompt for each latent, got {len(latents)} and {len(texts)}")
    return DataSet(latents, tuple(Prompt(text, -1 - i) for i, text in enumerate(texts)))


@dataclass(frozen=True)
class DataLoss:
    """The matching error of some data at the levels of the iteration, weighted.

        weight mean over rows and levels of mean (v - (eps - x0))^2

    Rows and noise are keyed by (seed, iteration, update, process). Source: DDRL 2512.04332, by a third party's notes,
    which puts it in the place of KL.
    """

    parts: Parts
    data: DataSet

    def pieces(self, iteration: int, update: int, metrics: Metrics) -> Iterator[Tensor]:
        """Scalars that add up to the loss, one a level; take each backward before the next is asked for."""
        parts, config = self.parts, self.parts.config.data
        assert config is not None
        key = ("data", parts.config.seed, iteration, update, parts.accelerator.process_index)
        rows = [keys.key(*key, i) % len(self.data.latents) for i in range(config.samples)]
        prompts, grid = [self.data.prompts[row] for row in rows], parts.grid
        x0 = self.data.latents[rows].to(parts.accelerator.device)
        levels = parts.choices.levels.at(when(parts.config, iteration), grid.sigmas)
        for number, sigma in enumerate(levels):
            level = parts.policy.level(grid, sigma)
            eps = keys.normal(x0.shape, *key, "noise", number).to(x0.device)
            x = (1 - level.sigmas[0]) * x0 + level.sigmas[0] * eps
            v = parts.policy.predict(prompts, x, level, grad=True).v
            error = reduce_coordinates((v - (eps - x0)) ** 2, "mean")
            metrics.update({"data_loss": error, "calls/replay": len(rows)})
            yield config.weight * error.mean() / len(levels)


def data_loss(parts: Parts) -> DataLoss | None:
    """The data loss of a configured run, if it has one. Raises ValueError for latents of another shape than the model's."""
    if parts.config.data is None:
        return None
    data, wanted = load_data(parts.config.data.latents), parts.policy.latent_shape
    if wanted is not None and tuple(data.latents.shape[1:]) != wanted:
        raise ValueError(
            f"data.latents: must be of the model's shape {wanted} here, got {tuple(data.latents.shape[1:])}; encode anew"
        )
    return DataLoss(parts, data)
