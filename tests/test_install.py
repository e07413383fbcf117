"""Installing from source: what the wheel holds, and that it says what is missing where the kernels cannot be built.

Everything is installed with pip from a copy of the sources into a folder of its own, offline, and used from another
folder; PyTorch is the environment's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
OFFLINE = ("--no-build-isolation", "--no-deps", "--no-index")

pytestmark = pytest.mark.skipif(
    subprocess.run([*PIP, "--version"], capture_output=True).returncode != 0,
    reason="this environment has no pip",
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of what the build reads, as a fresh clone has it."""
    copy = tmp_path / "source"
    copy.mkdir()
    for name in (
        "setup.py",
        "pyproject.toml",
        "MANIFEST.in",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
    ):
        shutil.copy(ROOT / name, copy)
    made = shutil.ignore_patterns("__pycache__", "*.so", "_native_reason.txt")
    for name in ("sparsemlp", "kernels", "csrc"):
        shutil.copytree(ROOT / name, copy / name, ignore=made)
    return copy


def run(*command: str, cwd: Path, **environment: str) -> str:
    """The command's output, with Python's path as given and of SPARSEMLP_ variables only the tests' cache."""
    inherited = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("SPARSEMLP_", "PYTHONPATH", "PIP_")) or k == "SPARSEMLP_CACHE_DIR"
    }
    done = subprocess.run(command, cwd=cwd, env={**inherited, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def info(site: Path, cwd: Path) -> str:
    return run(sys.executable, "-m", "sparsemlp.info", cwd=cwd, PYTHONPATH=str(site))


COMPUTE = """
import torch, sparsemlp, sparsemlp.kernels
x, w_gate, w_up, w_down_t = (torch.randn(n, 8) for n in (3, 16, 16, 16))
dense = torch.nn.functional.silu(x @ w_gate.T) * (x @ w_up.T) @ w_down_t
torch.testing.assert_close(sparsemlp.gated_mlp(x, w_gate, w_up, w_down_t), dense)
print(sparsemlp.__file__)
"""


def wheel(source: Path, folder: Path, **environment: str) -> Path:
    run(*PIP, "wheel", *OFFLINE, "-w", str(folder), ".", cwd=source, **environment)
    (built,) = folder.glob("*.whl")
    return built


def test_without_a_compiler_it_installs_and_says_so(source: Path, tmp_path: Path):
    built = wheel(source, tmp_path / "wheels", CXX="/nonexistent")
    assert built.name == "sparsemlp-0.1.0-py3-none-any.whl"
    names = set(zipfile.ZipFile(built).namelist())
    modules = {
        str(path.relative_to(source)).replace("kernels/", "sparsemlp/kernels/", 1)
        for folder in ("sparsemlp", "kernels")
        for path in (source / folder).rglob("*.py")
    }
    modules |= {str(path.relative_to(source)) for path in (source / "sparsemlp" / "router").rglob("*.json")}
    package = {name for name in names if ".dist-info/" not in name}
    assert package == modules | {"sparsemlp/py.typed", "sparsemlp/_native_reason.txt"}
    assert any(name.endswith("licenses/LICENSE") for name in names)

    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run(*PIP, "install", *OFFLINE, "--target", str(site), str(built), cwd=elsewhere)
    page = info(site, elsewhere)
    assert (
        "native     not available: extension not built: no C++ compiler was found at install (tried '/nonexistent'; "
        "install g++ or clang, or set CXX)"
    ) in page
    assert "notice:" not in page
    used = run(sys.executable, "-c", COMPUTE, cwd=elsewhere, PYTHONPATH=str(site))
    assert Path(used.strip()).is_relative_to(site)
    # The console script of the installed package.
    assert page == run(
        sys.executable, str(site / "bin" / "sparsemlp"), "info", cwd=elsewhere, PYTHONPATH=str(site)
    )
    # A checkout that hides the installed package.
    assert f"notice: {source / 'sparsemlp'} is imported and hides the package installed in {site}" in info(
        site, source
    )


def reason(source: Path, **environment: str) -> str:
    """What a build writes down when it leaves the kernels out."""
    run(sys.executable, "setup.py", "--version", cwd=source, **environment)
    return (source / "sparsemlp" / "_native_reason.txt").read_text()


def test_a_compiler_that_fails_is_quoted(source: Path, tmp_path: Path):
    compiler = tmp_path / "old-c++"
    compiler.write_text("#!/bin/sh\necho 'error: unrecognized option -std=c++20' >&2\nexit 1\n")
    compiler.chmod(0o755)
    expected = "could not compile a C++20 program at install: error: unrecognized option -std=c++20\n"
    assert reason(source, CXX=str(compiler)).endswith(expected)


def test_an_isolated_build_says_what_to_do(source: Path, tmp_path: Path):
    # pip's isolated environment holds setuptools and no torch; making one needs a package index, so it is imitated.
    hidden = tmp_path / "hidden" / "torch"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
    )
    assert "pip install --no-build-isolation ." in reason(source, PYTHONPATH=str(hidden.parent))


def test_an_editable_install_works_from_any_folder(source: Path, tmp_path: Path):
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        f"import site\nsite.addsitedir({str(site)!r})\n"
    )  # runs the .pth files
    run(*PIP, "install", *OFFLINE, "--target", str(site), "-e", ".", cwd=source, CXX="/nonexistent")
    used = run(sys.executable, "-c", COMPUTE, cwd=tmp_path, PYTHONPATH=str(site))
    assert Path(used.strip()).is_relative_to(source)


@pytest.mark.slow
def test_the_compiled_wheel_computes_from_another_folder(source: Path, tmp_path: Path):
    built = wheel(source, tmp_path / "wheels")
    assert "-cp310-abi3-" in built.name
    names = zipfile.ZipFile(built).namelist()
    assert "sparsemlp/_C.abi3.so" in names
    assert "sparsemlp/_native_reason.txt" not in names
    site = tmp_path / "site"
    run(*PIP, "install", *OFFLINE, "--target", str(site), str(built), cwd=tmp_path)
    assert "native     available on cpu" in info(site, tmp_path)
    run(sys.executable, "-c", COMPUTE, cwd=tmp_path, PYTHONPATH=str(site))


@pytest.mark.slow
def test_a_source_distribution_can_build_the_kernels(source: Path, tmp_path: Path):
    # Even one made where they cannot be built.
    code = "import setuptools.build_meta as b, sys; print(b.build_sdist(sys.argv[1]))"
    run(sys.executable, "-c", code, str(tmp_path), cwd=source, CXX="/nonexistent")
    (archive,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(archive, tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    sources = {p.relative_to(source / "csrc") for p in (source / "csrc").rglob("*") if p.is_file()}
    assert sources <= {p.relative_to(unpacked / "csrc") for p in (unpacked / "csrc").rglob("*")}
