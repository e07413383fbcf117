"""Training an MLP, gated or not, on a GPU: forward with what is stored, backward without what has derivative 0.

Three ways, exact all of them:

* dense, the default: the vendor's products, with masks, derivatives and column sums fused into one pass between them;
* `compact` in the configuration: products of the living neurons only (`_training_living`), for any number of them;
* below the density `gather_below`: products by lists of entries (`_training_lists`). The host reads the number of
  entries then, one wait in a forward and one in a backward pass, and never while a CUDA graph is captured.

A 0 of a masked entry times an inf or NaN is NaN in a dense product: what is not finite is computed again with a select
for every entry (`_masked`, `_training_entries.repair`). Column sums are partial sums of blocks of tokens, added by
PyTorch in a fixed order: a call gives the same bits again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sparsemlp._layout import float32_run, in_memory, with_rows
from sparsemlp.kernels import _configs, _masked, _training_lists
from sparsemlp.kernels import _training_entries as entries
from sparsemlp.kernels import _training_living as living
from sparsemlp.kernels._launch import DTYPE_NAMES, Launch, run
from sparsemlp.kernels._rule import Rule
from sparsemlp.kernels._training_entries import Stored
from sparsemlp.kernels._training_lists import Lists
from sparsemlp.reference import training as reference
from sparsemlp.reference.gated_mlp import gemm_bias
from sparsemlp.reference.training import GATED_WANTED, WANTED, names_of

__all__ = ["default", "gated_mlp_bwd", "gated_mlp_fwd", "mlp_bwd", "mlp_fwd"]

_SUMS = ("b_gate", "b_up", "skipped_mean")
"""Gradients that are sums over tokens."""
_AS_GATED = {"w_in": "w_gate", "b_in": "b_gate", "w_out_t": "w_down_t"}


def default(dtype: torch.dtype) -> _configs.Config:
    """A configuration that fits every supported GPU's registers and shared memory; nothing in it was measured."""
    return {
        **_masked.DEFAULT,
        **entries.DEFAULT,
        **living.default(dtype),
        **_training_lists.DEFAULT,
        "compact": False,  # whether dead neurons are left out of dense products
        "gather_below": 0.0,  # the density of entries below which products go by lists; 0: never, and no look at it
    }


class _Operands(NamedTuple):
    """What a backward pass multiplies besides what is stored, rows in consecutive memory."""

    grad: Tensor
    x: Tensor
    w_gate: Tensor
    w_up: Tensor | None
    w_down_t: Tensor


def _config(pre: Tensor, d: int) -> _configs.Config:
    (tokens, f), dtype = pre.shape, pre.dtype
    key = {"tokens": tokens, "d": d, "f": f, "dtype": DTYPE_NAMES[dtype]}
    return _configs.find("training", pre.device, key, default(dtype))


def _rule(
    threshold: Tensor,
    token_scale: Tensor | None,
    skipped_mean: Tensor | None,
    params: Tensor | None,
    activation: str,
    indicator: str,
) -> Rule:
    limit, scale, mean, values = (float32_run(t) for t in (threshold, token_scale, skipped_mean, params))
    assert limit is not None
    return Rule(limit, scale, mean, values, activation, indicator)


def _rows(t: Tensor) -> Tensor:
    return with_rows(in_memory(t))


def _done(result: tuple[Tensor, Launch]) -> Tensor:
    """What a launch computes, computed."""
    out, launch = result
    run([launch])
    return out


def mlp_fwd(
    x: Tensor,
    w_in: Tensor,
    w_out_t: Tensor,
    threshold: Tensor,
    token_scale: Tensor | None,
    skipped_mean: Tensor | None,
    skipped_out: Tensor | None,
    b_in: Tensor | None,
    b_out: Tensor | None,
    activation_params: Tensor | None,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """The operator's arguments in order."""
    if 0 in (*x.shape, *w_in.shape):
        return reference.mlp_fwd(
            x, w_in, w_out_t, threshold, token_scale, skipped_mean, skipped_out, b_in, b_out, activation_params,
            activation,
        )  # fmt: skip
    pre = F.linear(x, w_in, b_in)
    rule = _rule(threshold, token_scale, skipped_mean, activation_params, activation, "ungated")
    return _forward(Stored(pre, None, rule), w_out_t, b_out, skipped_out), pre


def gated_mlp_fwd(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down_t: Tensor,
    threshold: Tensor,
    token_scale: Tensor | None,
    skipped_mean: Tensor | None,
    skipped_out: Tensor | None,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    b_down: Tensor | None,
    activation_params: Tensor | None,
    activation: str,
    indicator: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The operator's arguments in order."""
    if 0 in (*x.shape, *w_gate.shape):
        return reference.gated_mlp_fwd(
            x, w_gate, w_up, w_down_t, threshold, token_scale, skipped_mean, skipped_out, b_gate, b_up, b_down,
            activation_params, activation, indicator,
        )  # fmt: skip
    pre, up = F.linear(x, w_gate, b_gate), F.linear(x, w_up, b_up)
    rule = _rule(threshold, token_scale, skipped_mean, activation_params, activation, indicator)
    return _forward(Stored(pre, up, rule), w_down_t, b_down, skipped_out), pre, up


def _forward(stored: Stored, w_t: Tensor, b: Tensor | None, skipped_out: Tensor | None) -> Tensor:
    w_t, pre, dtype = _rows(w_t), stored.pre, stored.pre.dtype
    config = _config(pre, w_t.shape[1])
    b, shift = None if b is None else in_memory(b).contiguous(), float32_run(skipped_out)
    lists = _listed(stored, config, both=False)
    if lists is not None:
        found, launch = _training_lists.values(stored, lists, {"w_down_t"}, config)
        run([launch])
        assert found.hidden is not None
        return _done(
            _training_lists.product(
                lists, found.hidden, w_t, dtype, config, moving=False, bias=b, skipped_out=shift
            )
        )
    order = _living(stored, config, both=False)
    places = None if order is None else order.places
    h = _done(_masked.hidden(pre, stored.up, stored.rule, config, places=places))
    if order is None:
        out = F.linear(h, w_t.t(), gemm_bias(b, skipped_out, dtype))
    else:
        out = _done(living.rows_product(h, w_t, order, config, bias=b, skipped_out=shift))
    run([_masked.repair(pre, stored.up, h, w_t, b, shift, out, stored.rule, config, places=places)])
    return out


def _capturing(t: Tensor) -> bool:
    return t.is_cuda and torch.cuda.is_current_stream_capturing()


def _listed(stored: Stored, config: _configs.Config, *, both: bool) -> Lists | None:
    """The entries' lists, by token, where they are so few that products by them are faster."""
    below = config["gather_below"]
    if below <= 0 or _capturing(stored.pre):
        return None
    counts = _done(_training_lists.counts(stored, config, both=both))
    starts = F.pad(counts.cumsum(0, dtype=torch.int64), (1, 0))
    found = int(starts[-1])
    if found >= below * stored.pre.numel():
        return None
    lists, launch = _training_lists.filled(stored, starts, found, config, both=both)
    run([launch])
    return lists


def _living(stored: Stored, config: _configs.Config, *, both: bool) -> living.Living | None:
    """The neurons with the living ones first, where the dead are to be left out."""
    if not config["compact"]:
        return None
    return living.ordered(_done(living.flags(stored, config, both=both)))


def mlp_bwd(
    grad: Tensor,
    x: Tensor,
    w_in: Tensor,
    w_out_t: Tensor,
    pre: Tensor,
    threshold: Tensor,
    token_scale: Tensor | None,
    skipped_mean: Tensor | None,
    activation_params: Tensor | None,
    activation: str,
    wanted: str,
) -> tuple[Tensor, ...]:
    """The operator's arguments in order."""
    if 0 in (*x.shape, *w_in.shape):
        return reference.mlp_bwd(
            grad, x, w_in, w_out_t, pre, threshold, token_scale, skipped_mean, activation_params, activation, wanted
        )  # fmt: skip
    rule = _rule(threshold, token_scale, skipped_mean, activation_params, activation, "ungated")
    operands = _Operands(_rows(grad), _rows(x), _rows(w_in), None, _rows(w_out_t))
    names = {_AS_GATED.get(name, name) for name in names_of(wanted)}
    found = _backward(Stored(pre.contiguous(), None, rule), operands, names)
    return _results(x, skipped_mean, found, tuple(_AS_GATED.get(name, name) for name in WANTED))


def gated_mlp_bwd(
    grad: Tensor,
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down_t: Tensor,
    pre: Tensor,
    up: Tensor,
    threshold: Tensor,
    token_scale: Tensor | None,
    skipped_mean: Tensor | None,
    activation_params: Tensor | None,
    activation: str,
    indicator: str,
    wanted: str,
) -> tuple[Tensor, ...]:
    """The operator's arguments in order."""
    if 0 in (*x.shape, *w_gate.shape):
        return reference.gated_mlp_bwd(
            grad, x, w_gate, w_up, w_down_t, pre, up, threshold, token_scale, skipped_mean, activation_params,
            activation, indicator, wanted,
        )  # fmt: skip
    rule = _rule(threshold, token_scale, skipped_mean, activation_params, activation, indicator)
    operands = _Operands(*(_rows(t) for t in (grad, x, w_gate, w_up, w_down_t)))
    found = _backward(Stored(pre.contiguous(), up.contiguous(), rule), operands, set(names_of(wanted)))
    return _results(x, skipped_mean, found, GATED_WANTED)


def _results(
    x: Tensor, skipped_mean: Tensor | None, found: dict[str, Tensor], names: tuple[str, ...]
) -> tuple[Tensor, ...]:
    mean = x.new_empty((0,), dtype=torch.float32 if skipped_mean is None else skipped_mean.dtype)
    none = {name: x.new_empty((0,)) for name in names} | {"skipped_mean": mean}
    return tuple(found[name].to(none[name].dtype) if name in found else none[name] for name in names)


def _backward(stored: Stored, operands: _Operands, names: set[str]) -> dict[str, Tensor]:
    if not names:
        return {}
    config = _config(stored.pre, operands.x.shape[1])
    lists = _listed(stored, config, both=True)
    if lists is not None:
        return _by_lists(stored, operands, names, lists, config)
    return _dense(stored, operands, names, config)


def _by_lists(
    stored: Stored, operands: _Operands, names: set[str], lists: Lists, config: _configs.Config
) -> dict[str, Tensor]:
    """The gradients `names` by gathered rows."""
    grad, x, w_gate, w_up, w_down_t = operands
    value, launch = _training_lists.values(stored, lists, names, config, grad, w_down_t)
    run([launch])
    found: dict[str, Tensor] = {}
    if "x" in names:
        assert value.grad_pre is not None
        more = None if w_up is None or value.grad_up is None else (value.grad_up, w_up)
        found["x"] = _done(
            _training_lists.product(lists, value.grad_pre, w_gate, x.dtype, config, moving=True, more=more)
        )
    if names == {"x"}:
        return found
    turned, one = (
        _training_lists.by_neuron(lists, stored.pre.shape[1]),
        x.new_ones((1, 1)).expand(x.shape[0], 1),
    )
    for name, of, by in (
        ("w_gate", value.grad_pre, x), ("w_up", value.grad_up, x), ("w_down_t", value.hidden, grad),
        ("b_gate", value.grad_pre, one), ("b_up", value.grad_up, one), ("skipped_mean", value.grad_mean, one),
    ):  # fmt: skip
        if name in names:
            assert of is not None
            dtype = torch.float32 if name == "skipped_mean" else x.dtype
            moving = of is value.grad_pre
            found[name] = _done(_training_lists.product(turned, of, by, dtype, config, moving=moving))
    return {name: g[:, 0] if name in _SUMS else g for name, g in found.items()}


def _dense(
    stored: Stored, operands: _Operands, names: set[str], config: _configs.Config
) -> dict[str, Tensor]:
    """The gradients `names` by dense products, of the living neurons only where that is configured."""
    grad, x, w_gate, w_up, w_down_t = operands
    order = _living(stored, config, both=True)
    places = None if order is None else order.places
    if names == {"w_down_t"}:
        hidden = _done(_masked.hidden(stored.pre, stored.up, stored.rule, config, places=places))
        parts = entries.Gradients(None, None, hidden, {})
    else:
        step = grad @ w_down_t.t() if order is None else _done(
            living.hidden_product(grad, w_down_t, order, config)
        )  # fmt: skip
        parts, launch = entries.gradients(step, stored, names, config, places)
        run([launch])
    found = {name: partial.sum(dim=0) for name, partial in parts.sums.items()}
    for name, values, factor in (
        ("w_gate", parts.grad_pre, x), ("w_up", parts.grad_up, x), ("w_down_t", parts.hidden, grad),
    ):  # fmt: skip
        if name in names:
            assert values is not None
            product = values.t() @ factor if order is None else _done(
                living.weight_product(values, factor, order, config)
            )  # fmt: skip
            moving = values is parts.grad_pre
            run([entries.repair(
                product, values, factor, stored, config, by_neuron=True, moving=moving, places=places
            )])  # fmt: skip
            found[name] = product
    if "x" in names:
        assert parts.grad_pre is not None
        more = None if w_up is None or parts.grad_up is None else (parts.grad_up, w_up)
        product = _rows_product(parts.grad_pre, w_gate, order, config)
        if more is not None:
            product = _rows_product(*more, order, config, product)
        run([entries.repair(
            product, parts.grad_pre, w_gate, stored, config, by_neuron=False, moving=True, places=places, more=more
        )])  # fmt: skip
        found["x"] = product
    return found


def _rows_product(
    values: Tensor,
    w: Tensor,
    order: living.Living | None,
    config: _configs.Config,
    added: Tensor | None = None,
) -> Tensor:
    """values @ w (+ added), values (T, F) and w (F, D)."""
    if order is not None:
        return _done(living.rows_product(values, w, order, config, added=added))
    return values @ w if added is None else torch.addmm(added, values, w)
