"""Reading MNIST: the IDX format, and files that are not what they should be."""

import gzip
import hashlib
import os
import struct
import urllib.request
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from dmoe_jax.data import DataError, mnist
from dmoe_jax.data.mnist import load_mnist, read_mnist


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three images to train on and two to test: image i is all i, its label i."""
    monkeypatch.setattr(mnist, "PARTS", {"train": 3, "t10k": 2})
    for part, count in mnist.PARTS.items():
        numbers = np.arange(count, dtype=np.uint8)
        images = np.tile(numbers[:, None, None], (1, 28, 28))
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(idx(images))
        (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(idx(numbers))
    return tmp_path


def idx(array: np.ndarray, kind: int = 8) -> bytes:
    """A file of IDX, packed."""
    header = struct.pack(f">HBB{array.ndim}I", 0, kind, array.ndim, *array.shape)
    return gzip.compress(header + array.tobytes())


def test_reads_images_row_by_row_and_labels(folder: Path) -> None:
    """Image i is all i."""
    data = read_mnist(folder)
    assert data.train.pixels.shape == (3, 784)
    assert data.train.pixels[:, [0, 783]].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert data.test.labels.tolist() == [0, 1]


def test_wrong_files_are_named(folder: Path) -> None:
    """Whatever is wrong, the error names the file and what was expected."""
    path = folder / "t10k-labels-idx1-ubyte.gz"
    for content, message in (
        (idx(np.zeros(3, np.uint8)), r"expected bytes in the shape \(2,\)"),
        (idx(np.zeros(2, np.uint8), 13), "got the header 00000d01"),
        (idx(np.array([1, 10], np.uint8)), "labels from 0 to 9, got 10"),
        (gzip.compress(b"\0\0\x08\x01\0\0\0\x02" + b"\0" * 9), "more than 10 bytes"),
        (b"no gzip", "cannot be read"),
        (None, "is missing"),
    ):
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(DataError, match=rf"{path}.*{message}"):
            read_mnist(folder)


@pytest.mark.skipif("DMOE_DATA" not in os.environ, reason="DMOE_DATA is not set")
def test_the_published_files() -> None:
    """Counts of digits as published: 5,923 zeros to train on, 980 to test."""
    data = read_mnist(Path(os.environ["DMOE_DATA"], "mnist"))
    assert np.bincount(data.train.labels).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert np.bincount(data.test.labels)[0] == 980
    assert 33 < data.train.pixels.mean() < 34  # 0.1307 of 255, as everybody normalises by


@pytest.fixture
def published(folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that were asked for; the files of `folder` are what is published. The cache is empty."""
    asked: list[str] = []

    def urlopen(url: str, timeout: float) -> IO[bytes]:
        asked.append(url)
        return (folder / url.rpartition("/")[2]).open("rb")

    unpacked = {name: gzip.decompress((folder / f"{name}-ubyte.gz").read_bytes()) for name in mnist.SHA256}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in unpacked.items()}
    monkeypatch.setattr(mnist, "SHA256", digests)
    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    monkeypatch.delenv("DMOE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    return asked


def test_a_download_is_told_of_checked_and_kept(published: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """Four files once; the second time they are in the cache, and say so."""
    train, _ = data = load_mnist()
    assert len(train.labels) == 3
    assert data.origin.startswith(f"a download from {mnist.BASE_URL} (kept in ")
    assert caplog.messages == [f"downloading MNIST from {mnist.BASE_URL}"]
    assert "cache" in load_mnist().origin
    assert len(published) == 4


def test_other_bytes_than_the_published_are_refused(published: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept of them. The message says what was tried, and what would help."""
    monkeypatch.setitem(mnist.SHA256, "t10k-labels-idx1", "00")
    line = "DMOE_DATA is not set; nothing in the cache .*; download: .*t10k-labels.*Set DMOE_DATA"
    with pytest.raises(DataError, match=line):
        load_mnist()
    assert published
    monkeypatch.setenv("DMOE_DATA", "/nowhere")
    with pytest.raises(DataError, match=r"/nowhere/mnist/train-images-idx3-ubyte\.gz is missing"):
        load_mnist()
