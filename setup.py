"""Builds the compiled kernels where a C++ compiler and PyTorch are present; installs pure Python elsewhere.

Everything declarative is in pyproject.toml. What is here: the package map, the extension, and the sentence that
`python -m sparsemlp.info` prints when the extension could not be built.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
REASON = ROOT / "sparsemlp" / "_native_reason.txt"
SOURCES = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc" / "cpu").glob("*.cpp"))
HEADERS = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.suffix in (".h", ".inl"))
CXX_FLAGS = [
    "-O3",
    "-std=c++20",
    "-fvisibility=hidden",
    "-Wall",
    "-Wno-maybe-uninitialized",  # GCC 12 reports both falsely from inside the AVX-512 headers
    "-Wno-uninitialized",
    "-DTORCH_STABLE_ONLY",
    "-DTORCH_TARGET_VERSION=0x020b000000000000",  # one library for PyTorch 2.11 and later
    f"-ffile-prefix-map={ROOT.resolve()}=.",  # no build folder inside what is installed
]


def compiler_problem() -> str | None:
    """Why no C++20 program can be compiled here, or None."""
    compiler = os.environ.get("CXX", "c++")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text("#include <concepts>\nint main() { return 0; }\n")
        try:
            subprocess.run(
                [*shlex.split(compiler), "-std=c++20", str(source), "-o", str(Path(folder, "probe"))],
                check=True,
                capture_output=True,
                text=True,
            )
        except OSError:
            return (
                f"no C++ compiler was found at install (tried {compiler!r}; install g++ or clang, or set CXX)"
            )
        except subprocess.CalledProcessError as error:
            lines = (error.stderr or "").strip().splitlines() or ["no message"]
            return f"the C++ compiler {compiler!r} could not compile a C++20 program at install: {lines[0]}"
    return None


def extension() -> tuple[list, dict]:
    """(ext_modules, cmdclass), empty where the extension cannot be built; the reason goes to REASON."""
    REASON.unlink(missing_ok=True)
    problem: str | None
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError:
        problem = (
            "PyTorch was not visible to the build (pip builds in an isolated environment unless told otherwise); "
            "install torch first, then run `pip install --no-build-isolation .`"
        )
    else:
        problem = compiler_problem()
    if problem is not None:
        REASON.write_text(problem + "\n")
        print(f"sparsemlp: building without compiled kernels: {problem}")
        return [], {}
    native = CppExtension(
        "sparsemlp._C",
        SOURCES,
        include_dirs=[str(ROOT / "csrc" / "include")],
        depends=HEADERS,
        extra_compile_args={"cxx": [*CXX_FLAGS, *shlex.split(os.environ.get("SPARSEMLP_CXXFLAGS", ""))]},
        py_limited_api=True,
    )
    return [native], {"build_ext": BuildExtension.with_options(no_python_abi_suffix=False)}


ext_modules, cmdclass = extension()
setup(
    packages=[*find_packages(include=["sparsemlp", "sparsemlp.*"]), "sparsemlp.kernels"],
    package_dir={"sparsemlp": "sparsemlp", "sparsemlp.kernels": "kernels"},
    package_data={
        "sparsemlp": ["py.typed", "_native_reason.txt", "router/profiles/*.json"],
        "sparsemlp.kernels": ["configs/*/*.json"],
    },
    ext_modules=ext_modules,
    cmdclass=cmdclass,
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if ext_modules else {},
)
