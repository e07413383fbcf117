"""Rows of `tests.mutants` for the screen: changes that break its Triton kernels, and what must notice each."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from tests import screen_cases

__all__ = ["rows"]

Check = Callable[[], object]
Row = tuple[str, str, str, Check]


def rows(cases: Callable[..., Check], call: Callable[..., Check]) -> list[Row]:
    """(file, old, new, check); `cases` and `call` make checks of named cases and of conformance tests."""
    four, three, eight = (functools.partial(screen_cases.check_places, 3, bits, 32) for bits in (4, 3, 8))
    long, wide = (functools.partial(screen_cases.check_places, 1, 4, group) for group in (32, 128))
    many4, many3, many8 = (functools.partial(screen_cases.check_places, 20, bits, 64) for bits in (4, 3, 8))
    few, many = cases("screen-4x32-0.5-silu---float-T5"), cases("screen-4x32-0.5-silu---float-T36")
    nan_copy = call("test_nan_before_the_decision_keeps", "screen_up", torch.nan, 4, torch.float32)
    nan_token = call("test_nan_before_the_decision_keeps", "x", torch.nan, 4, torch.float32)
    percent = call("test_a_threshold_one_percent_off_fails", 24, torch.float32)
    found: list[Row] = [("_screen.py", old, new, check) for old, new, check in (
        ("highest = ~tl.load", "highest = tl.load", three),
        ("word >> 1 if q % 4 == 3", "word if q % 4 == 3", three),
        ("(highest << (7 - q))", "(highest << 7)", three),
        (" ^ _HALF_SIGNS", "", four),
        ("(word << 4 if q % 2 == 0 else word)", "word", four),
        ("other=0) ^ _SIGNS", "other=0)", eight),
        ("inputs + part * 8 + q", "inputs + q", wide),
        ("at + part * (BITS * _ROWS)", "at", wide),
        ("range(0, T, SCREEN_T)", "range(0, 1, SCREEN_T)", few),
        ("for start in range(0, groups, BLOCK_G)", "for start in range(0, BLOCK_G, BLOCK_G)", long),
        ("(g < groups) & inside", "(g < groups - 1) & inside", few),
        ("inside = block * _ROWS < F", "inside = block * _ROWS < F - _ROWS", few),
        ("(row + g) * (GROUP // 4), real", "g * (GROUP // 4), real", few),
        ("tl.load(units + row + g", "tl.load(units + g", few),
        ("if bias is not None:", "if bias is None:", few),
        ("ACT(act, a, b, c) * up", "ACT(act, a, b, c)", few),
        ("tl.where(place, part[:, :, None], 0.0)", "place * part[:, :, None]", nan_token),
        ("+ _TO_INTEGER - _TO_INTEGER", "", percent),
        ("mask=k < D, other", "mask=k < D - 1, other", few),
        ('float("nan")', "0.0", nan_token),
        ("x + t * stride_x + k", "x + t + k", few),
    )]  # fmt: skip
    found += [("gated_mlp_screen.py", old, new, check) for old, new, check in (
        ("for g in range(groups):", "for g in range(groups - 1):", many),
        ("tl.where(k < 16, first, second)", "first", many3),
        ("((high & 1) << 2)) - 4", "((high & 1) << 2)) - 3", many3),
        (" ^ _HALF_SIGNS", "", many4),
        ("(28 - k % 4 * 8 - k // 4 * 4)", "(28 - k % 4 * 8)", many4),
        (" ^ _SIGNS", "", many8),
        ("+ (g * GROUP + k)[None, :]", "+ k[None, :]", many),
        ("if bias is not None:", "if bias is None:", many),
        ("act * up, mask", "act, mask", many),
    )]  # fmt: skip
    return [
        *found,
        ("_rule.py", "m = tl.load(scores +", "m += tl.load(scores +", many),
        ("_tiles.py", "(tl.abs(m) < limit) == 0", "tl.abs(m) >= limit", nan_copy),
    ]
