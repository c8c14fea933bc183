"""A user's own text: one file, of which the end is held out, or a folder with a file for each part."""

from pathlib import Path

from dmoe_jax.data.embedded import tokenise
from dmoe_jax.data.errors import DataError

HELD_OUT = 0.1
"""Share of a single file, at its end, that is not trained on: half of it for validation, half for test."""

MIN_COUNT = 2
"""Words seen only once in train become `<unk>`, so that a model meets `<unk>` in training at all."""

_MIN_WORDS = 20
"""In each part; a perplexity over fewer says nothing."""

Parts = tuple[list[str], list[str], list[str]]
"""The words of train, valid and test."""


def read_own_text(path: Path) -> Parts:
    """Read a text: lower-case words, numbers and punctuation, `<eos>` after each line that is not blank.

    Args:
      path: a text file, or a folder with train.txt, valid.txt and test.txt; UTF-8.

    Raises:
      DataError: there is no such file or folder, it is no UTF-8 text, or a part of it is too short.
    """
    if path.is_dir():
        words = (_words(path / f"{split}.txt") for split in ("train", "valid", "test"))
        train, valid, test = words
    else:
        text = _words(path)
        end, middle = (int(len(text) * (1 - share)) for share in (HELD_OUT, HELD_OUT / 2))
        train, valid, test = text[:end], text[end:middle], text[middle:]
    for name, part in (("train", train), ("valid", valid), ("test", test)):
        if len(part) < _MIN_WORDS:
            raise DataError(
                f"{path} is too short: its {name} part has {len(part)} words, expected at least {_MIN_WORDS}"
                + ("" if path.is_dir() else f" (the last {HELD_OUT:.0%} of a file are held out)")
            )
    return train, valid, test


def _words(path: Path) -> list[str]:
    try:
        return tokenise(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: expected UTF-8 text: {error}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
