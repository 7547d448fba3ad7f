"""Tiny pipelines with random weights, built in memory: `build("sd3")`, called with `CALLS["sd3"]`.

Two builds of a name are equal, in this process and in another. Tokenizers go by single characters.
"""

from collections.abc import Callable
from typing import Any

import diffusers
import torch
import transformers

WIDTH = 16
CHARACTERS = [chr(code) for code in range(33, 127)]
QWEN_TOKENS = ["endoftext", "im_start", "im_end", "vision_start", "vision_end", "vision_pad", "image_pad", "video_pad"]
CALLS: dict[str, dict[str, Any]] = {
    "sd3": {"height": 16, "width": 24, "guidance_scale": 3.0, "max_sequence_length": 32},
    "flux": {"height": 16, "width": 24, "guidance_scale": 3.0, "max_sequence_length": 32},
    "qwen_image": {"height": 16, "width": 24, "true_cfg_scale": 3.0, "negative_prompt": " "},
    "wan": {"height": 32, "width": 48, "num_frames": 5, "guidance_scale": 3.0, "max_sequence_length": 32},
    "wan_euler": {"height": 32, "width": 48, "num_frames": 5, "guidance_scale": 3.0, "max_sequence_length": 32},
}


def build(name: str) -> Any:
    """The pipeline of that name, in eval mode, on the CPU, silent."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(len(name))
        pipeline = _BUILDERS[name]()
        for component in pipeline.components.values():
            if isinstance(component, torch.nn.Module):
                _wake(component.eval())
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def run(name: str, pipeline: Any, prompt: str = "a red cube", *, seed: int = 0, steps: int = 2) -> torch.Tensor:
    """What the pipeline makes of the prompt, as one tensor."""
    generator = torch.Generator().manual_seed(seed)
    output = pipeline(prompt, num_inference_steps=steps, generator=generator, output_type="pt", **CALLS[name])
    return output.frames if hasattr(output, "frames") else output.images


def add_lora(network: Any, *, rank: int = 3, alpha: int = 7, seed: int = 0) -> None:
    """Attach an adapter to the attention projections, with noise in both matrices, as if it had been trained."""
    from peft import LoraConfig

    network.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, target_modules=["to_q", "to_k", "to_v"]))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


def _wake(module: torch.nn.Module) -> None:
    """Small noise into all-zero weights: a zero gate or output layer hides the prompt and stops gradients."""
    with torch.no_grad():
        for parameter in module.parameters():
            if not parameter.any():
                parameter.normal_(std=0.02)


def _clip(projected: bool) -> tuple[Any, Any]:
    letters = [*CHARACTERS, *(f"{c}</w>" for c in CHARACTERS), "<|startoftext|>", "<|endoftext|>"]
    tokenizer = transformers.CLIPTokenizer(vocab={t: i for i, t in enumerate(letters)}, merges=[], model_max_length=77)
    config = transformers.CLIPTextConfig(
        vocab_size=len(letters),
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        projection_dim=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=len(letters) - 2,
        eos_token_id=len(letters) - 1,
        pad_token_id=len(letters) - 1,
    )
    kind = transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel
    return tokenizer, kind(config)


def _t5(width: int, *, multilingual: bool = False) -> tuple[Any, Any]:
    pieces = ["<pad>", "</s>", "<unk>", "\u2581", *CHARACTERS]
    tokenizer = transformers.T5Tokenizer(vocab=[(p, -float(i)) for i, p in enumerate(pieces)], extra_ids=0)
    sizes = {"d_model": width, "d_ff": WIDTH, "d_kv": 8, "num_heads": 2, "num_layers": 2, "vocab_size": len(pieces)}
    if multilingual:
        return tokenizer, transformers.UMT5EncoderModel(transformers.UMT5Config(**sizes))
    return tokenizer, transformers.T5EncoderModel(transformers.T5Config(**sizes))


def _qwen() -> tuple[Any, Any]:
    from tokenizers.pre_tokenizers import ByteLevel

    special = [f"<|{name}|>" for name in QWEN_TOKENS]
    pieces = [*special, *sorted(ByteLevel.alphabet())]
    number = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = transformers.Qwen2Tokenizer(vocab=number, merges=[], extra_special_tokens=special[1:])
    text = {
        "vocab_size": len(pieces),
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "bos_token_id": number["<|endoftext|>"],
        "eos_token_id": number["<|im_end|>"],
        "rope_parameters": {"mrope_section": [1, 1, 2], "rope_type": "default", "rope_theta": 10_000.0},
    }
    vision = {"depth": 1, "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_heads": 2, "out_hidden_size": WIDTH}
    config = transformers.Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        vision_start_token_id=number["<|vision_start|>"],
        vision_end_token_id=number["<|vision_end|>"],
        vision_token_id=number["<|vision_pad|>"],
        image_token_id=number["<|image_pad|>"],
        video_token_id=number["<|video_pad|>"],
    )
    return tokenizer, transformers.Qwen2_5_VLForConditionalGeneration(config)


def _image_vae() -> Any:
    return diffusers.AutoencoderKL(
        latent_channels=4,
        block_out_channels=(4, 4),
        norm_num_groups=2,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.5,
        shift_factor=0.1,
    )


def _sd3() -> Any:
    (tokenizer, encoder), (tokenizer_2, encoder_2) = _clip(projected=True), _clip(projected=True)
    tokenizer_3, encoder_3 = _t5(2 * WIDTH)
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_projection_dim=16,
        joint_attention_dim=2 * WIDTH,
        pooled_projection_dim=2 * WIDTH,
        pos_embed_max_size=32,
        out_channels=4,
    )
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_image_vae(),
        text_encoder=encoder,
        tokenizer=tokenizer,
        text_encoder_2=encoder_2,
        tokenizer_2=tokenizer_2,
        text_encoder_3=encoder_3,
        tokenizer_3=tokenizer_3,
    )


def _flux() -> Any:
    (tokenizer, encoder), (tokenizer_2, encoder_2) = _clip(projected=False), _t5(WIDTH)
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        guidance_embeds=True,
        axes_dims_rope=(2, 2, 4),
    )
    return diffusers.FluxPipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=_image_vae(),
        text_encoder=encoder,
        tokenizer=tokenizer,
        text_encoder_2=encoder_2,
        tokenizer_2=tokenizer_2,
    )


def _qwen_image() -> Any:
    tokenizer, encoder = _qwen()
    transformer = diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(2, 2, 4),
    )
    vae = diffusers.AutoencoderKLQwenImage(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    return diffusers.QwenImagePipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=vae,
        text_encoder=encoder,
        tokenizer=tokenizer,
    )


def _wan(scheduler: Any) -> Any:
    tokenizer, encoder = _t5(WIDTH, multilingual=True)
    transformer = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=WIDTH,
        freq_dim=WIDTH,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    )
    vae = diffusers.AutoencoderKLWan(
        base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    return diffusers.WanPipeline(
        transformer=transformer, scheduler=scheduler, vae=vae, text_encoder=encoder, tokenizer=tokenizer
    )


_BUILDERS: dict[str, Callable[[], Any]] = {
    "sd3": _sd3,
    "flux": _flux,
    "qwen_image": _qwen_image,
    "wan": lambda: _wan(
        diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
        )
    ),
    "wan_euler": lambda: _wan(diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)),
}
