"""How large the gradient of each window step or noise level is: which of them rules an update."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class PlaceGradients:
    """Measures the gradient that each piece of a loss leaves, by the place it comes from.

    While a piece is measured, what was summed up before is held aside: a second gradient's memory.
    """

    def __init__(self, trained: Mapping[str, nn.Parameter]) -> None:
        self.parameters = list(trained.values())
        self.norms: dict[int, Tensor] = {}

    @contextmanager
    def of(self, place: int | None) -> Iterator[None]:
        """Take a piece's backward inside; its gradient is added to the parameters' as ever. None is not measured."""
        if place is None:
            yield
            return
        held = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        yield
        own = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        self.norms[place] = torch.stack([grad.norm() for grad in own]).norm() if own else torch.zeros(())
        for parameter, before in zip(self.parameters, held, strict=True):
            if before is not None:
                parameter.grad = before if parameter.grad is None else before + parameter.grad

    def stats(self) -> dict[str, Tensor]:
        """The norm of each place, and its share in the sum of all norms; for logging."""
        total = sum(self.norms.values(), torch.zeros(())).clamp(min=1e-30)
        norms = {f"grad_norm/{place}": norm for place, norm in self.norms.items()}
        return norms | {f"grad_share/{place}": norm / total for place, norm in self.norms.items()}
