"""The networks of the embedded pipeline: autoencoder, tokenizer, text encoders and transformer, untrained."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from diffusers.models.attention_processor import Attention
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

from reward_models.shapes_world import KINDS, captions, meanings

MAX_TOKENS = 14
SHIFT = 3.0


def new_vae() -> AutoencoderKL:
    """Four latent channels at a quarter of the resolution."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 48),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=32,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )


def new_tokenizer() -> CLIPTokenizer:
    """CLIP's byte-level pairs with one token for each word of the grammar, and single characters for all else.

    Words are merged from their end: only one pair then ever applies, so that no word can break up another.
    """
    vocab: dict[str, int] = {}
    merges: list[tuple[str, str]] = []
    for suffix in ("", "</w>"):
        for char in sorted(pre_tokenizers.ByteLevel.alphabet()):
            vocab[char + suffix] = len(vocab)
    texts = (caption for kind in KINDS for meaning in meanings(kind) for caption in captions(meaning))
    for word in sorted({word for text in texts for word in text.split() if len(word) > 1}):
        right = word[-1] + "</w>"
        for char in reversed(word[:-1]):
            if char + right not in vocab:
                vocab[char + right] = len(vocab)
                merges.append((char, right))
            right = char + right
    for special in ("<|startoftext|>", "<|endoftext|>"):
        vocab[special] = len(vocab)
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=MAX_TOKENS)


def new_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModelWithProjection:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        projection_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=MAX_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModelWithProjection(config)


def silent_tokenizer() -> PreTrainedTokenizerFast:
    """Makes one end token of any text: nothing is cut off, whatever max_sequence_length the pipeline is called with."""
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(Regex(r"[\s\S]"), "")
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=256
    )


def silent_t5(width: int) -> T5EncoderModel:
    """A one-layer T5 whose final norm is zero, so that it says nothing.

    The architecture is at home without its T5, and then sees zeros in its place, but plain `from_pretrained` refuses
    a folder where it is missing.
    """
    config = T5Config(vocab_size=98, d_model=width, d_kv=8, d_ff=8, num_layers=1, num_heads=1)
    encoder = T5EncoderModel(config)
    torch.nn.init.zeros_(encoder.encoder.final_layer_norm.weight)
    return encoder


def new_pipeline(vae: AutoencoderKL) -> StableDiffusion3Pipeline:
    """Stable Diffusion 3's architecture, its T5 silent: 2.3 million parameters in the transformer."""
    tokenizer = new_tokenizer()
    transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=4,
        num_attention_heads=4,
        attention_head_dim=32,
        caption_projection_dim=128,
        joint_attention_dim=128,
        pooled_projection_dim=128,
        pos_embed_max_size=4,
        qk_norm="rms_norm",
    )
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        vae=vae,
        text_encoder=new_text_encoder(tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=new_text_encoder(tokenizer),
        tokenizer_2=tokenizer,
        text_encoder_3=silent_t5(transformer.config.joint_attention_dim),
        tokenizer_3=silent_tokenizer(),
    )


class BiasedJointAttention:
    """SD3's joint attention with a bias on the keys, which makes one zero token weigh as much as many.

    Equal tokens stay equal through the blocks, as text has no positions there; n of them are one whose logit as a
    key is larger by log n. So 256 zero tokens cost as much as one.
    """

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        key_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        def heads(projection: torch.nn.Module, x: Tensor) -> Tensor:
            return projection(x).unflatten(2, (attn.heads, -1)).transpose(1, 2)

        image, text = hidden_states, encoder_hidden_states
        query = torch.cat([attn.norm_q(heads(attn.to_q, image)), attn.norm_added_q(heads(attn.add_q_proj, text))], dim=2)
        key = torch.cat([attn.norm_k(heads(attn.to_k, image)), attn.norm_added_k(heads(attn.add_k_proj, text))], dim=2)
        value = torch.cat([heads(attn.to_v, image), heads(attn.add_v_proj, text)], dim=2)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=key_bias)
        image, text = mixed.transpose(1, 2).flatten(2).split([image.shape[1], text.shape[1]], dim=1)
        image = attn.to_out[0](image)
        return image, text if attn.context_pre_only else attn.to_add_out(text)
