"""English text that is there already: inside a wheel that the demo reads, or inside Python."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Bytes", "load"]


class Bytes:
    """A text as bytes, cut into a part for training and one that is held out; windows of them at random."""

    def __init__(self, training: str, held_out: str, name: str) -> None:
        self.name = name
        self._parts = [
            torch.frombuffer(bytearray(part.encode()), dtype=torch.uint8) for part in (training, held_out)
        ]

    def __len__(self) -> int:
        return len(self._parts[0])

    def batch(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        """(count, length + 1) of the training part, int64, from places that the generator draws."""
        part = self._parts[0]
        starts = torch.randint(len(part) - length - 1, (count,), generator=generator)
        return torch.stack([part[s : s + length + 1] for s in starts.tolist()]).long()

    def held_out(self, batches: int, count: int, length: int) -> list[Tensor]:
        """The same windows of the held-out part in every run, spread evenly over it."""
        part = self._parts[1]
        windows = batches * count
        step = max(1, math.floor((len(part) - length - 1) / windows))
        rows = [part[i * step : i * step + length + 1] for i in range(windows)]
        return [torch.stack(rows[i : i + count]).long() for i in range(0, windows, count)]


def load(source: str) -> Bytes:
    """The text called `source`.

    Args:
        source: "wikipedia" (88 English articles, 2.7 MB, in the wheel gensim; `pip install 'sparsemlp[demo]'` and
            `pip install --no-deps gensim==4.4.0`), "python" (the language reference inside Python, 0.5 MB, always
            there) or a file of UTF-8 text.
    """
    if source == "wikipedia":
        from sparsemlp.demo import data

        texts = data.load_texts()
        return Bytes("\n\n".join(texts.calibration), "\n\n".join(texts.held_out), source)
    if source == "python":
        from pydoc_data.topics import topics

        text = "\n\n".join(topics.values())
    else:
        text = Path(source).read_text(encoding="utf-8")
    cut = int(0.9 * len(text))
    return Bytes(text[:cut], text[cut:], source)
