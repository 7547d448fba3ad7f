"""What a pipeline cannot tell by its type: found by inspection, named when it cannot be.

Adding a family that inspection gets wrong means adding one entry to a table here.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

NETWORK_NAMES = ("transformer", "transformer_2", "unet")
COPIES_ARGUMENTS = ("num_images_per_prompt", "num_videos_per_prompt")
# The first one that a pipeline takes is classifier-free guidance.
GUIDANCE_ARGUMENTS = ("true_cfg_scale", "guidance_scale")
OUTPUT_FIELDS = ("images", "frames", "image", "videos")
ATTENTION_PROJECTIONS = frozenset(
    {"to_q", "to_k", "to_v", "to_out", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"}
    | {"to_query", "to_key", "to_value", "out_layer", "img_qkv_proj", "txt_qkv_proj"}
)


def pipeline_call(pipeline: Any) -> Callable[..., Any]:
    """The pipeline's own call, past its no_grad decorator, so that replay can carry gradients."""
    return inspect.unwrap(type(pipeline).__call__)


def policy_networks(pipeline: Any) -> dict[str, nn.Module]:
    """The denoisers, by component name. Raises ValueError when there is none."""
    found = {n: getattr(pipeline, n) for n in NETWORK_NAMES if isinstance(getattr(pipeline, n, None), nn.Module)}
    if not found:
        raise ValueError(
            f"{type(pipeline).__name__} has no denoiser under any of the names {', '.join(NETWORK_NAMES)}; "
            "only diffusion pipelines can be trained"
        )
    return found


def copies_argument(pipeline: Any) -> str | None:
    """The argument that asks for several samples of a prompt, if the pipeline has one."""
    return _first_argument(pipeline, COPIES_ARGUMENTS)


def guidance_argument(pipeline: Any) -> str | None:
    """The argument of classifier-free guidance, if the pipeline has it.

    A scale without a negative prompt beside it is an embedded, distilled one (FLUX.2): it goes through model.call.
    """
    takes_negative = "negative_prompt" in inspect.signature(pipeline_call(pipeline)).parameters
    return _first_argument(pipeline, GUIDANCE_ARGUMENTS) if takes_negative else None


def _first_argument(pipeline: Any, names: tuple[str, ...]) -> str | None:
    parameters = inspect.signature(pipeline_call(pipeline)).parameters
    return next((name for name in names if name in parameters), None)


def output_of(result: Any) -> torch.Tensor:
    """The pictures or films in a pipeline's output object."""
    for name in OUTPUT_FIELDS:
        if getattr(result, name, None) is not None:
            return getattr(result, name)
    raise ValueError(f"cannot find pictures in {type(result).__name__}; expected one of the fields {OUTPUT_FIELDS}")


def attention_targets(network: nn.Module) -> list[str]:
    """Full names of the linear layers that are attention projections. Raises ValueError when there are none."""
    linear = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    found = [n for n in linear if n.rsplit(".", 1)[-1] in ATTENTION_PROJECTIONS or ".".join(n.split(".")[-2:]) == "to_out.0"]
    if not found:
        raise ValueError(
            f"{type(network).__name__} has no attention projection of a known name; give model.lora.targets, "
            f"for instance {sorted({n.rsplit('.', 1)[-1] for n in linear})[:6]}"
        )
    return found


def size_rule(pipeline: Any, name: str) -> tuple[int, int]:
    """(unit, rest): legal values of height, width or num_frames are multiples of the unit plus the rest."""
    if name == "num_frames":
        return int(getattr(pipeline, "vae_scale_factor_temporal", 1)), 1
    scale = getattr(pipeline, "vae_scale_factor_spatial", None) or getattr(pipeline, "vae_scale_factor", 1)
    patch = next(iter(policy_networks(pipeline).values())).config.get("patch_size", 1)  # type: ignore[union-attr]
    patch = patch if isinstance(patch, int) else patch[-1]
    return int(scale) * max(int(patch or 1), 2 if hasattr(pipeline, "_pack_latents") else 1), 0


def check_size(pipeline: Any, name: str, value: int) -> None:
    """Raise ValueError, with the nearest legal values, for a size that the pipeline would round or refuse."""
    unit, rest = size_rule(pipeline, name)
    if (value - rest) % unit:
        below = (value - rest) // unit * unit + rest
        legal = [str(v) for v in (below, below + unit) if v > 0]
        what = f"a multiple of {unit}" + (f" plus {rest}" if rest else "")
        raise ValueError(f"sampler.{name}={value} must be {what} for {type(pipeline).__name__}; nearest: {' or '.join(legal)}")
