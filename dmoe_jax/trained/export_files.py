"""The files of an exported model: safetensors, with names and facts that docs/how_to/export.md promises. No JAX.

A file begins with the size of its header in bytes (uint64), then the header in JSON, then all arrays, little-endian:

    {"__metadata__": {"format": "dmoe_jax", ...},
     "trunk.embed.table": {"dtype": "F32", "shape": [9, 8], "data_offsets": [0, 288]}, ...}

An export is one such file with everything, or a folder with `trunk.safetensors` and a file for each expert. Either may
be a stranger's: what is read is checked, sizes against the file's own, and nothing in it is executed.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dmoe_net.meaning import is_meaning

SUFFIX = ".safetensors"
TRUNK_FILE = f"trunk{SUFFIX}"
KNOWN = "experts.known"
"""Name of the array, bool [layers, *grid], that is true for experts that are there."""

_FORMAT = {"format": "dmoe_jax", "version": "1"}
_MAX_HEADER_BYTES = 16 << 20
_MAX_TEXT = 1000
DTYPES = {
    **{f"F{bits}": np.dtype(f"<f{bits // 8}") for bits in (16, 32, 64)},
    **{f"I{bits}": np.dtype(f"<i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": np.dtype(f"<u{bits // 8}") for bits in (8, 16, 32, 64)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "BOOL": np.dtype(bool),
}
"""Types of arrays by their names in a header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredArray:
    """Place of an array in a file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int
    """Byte of the file at which it begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFacts:
    """Facts of an exported model beside its parameters."""

    sizes: Mapping[str, Any]
    """Fields of `TransformerXLConfig`, those of the layer nested. Unchecked where they were read from a file."""
    router: str
    """Name of its router, or FILE.py:NAME."""
    step: int
    """Number of trunk updates that it has taken."""
    meaning: str
    """Meaning of its words, see `Vocabulary.meaning`; "" where it is not known."""
    corpus: str
    """Name of the text that it was trained on."""

    def metadata(self) -> dict[str, str]:
        """The facts as a file has them."""
        texts = {"router": self.router, "step": str(self.step), "meaning": self.meaning, "corpus": self.corpus}
        return {**_FORMAT, "config": json.dumps(self.sizes), **texts}


def is_export(path: Path) -> bool:
    """True if a path looks like an exported model: a file of its suffix, or a folder with a trunk."""
    return path.is_file() if path.suffix == SUFFIX else (path / TRUNK_FILE).is_file()


def trunk_file(path: Path) -> Path:
    """The file with the trunk and the facts of the export at a path."""
    return path / TRUNK_FILE if path.is_dir() else path


def vocabulary_folder(path: Path) -> Path:
    """Folder with the vocabulary of the export at a path, in the form that a run folder has it in."""
    return path.with_suffix(".vocabulary") if path.suffix == SUFFIX else path


def expert_metadata(uid: str) -> dict[str, str]:
    """Metadata of an expert's file."""
    return {**_FORMAT, "uid": uid}


def read_facts(path: Path) -> ExportFacts:
    """The facts of the export at a path. Raises ValueError if it is none, OSError if it cannot be read."""
    if not is_export(path):
        raise ValueError(f"there is no export {path}; expected a file {SUFFIX}, or a folder with {TRUNK_FILE}")
    file = trunk_file(path)
    _, metadata = read_header(file)
    try:
        sizes, step = json.loads(metadata["config"]), metadata["step"]
        texts = {name: metadata[name] for name in ("router", "meaning", "corpus")}
    except (KeyError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no exported model: its metadata are not those of one: {error}") from error
    if not isinstance(sizes, dict) or not (step.isdecimal() and step.isascii() and len(step) < 19):
        raise ValueError(f"{file} is no exported model: config {sizes!r:.80}, step {step!r:.80}")
    for name, text in texts.items():
        if not (is_meaning(text) if name == "meaning" else len(text) <= _MAX_TEXT and text.isprintable()):
            raise ValueError(f"{file} is no exported model: its {name} is {text!r:.80}")
    return ExportFacts(sizes=sizes, step=int(step), **texts)


def read_header(file: Path, *, uid: str | None = None) -> tuple[dict[str, StoredArray], dict[str, str]]:
    """The arrays of a file by name, and its metadata.

    Args:
      uid: the expert that the file is to be of; None: it is not an expert's.

    Raises:
      ValueError: it is no file of an export, or damaged; the message names it. OSError: it cannot be read.
    """
    try:
        header, begin, end = _read_json(file)
        metadata = header.pop("__metadata__", None)
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("its metadata are missing, or no strings")
        arrays = _arrays_of(header, begin, end)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no whole safetensors file of dmoe_jax: {error}") from error
    for name, wanted in {**_FORMAT, **({} if uid is None else {"uid": uid})}.items():
        if metadata.get(name) != wanted:
            raise ValueError(f"{file}: its metadata have {name} {metadata.get(name)!r:.80}, expected {wanted!r}")
    return arrays, metadata


def read_array(file: Path, stored: StoredArray) -> np.ndarray:
    """An array of a file, as its header has it."""
    count = math.prod(stored.shape)
    array = np.fromfile(file, stored.dtype, count, offset=stored.begin)
    if array.size != count:
        raise ValueError(f"{file} has become shorter while it was read")
    return array.reshape(stored.shape)


def _read_json(file: Path) -> tuple[dict[str, Any], int, int]:
    """The header of a file, and the bytes at which its arrays begin and end."""
    with file.open("rb") as opened:
        end = opened.seek(0, 2)
        opened.seek(0)
        num_bytes = int.from_bytes(opened.read(8), "little")
        if end < 8 or not num_bytes <= min(end - 8, _MAX_HEADER_BYTES):
            raise ValueError(
                f"a header of {num_bytes} bytes in a file of {end}; at most {_MAX_HEADER_BYTES} are allowed"
            )
        header = json.loads(opened.read(num_bytes), object_pairs_hook=_without_repeats)
    if not isinstance(header, dict):
        raise ValueError(f"expected a JSON object as its header, got {type(header).__name__}")
    return header, 8 + num_bytes, end


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is there twice")
    return found


def _arrays_of(header: Mapping[str, Any], begin: int, end: int) -> dict[str, StoredArray]:
    """Every array of a header: together they fill the file, without gaps and without overlaps."""
    arrays: dict[str, StoredArray] = {}
    spans = []
    for name, entry in header.items():
        match entry:
            case {"dtype": str(code), "shape": list(shape), "data_offsets": [int(first), int(last)], **more}:
                is_shape = len(shape) <= 32 and all(type(size) is int and 0 <= size < 1 << 48 for size in shape)
                if code not in DTYPES or not is_shape or more:
                    raise ValueError(f"array {name!r:.80} is {entry!r:.200}")
            case _:
                raise ValueError(f"array {name!r:.80} is {entry!r:.200}")
        if math.prod(shape) * DTYPES[code].itemsize != last - first:
            raise ValueError(f"array {name!r:.80} of shape {shape} has {last - first} bytes")
        arrays[name] = StoredArray(dtype=DTYPES[code], shape=tuple(shape), begin=begin + first)
        spans.append((begin + first, begin + last))
    place = begin
    for first, last in sorted(spans):
        if first != place:
            raise ValueError(f"its arrays have a gap, or overlap, at byte {place}")
        place = last
    if place != end:
        raise ValueError(f"its arrays end at byte {place}, the file at byte {end}")
    return arrays
