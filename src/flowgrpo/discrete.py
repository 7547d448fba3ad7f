"""Models with discrete noise levels of their own (epsilon, v and data prediction) seen as flows.

Their latent x = alpha x0 + s eps is a flow's in another unit:

    y = x / (alpha + s) = (1 - sigma) x0 + sigma eps,    sigma = s / (alpha + s)

so every transition and solver serves them too; Euler's step in y is DDIM's, and the ddim transition is DDIM's eta.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flowgrpo.schedule import Grid

KINDS = ("epsilon", "v_prediction", "sample")


def is_discrete(scheduler: Any) -> bool:
    """Whether the network was trained on the levels of an `alphas_cumprod` table."""
    return hasattr(scheduler, "alphas_cumprod") and scheduler.config.get("prediction_type") in KINDS


def ddim_scheduler(scheduler: Any) -> Any:
    """The pipeline's own scheduler if it is a DDIM one, else diffusers' DDIM on the same levels."""
    from diffusers import DDIMScheduler

    return scheduler if "DDIM" in type(scheduler).__name__ else DDIMScheduler.from_config(scheduler.config)


def as_flow(kept: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """(sigma, scale) of the flow in place of alphas_cumprod: s / (alpha + s) and alpha + s."""
    alpha, s = kept.sqrt(), (1 - kept).sqrt()
    return s / (alpha + s), alpha + s


def ddim_grid(scheduler: Any, num_steps: int) -> Grid:
    """The levels that DDIM visits in this number of steps; the last one is what its config calls the final alpha."""
    ddim = ddim_scheduler(scheduler)
    ddim.set_timesteps(num_steps)
    timesteps = torch.as_tensor(ddim.timesteps).cpu()
    kept = torch.cat([ddim.alphas_cumprod[timesteps.long()], ddim.final_alpha_cumprod.reshape(1)]).double()
    sigmas, scales = as_flow(kept)
    return Grid(tuple(sigmas.tolist()), timesteps, tuple(scales.tolist()))


def ddim_level(scheduler: Any, sigma: float) -> Grid:
    """One step to 0 from the level of the table that is nearest to this one."""
    sigmas, scales = as_flow(ddim_scheduler(scheduler).alphas_cumprod.double())
    number = int((sigmas - sigma).abs().argmin())
    return Grid((float(sigmas[number]), 0.0), torch.tensor([number]), (float(scales[number]), 1.0))


def velocity(
    output: Float[Tensor, " b *s"], y: Float[Tensor, " b *s"], sigma: float, scale: float, kind: str
) -> Float[Tensor, " b *s"]:
    """v = eps - x0 from what the network says at x = scale y, alpha = scale (1 - sigma), s = scale sigma.

        epsilon: eps = output    v_prediction: x0 = alpha x - s output, eps = s x + alpha output    sample: x0 = output

    The other of x0 and eps follows from x = alpha x0 + s eps. Source: progressive distillation (2202.00512) for v.
    """
    if kind == "flow_prediction":
        return output
    if kind == "v_prediction":
        alpha, s = scale * (1 - sigma), scale * sigma
        return s * scale * y + alpha * output - (alpha * scale * y - s * output)
    if kind == "epsilon":
        return (output - y) / (1 - sigma)
    return (y - output) / sigma
