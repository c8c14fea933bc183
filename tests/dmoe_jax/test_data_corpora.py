"""Corpora: what is used and why, what is refused, and the facts of WikiText-2."""

import gzip
import hashlib
import http.client
import io
import itertools
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

from dmoe_jax.data import DataError, raw_text, wikitext2
from dmoe_jax.data.corpora import MIN_COUNT, Corpus, load_corpus
from dmoe_jax.data.vocabulary import unigram_perplexity
from dmoe_jax.data.words import EOS, UNK, tokenise
from dmoe_jax.machine.cache_folder import cache_folder

TINY = {
    "train": b" \n = A = \n b b <unk> \n c d \n",  # 12 tokens, 7 different words: = b <eos> A <unk> c d
    "valid": b"b c\nd\n",  # 5 tokens
    "test": b"A",  # 2 tokens: a last line without a line feed is a line too, as are blank ones
}

Opener = Callable[..., IO[bytes]]


@pytest.fixture(autouse=True)
def network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Opener], None]:
    """Sets what opens an address. Before that none may be; and no test sees the caller's data or cache."""

    def connect(opener: Opener) -> None:
        monkeypatch.setattr(urllib.request, "urlopen", opener)

    def forbidden(url: str, timeout: float) -> IO[bytes]:
        raise AssertionError(f"{url} was opened")

    connect(forbidden)
    monkeypatch.delenv("DMOE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return connect


@pytest.fixture
def tiny_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The facts of a text of nineteen tokens in place of WikiText-2's."""
    monkeypatch.setattr(wikitext2, "NUM_TOKENS", {"train": 12, "valid": 5, "test": 2})
    monkeypatch.setattr(wikitext2, "VOCAB_SIZE", 7)
    monkeypatch.setattr(wikitext2, "SHA256", {split: hashlib.sha256(text).hexdigest() for split, text in TINY.items()})


def make_folder(folder: Path, texts: dict[str, bytes]) -> Path:
    """A folder for DMOE_DATA."""
    (folder / "wikitext-2").mkdir(parents=True)
    for split, text in texts.items():
        (folder / "wikitext-2" / f"{split}.txt.gz").write_bytes(gzip.compress(text))
    return folder


def serving(texts: dict[str, bytes]) -> Opener:
    """An opener that knows the public addresses of these texts."""
    by_url = {f"{wikitext2.BASE_URL}{split}.txt": text for split, text in texts.items()}
    return lambda url, timeout: io.BytesIO(by_url[url])


def unreachable(url: str, timeout: float) -> IO[bytes]:
    raise urllib.error.URLError("no route to host")


def words_of(corpus: Corpus, split: str) -> list[str]:
    return [corpus.vocabulary.words[number] for number in getattr(corpus, split)]


def test_git_blob_ids() -> None:
    """The ids that git gives the empty file and the example of the book Pro Git (section 10.2)."""
    assert wikitext2.git_blob_id(b"") == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
    assert wikitext2.git_blob_id(b"test content\n") == "d670460b4b4aece5915caf5c68d12f560a9fe3e4"


@pytest.mark.usefixtures("tiny_facts")
@pytest.mark.parametrize("source", ["auto", "wikitext-2"])
def test_folder_is_used_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """A good DMOE_DATA is read without a look at cache or network, and the description says so."""
    folder = make_folder(tmp_path / "data", TINY)
    monkeypatch.setenv("DMOE_DATA", str(folder))
    corpus = load_corpus(source=source)
    assert corpus.name == "wikitext-2"
    assert corpus.description == (
        f"WikiText-2 from DMOE_DATA={folder}: 12 / 5 / 2 tokens (train / valid / test), vocabulary 7"
    )
    assert words_of(corpus, "train") == [EOS, "=", "A", "=", EOS, "b", "b", UNK, EOS, "c", "d", EOS]
    assert words_of(corpus, "valid") + words_of(corpus, "test") == ["b", "c", EOS, "d", EOS, "A", EOS]
    assert corpus.vocabulary.words == (EOS, "=", "b", UNK, "A", "c", "d")
    with pytest.raises(ValueError, match="read-only"):
        corpus.train[0] = 1


@pytest.mark.usefixtures("tiny_facts")
@pytest.mark.parametrize(
    ("split", "content", "message"),
    [
        ("valid", None, r"valid.txt.gz is missing: expected the valid text of WikiText-2"),
        ("valid", b"not gzip", "valid.txt.gz cannot be read: expected .*, gzip of UTF-8 text: "),
        ("valid", gzip.compress(os.urandom(1000))[:-500], "valid.txt.gz cannot be read"),
        ("valid", gzip.compress(b"b c\n"), "valid.txt.gz: expected 5 tokens with one <eos> a line, got 3"),
        ("valid", gzip.compress(b"b \xff\n d\n"), "valid.txt.gz: expected UTF-8 text"),
        ("train", gzip.compress(TINY["train"].replace(b"d", b"c")), "expected 7 different words in train, got 6"),
        # A small file that unfolds past the limit is refused before it is counted.
        ("train", (1 << 23) + 1, "train.txt.gz: .* at most 16,777,216 bytes of text, got more"),
    ],
    ids=["missing", "not gzip", "cut off", "miscounted", "not UTF-8", "another text", "a bomb"],
)
def test_broken_folders_are_never_passed_over(
    split: str, content: bytes | int | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the file; as many tokens but one word fewer is another text."""
    folder = make_folder(tmp_path / "data", TINY)
    file = folder / "wikitext-2" / f"{split}.txt.gz"
    file.unlink()
    if content is not None:
        file.write_bytes(gzip.compress(b"a " * content) if isinstance(content, int) else content)
    monkeypatch.setenv("DMOE_DATA", str(folder))
    with pytest.raises(DataError, match=f"{folder}/wikitext-2.*{message}"):
        load_corpus()


@pytest.mark.usefixtures("tiny_facts")
def test_download_is_kept_in_the_cache(network: Callable[[Opener], None], tmp_path: Path) -> None:
    """The second load reads the cache and opens no address. The cache is ours: a bad file in it is downloaded anew."""
    network(serving(TINY))
    corpus = load_corpus()
    cache = tmp_path / "cache" / "dmoe_jax" / "wikitext-2"
    assert f"a download from {wikitext2.BASE_URL} (kept in {cache})" in corpus.description
    assert sorted(path.name for path in cache.iterdir()) == ["test.txt.gz", "train.txt.gz", "valid.txt.gz"]
    network(unreachable)
    again = load_corpus(source="wikitext-2")
    assert f"the cache {cache}" in again.description
    np.testing.assert_array_equal(again.train, corpus.train)
    network(serving(TINY))
    (cache / "test.txt.gz").write_bytes(b"")
    assert "a download from" in load_corpus().description
    assert gzip.decompress((cache / "test.txt.gz").read_bytes()) == TINY["test"]


@pytest.mark.usefixtures("tiny_facts")
def test_cache_that_cannot_be_written_costs_no_run(network: Callable[[Opener], None], tmp_path: Path) -> None:
    """The corpus is loaded all the same, and the description says that it was not kept."""
    (tmp_path / "cache").write_text("a file where the cache folder should be")
    network(serving(TINY))
    corpus = load_corpus()
    assert corpus.name == "wikitext-2"
    assert "(not kept: " in corpus.description


@pytest.mark.usefixtures("tiny_facts")
def test_downloads_are_checked_byte_for_byte(network: Any, monkeypatch: Any, tmp_path: Path) -> None:
    """Right counts with wrong words are refused; train may also be the form that git knows."""
    swapped = {**TINY, "train": TINY["train"].replace(b"c d", b"d c")}
    network(serving(swapped))
    with pytest.raises(DataError, match=r"train\.txt: expected the known text with SHA-256"):
        load_corpus(source="wikitext-2")
    monkeypatch.setattr(wikitext2, "PUBLIC_TRAIN_GIT_BLOB", wikitext2.git_blob_id(swapped["train"]))
    assert words_of(load_corpus(), "train")[-3:] == ["d", "c", EOS]
    network(serving({**TINY, "valid": b"c b\nd\n"}))
    with pytest.raises(DataError, match=r"valid\.txt: expected the known text"):
        wikitext2.download(tmp_path)


class Cut(io.BytesIO):
    """A connection that ends too early."""

    def read(self, size: int | None = -1) -> bytes:
        raise http.client.IncompleteRead(b"b", 100)


def test_failed_downloads(network: Callable[[Opener], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No network, a cut connection, too many bytes and too much time are DataErrors that name the address."""
    large = bytes((16 << 20) + 1)
    for opener, message in (
        (unreachable, "no route to host"),
        (lambda url, timeout: Cut(), "IncompleteRead"),
        (lambda url, timeout: io.BytesIO(large), "at most 16,777,216 bytes, got more"),
    ):
        network(opener)
        with pytest.raises(DataError, match=rf"{wikitext2.BASE_URL}valid.txt: .*{message}"):
            wikitext2.download(tmp_path)
    network(serving(TINY))
    monkeypatch.setattr(time, "monotonic", itertools.count(0.0, 301.0).__next__)
    with pytest.raises(DataError, match="not finished after 300 s"):
        wikitext2.download(tmp_path)


def test_without_anything_auto_falls_back_and_says_why(network: Callable[[Opener], None]) -> None:
    """The last resort tells what was tried; whoever asks for WikiText-2 never gets another text."""
    network(unreachable)
    corpus = load_corpus()
    assert corpus.name == "embedded"
    for reason in ("DMOE_DATA is not set", "nothing in the cache", "no route to host"):
        assert reason in corpus.description
    with pytest.raises(DataError, match=r"no route to host.*Set DMOE_DATA to a folder"):
        load_corpus(source="wikitext-2")


def test_embedded_corpus_is_a_text_to_learn_from() -> None:
    """Same ids each time; parts near 80, 10 and 10 %; <unk> and <eos> occur; the baseline is sane."""
    corpus, again = load_corpus(source="embedded"), load_corpus(source="embedded")
    for split in ("train", "valid", "test"):
        np.testing.assert_array_equal(getattr(corpus, split), getattr(again, split))
    sizes = np.array([corpus.train.size, corpus.valid.size, corpus.test.size])
    assert sizes.sum() > 50_000
    np.testing.assert_allclose(sizes / sizes.sum(), [0.8, 0.1, 0.1], atol=0.06)
    vocab_size = len(corpus.vocabulary)
    assert 1_000 < vocab_size < 5_000
    for word in (UNK, EOS):
        assert corpus.vocabulary.words.index(word) in corpus.train
        assert corpus.vocabulary.words.index(word) in corpus.valid
    counts = np.bincount(corpus.train, minlength=vocab_size)
    assert counts.min() >= MIN_COUNT
    assert (np.diff(counts) <= 0).all()
    assert 50 < unigram_perplexity(corpus.train, corpus.valid, vocab_size) < vocab_size


def test_embedded_articles_do_not_repeat_each_other() -> None:
    """A paragraph that stood in an earlier article, by title, is left out, however it was wrapped."""
    topics = {"b": "common\nwords\n\nown b\n", "a": "own a\n\ncommon words\n"}
    articles = [["own", "a", EOS, "common", "words", EOS], ["own", "b", EOS]]
    assert [tokenise(article) for article in raw_text.articles_of(topics)] == articles


def test_embedded_articles_stay_whole() -> None:
    """Ten articles of ten words: eight, one and one; order is kept."""
    articles = ["".join(f"word{letter}\n" for _ in range(5)) for letter in "abcdefghij"]
    assert raw_text.split_articles(articles) == ["\n".join(articles[:8]), articles[8], articles[9]]


REAL_DATA = os.environ.get("DMOE_DATA")


@pytest.mark.skipif(not REAL_DATA, reason="DMOE_DATA is not set: the real WikiText-2 is not at hand")
def test_wikitext2_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The published counts, a vocabulary that is train's alone, and the unigram baseline of 965."""
    monkeypatch.setenv("DMOE_DATA", str(REAL_DATA))
    corpus = load_corpus(source="wikitext-2")
    assert (corpus.train.size, corpus.valid.size, corpus.test.size) == (2_088_628, 217_646, 245_569)
    assert len(corpus.vocabulary) == 33_278
    assert corpus.train.max() == 33_277
    # The number of lines, which wc -l gives.
    assert np.count_nonzero(corpus.valid == corpus.vocabulary.words.index(EOS)) == 3_760
    assert round(unigram_perplexity(corpus.train, corpus.valid, 33_278)) == 965
    for split in wikitext2.SPLITS:
        text = gzip.decompress(Path(str(REAL_DATA), "wikitext-2", f"{split}.txt.gz").read_bytes())
        if split != "train":  # a copy may have its training articles in another order
            wikitext2.check_bytes(split, text, split)


def test_a_user_without_a_home_has_no_cache(network: Any, monkeypatch: Any, tmp_path: Path) -> None:
    """As a container's uid that is in no passwd file: no folder named ~ appears, and the text says why."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.chdir(tmp_path)
    network(unreachable)
    assert cache_folder() is None
    assert "no home directory for a cache" in load_corpus().description
    assert list(tmp_path.iterdir()) == []
