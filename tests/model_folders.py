"""A tiny random Llama with a byte tokenizer as a Hugging Face folder, and text for it."""

from __future__ import annotations

from pathlib import Path

import torch

from tests import tiny_models

LAYERS = tiny_models.SIZES["num_hidden_layers"]
_WORDS = (
    "the",
    "of",
    "and",
    "sparse",
    "neurons",
    "model",
    "weight",
    "token",
    "layer",
    "read",
    "skip",
    "gate",
)


def save(folder: Path, **changes) -> Path:
    """Saves the model; `changes` to its config. A token is a byte."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    with torch.random.fork_rng():
        model = tiny_models.make(
            "Llama", **{"vocab_size": len(alphabet), "max_position_embeddings": 512, **changes}
        )
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def text(characters: int, seed: int = 0) -> str:
    """Words in random order."""
    generator = torch.Generator().manual_seed(seed)
    picked = torch.randint(len(_WORDS), (characters,), generator=generator).tolist()
    return " ".join(_WORDS[i] for i in picked)[:characters]
