"""Writes a file so that readers see the old content or the new, never a part."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["write_file"]


def write_file(path: Path, content: bytes) -> None:
    """Writes a temporary file in the same folder, flushes it to disk, and renames it to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, 0o644)  # mkstemp makes private files; these are results to share
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
