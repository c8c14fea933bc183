"""Small tokenizers, trained here, and a text that they know."""

import io
from collections.abc import Callable
from pathlib import Path

import sentencepiece
import tokenizers

LINES = ["the cat sat on the mat .", "a dog ran to the cat !", "", "Was it a cat ?  It was ."]
TEXT = "\n".join(LINES * 60) + "\n"


def byte_pairs(lines: list[str] = LINES, *, size: int = 280) -> tokenizers.Tokenizer:
    """A tokenizer of byte-level pairs, as GPT-2's is made."""
    found = tokenizers.Tokenizer(tokenizers.models.BPE())
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    found.train_from_iterator(lines * 20, trainer)
    return found


def json_file(folder: Path, *, lines: list[str] = LINES, name: str = "tokenizer.json") -> Path:
    """The file of a tokenizer of byte-level pairs."""
    (folder / name).write_text(byte_pairs(lines).to_str(), encoding="utf-8")
    return folder / name


def model_file(folder: Path) -> Path:
    """The file of a SentencePiece model."""
    data = io.BytesIO()
    lines = iter([line for line in LINES * 20 if line])
    sizes = {"vocab_size": 32, "hard_vocab_limit": False}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=data, minloglevel=2, **sizes)
    (folder / "tokenizer.model").write_bytes(data.getvalue())
    return folder / "tokenizer.model"


FILES: dict[str, Callable[[Path], Path]] = {"json": json_file, "model": model_file}
"""Kinds of files."""
