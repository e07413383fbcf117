"""What a reader would copy works: every example, and README's Python, on a tiny random model."""

from __future__ import annotations

import csv
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import readme, report
from sparsemlp import _env, activations

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
WORDS = [f"w{i}" for i in range(100)]


def make_model(folder: Path) -> None:
    """A random Llama and a tokenizer of the words w0, w1, … as `save_pretrained` writes them."""
    transformers = pytest.importorskip("transformers", reason="the example is about Hugging Face models")
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS) + 1,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*WORDS, "?"])}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(folder)


def run(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "path",
    sorted(p for p in (ROOT / "examples").glob("*.py") if p.stem != "train_charlm"),
    ids=lambda path: path.stem,
)
def test_example_runs(path: Path, tmp_path: Path):
    assert run(str(path), cwd=tmp_path).strip()


def test_the_training_run_compares_kernels(tmp_path: Path):
    """The same losses by both kernels, an L1 term that lowers the density, and files that say so."""
    pytest.importorskip("tqdm", reason="the example shows its progress")
    script = str(ROOT / "examples" / "train_charlm.py")
    arguments = "--quick", "--activation", "jsrelu", "--l1", "0,3", "--steps", "5", "--out", "out"
    out = run(script, *arguments, cwd=tmp_path)
    with open(tmp_path / "out" / "summary.csv", encoding="utf-8", newline="") as file:
        plain, l1 = csv.DictReader(file)
    with open(tmp_path / "out" / "steps.csv", encoding="utf-8", newline="") as file:
        steps = list(csv.DictReader(file))
    with open(tmp_path / "out" / "density.csv", encoding="utf-8", newline="") as file:
        layers = [row["layer"] for row in csv.DictReader(file) if row["run"] == plain["run"]]
    assert out.count("| `jsrelu` |") == 2
    assert layers == ["block 0", "block 1"] * 2  # steps 0 and 4
    assert len(steps) == 2 * 5
    dense, sparse = ([float(row[f"loss_{kernels}"]) for row in steps[:5]] for kernels in ("dense", "sparse"))
    moved = min(abs(a - b) for a, b in itertools.pairwise(dense))
    assert max(abs(a - b) for a, b in zip(dense, sparse, strict=True)) < moved / 10  # one curve
    assert dense[-1] < dense[0]
    assert all(float(row["seconds_sparse"]) > 0 for row in steps)
    assert float(l1["density_end"]) < float(plain["density_end"])


def test_the_page_of_the_training_run_shows_the_files():
    path = ROOT / "docs" / "training_run.md"
    page = path.read_text(encoding="utf-8")
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        from charlm import report as training
    finally:
        sys.path.remove(str(ROOT / "examples"))
    found = path.with_suffix("") / "summary.csv"
    if found.is_file():
        rows = training.read(found, training.Summary)
        assert training.render(page, rows, "training_run/curves.png") == page
    row = training.Summary("r", "relu", 0.0, 3, 2.0, 2.5, 0.5, 0.25, ratio=1.5, facts="a machine")
    text = training.render(page, [row], "")
    assert "a machine.\n\n| activation |" in text
    assert "| `relu` | 0 | 2.0000 / 2.5000 | – | – / – | 50.0% → 25.0% |" in text
    assert training.render(text, [row], "") == text
    with pytest.raises(ValueError, match="put the marks back"):
        training.render("no marks", [row], "")


def test_the_five_lines_take_a_model_and_a_text(tmp_path: Path):
    make_model(tmp_path / "model")
    (tmp_path / "text.txt").write_text(" ".join(WORDS * 12))
    out = run(str(ROOT / "examples" / "five_lines.py"), "model", "text.txt", cwd=tmp_path)
    skipped = [float(found) for found in re.findall(r"([\d.]+)% of the activations", out)]
    assert len(skipped) == 2
    assert all(45 < percent < 55 for percent in skipped)


def test_readme_python_runs(tmp_path: Path):
    blocks = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 3
    make_model(tmp_path / "MODEL_DIR")
    (tmp_path / "calibration.txt").write_text(" ".join(WORDS * 30))
    end = "\nassert y.shape == x.shape and (tmp / 'plan50' / 'plan.json').is_file()\n"
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks) + "\nimport pathlib; tmp = pathlib.Path()" + end)
    assert run(str(script), cwd=tmp_path).split()[0] in WORDS


def test_readme_lists_the_environment_variables():
    rows = [line for line in README.splitlines() if line.startswith("| `SPARSEMLP_")]
    assert rows == [line for line in (_env.__doc__ or "").splitlines() if line.startswith("| `")]


def test_readme_and_page_list_the_activations():
    page = (ROOT / "docs" / "ops" / "gated_mlp.md").read_text(encoding="utf-8")
    for name, row in activations.ACTIVATIONS.items():
        assert f"`{name}`" in README
        assert re.search(rf"[` ]{name}[` ]", page)
        assert not row.params or f"`{name}`: ({', '.join(row.params)})" in page


def test_figures_come_from_the_files(tmp_path: Path):
    names = [
        "shape",
        "D",
        "F",
        "dtype",
        "tokens",
        "activation",
        "cpu",
        "threads",
        "isa",
        "torch",
        "time",
        "status",
    ]
    values = [
        "tiny",
        "64",
        "160",
        "bf16",
        "1",
        "silu",
        "CPU-7",
        "2",
        "avx2",
        "2.13",
        "2030-01-02T03:04:05",
        "verified",
    ]
    facts: dict[str, str | int | float] = dict(zip(names, values, strict=True))
    row = report.Row(
        "own_50", "own 50 %", 1, 2.346, 3, 4, 5, union_density=0.5, share_of_read=0.9, vs_eager=1.75
    )
    result = tmp_path / "benchmarks" / "results" / "cpu-7" / "tiny.csv"
    report.write_csv(report.Result(facts, [row]), result)
    (tmp_path / "docs" / "demo").mkdir(parents=True)
    (tmp_path / "docs" / "demo" / "demo.txt").write_text("what the demo printed\n")
    text = readme.render(README, tmp_path)
    assert "CPU-7, 2 threads, avx2, PyTorch 2.13, 2030-01-02." in text
    assert "| own 50 % | 50% | 2.35 | 5.0 | 90% | 1.75 | – |" in text
    assert "```text\nwhat the demo printed\n```" in text
    assert readme.render(text, tmp_path) == text
    with pytest.raises(ValueError, match="put the marks back"):
        readme.render("no marks", tmp_path)
    report.write_csv(report.Result({**facts, "status": "unverified"}, [row]), result)
    with pytest.raises(ValueError, match="unverified, expected verified"):
        readme.render(README, tmp_path)
