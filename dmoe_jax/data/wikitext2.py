"""WikiText-2 (Merity et al. 2016): its files, what is known of them, and its public copy.

The text is word level, already tokenised, with `<unk>` in place. Every line ends in one `<eos>`, blank lines too. Two
forms of the training text are known, with the same articles in another order; both give the same vocabulary.
"""

import gzip
import hashlib
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from dmoe_jax.data import files
from dmoe_jax.data.files import DataError
from dmoe_jax.data.words import EOS

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


def read_folder(folder: Path) -> list[str]:
    """Read `train.txt.gz`, `valid.txt.gz` and `test.txt.gz` of a folder, and count their words.

    Counts are checked and checksums are not: a user's copy may have its articles in an order of its own.

    Raises:
      DataError: naming the file that is missing, unreadable, too large or miscounted.
    """
    (train, num_words), *others = (_read(folder, split) for split in SPLITS)
    if num_words != VOCAB_SIZE:
        raise DataError(f"{folder}: expected {VOCAB_SIZE:,} different words in train, got {num_words:,}")
    return [train, *(text for text, _ in others)]


def _read(folder: Path, split: str) -> tuple[str, int]:
    """A part's text, and its number of different words with `<eos>`."""
    path, most_bytes = folder / f"{split}.txt.gz", files.MAX_FILE_BYTES
    data = files.read_gzip(path, most_bytes + 1, f"the {split} text of WikiText-2, gzip of UTF-8 text")
    if len(data) > most_bytes:
        raise DataError(f"{path}: expected at most {most_bytes:,} bytes of text, got more")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: expected UTF-8 text: {error}") from error
    text += "" if text.endswith("\n") else "\n"  # a last line without a line feed is a line too
    words = text.split()
    if (found := len(words) + text.count("\n")) != NUM_TOKENS[split]:
        raise DataError(f"{path}: expected {NUM_TOKENS[split]:,} tokens with one <eos> a line, got {found:,}")
    return text, len({*words, EOS})


def download(folder: Path) -> None:
    """Fetch the public copy into a folder; every part must be a known text, byte for byte.

    Raises:
      DataError: naming the address, and what was wrong with it.
    """
    deadline = time.monotonic() + files.TOTAL_TIMEOUT_S
    for split in ("valid", "test", "train"):  # small parts first, to fail soon
        url = f"{BASE_URL}{split}.txt"
        text = files.fetch(url, deadline)
        check_bytes(split, text, url)
        (folder / f"{split}.txt.gz").write_bytes(gzip.compress(text, mtime=0))


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
