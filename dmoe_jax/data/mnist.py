"""MNIST (LeCun et al. 1998): its four files in IDX format, gzip, as they have always been published."""

import hashlib
import logging
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, UInt8

from dmoe_jax.data.files import TOTAL_TIMEOUT_S, DataError, NotAtHand, fetch, find_data, read_gzip

_log = logging.getLogger(__name__)

BASE_URL = "https://storage.googleapis.com/cvdf-datasets/mnist/"
"""A public copy of the four files."""

SHA256: Mapping[str, str] = MappingProxyType(
    {
        "train-images-idx3": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "train-labels-idx1": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "t10k-images-idx3": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "t10k-labels-idx1": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    }
)
"""Checksums of the unpacked files."""

_MOST_BYTES = 64 * 2**20
"""The largest unpacked file has 47 MB."""

PARTS = {"train": 60_000, "t10k": 10_000}
"""Images of each part, by its name in the files' names."""

SIDE = 28
NUM_CLASSES = 10

_WHAT = "a file of MNIST, gzip of IDX"


class Images(NamedTuple):
    """Pictures of digits, 784 pixels row by row, from 0 to 255."""

    pixels: UInt8[np.ndarray, "images pixels"]
    labels: Int32[np.ndarray, " images"]


@dataclass(frozen=True, slots=True)
class Mnist:
    """Both parts, in this order where it is unpacked: `train, test = load_mnist()`."""

    train: Images
    test: Images
    origin: str
    """Place that they come from, for people."""

    def __iter__(self) -> Iterator[Images]:
        return iter((self.train, self.test))


def load_mnist() -> Mnist:
    """MNIST from the folder `mnist` of `$DMOE_DATA`, else of the user's cache folder, else from the network.

    A download (11 MB) is kept in the cache; the log says where from (a warning). Call it before anything is compiled.

    Raises:
      DataError: `$DMOE_DATA` is set but its MNIST is missing or damaged; or it cannot be had. The message says what was
        tried.
    """
    try:
        data, origin = find_data("mnist", read_mnist, _download, BASE_URL)
    except NotAtHand as error:
        files = ", ".join(f"{name}-ubyte.gz" for name in SHA256)
        raise DataError(f"MNIST cannot be had: {error}. Set DMOE_DATA to a folder that holds mnist/{files}") from error
    return replace(data, origin=origin)


def _download(folder: Path) -> None:
    """Fetch the four files, each of them byte for byte what is known once it is unpacked."""
    _log.warning("downloading MNIST from %s", BASE_URL)
    deadline = time.monotonic() + TOTAL_TIMEOUT_S
    for name, digest in SHA256.items():
        url, path = f"{BASE_URL}{name}-ubyte.gz", folder / f"{name}-ubyte.gz"
        path.write_bytes(fetch(url, deadline))
        found = hashlib.sha256(read_gzip(path, _MOST_BYTES, _WHAT)).hexdigest()
        if found != digest:
            raise DataError(f"{url}: expected the known bytes with SHA-256 {digest}, got {found}")


def read_mnist(folder: Path) -> Mnist:
    """Read `train-images-idx3-ubyte.gz` and its three companions. Takes about half a second.

    Raises:
      DataError: naming the file that is missing, unreadable, or not of the known type and sizes.
    """
    parts = {}
    for part, count in PARTS.items():
        pixels = _read_idx(folder / f"{part}-images-idx3-ubyte.gz", (count, SIDE, SIDE))
        path = folder / f"{part}-labels-idx1-ubyte.gz"
        labels = _read_idx(path, (count,))
        if labels.max() >= NUM_CLASSES:
            raise DataError(f"{path}: expected labels from 0 to {NUM_CLASSES - 1}, got {labels.max()}")
        parts[part] = Images(pixels.reshape(count, SIDE * SIDE), labels.astype(np.int32))
    return Mnist(train=parts["train"], test=parts["t10k"], origin=str(folder))


def _read_idx(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """The bytes in a file: two zeros, the element type, the number of axes, their lengths, then the elements."""
    header = struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape)  # 8: unsigned bytes
    size = len(header) + int(np.prod(shape))
    data = read_gzip(path, size + 1, _WHAT)
    if data[: len(header)] != header or len(data) != size:
        length = f"more than {size}" if len(data) > size else f"{len(data)}"
        raise DataError(
            f"{path}: expected bytes in the shape {shape} behind the header {header.hex()}, got the header "
            f"{data[: len(header)].hex()} and {length} bytes in all"
        )
    return np.frombuffer(data, np.uint8, offset=len(header)).reshape(shape)
