"""What importing costs and needs, each in a fresh process: PyTorch, and nothing that PyTorch would not bring itself."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparsemlp import _env

ROOT = Path(__file__).resolve().parent.parent

OPTIONAL = (
    "triton",
    "transformers",
    "accelerate",
    "tqdm",
    "safetensors",
    "numpy",
    "matplotlib",
    "gguf",
    "peft",
)

BLOCK = f"""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OPTIONAL!r}:
            raise ModuleNotFoundError(f"blocked by the test: {{name}}", name=name)
sys.meta_path.insert(0, Block())
"""

CALL = """
import torch, sparsemlp
g = torch.Generator().manual_seed(0)
x, w_gate, w_up, w_down_t = (torch.randn(n, 8, generator=g) for n in (3, 16, 16, 16))
dense = torch.nn.functional.silu(x @ w_gate.T) * (x @ w_up.T) @ w_down_t
"""

WALK = """
import importlib, pkgutil, sparsemlp
def modules(package):
    for found in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if found.name.startswith(SKIP) or found.name.endswith(("__main__", "._C")):
            continue
        module = importlib.import_module(found.name)
        yield module
        if found.ispkg:
            yield from modules(module)
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The code in a fresh interpreter, from the repository's root; of SPARSEMLP_ variables only the tests' cache."""
    inherited = {
        k: v for k, v in os.environ.items() if not k.startswith("SPARSEMLP_") or k == "SPARSEMLP_CACHE_DIR"
    }
    return subprocess.run(
        [sys.executable, "-W", "ignore::UserWarning", "-c", code],
        cwd=ROOT,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
    )


def check(code: str, **environment: str) -> str:
    done = run(code, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_needs_torch_only():
    check(BLOCK + CALL + "torch.testing.assert_close(sparsemlp.gated_mlp(x, w_gate, w_up, w_down_t), dense)")


def test_import_brings_only_itself_and_the_standard_library():
    out = check(
        """
import sys, torch
before = set(sys.modules)
import sparsemlp
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(new - set(sys.stdlib_module_names)))
print(*sorted(name for name in set(sys.modules) - before if name.startswith("torch.distributed")))
print(torch.cuda.is_initialized())
"""
    )
    assert out.splitlines() == ["sparsemlp", "", "False"]


def test_without_the_compiled_library():
    out = check(
        CALL
        + """
torch.testing.assert_close(sparsemlp.gated_mlp(x, w_gate, w_up, w_down_t), dense)
try:
    sparsemlp.gated_mlp(x, w_gate, w_up, w_down_t, backend="native")
except sparsemlp.BackendUnavailableError as error:
    print(error)
""",
        SPARSEMLP_NATIVE="0",
    )
    assert "native: switched off by SPARSEMLP_NATIVE=0; triton: " in out


@pytest.mark.parametrize("native", ["0", "1"])
def test_the_first_call_of_a_process_may_be_a_compiled_one(native: str):
    check(
        CALL
        + """
mlp = torch.compile(lambda *tensors: sparsemlp.gated_mlp(*tensors), fullgraph=True, backend="aot_eager")
torch.testing.assert_close(mlp(x, w_gate, w_up, w_down_t), dense)
""",
        SPARSEMLP_NATIVE=native,
    )


def test_a_wrong_environment_variable_is_named():
    for variable, value, expected in (
        ("SPARSEMLP_ISA", "avx3", "expected one of: portable, avx2, avx512, avx512bf16"),
        ("SPARSEMLP_NATIVE", "yes", "expected one of: 0, 1"),
    ):
        done = run("import sparsemlp", **{variable: value})
        assert done.returncode == 1
        last = done.stderr.strip().splitlines()[-1]
        assert last == f"ValueError: environment variable {variable} is {value!r}, {expected}"


def test_the_developers_own_cache_is_out_of_reach():
    """tests/conftest.py: in this process and in those that tests start."""
    (folder,) = check("from sparsemlp import _env; print(_env.CACHE_DIR)").splitlines()
    assert folder == str(_env.CACHE_DIR) == os.environ["SPARSEMLP_CACHE_DIR"]
    assert Path(folder).name.startswith("sparsemlp-tests-")


def test_every_module_imports_without_the_optional_packages():
    # An integration may need its library; everything else must explain a missing one when it is used, not before.
    check(
        BLOCK + "SKIP = 'sparsemlp.integrations.'" + WALK + "print([m.__name__ for m in modules(sparsemlp)])"
    )


def test_every_name_in_all_resolves():
    out = check(
        "SKIP = '-'"
        + WALK
        + """
for module in (sparsemlp, *modules(sparsemlp)):
    for name in getattr(module, "__all__", ()):
        getattr(module, name)
        print(module.__name__, name)
"""
    )
    assert "sparsemlp gated_mlp" in out.splitlines()
    assert "sparsemlp.info machine" in out.splitlines()


def test_nobody_imports_the_bare_name_kernels():
    # From the repository's root it would be our folder, elsewhere Hugging Face's package.
    def imported(node: ast.AST) -> list[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        return [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []

    for folder in ("sparsemlp", "kernels", "benchmarks", "examples", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                assert "kernels" not in {name.partition(".")[0] for name in imported(node)}, path
