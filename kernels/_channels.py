"""Input sparsity: products with the entries of x that reach a threshold, from an input-major weight.

`sparse_linear` is this; by `input_threshold` it gives `gated_mlp` its gate's pre-activations. An input channel is
treated as a neuron whose pre-activation is x itself and whose activation is the identity, so the kernels are those of
the MLPs: few tokens, the channels that some token wants are listed (`_select`) and their rows of the weight added
(`_rows`); many, a mask and a dense product (`_masked`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sparsemlp.kernels import _configs, _masked, _rows, _select
from sparsemlp.kernels._launch import DTYPE_NAMES, Launch, run
from sparsemlp.kernels._rule import Rule

__all__ = ["default", "few", "many"]


def default(tokens: int, k: int, n: int, dtype: torch.dtype) -> _configs.Config:
    """A configuration that fits every supported GPU's registers and shared memory.

    The names are `gated_mlp`'s, its F being the channels K and its D the columns N. A block of channels is a few bytes
    of x: what counts is that there are several for every split of the list, dealt evenly. Many columns are enough
    programs by themselves (`benchmarks/gpu_model.py`: predicted, not measured).
    """
    splits = 8 if n > 8192 else 32
    return {"block_f": 32, "select_warps": 1, **_rows.default(tokens, dtype), "splits": splits}


def _rule(threshold: Tensor, token_scale: Tensor | None) -> Rule:
    return Rule(threshold, token_scale, None, None, "identity", "ungated")


def _key(x: Tensor, weight_t: Tensor) -> dict[str, int | str]:
    (tokens, k), n = x.shape, weight_t.shape[1]
    return {"tokens": tokens, "k": k, "n": n, "dtype": DTYPE_NAMES[x.dtype]}


def few(
    x: Tensor,
    weight_t: Tensor,
    threshold: Tensor,
    token_scale: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> tuple[Tensor, list[Launch]]:
    """The output (T, N) in out_dtype, not yet computed, and what computes it; at most `_rows.MOST_TOKENS` tokens."""
    (tokens, k), n = x.shape, weight_t.shape[1]
    config = _configs.find("sparse_linear", x.device, _key(x, weight_t), default(tokens, k, n, x.dtype))
    dealt = _rows.deal(tokens, n, k, x.dtype, config)
    listed = dealt.listed(x.device)
    select = _select.launch(
        dealt, listed, _rule(threshold, token_scale), None, None, None, x, None, None,
        block_d=1, warps=config["select_warps"], stages=1,
    )  # fmt: skip
    out, rest = _rows.launches(dealt, listed, weight_t, bias, None, out_dtype, config)
    return out, [select, *rest]


def many(
    x: Tensor, weight_t: Tensor, threshold: Tensor, token_scale: Tensor | None, bias: Tensor | None
) -> Tensor:
    """The output (T, N) in x's dtype for any number of tokens."""
    config = _configs.find("sparse_linear_prefill", x.device, _key(x, weight_t), _masked.DEFAULT)
    rule, x = _rule(threshold, token_scale), x.contiguous()
    h, mask = _masked.hidden(x, None, rule, config)
    run([mask])
    out = F.linear(h, weight_t.t(), bias)
    run([_masked.repair(x, None, h, weight_t, bias, None, out, rule, config)])
    return out
