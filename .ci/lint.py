"""The house's own rules, beside ruff, clang-format and mypy: `python .ci/lint.py`, or `make lint`.

Each rule returns the sentences of what breaks it; any sentence fails the run.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 400
MAX_SETUP_LINES = 100
SOURCES = (".py", ".cpp", ".cu", ".h", ".inl")
DRAWERS = {"utils", "util", "common", "helpers", "helper", "misc"}

# One library runs on every later PyTorch only while nothing but its stable headers is included.
ALLOWED_INCLUDE = re.compile(
    r"torch/csrc/stable/|torch/headeronly/|torch/csrc/inductor/aoti_torch/c/|(?!torch/|ATen/|c10/|pybind11/|Python\.h)"
)
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
FUNCTION = re.compile(r"^[0-9a-f]+ <(?P<name>.*)>:$")
ANONYMOUS = ("(anonymous namespace)", "_GLOBAL__N_")  # the latter in names that objdump cannot spell out
VECTOR = re.compile(r"\tv[a-z0-9]+ ")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def tracked() -> list[Path]:
    """The files under version control, and those that would be with `git add .`."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [ROOT / line for line in listed.splitlines() if (ROOT / line).is_file()]


def includes(source: str) -> list[str]:
    """The headers a C++ file may not include."""
    return [name for name in INCLUDE.findall(source) if not ALLOWED_INCLUDE.match(name)]


def shared_vector_code(disassembly: str) -> list[str]:
    """Functions with VEX/EVEX code that other objects can link to.

    The linker keeps one copy of a function that several objects define; were it one compiled for AVX-512, every CPU
    would run it. Code for a raised instruction set therefore lives in anonymous namespaces.
    """
    found, current = set(), ""
    for line in disassembly.splitlines():
        if header := FUNCTION.match(line):
            current = header["name"]
        elif VECTOR.search(line) and not any(mark in current for mark in ANONYMOUS):
            found.add(current)
    return sorted(found)


def check_includes(files: list[Path]) -> Iterator[str]:
    for path in files:
        if path.is_relative_to(ROOT / "csrc") and path.suffix in SOURCES:
            for name in includes(path.read_text()):
                yield f"{path.relative_to(ROOT)}: includes <{name}>, which is not of PyTorch's stable ABI"


def check_isa_objects() -> Iterator[str]:
    names = [p.stem for p in (ROOT / "csrc" / "cpu").glob("*.cpp") if "_avx" in p.stem]
    objects = [o for name in names for o in (ROOT / "build").rglob(f"{name}.o")]
    objects = [o for o in objects if "sanitize" not in o.parts]  # `make sanitize` installs nothing
    tool = shutil.which("objdump")
    if tool is None or (names and not objects):
        why = "objdump is not installed" if tool is None else "no compiled objects under build/"
        print(f"skipped: instruction sets of compiled objects ({why})")
        return
    for path in objects:
        text = subprocess.run([tool, "-dC", str(path)], capture_output=True, text=True, check=True).stdout
        for name in shared_vector_code(text):
            yield f"{path.relative_to(ROOT)}: {name} holds AVX code outside an anonymous namespace"


def check_lengths(files: list[Path]) -> Iterator[str]:
    for path in files:
        if path.suffix not in SOURCES:
            continue
        limit = MAX_SETUP_LINES if path == ROOT / "setup.py" else MAX_LINES
        lines = len(path.read_text().splitlines())
        if lines > limit:
            yield f"{path.relative_to(ROOT)}: {lines} lines, at most {limit}; split it"


def check_names(files: list[Path]) -> Iterator[str]:
    for path in files:
        if path.suffix in SOURCES and path.stem.strip("_") in DRAWERS:
            yield f"{path.relative_to(ROOT)}: a module is to be named after what it holds"


def check_links(files: list[Path]) -> Iterator[str]:
    for path in files:
        if path.suffix != ".md":
            continue
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        for target in LINK.findall(text):
            if "://" not in target and not (path.parent / target).exists():
                yield f"{path.relative_to(ROOT)}: links to {target}, which does not exist"


def check_packages() -> Iterator[str]:
    """A folder of modules without __init__.py would be left out of the wheel."""
    for folder in sorted((ROOT / "sparsemlp").rglob("*")):
        if folder.is_dir() and any(folder.glob("*.py")) and not (folder / "__init__.py").is_file():
            yield f"{folder.relative_to(ROOT)}: has modules but no __init__.py"


def check_figures() -> Iterator[str]:
    """README shows the committed figures. While new ones are being made there is nothing to hold it against."""
    folders = ["docs/demo", "benchmarks/results"]
    status = ["git", "status", "--porcelain", "--", *folders]
    if subprocess.run(status, cwd=ROOT, capture_output=True, text=True, check=True).stdout:
        print(
            "skipped: README's figures (docs/demo or benchmarks/results has changes that are not committed)"
        )
        return
    command = [sys.executable, "-m", "benchmarks.readme", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        yield done.stderr.strip()


def main() -> int:
    files = tracked()
    problems = [
        *check_includes(files),
        *check_isa_objects(),
        *check_lengths(files),
        *check_names(files),
        *check_links(files),
        *check_packages(),
        *check_figures(),
    ]
    print("\n".join(problems) or "house rules: all kept")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
