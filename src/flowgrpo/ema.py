"""A moving average of the trained weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter

__all__ = ["Ema"]


class Ema:
    """Averages named parameters in float32: `shadow <- d shadow + (1 - d) parameter` after each optimizer step.

    `decay` d lies in [0, 1). With `warmup`, update n (from 0) uses `min(decay, (1 + n) / (10 + n))`, so that a short
    run's average is not ruled by its start.
    """

    def __init__(self, parameters: Mapping[str, Parameter], decay: float, *, warmup: bool = False) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"ema decay={decay} must be at least 0 and below 1; 0.99 averages some 100 updates")
        self.parameters = dict(parameters)
        self.decay = decay
        self.warmup = warmup
        self.num_updates = 0
        self.shadow = {name: _copy(parameter) for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def update(self, decay: float | None = None) -> None:
        """Move the average towards the present weights, with a decay of this moment if one is given."""
        n = self.num_updates
        if decay is None:
            decay = min(self.decay, (1 + n) / (10 + n)) if self.warmup else self.decay
        for name, parameter in self.parameters.items():
            self.shadow[name].lerp_(parameter.to(torch.float32), 1 - decay)
        self.num_updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The parameters hold the average inside, and their own values again, bit for bit, afterwards."""
        own = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        try:
            self._write(self.shadow)
            yield
        finally:
            self._write(own)

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the averages by parameter name, and the count of updates as "num_updates" (int64, no axes)."""
        return {name: average.clone() for name, average in self.shadow.items()} | {
            "num_updates": torch.tensor(self.num_updates)
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over a saved average. Raises ValueError naming missing, extra and wrongly shaped entries."""
        wanted = {"num_updates": torch.Size()} | {name: average.shape for name, average in self.shadow.items()}
        faults = [f"missing {name}" for name in wanted if name not in state]
        faults += [f"extra {name}" for name in state if name not in wanted]
        faults += [
            f"{name} is {tuple(state[name].shape)}, must be {tuple(shape)}"
            for name, shape in wanted.items()
            if name in state and state[name].shape != shape
        ]
        if faults:
            raise ValueError(f"saved average does not fit the trained weights: {'; '.join(faults)}; use the run's own config")
        for name, average in self.shadow.items():
            average.copy_(state[name])
        self.num_updates = int(state["num_updates"])

    @torch.no_grad()
    def _write(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(values[name])


def _copy(parameter: Tensor) -> Tensor:
    return parameter.detach().to(torch.float32, copy=True)
