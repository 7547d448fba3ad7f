"""What trains: a LoRA adapter or the network's own weights; and the frozen reference beside it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from flowgrpo.config import LoraConfig
from flowgrpo.families import attention_targets


def make_trainable(
    networks: Mapping[str, nn.Module], train: Literal["lora", "full"], lora: LoraConfig
) -> dict[str, nn.Parameter]:
    """Freeze everything, then free what trains, in float32. Returns it by name, ``network/parameter``."""
    for network in networks.values():
        network.requires_grad_(False).eval()
        if train == "lora":
            _add_lora(network, lora)
        else:
            network.requires_grad_(True)
    trained = {f"{name}/{n}": p for name, net in networks.items() for n, p in net.named_parameters() if p.requires_grad}
    for parameter in trained.values():
        parameter.data = parameter.data.float()
    return trained


def _add_lora(network: nn.Module, lora: LoraConfig) -> None:
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    targets = lora.targets or attention_targets(network)
    unknown = [t for t in targets if not any(n == t or n.endswith(f".{t}") for n, _ in network.named_modules())]
    if unknown:
        raise ValueError(f"model.lora.targets: no layer of {type(network).__name__} is named {unknown}; see its modules")
    peft_config = PeftConfig(
        r=lora.rank,
        lora_alpha=lora.alpha if lora.alpha is not None else 2 * lora.rank,  # type: ignore[arg-type]
        target_modules=targets,
        init_lora_weights="gaussian" if lora.init == "gaussian" else True,
    )
    if hasattr(network, "add_adapter"):
        network.add_adapter(peft_config)  # type: ignore[operator]
    else:
        inject_adapter_in_model(peft_config, network)


class Reference:
    """The frozen policy that KL is measured from: the start of the run, or what has followed the policy since.

    With LoRA the start is the network with its adapter switched off. All else is a copy of the trained weights, kept on the
    CPU: with full training, and of an adapter where the reference is to move (`moves`).
    """

    def __init__(
        self, networks: Mapping[str, nn.Module], trained: Mapping[str, nn.Parameter], train: str, moves: bool = False
    ) -> None:
        self.networks, self.trained, self.moves = networks, trained, moves
        self.held: dict[str, Tensor] | None = (
            {name: p.detach().to("cpu", copy=True) for name, p in trained.items()} if train == "full" or moves else None
        )

    def follow(self, stays: float) -> None:
        """Become `stays` times itself plus the rest of the present policy."""
        if self.held is not None and stays < 1:
            for name, parameter in self.trained.items():
                self.held[name].lerp_(parameter.detach().to("cpu"), 1 - stays)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, the networks are the reference. Take it before the policy's own forward pass, not between it and backward."""
        if self.held is None:
            with _without_adapters(self.networks):
                yield
        else:
            with swapped(self.trained, self.held):
                yield


@contextmanager
def swapped(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the parameters hold `values`; afterwards their own data again, untouched."""
    own = {name: p.data for name, p in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = values[name].to(parameter.device, parameter.dtype)
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = own[name]


@contextmanager
def _without_adapters(networks: Mapping[str, nn.Module]) -> Iterator[None]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [m for network in networks.values() for m in network.modules() if isinstance(m, BaseTunerLayer)]
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def gradient_norm(parameters: Mapping[str, nn.Parameter], max_norm: float) -> float:
    """Scale the gradients down to `max_norm`; returns their norm before."""
    return float(torch.nn.utils.clip_grad_norm_(list(parameters.values()), max_norm))
