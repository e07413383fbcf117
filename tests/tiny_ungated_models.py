"""Tiny Hugging Face models with ungated MLPs and random weights, and what they compute from fixed inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.3,  # activations of a size that thresholds matter for
}
IMAGE = {"image_size": 16, "patch_size": 8}


@dataclass(frozen=True)
class Family:
    """A kind of model: how to make it, its MLPs' names, class and activation, and which input it takes."""

    model: str
    config: str
    options: dict[str, Any]
    names: tuple[str, ...]
    kind: str
    activation: str
    takes: str = "ids"


def _two(pattern: str) -> tuple[str, ...]:
    return tuple(pattern.format(i) for i in range(2))


def _part(*keys: str, **changes: Any) -> dict[str, Any]:
    return {**{k: v for k, v in SIZES.items() if k not in keys}, **changes}


_VISION = _part("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
_OPT = {
    "vocab_size": 64, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "init_std": 0.3, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
_BART = {
    "vocab_size": 64, "d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40, "encoder_layers": 1,
    "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64,
    "init_std": 0.3,
}  # fmt: skip

FAMILIES = {
    "OPT": Family(
        "OPTForCausalLM", "OPTConfig", _OPT, _two("model.decoder.layers.{}"), "OPTDecoderLayer", "relu"
    ),
    "T5": Family(
        "T5ForConditionalGeneration", "T5Config",
        {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4},
        ("encoder.block.0.layer.1.DenseReluDense", "decoder.block.0.layer.2.DenseReluDense"), "T5DenseActDense", "relu",
        "pairs",
    ),
    "GPT2": Family(
        "GPT2LMHeadModel", "GPT2Config",
        {"vocab_size": 64, "n_embd": 32, "n_inner": 48, "n_layer": 2, "n_head": 4, "n_positions": 64,
         "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": None},
        _two("transformer.h.{}.mlp"), "GPT2MLP", "gelu_tanh",
    ),
    "ViT": Family("ViTModel", "ViTConfig", {**_VISION, **IMAGE}, _two("layers.{}.mlp"), "ViTMLP", "gelu", "images"),
    "CLIP": Family(
        "CLIPModel", "CLIPConfig",
        {"text_config": {**SIZES, "hidden_act": "gelu", "eos_token_id": 2},
         "vision_config": {**_VISION, **IMAGE, "hidden_act": "gelu"}, "projection_dim": 16},
        (*_two("text_model.encoder.layers.{}.mlp"), *_two("vision_model.encoder.layers.{}.mlp")), "CLIPMLP", "gelu",
        "both",
    ),
    "BERT": Family("BertModel", "BertConfig", SIZES, _two("encoder.layer.{}"), "BertLayer", "gelu"),
    "Phi": Family("PhiForCausalLM", "PhiConfig", SIZES, _two("model.layers.{}.mlp"), "PhiMLP", "gelu_tanh"),
    "BART": Family("BartModel", "BartConfig", _BART, ("encoder.layers.0", "decoder.layers.0"), "", "gelu", "pairs"),
    "Bloom": Family(
        "BloomForCausalLM", "BloomConfig",
        {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3, "bos_token_id": 1,
         "eos_token_id": None},
        _two("transformer.h.{}.mlp"), "BloomMLP", "gelu_tanh",
    ),
    "Nemotron": Family(
        "NemotronForCausalLM", "NemotronConfig", {**SIZES, "num_key_value_heads": 2, "hidden_act": "relu2"},
        _two("model.layers.{}.mlp"), "NemotronMLP", "relu2",
    ),
}  # fmt: skip

_GPT = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4}
_TWO_TOWERS = {"text_config": SIZES, "vision_config": {**_VISION, **IMAGE}}
MORE = {
    "SigLIP": Family(
        "SiglipModel", "SiglipConfig", _TWO_TOWERS,
        (*_two("text_model.encoder.layers.{}.mlp"), *_two("vision_model.encoder.layers.{}.mlp"),
         "vision_model.head.mlp"),
        "SiglipMLP", "gelu_tanh", "both",
    ),
    "DINOv2": Family(
        "Dinov2Model", "Dinov2Config", {**_VISION, **IMAGE}, _two("encoder.layer.{}.mlp"), "Dinov2MLP", "gelu", "images"
    ),
    "GPTJ": Family("GPTJModel", "GPTJConfig", _GPT, _two("h.{}.mlp"), "GPTJMLP", "gelu_tanh"),
    "CodeGen": Family("CodeGenModel", "CodeGenConfig", _GPT, _two("h.{}.mlp"), "CodeGenMLP", "gelu_tanh"),
    "GPTNeo": Family(
        "GPTNeoModel", "GPTNeoConfig",
        {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]},
        _two("h.{}.mlp"), "GPTNeoMLP", "gelu_tanh",
    ),
    "GPTNeoX": Family("GPTNeoXModel", "GPTNeoXConfig", SIZES, _two("layers.{}.mlp"), "GPTNeoXMLP", "gelu"),
    "DistilBERT": Family(
        "DistilBertModel", "DistilBertConfig",
        {"vocab_size": 64, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
        _two("transformer.layer.{}.ffn"), "FFN", "gelu",
    ),
    "Persimmon": Family("PersimmonModel", "PersimmonConfig", SIZES, _two("layers.{}.mlp"), "PersimmonMLP", "relu2"),
    "StarCoder2": Family(
        "Starcoder2Model", "Starcoder2Config", {**SIZES, "num_key_value_heads": 2, "residual_dropout": 0.1},
        _two("layers.{}.mlp"), "Starcoder2MLP", "gelu_tanh",
    ),
    "RoBERTa": Family("RobertaModel", "RobertaConfig", SIZES, _two("encoder.layer.{}"), "RobertaLayer", "gelu"),
    "ELECTRA": Family("ElectraModel", "ElectraConfig", SIZES, _two("encoder.layer.{}"), "ElectraLayer", "gelu"),
    "Whisper": Family(
        "WhisperModel", "WhisperConfig",
        {**_BART, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 32, "bos_token_id": 1,
         "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1},
        ("encoder.layers.0", "decoder.layers.0"), "", "gelu", "audio",
    ),
    "MPT": Family(
        "MptModel", "MptConfig", {"vocab_size": 64, "d_model": 32, "n_heads": 4, "n_layers": 2}, _two("blocks.{}.ffn"),
        "MptMLP", "gelu",
    ),
}  # fmt: skip
"""Families of which only the dense outputs are tested."""


def make(family: str, **changes: Any) -> nn.Module:
    f = (FAMILIES | MORE)[family]
    torch.manual_seed(0)
    return getattr(transformers, f.model)(getattr(transformers, f.config)(**{**f.options, **changes})).eval()


def run(family: str, model: nn.Module, rows: slice = slice(None)) -> Tensor:
    """The model's main output for two fixed inputs, of which `rows` are used."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 64, (2, 12), generator=g)[rows]
    dtype = next(model.parameters()).dtype
    images = torch.randn(2, 3, IMAGE["image_size"], IMAGE["image_size"], generator=g).to(dtype)[rows]
    call: dict[str, Callable[[], Any]] = {
        "ids": lambda: model(input_ids=ids)[0],
        "pairs": lambda: model(input_ids=ids, decoder_input_ids=ids.flip(1))[0],
        "images": lambda: model(pixel_values=images)[0],
        "both": lambda: _embeddings(model(input_ids=ids, pixel_values=images)),
        "audio": lambda: model(input_features=images.reshape(len(ids), -1)[:, :128].reshape(-1, 8, 16),
                               decoder_input_ids=ids)[0],
    }  # fmt: skip
    return call[(FAMILIES | MORE)[family].takes]()


def _embeddings(out: Any) -> Tensor:
    return torch.cat([out.text_embeds, out.image_embeds])
