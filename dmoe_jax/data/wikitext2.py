"""WikiText-2 (Merity et al. 2016): its files, what is known of them, and its public copy.

The text is word level, already tokenised, with `<unk>` in place. Every line ends in one `<eos>`, blank lines too. Two
forms of the training text are known, with the same articles in another order; both give the same vocabulary.
"""

import gzip
import hashlib
import http.client
import os
import tempfile
import time
import urllib.request
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from dmoe_jax.data import DataError
from dmoe_jax.data.vocabulary import EOS

SPLITS = ("train", "valid", "test")

NUM_TOKENS: Mapping[str, int] = MappingProxyType({"train": 2_088_628, "valid": 217_646, "test": 245_569})
"""Words of each part, with one `<eos>` a line."""

VOCAB_SIZE = 33_278
"""Different words with `<eos>`; all of them occur in train."""

SHA256: Mapping[str, str] = MappingProxyType(
    {
        "train": "728c77e87e176af4730f9a80fc6008bcaff421a7202c1c048877c0eec3685f89",
        "valid": "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
        "test": "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
    }
)
"""Checksums of the uncompressed bytes. The articles of this train stand in another order than the public copy's."""

PUBLIC_TRAIN_GIT_BLOB = "2d84b35af79e411d73ea7cae83c73964c6ac83b4"
"""Git's name (SHA-1 over a header and the bytes) of the public copy's train.txt."""

BASE_URL = "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2/"

MAX_TEXT_BYTES = 16 * 2**20
"""Train is 10.8 MB. A larger file is not WikiText-2, and a small gzip file may unfold to fill the memory."""

SOCKET_TIMEOUT_S = 10.0
"""Patience with one silent connection: a machine without a network should learn it soon."""

TOTAL_TIMEOUT_S = 300.0
"""Patience with all of the download: 13 MB at 45 kB/s."""

Texts = Mapping[str, bytes]
"""The uncompressed bytes of each part."""


def split_words(text: bytes) -> list[str]:
    """The words of a text, `<eos>` for each line; a last line without a line feed is a line too.

    Raises:
      DataError: the bytes are not UTF-8.
    """
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"expected UTF-8 text: {error}") from error
    if decoded and not decoded.endswith("\n"):
        decoded += "\n"
    return decoded.replace("\n", f" {EOS} ").split()


def check_bytes(split: str, text: bytes, where: str) -> None:
    """Raise `DataError`, naming `where`, unless the bytes are a known form of this part of WikiText-2."""
    digest = hashlib.sha256(text).hexdigest()
    if digest == SHA256[split] or (split == "train" and git_blob_id(text) == PUBLIC_TRAIN_GIT_BLOB):
        return
    known = SHA256[split] + (f" or git blob {PUBLIC_TRAIN_GIT_BLOB}" if split == "train" else "")
    raise DataError(f"{where}: expected the known text with SHA-256 {known}, got {digest}")


def git_blob_id(data: bytes) -> str:
    """The name under which git stores a file: SHA-1 of b"blob <size>\\0" and its bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def read_folder(folder: str) -> Texts:
    """Read and count `train.txt.gz`, `valid.txt.gz` and `test.txt.gz` of a folder.

    Counts are checked and checksums are not: a user's copy may have its articles in an order of its own.

    Raises:
      DataError: naming the file that is missing, unreadable, too large or miscounted.
    """
    texts = {}
    for split in SPLITS:
        path = os.path.join(folder, f"{split}.txt.gz")
        text = read_gzip(path, MAX_TEXT_BYTES + 1, f"the {split} text of WikiText-2, gzip of UTF-8", "UTF-8 text")
        if len(text) > MAX_TEXT_BYTES:
            raise DataError(f"{path}: expected at most {MAX_TEXT_BYTES:,} bytes of text, got more")
        try:
            num_tokens = len(split_words(text))
        except DataError as error:
            raise DataError(f"{path}: {error}") from error
        if num_tokens != NUM_TOKENS[split]:
            raise DataError(f"{path}: expected {NUM_TOKENS[split]:,} tokens with one <eos> a line, got {num_tokens:,}")
        texts[split] = text
    return texts


def read_gzip(path: str | Path, most_bytes: int, expected: str, content: str) -> bytes:
    """The first so many bytes that are packed in a file: a small one may unfold to fill the memory.

    Raises:
      DataError: there is no such file, or it cannot be unpacked.
    """
    try:
        with gzip.open(path) as file:
            return file.read(most_bytes)
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing: expected {expected}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: expected gzip of {content}: {error}") from error


def write_folder(texts: Texts, folder: str) -> None:
    """Write the files that `read_folder` reads, each at once: a reader never sees half a file."""
    os.makedirs(folder, exist_ok=True)
    for split in SPLITS:
        descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=f".{split}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(gzip.compress(texts[split], mtime=0))
            os.replace(temporary, os.path.join(folder, f"{split}.txt.gz"))
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
            raise


def download() -> Texts:
    """Fetch the public copy; every part must be a known text, byte for byte. Small parts first, to fail soon.

    Raises:
      DataError: naming the address, and what was wrong with it.
    """
    deadline = time.monotonic() + TOTAL_TIMEOUT_S
    texts = {}
    for split in ("valid", "test", "train"):
        url = f"{BASE_URL}{split}.txt"
        texts[split] = fetch(url, deadline)
        check_bytes(split, texts[split], url)
    return texts


def fetch(url: str, deadline: float) -> bytes:
    """The bytes behind an address: at most `MAX_TEXT_BYTES`, before `deadline` on the monotonic clock.

    Certificates are verified, and proxies come from the environment.

    Raises:
      DataError: naming the address, and what was wrong with it.
    """
    parts: list[bytes] = []
    size = 0
    try:
        with urllib.request.urlopen(url, timeout=SOCKET_TIMEOUT_S) as file:
            while part := file.read(1 << 16):
                parts.append(part)
                size += len(part)
                if size > MAX_TEXT_BYTES:
                    raise DataError(f"{url}: expected at most {MAX_TEXT_BYTES:,} bytes, got more")
                if time.monotonic() > deadline:
                    raise DataError(f"{url}: not finished after {TOTAL_TIMEOUT_S:.0f} s")
    except (OSError, http.client.HTTPException) as error:
        raise DataError(f"{url}: {error}") from error
    return b"".join(parts)
