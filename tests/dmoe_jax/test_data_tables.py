"""Texts out of data sets of the library `datasets`, saved or on the hub."""

import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from dmoe_jax.data.corpora import check_source, load_corpus
from dmoe_jax.data.files import DataError

LINES = ["the cat sat on the mat .", "a dog ran .\nto the cat .\n", ""]
NUM = {"train": 40, "validation": 10, "test": 8}


def table(repeats: int = 40, **columns: Any) -> datasets.Dataset:
    return datasets.Dataset.from_dict(columns or {"text": LINES * repeats})


def splits(*names: str) -> datasets.DatasetDict:
    return datasets.DatasetDict({name: table(NUM.get(name, 9)) for name in names})


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    """No bars of progress, which are for people."""
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.mark.parametrize("valid", ["validation", "valid"])
def test_a_saved_data_set_has_its_own_parts(valid: str, tmp_path: Path) -> None:
    """As the same text in three files has them: each record on lines of its own, no blank one behind a line feed."""
    splits("train", valid, "test", "more").save_to_disk(str(tmp_path / "saved"))
    corpus = load_corpus(source=str(tmp_path / "saved"))
    (tmp_path / "files").mkdir()
    for name, split in (("train", "train"), ("valid", valid), ("test", "test")):
        repeats = NUM.get(split, 9)
        (tmp_path / "files" / f"{name}.txt").write_text(f"{LINES[0]}\n{LINES[1]}" * repeats)
    same = load_corpus(source=str(tmp_path / "files"))
    for part in ("train", "valid", "test"):
        np.testing.assert_array_equal(getattr(corpus, part), getattr(same, part))
    assert corpus.vocabulary == same.vocabulary
    assert corpus.name == "saved"
    assert f"column text of the data set {tmp_path / 'saved'}: " in corpus.description


def test_of_one_split_the_end_is_held_out(tmp_path: Path) -> None:
    """A data set without splits, or with train alone."""
    table().save_to_disk(str(tmp_path / "one"))
    splits("train").save_to_disk(str(tmp_path / "train"))
    one, train = (load_corpus(source=str(tmp_path / name)) for name in ("one", "train"))
    np.testing.assert_array_equal(one.train, train.train)
    assert one.train.size == int(0.9 * (one.train.size + one.valid.size + one.test.size))


def test_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name and its configuration go to `load_dataset`; what that raises is one sentence."""
    asked: list[tuple[Any, ...]] = []

    def load(*words: Any) -> Any:
        asked.append(words)
        if words[0] == "no/thing":
            raise FileNotFoundError("Couldn't find it\nand advice")
        return splits("train", "validation", "test")

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert load_corpus(source="hf:some/name:config-1").name == "hf:some/name:config-1"
    assert load_corpus(source="hf:name").train.size > 0
    assert asked == [("some/name", "config-1"), ("name", None)]
    with pytest.raises(DataError, match=r"hf:no/thing: the data set cannot be had: Couldn't find it$"):
        load_corpus(source="hf:no/thing")
    for source in ("hf:", "hf:../folder", "hf:a/b/c", "hf:name:config:more"):
        with pytest.raises(DataError, match=r"expected hf:NAME or hf:NAME:CONFIG"):
            check_source(source)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (splits("train", "test"), "expected the splits train, validation and test, or train alone; got train, test$"),
        (splits("validation"), "or train alone; got validation$"),
        (table(words=["a"]), "expected a column 'text', got words$"),
        (table(text=[1, 2]), "expected texts in the column 'text'$"),
        (table(text=["a", None]), "expected texts in the column 'text'$"),
        (table(1), r"too short: its train part has 16 tokens, .* \(the last 10% of a text in one part are held out\)"),
    ],
)
def test_what_has_no_text_is_one_sentence(found: Any, message: str, tmp_path: Path) -> None:
    """The message names the data set, and says what it has."""
    found.save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match=rf"{tmp_path / 'saved'}.*{message}"):
        load_corpus(source=str(tmp_path / "saved"))


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded."""
    table().save_to_disk(str(tmp_path / "saved"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    for source in ("hf:name", str(tmp_path / "saved")):
        with pytest.raises(DataError, match=r"needs the package datasets \(.*\): pip install 'dmoe_jax\[text\]'"):
            check_source(source)
