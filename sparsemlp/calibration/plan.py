"""`Plan`: thresholds and means of a model's MLPs, and the two files they are saved in.

A saved plan is a folder with `plan.json` (format, version, method, of a screen its bits and group, target, the model's
fingerprint, each layer's figures and a checksum) and `plan.safetensors` (`<layer>.threshold`, `<layer>.skipped_mean`,
float32). Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsemlp.calibration import fingerprints
from sparsemlp.screen import check_sizes

__all__ = ["FORMAT", "METHODS", "VERSION", "LayerPlan", "Plan", "check_method", "check_target"]

FORMAT = "sparsemlp-plan"
VERSION = 1
METHODS = ("cats", "upaware", "screen")
JSON_FILE, TENSOR_FILE = "plan.json", "plan.safetensors"
_THRESHOLD, _MEAN = ".threshold", ".skipped_mean"


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """One MLP's thresholds.

    Args:
        threshold: t ≥ 0, float32, 0-d or (F,); inf: never active.
        skipped_mean: μ, float32 (F,), finite, or None for no mean compensation.
        sparsity: share of activations skipped on the calibration text.
        hidden_error: Σ(h − what replaces it)² over the skipped entries / Σh² over all, on the calibration text.
    """

    threshold: Tensor
    skipped_mean: Tensor | None
    sparsity: float
    hidden_error: float = 0.0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LayerPlan):
            return NotImplemented
        means = (self.skipped_mean, other.skipped_mean)
        same_mean = means[0] is means[1] or (None not in means and _same_bits(*means))  # type: ignore[arg-type]
        figures = (self.sparsity, self.hidden_error) == (other.sparsity, other.hidden_error)
        return figures and same_mean and _same_bits(self.threshold, other.threshold)

    __hash__ = None  # type: ignore[assignment]


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(torch.int32), b.view(torch.int32))


@dataclass
class Plan:
    """Thresholds for every MLP of one model; made by `sparsemlp.calibrate`, applied by `sparsify(model, plan)`.

    Args:
        method: "cats", "upaware" or "screen"; thresholds of the first two are on |a|, of the last on the screen's |m|.
        target: share of activations to skip that was asked for, in [0, 1).
        fingerprint: what identifies the model, see `sparsemlp.calibration.fingerprints`.
        layers: by the MLP's qualified name, in model order; the fingerprint's layers.
        tokens: how many calibration tokens the plan rests on.
        package_version: version of sparsemlp that made it.
        bits, group: of method "screen", and None of the others: bits a weight of the low-bit copies that the thresholds
            are for, and weights to a scale, see `sparsemlp.screen.pack`.

    Raises:
        ValueError: anything inconsistent: a NaN or negative threshold, a wrong shape, a layer too many or too few, a
            screen that is not offered.
    """

    method: str
    target: float
    fingerprint: dict[str, Any]
    layers: dict[str, LayerPlan]
    tokens: int = 0
    package_version: str = field(default_factory=lambda: _package_version())
    bits: int | None = None
    group: int | None = None

    def __post_init__(self) -> None:
        check_method(self.method)
        check_target(self.target)
        if self.method == "screen":
            check_sizes(self.bits, self.group)
        elif self.bits is not None or self.group is not None:
            raise ValueError(
                f"bits is {self.bits!r} and group {self.group!r} with method {self.method!r}, expected None beside "
                "any but 'screen'; leave them away"
            )
        if type(self.tokens) is not int or self.tokens < 0:
            raise ValueError(
                f"tokens is {self.tokens!r}, expected the number of calibration tokens; calibrate again"
            )
        if not isinstance(self.package_version, str):
            raise ValueError(
                f"package_version is {self.package_version!r}, expected a string; calibrate again"
            )
        known = fingerprints.layers(self.fingerprint)
        for name in known:
            if name not in self.layers:
                raise ValueError(
                    f"layers lacks {name}, expected every layer of the fingerprint; calibrate again"
                )
        for name, layer in self.layers.items():
            if name not in known:
                raise ValueError(f"layers has {name}, which the fingerprint does not know; calibrate again")
            _check_layer(name, layer, known[name]["intermediate_size"])
        self.layers = {name: self.layers[name] for name in known}

    @property
    def sparsity(self) -> float:
        """Mean over layers of the share of activations skipped on the calibration text."""
        return sum(layer.sparsity for layer in self.layers.values()) / len(self.layers)

    def check(self, model: nn.Module) -> None:
        """Checks that the plan was made for this model.

        Raises:
            ValueError: architecture, layer names, sizes or activations differ; the message says which.
        """
        differs = fingerprints.differences(
            self.fingerprint, fingerprints.fingerprint(model), "the plan", "the model"
        )
        if differs:
            raise ValueError(
                f"the plan is for another model ({differs}), expected this one's; calibrate this model"
            )

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes `plan.json` and `plan.safetensors` into the folder, which is made where missing.

        Each file appears whole or not at all. The JSON is written last and holds the tensors' checksum: after an
        interrupted save over an older plan, `load` either finds the older one or says that the two do not match.

        Raises:
            OSError: the folder cannot be written.
            ImportError: safetensors is not installed.
        """
        path = Path(folder)
        tensors = {}
        for name, layer in self.layers.items():
            tensors[name + _THRESHOLD] = layer.threshold.detach().cpu().contiguous().clone()
            if layer.skipped_mean is not None:
                tensors[name + _MEAN] = layer.skipped_mean.detach().cpu().contiguous().clone()
        data = _safetensors().save(tensors)
        record = {
            "format": FORMAT,
            "version": VERSION,
            "package_version": self.package_version,
            "method": self.method,
            **({"bits": self.bits, "group": self.group} if self.method == "screen" else {}),
            "target": self.target,
            "calibration_tokens": self.tokens,
            "tensors_sha256": hashlib.sha256(data).hexdigest(),
            "fingerprint": self.fingerprint,
            "layers": {
                name: {"sparsity": layer.sparsity, "hidden_error": layer.hidden_error}
                for name, layer in self.layers.items()
            },
        }
        text = json.dumps(record, indent=1, allow_nan=False) + "\n"
        path.mkdir(parents=True, exist_ok=True)
        _write(path / TENSOR_FILE, data)
        _write(path / JSON_FILE, text.encode())

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Plan:
        """Reads a plan that `save` wrote, bit for bit.

        Raises:
            FileNotFoundError: there is no such folder.
            ValueError: a missing, damaged, inconsistent or newer file; the message says which and what to do.
            ImportError: safetensors is not installed.
        """
        path = Path(folder)
        if not path.is_dir():
            raise FileNotFoundError(
                f"folder is {str(path)!r}, expected a folder written by Plan.save; check the path"
            )
        record = _record(path / JSON_FILE)
        data = _read(path / TENSOR_FILE)
        if hashlib.sha256(data).hexdigest() != record.get("tensors_sha256"):
            raise ValueError(
                f"{path / TENSOR_FILE} does not match the checksum in {JSON_FILE} (damaged, of another plan, or an "
                "interrupted save), expected the file saved with it; save the plan again"
            )
        try:
            tensors = _safetensors().load(data)
        except ImportError:
            raise
        except Exception as error:  # safetensors raises its own types
            raise ValueError(
                f"{path / TENSOR_FILE} is not safetensors ({error}); save the plan again"
            ) from None
        try:
            return cls._from_record(record, tensors)
        except ValueError as error:
            raise ValueError(f"the plan in {path} is damaged: {error}") from None
        except (KeyError, TypeError, AttributeError) as error:
            what = f"key {error} is missing" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path / JSON_FILE} is damaged: {what}; save the plan again") from None

    @classmethod
    def _from_record(cls, record: dict[str, Any], tensors: dict[str, Tensor]) -> Plan:
        layers = {}
        for name, figures in record["layers"].items():
            if name + _THRESHOLD not in tensors:
                raise ValueError(f"{TENSOR_FILE} lacks {name}{_THRESHOLD}; save the plan again")
            layers[name] = LayerPlan(
                tensors.pop(name + _THRESHOLD),
                tensors.pop(name + _MEAN, None),
                float(figures["sparsity"]),
                float(figures["hidden_error"]),
            )
        if tensors:
            raise ValueError(
                f"{TENSOR_FILE} has {min(tensors)}, which {JSON_FILE} does not know; save it again"
            )
        return cls(
            record["method"],
            record["target"],
            record["fingerprint"],
            layers,
            record["calibration_tokens"],
            record["package_version"],
            *(record[key] if record["method"] == "screen" else record.get(key) for key in ("bits", "group")),
        )


def check_target(target: object) -> None:
    """ValueError unless it is a number in [0, 1)."""
    if isinstance(target, bool) or not isinstance(target, (int, float)) or not 0 <= target < 1:
        raise ValueError(
            f"target is {target!r}, expected a share in [0, 1), such as 0.5 for half of the activations"
        )


def check_method(method: object) -> None:
    """ValueError unless it is a known method."""
    if method not in METHODS:
        raise ValueError(
            f"method is {method!r}, expected one of: {', '.join(METHODS)}; an unknown one may be newer"
        )


def _check_layer(name: str, layer: LayerPlan, neurons: int) -> None:
    threshold, mean = layer.threshold, layer.skipped_mean
    if tuple(threshold.shape) not in ((), (neurons,)):
        raise ValueError(
            f"threshold of layer {name} has shape {tuple(threshold.shape)}, expected () or ({neurons},); "
            "calibrate again"
        )
    if mean is not None and tuple(mean.shape) != (neurons,):
        raise ValueError(
            f"skipped_mean of layer {name} has shape {tuple(mean.shape)}, expected ({neurons},); calibrate again"
        )
    for what, tensor in (("threshold", threshold), ("skipped_mean", mean)):
        if tensor is not None and tensor.dtype != torch.float32:
            raise ValueError(f"{what} of layer {name} is {tensor.dtype}, expected float32; convert it")
    if not bool((threshold >= 0).all()):
        bad = "NaN" if bool(threshold.isnan().any()) else f"{float(threshold.min())}"
        raise ValueError(
            f"threshold of layer {name} holds {bad}, expected numbers ≥ 0 (inf: never); calibrate again"
        )
    if mean is not None and not bool(mean.isfinite().all()):
        raise ValueError(
            f"skipped_mean of layer {name} holds NaN or infinity, expected finite; calibrate again"
        )
    if not 0 <= layer.sparsity <= 1:
        raise ValueError(
            f"sparsity of layer {name} is {layer.sparsity}, expected a share in [0, 1]; calibrate again"
        )
    if not 0 <= layer.hidden_error < math.inf:
        raise ValueError(
            f"hidden_error of layer {name} is {layer.hidden_error}, expected ≥ 0; calibrate again"
        )


def _record(path: Path) -> dict[str, Any]:
    """The JSON's content after the checks that tell a plan of this version."""
    data = _read(path)
    try:
        record = json.loads(data)
    except RecursionError:
        raise ValueError(f"{path} is not valid JSON (nested too deeply); save the plan again") from None
    except ValueError as error:  # also an integer of too many digits
        raise ValueError(f"{path} is not valid JSON ({error}); save the plan again") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError(
            f"{path} is not a plan, expected format {FORMAT!r}; point to a folder written by Plan.save"
        )
    version = record.get("version")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise ValueError(
            f"{path} has version {version!r}, expected a whole number from 1; save the plan again"
        )
    if version > VERSION:
        raise ValueError(
            f"{path} has version {version}, this sparsemlp reads up to {VERSION}; "
            "install a newer sparsemlp or calibrate again"
        )
    return record


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ValueError(
            f"{path.parent} has no {path.name}, expected a folder written by Plan.save; save it again"
        ) from None
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}); check its type and permissions"
        ) from None


def _write(path: Path, data: bytes) -> None:
    """Writes the whole file under another name and renames it, so that no reader ever sees a part."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if os.name == "posix":  # the rename itself must reach the disk before the next file is written
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError(
            "saving and loading a plan needs safetensors, which is not installed; pip install 'sparsemlp[calibrate]'"
        ) from None
    return safetensors.torch


def _package_version() -> str:
    from sparsemlp import __version__

    return __version__
