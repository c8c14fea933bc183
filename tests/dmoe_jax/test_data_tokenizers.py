"""Tokenizers of other libraries as vocabularies: pieces by falling frequency, files, and what is refused."""

import json
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest

from dmoe_jax.data import tokenizers as own
from dmoe_jax.data.corpora import load_corpus
from dmoe_jax.data.files import DataError
from dmoe_jax.data.pieces import PieceVocabulary
from dmoe_jax.data.tokenizers import MAX_PIECES, Tokenizer, check_tokenizer, load_tokenizer, open_tokenizer
from dmoe_jax.data.vocabulary import unigram_perplexity
from tests.dmoe_jax.tokenizer_files import FILES, LINES, TEXT, byte_pairs, json_file


@pytest.fixture(scope="module", params=[*FILES])
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a tokenizer of either kind."""
    return FILES[request.param](tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "my.txt").write_text(TEXT)
    return tmp_path / "my.txt"


def test_ids_go_by_falling_frequency_and_unseen_pieces_are_last(file: Path, text: Path) -> None:
    """As adaptive softmax and its cutoffs want them; every piece of the tokenizer has an id, and only one."""
    corpus = load_corpus(source=str(text), tokenizer=str(file))
    vocabulary = corpus.vocabulary
    assert isinstance(vocabulary, PieceVocabulary)
    counts = np.bincount(corpus.train, minlength=len(vocabulary))
    assert (np.diff(counts) <= 0).all()
    assert counts[0] > counts[-1] == 0
    assert len({*vocabulary.words}) == len(vocabulary) == vocabulary.tokenizer.own_ids.size
    unseen = vocabulary.order[counts == 0]
    assert (np.diff(unseen) > 0).all()
    assert 1 < unigram_perplexity(corpus.train, corpus.valid, len(vocabulary)) < len(vocabulary)
    assert [vocabulary.piece(number) for number in (0, 1)] == list(vocabulary.words[:2])


def test_parts_are_those_of_the_text(file: Path, text: Path) -> None:
    """Nine tenths for training, then halves; joined they are the text as the tokenizer keeps it."""
    corpus = load_corpus(source=str(text), tokenizer=str(file))
    whole = np.concatenate([corpus.train, corpus.valid, corpus.test])
    assert corpus.train.size == int(whole.size * 0.9)
    np.testing.assert_array_equal(corpus.vocabulary.encode_text(TEXT), whole)
    kept = corpus.vocabulary.decode(whole)
    assert kept.split() == TEXT.split()
    assert (kept == TEXT) == (file.suffix == ".json")
    assert f"in pieces of the tokenizer {file}: " in corpus.description
    assert "perplexities are for each piece: compare those of other tokens by bits for each byte" in corpus.description
    with pytest.raises(ValueError, match="read-only"):
        corpus.train[0] = 1


def test_another_text_is_said_in_the_same_ids(file: Path, text: Path, tmp_path: Path) -> None:
    """With the vocabulary of a model the ids are the model's, whatever is frequent here."""
    vocabulary = load_corpus(source=str(text), tokenizer=str(file)).vocabulary
    (tmp_path / "other.txt").write_text("dog ! dog ! ran\n" * 100)
    other = load_corpus(source=str(tmp_path / "other.txt"), vocabulary=vocabulary)
    assert other.vocabulary is vocabulary
    np.testing.assert_array_equal(vocabulary.encode_text("dog ! dog ! ran\n" * 100)[: other.train.size], other.train)
    with pytest.raises(ValueError, match="got also the tokenizer 'x'"):
        load_corpus(source=str(text), vocabulary=vocabulary, tokenizer="x")


def test_the_meaning_is_the_file_and_the_order(file: Path) -> None:
    """A text of other frequencies, or another file, makes other ids; the same text and file make the same."""
    tokenizer = load_tokenizer(str(file))

    def meaning(text: str, made_of: Tokenizer = tokenizer) -> str:
        return PieceVocabulary.build(made_of, made_of.encode(text)).meaning

    assert meaning(TEXT) == meaning(TEXT)
    assert meaning(TEXT).startswith(f"vocabulary: {tokenizer.own_ids.size} pieces, ")
    other = open_tokenizer(byte_pairs(["another text"], size=tokenizer.own_ids.size).to_str().encode(), "other")
    assert len({meaning(TEXT), meaning("dog dog dog"), meaning(TEXT, other)}) == 3


@pytest.mark.parametrize("gap", ["\n\n", " ", "\n  ", "\n"])
def test_long_texts_are_cut_where_the_tokenizer_cuts_anyway(gap: str, tmp_path: Path) -> None:
    """The pieces of half a million characters are those of the library for the text as a whole."""
    library, tokenizer = byte_pairs(), load_tokenizer(str(json_file(tmp_path)))
    text = gap.join([*LINES, "x" * 30_000] * 12)
    assert tokenizer.encode(text).tolist() == library.encode(text).ids
    assert tokenizer.encode("").tolist() == []


def test_what_a_file_asks_for_beside_pieces_is_not_done(tmp_path: Path) -> None:
    """A text is not cut off, filled up or framed, and has the same pieces each time."""
    library = byte_pairs()
    plain = library.encode(TEXT).ids
    library.enable_truncation(4)
    library.enable_padding(length=5000)
    library.add_special_tokens(["<s>"])
    record = json.loads(library.to_str())
    record["model"]["dropout"] = 0.5
    tokenizer = open_tokenizer(json.dumps(record).encode(), "x")
    assert tokenizer.encode(TEXT).tolist() == plain


def test_a_folder_or_a_name_on_the_hub_has_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of `from_pretrained`, as it lies there; what the hub raises is one sentence."""
    json_file(tmp_path)
    asked: list[tuple[str, ...]] = []

    def download(*words: str) -> str:
        asked.append(words)
        if words[0] == "nobody/nothing":
            raise OSError("404 Client Error\nand a page of advice")
        return str(tmp_path / "tokenizer.json")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.chdir(tmp_path)
    assert load_tokenizer(str(tmp_path)).data == load_tokenizer("some/name").data
    assert asked == [("some/name", "tokenizer.json")]
    with pytest.raises(DataError, match=r"nobody/nothing: .* hub does not give one: 404 Client Error$"):
        load_tokenizer("nobody/nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        check_tokenizer("empty")


@pytest.mark.parametrize("source", ["my.json", "folder/my.model", "../no/such", "a b"])
def test_a_file_that_is_not_there_is_no_name(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A typing error does not become a question to the network."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"there is no such file; expected a tokenizer\.json of Hugging Face"):
        check_tokenizer(source)


def _big_id(record: dict[str, Any]) -> None:
    record["model"]["vocab"]["far"] = MAX_PIECES


def _no_pieces(record: dict[str, Any]) -> None:
    record["model"] |= {"vocab": {}, "merges": []}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"version": "1.0"', "x is no tokenizer of Hugging Face: "),
        (b"{}", "x is no tokenizer of Hugging Face: "),
        (b"", "x is no tokenizer of SentencePiece: "),
        (b"\x0a\x07nothing", "x is no tokenizer of SentencePiece: "),
        (_big_id, "x: expected a tokenizer of 1 to 1,048,576 pieces, got 281"),
        (_no_pieces, "x: expected a tokenizer of 1 to 1,048,576 pieces, got 0"),
    ],
)
def test_what_is_no_tokenizer_is_one_sentence(data: Any, message: str) -> None:
    """Whatever the library raises; a number that would fill the memory is seen before it does."""
    if callable(data):
        record = json.loads(byte_pairs().to_str())
        data(record)
        data = json.dumps(record).encode()
    with pytest.raises(DataError, match=message):
        open_tokenizer(data, "x")


def test_a_panic_of_the_library_is_an_error_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rust's panics are no `Exception`; Ctrl-C is none either, and stays what it is."""

    class PanicException(BaseException):
        pass

    for raised, expected in (
        (PanicException("index out of bounds"), DataError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ):

        def broken(*_: Any, raised: BaseException = raised) -> Any:
            raise raised

        monkeypatch.setattr(own, "_hugging_face", broken)
        with pytest.raises(expected):
            open_tokenizer(b"{}", "x")


def test_a_large_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size is looked at first."""
    monkeypatch.setattr(own, "MAX_BYTES", 1000)
    with pytest.raises(DataError, match=r"tokenizer\.json: expected at most 1,000 bytes, got more"):
        load_tokenizer(str(json_file(tmp_path)))


@pytest.mark.parametrize(("kind", "package"), [("json", "tokenizers"), ("model", "sentencepiece")])
def test_a_missing_package_is_named_with_its_extra(
    kind: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is loaded, and also where a run's folder is read."""
    source = str(FILES[kind](tmp_path))
    monkeypatch.setitem(sys.modules, package, None)
    line = rf"needs the package {package} \(.*\): pip install 'dmoe_jax\[text\]'"
    with pytest.raises(DataError, match=f"--tokenizer {source} {line}"):
        check_tokenizer(source)
    with pytest.raises(DataError, match=f"^x {line}"):
        open_tokenizer(Path(source).read_bytes(), "x")


def test_an_order_is_one_of_all_pieces(tmp_path: Path) -> None:
    """Each of the tokenizer's ids once."""
    tokenizer = load_tokenizer(str(json_file(tmp_path)))
    for order in (tokenizer.own_ids[1:], np.where(tokenizer.own_ids == 0, 1, tokenizer.own_ids).astype(np.int32)):
        with pytest.raises(ValueError, match="the order must have each of the tokenizer's 280 ids once"):
            PieceVocabulary(tokenizer=tokenizer, order=order)
    with pytest.raises(DataError, match="the id 400, which is none of its 280 pieces"):
        PieceVocabulary(tokenizer=tokenizer, order=tokenizer.own_ids).numbered(np.array([3, 400], np.int32))
