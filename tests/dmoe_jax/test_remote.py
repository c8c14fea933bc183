"""Folders at a URL are copied here to be read, and nothing is written there."""

from pathlib import Path
from typing import Any

import jax
import pytest
from etils.epath import backend
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from dmoe_jax.checkpoints import Checkpoints
from dmoe_jax.machine.disk import hold_folder, url_of
from dmoe_jax.node.saving import ExpertSaver
from dmoe_jax.runs.run_folder import RunFolder
from dmoe_jax.trained.export_files import read_facts, vocabulary_folder
from dmoe_jax.trained.imported import read_export
from dmoe_jax.trained.remote import local_copy
from tests.dmoe_jax.test_exporting import check_equal, export, scaled, swarm_run, trained
from tests.dmoe_jax.training_rig import outcome


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of this machine that is s3://bucket for the libraries that read from there."""
    (tmp_path / "bucket").mkdir()

    class Bucket(DirFileSystem):
        """As a store is, it is asked for whole URLs."""

        def _join(self, path: Any) -> Any:
            return super()._join(str(path).removeprefix("s3://"))

    store = Bucket(path=str(tmp_path), fs=LocalFileSystem())
    monkeypatch.setattr(backend._FileSystemSpecBackend, "_get_filesystem", lambda self, name: store)
    return tmp_path / "bucket"


def test_a_path_that_was_a_url_is_one_again() -> None:
    """A path has one slash where a URL has two; names with a colon are files of this machine."""
    assert url_of(Path("gs://bucket/runs/first")) == "gs://bucket/runs/first"
    assert url_of(Path("s3://bucket")) == "s3://bucket"
    for text in ("runs/first", "/gs:/bucket", "gs:", "gs:bucket", "file://bucket/x", "c:/x"):
        assert url_of(Path(text)) is None


def test_a_run_in_a_store_is_exported(bucket: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With its nodes' checkpoints, of which one lies there too; pictures and leftovers stay there."""
    run = swarm_run(bucket / "runs" / "first", {4: scaled(4.0), 6: scaled(6.0)}, {4: 1.0, 6: 2.0})
    (run / "vocabulary.json").write_text('["a"]')
    (run / "inspection").mkdir()
    (run / "checkpoints" / ".unfinished-8").mkdir()
    (run / "checkpoints" / "set-aside-7").mkdir()
    params = jax.tree.map(lambda leaf: leaf[0], trained().experts[0])
    Checkpoints(bucket / "node" / "layer0.0.0").save(3, {"params": params, "opt_state": ()}, {})
    with local_copy(Path("s3://bucket/runs/first")) as copy:
        assert sorted(path.name for path in copy.iterdir()) == [
            "checkpoints",
            "config.json",
            "metrics.jsonl",
            "vocabulary.json",
        ]
        assert sorted(path.name for path in (copy / "checkpoints").iterdir()) == ["4", "6"]
        assert copy.name == "first"
    assert not copy.exists()
    out = tmp_path / "model.safetensors"
    words = ["export", "s3://bucket/runs/first", str(out), "--checkpoint", "best", "--experts", "s3://bucket/node"]
    status, error = outcome(words, capsys)
    assert status == 0, error
    model = read_export(out)
    check_equal(model.trunk, scaled(4.0)["params"])
    assert (model.step, model.known.sum()) == (4, 1)


def test_an_export_in_a_store_is_read(bucket: Path) -> None:
    """A file with the vocabulary beside it, and a folder."""
    export(trained(), bucket / "model.safetensors")
    (bucket / "model.vocabulary").mkdir()
    (bucket / "model.vocabulary" / "vocabulary.json").write_text("[]")
    export(trained(), bucket / "parts", split=True)
    for name in ("model.safetensors", "parts"):
        with local_copy(Path(f"s3://bucket/{name}")) as path:
            check_equal(read_export(path).experts, trained().experts)
            assert read_facts(path).step == 7
            assert (vocabulary_folder(path) / "vocabulary.json").exists() == (name == "model.safetensors")


def test_what_is_not_there_or_cannot_be_read_is_told(bucket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sentence names the URL; a store's own errors are told by their first line; a package by its extra."""

    def read(url: str = "s3://bucket/x") -> None:
        with local_copy(Path(url)):
            raise AssertionError

    with pytest.raises(OSError, match="s3://bucket/x cannot be read: there is nothing there"):
        read()

    def denied(*args: Any) -> Any:
        raise RuntimeError("no credentials\nand a page of advice")

    monkeypatch.setattr(backend._FileSystemSpecBackend, "exists", denied)
    with pytest.raises(OSError, match=r"s3://bucket/x cannot be read: no credentials$"):
        read()

    def missing(*args: Any) -> Any:
        raise ImportError("Please install gcsfs")

    monkeypatch.setattr(backend._FileSystemSpecBackend, "exists", missing)
    with pytest.raises(ValueError, match=r"gs://bucket/x is read with .*pip install 'dmoe_jax\[gs\]'"):
        read("gs://bucket/x")


def test_a_mistake_with_a_copy_is_not_the_stores(bucket: Path) -> None:
    """An error in the block comes out as it is."""
    (bucket / "x").mkdir()
    with pytest.raises(ZeroDivisionError), local_copy(Path("s3://bucket/x")):
        raise ZeroDivisionError


def test_nothing_is_written_to_a_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands and Python say so before they begin, and make no folder of that name here."""
    monkeypatch.chdir(tmp_path)
    for words, what in (
        ("train --join 127.0.0.1:1 --out gs://bucket/run", "a run"),
        ("up --out gs://bucket/run", "a run"),
        ("node --checkpoint-dir gs://bucket/experts", "--checkpoint-dir"),
    ):
        status, error = outcome(words.split(), capsys)
        assert (status, len(error.splitlines())) == (2, 1), error
        assert f"{what} cannot be written to gs://bucket/" in error
        assert "copy it there afterwards" in error
    with pytest.raises(ValueError, match="a run cannot be written to s3://bucket/run"):
        RunFolder.create(Path("s3://bucket/run"), {})
    with pytest.raises(ValueError, match="checkpoints of experts cannot be written"):
        ExpertSaver(Path("s3://bucket/experts"), {}, [])
    with pytest.raises(ValueError, match="the run cannot be written"), hold_folder(Path("s3://bucket/run"), "run"):
        raise AssertionError
    assert list(tmp_path.iterdir()) == []
