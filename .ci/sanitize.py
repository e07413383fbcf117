"""The compiled kernels under AddressSanitizer and UndefinedBehaviorSanitizer: `make sanitize`. Needs GCC's libasan.

Builds them into build/sanitize, beside a copy of the package and its tests, so that the library in use stays as it is;
shows that an overrun in any operator on any instruction set is reported; then runs what tests the native backend: one
minute of compiling and three of tests on two cores. Masked AVX-512 loads are instructions that the sanitizer does not
look at: an overrun in one of them is found by `tests/guard_pages.py`, where every tensor touches a page that may not be
read.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "sanitize"
SANITIZERS = "-fsanitize=address,undefined,float-cast-overflow"
# The last of these win. Python's own -fwrapv would switch the check for signed overflow off; -O1 compiles in a minute,
# -O3 with sanitizers did not in several. A report does not end the process where ASAN_OPTIONS says so: OVERRUNS.
CXX_FLAGS = f"-O1 -g1 -fno-wrapv {SANITIZERS} -fno-sanitize-recover=all -fsanitize-recover=address"
SUITES = (
    "tests/test_conformance_*.py",
    "tests/test_fuzz_*.py",
    "tests/test_isa*.py",
    "tests/test_guard_pages.py",
)
TESTS = ("-k", "native and not triton", "-m", "not slow")

OVERRUNS = """
import os, sys
import numpy, torch
import sparsemlp
from sparsemlp import _native

N, D = 40, 64

def claimed(rows):
    # says that it has a row more than its memory holds, which NumPy lets one say
    own = numpy.ones((rows, D), numpy.float32)
    return torch.from_numpy(numpy.lib.stride_tricks.as_strided(own, (rows + 1, D)))

x, w, at = torch.ones(2, D), [claimed(N) for _ in range(3)], dict(threshold=torch.zeros(()), backend="native")
CALLS = {
    "activation": lambda: sparsemlp.activation(claimed(N), "relu", backend="native"),
    "gated_mlp": lambda: sparsemlp.gated_mlp(x, *w, **at),
    "mlp": lambda: sparsemlp.mlp(x, w[0], w[1], **at),
    "sparse_linear": lambda: sparsemlp.sparse_linear(torch.ones(2, N + 1), w[0], **at),
}
assert _native.problem() is None, _native.problem()
assert sparsemlp.__file__.startswith(os.getcwd()), sparsemlp.__file__
names = _native.isa_names()
for isa in range(len(names)):
    _native.isa = lambda: isa
    for name, call in CALLS.items():
        print(f"=call {name} on {names[isa]}", file=sys.stderr, flush=True)
        call()
"""


def libraries() -> str:
    """What has to be loaded before Python, as LD_PRELOAD wants it."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    paths = []
    for name in ("libasan.so", "libubsan.so", "libstdc++.so"):
        done = subprocess.run(
            [*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        )
        path = Path(done.stdout.strip())
        if not path.is_absolute():
            sys.exit(
                f"make sanitize: {shlex.join(compiler)} has no {name}, expected GCC with its sanitizers; set CXX"
            )
        paths.append(str(path.resolve()))
    return " ".join(paths)


def build() -> None:
    """The library and the copied package in FOLDER; objects of unchanged sources are kept from the last time."""
    for name in ("sparsemlp", "tests"):
        shutil.rmtree(FOLDER / name, ignore_errors=True)
    made = shutil.ignore_patterns("__pycache__", "*.so", "_native_reason.txt", "kernels")
    shutil.copytree(ROOT / "sparsemlp", FOLDER / "sparsemlp", ignore=made)
    shutil.copytree(
        ROOT / "kernels", FOLDER / "sparsemlp" / "kernels", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copytree(ROOT / "tests", FOLDER / "tests", ignore=made)
    shutil.copy(ROOT / "pyproject.toml", FOLDER)
    where = ["--build-lib", str(FOLDER), "--build-temp", str(FOLDER / "objects")]
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", *where],
        cwd=ROOT,
        env={**os.environ, "SPARSEMLP_CXXFLAGS": CXX_FLAGS, "LDFLAGS": SANITIZERS},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    built = list((FOLDER / "sparsemlp").glob("_C*.so"))
    if done.returncode != 0 or not built:
        sys.exit(f"{done.stdout}\nmake sanitize: the kernels do not compile with {CXX_FLAGS}")
    for check in (b"__asan_report_load", b"__ubsan_handle_add_overflow"):
        if check not in built[0].read_bytes():
            sys.exit(
                f"make sanitize: {built[0].name} does not call {check.decode()}: it was built without it"
            )


def check_overruns(environment: dict[str, str]) -> None:
    """Each of OVERRUNS' calls reads past its memory; each must be reported, or the tests would prove nothing."""
    done = subprocess.run(
        [sys.executable, "-c", OVERRUNS],
        cwd=FOLDER,
        env={
            **environment,
            "ASAN_OPTIONS": f"{environment['ASAN_OPTIONS']}:halt_on_error=0:suppress_equal_pcs=0",
        },
        capture_output=True,
        text=True,
    )
    calls = done.stderr.split("=call ")[1:]
    silent = [call.splitlines()[0] for call in calls if "AddressSanitizer: heap-buffer-overflow" not in call]
    if done.returncode != 0 or silent or not calls:
        sys.exit(
            f"{done.stderr[-4000:]}\nmake sanitize: overruns are not reported: {', '.join(silent) or 'it ended'}"
        )
    print(f"overruns are reported in {len(calls)} of {len(calls)} calls", flush=True)


def main() -> int:
    preload = libraries()
    print("compiling the kernels with sanitizers", flush=True)
    build()
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("SPARSEMLP_") and k != "PYTHONPATH"},
        "LD_PRELOAD": preload,
        "ASAN_OPTIONS": "detect_leaks=0",  # Python and PyTorch leave much for the end of the process
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    check_overruns(environment)
    suites = sorted(str(p.relative_to(FOLDER)) for pattern in SUITES for p in FOLDER.glob(pattern))
    # A report goes to the process's own stderr, which pytest would otherwise keep and take along when it dies.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--capture=sys",
        "-p",
        "no:cacheprovider",
        *TESTS,
        *suites,
    ]
    return subprocess.run([*command, *sys.argv[1:]], cwd=FOLDER, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
