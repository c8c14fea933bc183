"""MNIST (LeCun et al. 1998): its four files in IDX format, gzip, as they have always been published."""

import gzip
import os
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, UInt8

from dmoe_jax.data import DataError

PARTS = {"train": 60_000, "t10k": 10_000}
"""Images of each part, by its name in the files' names."""

SIDE = 28
NUM_CLASSES = 10

_UNSIGNED_BYTES = 8
"""IDX's code of the element type."""


class Images(NamedTuple):
    """Pictures of digits.

    Attributes:
      pixels: [images, 784], 0 to 255, row by row.
      labels: [images], the digits.
    """

    pixels: UInt8[np.ndarray, "images pixels"]
    labels: Int32[np.ndarray, " images"]


class Mnist(NamedTuple):
    """Both parts."""

    train: Images
    test: Images


def load_mnist() -> Mnist:
    """MNIST from the folder `mnist` in the one that the environment variable `DMOE_DATA` names; see `read_mnist`.

    Raises:
      DataError: the variable is not set, or as of `read_mnist`.
    """
    if not os.environ.get("DMOE_DATA"):
        raise DataError("set DMOE_DATA to the folder that has mnist/train-images-idx3-ubyte.gz and its companions")
    return read_mnist(Path(os.environ["DMOE_DATA"]) / "mnist")


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
    return Mnist(train=parts["train"], test=parts["t10k"])


def _read_idx(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """The bytes in a file: two zeros, the element type, the number of axes, their lengths, then the elements."""
    header = struct.pack(f">BBBB{len(shape)}I", 0, 0, _UNSIGNED_BYTES, len(shape), *shape)
    size = len(header) + int(np.prod(shape))
    try:
        with gzip.open(path) as file:
            data = file.read(size + 1)  # a small gzip file may unfold to fill the memory
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing: expected a file of MNIST, gzip of IDX") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: expected gzip of IDX: {error}") from error
    if data[: len(header)] != header or len(data) != size:
        length = f"more than {size}" if len(data) > size else f"{len(data)}"
        raise DataError(
            f"{path}: expected bytes in the shape {shape} behind the header {header.hex()}, got the header "
            f"{data[: len(header)].hex()} and {length} bytes in all"
        )
    return np.frombuffer(data, np.uint8, offset=len(header)).reshape(shape)
