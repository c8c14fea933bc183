"""Tokenizers of other libraries, out of their files: Hugging Face's tokenizer.json, and SentencePiece's models.

A file may be a stranger's: both libraries read it as data and run nothing of it. It is bounded here, and whatever they
raise becomes one error.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from jaxtyping import Int32

from dmoe_jax.data.files import DataError, needed_package, read_bounded
from dmoe_jax.runs.endings import one_line

MAX_BYTES = 64 << 20
"""Size of a tokenizer's file at most; the largest of published models have 33 MB."""

MAX_PIECES = 1 << 20
"""Pieces of a tokenizer at most, and a bound for its own ids."""

JSON_FILE, MODEL_FILE = "tokenizer.json", "tokenizer.model"
"""Names of the two kinds of files, in a folder of a tokenizer and in a run's."""

_CHUNK = re.compile(r".{65536}\s*\S*|.+", re.DOTALL)
"""Part of a long text that is tokenised by itself. The next one begins with a space, as words do anyway."""

_CHUNKS_AT_ONCE = 32
"""Chunks that are in memory with all that a tokenizer notes of them."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
"""Name of a repository on the Hugging Face hub."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokenizer:
    """A tokenizer, with the bytes that it was made of. Made by `open_tokenizer`.

    Attributes:
      file_name: `JSON_FILE` or `MODEL_FILE`.
      data: the bytes of its file.
      own_ids: its ids of all pieces, ascending.
      encode: text -> its ids, and no others before or behind them.
      decode: its ids -> text.
      piece: one of its ids -> the piece, as its table has it.
    """

    file_name: str
    data: bytes = field(repr=False)
    own_ids: Int32[np.ndarray, " vocab"] = field(repr=False)
    encode: Callable[[str], Int32[np.ndarray, " tokens"]] = field(repr=False)
    decode: Callable[[Sequence[int]], str] = field(repr=False)
    piece: Callable[[int], str] = field(repr=False)

    @property
    def sha256(self) -> str:
        """Checksum of its file."""
        return hashlib.sha256(self.data).hexdigest()


def check_tokenizer(source: str) -> None:
    """Check that a tokenizer can be meant: a file, a folder that has one, or a name on the Hugging Face hub.

    Raises:
      DataError: there is no such file, it is no name, or a package is missing.
    """
    path = Path(source)
    package = "tokenizers"
    if path.is_dir():
        package = "tokenizers" if _in_folder(path).name == JSON_FILE else "sentencepiece"
    elif path.suffix == ".model":
        package = "sentencepiece"
    is_file_name = path.suffix in (".json", ".model") or source.count("/") > 1
    if not path.exists() and (is_file_name or not _HUB_NAME.fullmatch(source)):
        raise DataError(
            f"--tokenizer {source}: there is no such file; expected a {JSON_FILE} of Hugging Face, a .model of "
            "SentencePiece, a folder with one of them, or a name on the Hugging Face hub"
        )
    needed_package(package, "text", f"--tokenizer {source}")


def load_tokenizer(source: str) -> Tokenizer:
    """Load a tokenizer from a file, a folder, or by its name on the Hugging Face hub.

    Raises:
      DataError: there is none, it cannot be read, or a package is missing.
    """
    check_tokenizer(source)
    path = Path(source)
    if not path.exists():  # from the hub's cache or the network, as `from_pretrained` gets it
        hub = needed_package("huggingface_hub", "text", f"--tokenizer {source}")
        with _one_error(f"--tokenizer {source}: there is no such file, and the Hugging Face hub does not give one"):
            path = Path(hub.hf_hub_download(source, JSON_FILE))
    elif path.is_dir():
        path = _in_folder(path)
    return open_tokenizer(read_bounded(path, MAX_BYTES), str(path))


def open_tokenizer(data: bytes, where: str) -> Tokenizer:
    """The tokenizer of a file's bytes, which tell the kind; `where` names the file in errors.

    Raises:
      DataError: it is no tokenizer, or has more than `MAX_PIECES`; or a package is missing.
    """
    is_json = data.lstrip()[:1] == b"{"
    with _one_error(f"{where} is no tokenizer of {'Hugging Face' if is_json else 'SentencePiece'}"):
        found = _hugging_face(data, where) if is_json else _sentencepiece(data, where)
    if not found.own_ids.size or found.own_ids.max() >= MAX_PIECES or found.own_ids.min() < 0:
        raise DataError(f"{where}: expected a tokenizer of 1 to {MAX_PIECES:,} pieces, got {found.own_ids.size:,}")
    return found


def _hugging_face(data: bytes, where: str) -> Tokenizer:
    library = needed_package("tokenizers", "text", where)
    tokenizer = library.Tokenizer.from_buffer(data)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None  # else a text would have other ids each time

    def encoded(chunks: list[str]) -> Iterator[Sequence[int]]:
        return (found.ids for found in tokenizer.encode_batch_fast(chunks, add_special_tokens=False))

    return Tokenizer(
        file_name=JSON_FILE,
        data=data,
        own_ids=np.unique(np.array([*tokenizer.get_vocab().values()], np.int64).clip(-1, MAX_PIECES)).astype(np.int32),
        encode=lambda text: _encode(text, encoded, where),
        decode=lambda ids: str(tokenizer.decode([*map(int, ids)], skip_special_tokens=False)),
        piece=lambda number: str(tokenizer.id_to_token(int(number))),
    )


def _sentencepiece(data: bytes, where: str) -> Tokenizer:
    library = needed_package("sentencepiece", "text", where)
    model = library.SentencePieceProcessor()
    model.LoadFromSerializedProto(data)
    return Tokenizer(
        file_name=MODEL_FILE,
        data=data,
        own_ids=np.arange(min(model.GetPieceSize(), MAX_PIECES + 1), dtype=np.int32),
        encode=lambda text: _encode(text, model.EncodeAsIds, where),
        decode=lambda ids: str(model.DecodeIds([*map(int, ids)])),
        piece=lambda number: str(model.IdToPiece(int(number))),
    )


def _encode(
    text: str, encoded: Callable[[list[str]], Iterator[Sequence[int]] | list[list[int]]], where: str
) -> Int32[np.ndarray, " tokens"]:
    """The ids of a text, chunk by chunk, so that a long one needs little memory."""
    chunks = _CHUNK.findall(text)
    found = [np.zeros(0, np.int32)]
    with _one_error(f"{where}: the text cannot be tokenised"):
        for start in range(0, len(chunks), _CHUNKS_AT_ONCE):
            found += [np.array(ids, np.int32) for ids in encoded(chunks[start : start + _CHUNKS_AT_ONCE])]
    return np.concatenate(found)


def _in_folder(folder: Path) -> Path:
    """The tokenizer's file in a folder. Raises DataError if there is none."""
    for name in (JSON_FILE, MODEL_FILE):
        if (folder / name).is_file():
            return folder / name
    raise DataError(f"--tokenizer {folder}: there is neither {JSON_FILE} nor {MODEL_FILE} in the folder")


@contextmanager
def _one_error(text: str) -> Iterator[None]:
    """Turn what a library raises in the block into a DataError; a panic of Rust is no `Exception`."""
    try:
        yield
    except DataError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{text}: {one_line(error)[:300]}") from error
