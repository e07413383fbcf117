"""`sparsify` with indicators that a model, a plan or another argument does not allow: errors change nothing."""

from __future__ import annotations

import pytest

from sparsemlp.integrations.transformers import find_mlps, sparsify
from sparsemlp.nn import SparseGatedMLP
from tests import tiny_models, tiny_ungated_models
from tests.test_transformers_screen import is_screened, mlps, plan_of


@pytest.mark.parametrize(("arguments", "message"), [
    (dict(indicator="down"), r"indicator is 'down', expected one of: gate, up, product, screen"),
    (dict(indicator="screen", screen_bits=5), r"screen_bits is 5, expected one of: 3, 4, 8"),
    (dict(indicator="screen", screen_group=5), r"screen_group is 5, expected one of: 32, 64, 128"),
    (dict(indicator="screen", screen_tokens=-1), r"screen_tokens is -1, expected None or a whole number ≥ 0"),
    (dict(indicator="screen", screen_tokens="most"), r"screen_tokens is 'most', expected None or a whole number ≥ 0"),
    (dict(indicator="screen", screen_tokens="auto"), r"screen_tokens is 'auto' without a plan, expected .*; give one"),
    (dict(screen_tokens="auto"), r"screen_tokens is given with indicator 'gate', expected it with 'screen' only; .*"),
    (dict(screen_tokens=8), r"screen_tokens is given with indicator 'gate', expected it with 'screen' only; .*"),
    (dict(screen_bits=4), r"screen_bits is given with indicator 'gate', expected it with 'screen' only; leave it None"),
    (dict(indicator="up", screen_group=32), r"screen_group is given with indicator 'up', expected .*; leave it None"),
])  # fmt: skip
@pytest.mark.parametrize("sparse", [False, True])
def test_wrong_arguments(arguments: dict[str, object], message: str, sparse: bool) -> None:
    model = tiny_models.make()
    if sparse:
        sparsify(model, threshold=0.5)
    before = {name: (type(m), id(m)) for name, m in model.named_modules()}
    with pytest.raises(ValueError, match=f"^{message}$"):
        sparsify(model, threshold=0.1, **arguments)
    assert {name: (type(m), id(m)) for name, m in model.named_modules()} == before
    assert not sparse or all(m.threshold == 0.5 and m.indicator == "gate" for m in mlps(model))


@pytest.mark.parametrize(("bits", "arguments", "message"), [
    (4, dict(indicator="gate"), r"indicator is 'gate' together with a plan for 'screen', expected the plan's; .*"),
    (4, dict(screen_bits=3), r"screen_bits is 3 together with a plan for 4, expected the plan's; leave .*"),
    (4, dict(screen_group=64), r"screen_group is 64 together with a plan for 32, expected the plan's; leave .*"),
    (None, dict(indicator="screen"), r"indicator is 'screen' together with a plan for 'gate', expected the plan's; .*"),
    (None, dict(screen_bits=4), r"screen_bits is given with indicator 'gate', expected it with 'screen' only; .*"),
])  # fmt: skip
def test_arguments_beside_a_plan_that_is_another(
    bits: int | None, arguments: dict[str, object], message: str
) -> None:
    model = tiny_models.make()
    with pytest.raises(ValueError, match=f"^{message}$"):
        sparsify(model, plan_of(model, 0.1, bits), **arguments)
    assert not any(isinstance(m, SparseGatedMLP) for m in model.modules())


def test_arguments_beside_a_plan_that_say_the_same() -> None:
    model = tiny_models.make()
    plan = plan_of(model, 0.1, 3, 64)
    sparsify(model, plan, indicator="screen", screen_bits=3, screen_group=64, screen_tokens=5)
    assert is_screened(model, 3, 64)
    assert all(m.screen_tokens == 5 for m in mlps(model))
    sparsify(model, plan_of(model, 0.1, None), indicator="gate")
    assert all(m.indicator == "gate" for m in mlps(model))


@pytest.mark.parametrize("family", ["OPT", "T5", "GPT2"])
@pytest.mark.parametrize("indicator", ["screen", "product"])
@pytest.mark.parametrize("sparse", [False, True])
def test_mlps_without_a_gate(family: str, indicator: str, sparse: bool) -> None:
    model = tiny_ungated_models.make(family)
    if sparse:
        sparsify(model, threshold=0.5)
    name = next(iter(find_mlps(model)))
    before = {name: (type(m), id(m)) for name, m in model.named_modules()}
    message = (
        rf"^indicator is '{indicator}' and the MLP of {name} has no gate, expected gated MLPs only; leave .*"
    )
    with pytest.raises(ValueError, match=message):
        sparsify(model, threshold=0.1, indicator=indicator)
    if indicator == "screen":
        with pytest.raises(ValueError, match=message):
            sparsify(model, plan_of(model, 0.1))
    assert {name: (type(m), id(m)) for name, m in model.named_modules()} == before
    assert not sparse or all(m.threshold == 0.5 for m in find_mlps(model).values())
    sparsify(model, indicator="gate")


def test_a_module_with_an_input_threshold() -> None:
    model = sparsify(tiny_models.make(), threshold=0.5)
    mlps(model)[1].set_input_threshold(0.1)
    with pytest.raises(
        ValueError, match=r"^model\.layers\.1\.mlp: input_threshold is given with indicator 'screen',"
    ):
        sparsify(model, plan_of(model, 0.1))
    assert all((m.threshold, m.indicator) == (0.5, "gate") for m in mlps(model))
    sparsify(model, plan_of(model, 0.1, None))
