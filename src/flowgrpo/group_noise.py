"""How the samples of a group are related: which of them are still one and the same at a step.

A *node* is a set of samples with one latent, numbered by its first sample. All noise is keyed by nodes, and the network is
called once per node: what a group shares is computed once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from flowgrpo import keys


@runtime_checkable
class GroupNoise(Protocol):
    """A rule for the relations within a group."""

    def node(self, sample: int, step: int, window: range) -> int:
        """The first of the samples that are one with `sample` while `step` is made; step -1 stands for the start noise."""
        ...

    def step_noise(self, key: Sequence[int | str], sample: int, step: int, window: range, shape: Sequence[int]) -> Tensor:
        """Standard normal noise of this shape for a node's window step."""
        ...


class _OwnNoise:
    """Window steps whose noise is every node's own."""

    def step_noise(self, key: Sequence[int | str], sample: int, step: int, window: range, shape: Sequence[int]) -> Tensor:
        """Keyed by the sample and the step."""
        return keys.normal(shape, "step", *key, sample, step)


@dataclass(frozen=True)
class Distinct(_OwnNoise):
    """Every sample has a start noise of its own (Flow-GRPO's usual setting)."""

    def node(self, sample: int, step: int, window: range) -> int:
        """The sample itself, from the start on."""
        return sample


@dataclass(frozen=True)
class Shared(_OwnNoise):
    """One start noise for the group: until the window its samples are one (DanceGRPO, MixGRPO)."""

    def node(self, sample: int, step: int, window: range) -> int:
        """0 before the window, then the sample itself."""
        return sample if step >= window.start and step >= 0 else 0


@dataclass(frozen=True)
class Tree:
    """The group is a tree: its samples are one until the first split, and part in `factor` at each split step.

        child noise at a split = (z_parent + spread z_child) / sqrt(1 + spread^2)

    which is standard normal again; between splits a node has noise of its own. The group size must be factor ** splits.
    Advantages are then those of the nodes at each step (`node_means`).

    Source: BranchGRPO 2509.06040 (splits 0, 3, 6, 9, factor 2, spread 4), as others summarise it.
    """

    splits: list[int] = field(default_factory=lambda: [0, 3, 6, 9])
    factor: int = 2
    spread: float = 4.0

    def __post_init__(self) -> None:
        if self.factor < 2:
            raise ValueError(f"group_noise.factor must be at least 2, got {self.factor}")
        if not self.splits or sorted(set(self.splits)) != list(self.splits) or self.splits[0] < 0:
            raise ValueError(f"group_noise.splits must be one or more rising steps from 0 on, got {self.splits}")
        if self.spread <= 0:
            raise ValueError(f"group_noise.spread must be above 0, or siblings are equal; got {self.spread}")

    @property
    def leaves(self) -> int:
        """The group size of a full tree."""
        return self.factor ** len(self.splits)

    def node(self, sample: int, step: int, window: range) -> int:
        """The first leaf under the node that the sample belongs to."""
        under = self.factor ** sum(split > step for split in self.splits)
        return sample // under * under

    def step_noise(self, key: Sequence[int | str], sample: int, step: int, window: range, shape: Sequence[int]) -> Tensor:
        """Keyed by the node; at a split mixed with the noise that its siblings have in common."""
        own = keys.normal(shape, "step", *key, sample, step)
        if step not in self.splits:
            return own
        parent = keys.normal(shape, "split", *key, self.node(sample, step - 1, window), step)
        return (parent + self.spread * own) / (1 + self.spread**2) ** 0.5


def check_group_noise(group_noise: GroupNoise, group_size: int, window: range) -> None:
    """Raise ValueError for a tree that does not fit the group or the window."""
    if not isinstance(group_noise, Tree):
        return
    if group_noise.leaves != group_size:
        raise ValueError(
            f"group_size must be factor ** splits = {group_noise.leaves} for this tree, got {group_size}; change group_size or "
            "sampler.group_noise"
        )
    outside = [step for step in group_noise.splits if step not in window]
    if outside:
        raise ValueError(
            f"sampler.group_noise.splits must lie in the window, steps {window.start} to {window.stop - 1}, got {outside}: "
            "elsewhere steps are deterministic and siblings would stay equal; widen the window or move the splits"
        )


def node_means(values: Float[Tensor, " b"], nodes: Tensor) -> Float[Tensor, " b"]:
    """Each value replaced by the mean over its node, NaN (missing) left out; a node with none keeps NaN.

    `nodes` (b, columns) int names the node of each row; rows with equal names are one node.
    """
    _, index = nodes.unique(dim=0, return_inverse=True)
    valid = ~values.isnan()
    total = torch.zeros(int(index.max()) + 1, dtype=values.dtype).index_add_(0, index[valid], values[valid])
    count = torch.zeros_like(total).index_add_(0, index[valid], torch.ones_like(values[valid]))
    return (total / count)[index]


GROUP_NOISES: Mapping[str, type] = {"shared": Shared, "distinct": Distinct, "tree": Tree}
