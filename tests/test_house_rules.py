"""The lint rules of .ci/lint.py find what they are for."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_spec = importlib.util.spec_from_file_location("house_rules", ROOT / ".ci" / "lint.py")
assert _spec is not None
assert _spec.loader is not None
lint = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(lint)


def test_only_stable_headers_are_allowed():
    good = (
        "cmath",
        "immintrin.h",
        "torch/csrc/stable/tensor.h",
        "torch/headeronly/core/ScalarType.h",
        "torch/csrc/inductor/aoti_torch/c/shim.h",
        "gated_mlp.h",
    )
    bad = (
        "torch/extension.h",
        "torch/torch.h",
        "ATen/ATen.h",
        "c10/core/Device.h",
        "pybind11/pybind11.h",
        "Python.h",
    )
    source = "".join(f"#include <{name}>\n" for name in good) + "".join(
        f'  # include "{name}"\n' for name in bad
    )
    assert lint.includes(source) == list(bad)


def test_vector_code_outside_anonymous_namespaces_is_found():
    disassembly = """
0000000000000000 <sparsemlp::(anonymous namespace)::dot(float const*)>:
   0:\tc5 f8 57 c0          \tvxorps %xmm0,%xmm0,%xmm0
0000000000000010 <std::vector<int>::size() const>:
  10:\t48 89 f8             \tmov    %rdi,%rax
0000000000000020 <float std::max<float>(float, float)>:
  20:\tc5 fa 5f c1          \tvmaxss %xmm1,%xmm0,%xmm0
"""
    assert lint.shared_vector_code(disassembly) == ["float std::max<float>(float, float)"]


def test_a_link_to_nothing_is_found(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(lint, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "[here](page.md#part) [gone](other.md) [out](https://example.org/x)\n```\n[code](no.md)\n```\n"
    )
    assert list(lint.check_links([page])) == ["page.md: links to other.md, which does not exist"]


def test_a_long_file_and_a_drawer_are_found(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(lint, "ROOT", tmp_path)
    path = tmp_path / "_utils.py"
    path.write_text("x = 1\n" * 401)
    assert list(lint.check_lengths([path])) == ["_utils.py: 401 lines, at most 400; split it"]
    assert list(lint.check_names([path])) == ["_utils.py: a module is to be named after what it holds"]
