"""A run folder as tables: columns of the right type, nothing lost, nothing made up, and every column documented."""

import ast
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmoe_jax.collaboration import GlobalStep
from dmoe_jax.runs.run_folder import RunFolder
from dmoe_jax.runs.tables import RunTables, read_run, tables_of
from dmoe_jax.trainer import StepRecord
from dmoe_jax.training.balance import Balance
from tests.dmoe_jax.documented_records import documented_columns, undocumented

ROOT = Path(__file__).parents[2]


def run_in(path: Path, *records: dict[str, Any]) -> RunTables:
    """A run with these records, as it is read."""
    folder = RunFolder.create(path, {"steps": 3, "expert": {"d_model": 8}})
    for record in records:
        folder.log(record.pop("kind"), **record)
    return read_run(path)


def test_a_run_is_read_into_columns(tmp_path: Path) -> None:
    """Settings as they were, kinds in order, and a value for each record."""
    steps = [{"kind": "train", "step": step, "loss": 6.0 - step, "trainer": 0} for step in (1, 2, 3)]
    run = run_in(tmp_path / "run", {"kind": "task", "name": "my.txt", "unit": "tokens"}, *steps)
    assert (run.settings["steps"], run.settings["expert"]) == (3, {"d_model": 8})
    assert run.config["command"]
    assert run.kinds == tuple(run) == ("task", "train")
    assert (len(run), "train" in run, "eval" in run, run.lines_left_out) == (2, True, False, 0)
    assert list(run["train"]) == ["step", "loss", "trainer"]
    assert (run["train"]["step"].dtype, run["train"]["step"].tolist()) == (np.int64, [1, 2, 3])
    assert (run["train"]["loss"].dtype, run["train"]["loss"].tolist()) == (np.float64, [5.0, 4.0, 3.0])
    assert run["task"]["name"].tolist() == ["my.txt"]
    assert repr(run) == f"RunTables({tmp_path / 'run'}: task 1 x 2, train 3 x 3)"
    with pytest.raises(KeyError, match=r"no records 'eval'; it has task, train"):
        run["eval"]


@pytest.mark.parametrize(
    ("values", "dtype", "column"),
    [
        ([1, 2], np.int64, [1, 2]),
        ([1, 2.5], np.float64, [1.0, 2.5]),
        ([1, None], np.float64, [1.0, math.nan]),
        ([math.nan, math.inf], np.float64, [math.nan, math.nan]),  # JSON has neither
        ([None, None], np.float64, [math.nan, math.nan]),
        ([True, False], np.bool_, [True, False]),
        ([True, None], np.object_, [True, None]),
        ([True, 1], np.object_, [True, 1]),
        (["a", None], np.object_, ["a", None]),
        ([[1, 2], [3, 4]], np.object_, [[1, 2], [3, 4]]),
        ([[1], [2, 3]], np.object_, [[1], [2, 3]]),
        ([2**63 - 1, 1], np.int64, [2**63 - 1, 1]),
        ([10**400, 1], np.object_, [10**400, 1]),
    ],
)
def test_columns_have_the_type_of_their_values(
    values: list[Any], dtype: Any, column: list[Any], tmp_path: Path
) -> None:
    """One dimension, whatever the values are; numbers keep their value."""
    found = run_in(tmp_path / "run", *({"kind": "x", "value": value} for value in values))["x"]["value"]
    assert (found.dtype, found.shape) == (dtype, (2,))
    for value, expected in zip(found.tolist(), column, strict=True):
        assert value == expected or (math.isnan(value) and math.isnan(expected))


def test_fields_that_come_and_go_leave_gaps() -> None:
    """A nested field has a column of its own; where it is missing stands NaN, or None among strings."""
    records = [
        {"kind": "calls", "ok": 1, "failures": {}},
        {"kind": "calls", "ok": 2, "failures": {"timeout": 1}, "by": {"peer": "a"}},
        {"kind": "calls", "ok": 3, "failures": {"timeout": 2, "bad answer": 1}},
    ]
    table = tables_of(records)["calls"]
    assert list(table) == ["ok", "failures.timeout", "by.peer", "failures.bad answer"]
    np.testing.assert_array_equal(table["failures.timeout"], [np.nan, 1, 2])
    np.testing.assert_array_equal(table["failures.bad answer"], [np.nan, np.nan, 1])
    assert table["by.peer"].tolist() == [None, "a", None]
    assert {len(column) for column in table.values()} == {3}


def test_every_cut_of_the_file_is_read_and_told(tmp_path: Path) -> None:
    """Wherever a kill cuts the file, whole lines count and a piece of one is counted as left out."""
    run_in(tmp_path, *({"kind": "train", "step": step} for step in range(3)))
    path = tmp_path / "metrics.jsonl"
    data = path.read_bytes()
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        run, whole = read_run(tmp_path), data[:size].count(b"\n")
        assert run.get("train", {}).get("step", np.empty(0)).tolist() == list(range(whole))
        assert run.lines_left_out == int(not data[:size].endswith(b"\n") and size > 0)
    path.unlink()
    assert read_run(tmp_path).kinds == ()


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    """Whatever is wrong, the message names the folder and what was expected; damage inside is named by its line."""
    expected = r"is no run folder: expected a folder with config.json and metrics.jsonl"
    (tmp_path / "file").touch()
    for name, text in (("empty", None), ("list", "[]"), ("other", '{"d_model": 8}'), ("half", '{"settings"')):
        (tmp_path / name).mkdir()
        if text is not None:
            (tmp_path / name / "config.json").write_text(text)
    for name in ("nowhere", "file", "empty", "list", "other", "half"):
        with pytest.raises(ValueError, match=f"{name} {expected}"):
            read_run(tmp_path / name)
    for name in "abcdef":
        run_in(tmp_path / "runs" / name, {"kind": "train", "step": 1})
    with pytest.raises(ValueError, match=r"it holds the runs a, b, c, d, \.\.\.$"):
        read_run(str(tmp_path / "runs"))
    path = tmp_path / "runs" / "a" / "metrics.jsonl"
    path.write_text("{}\n" + path.read_text())
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1: expected a JSON object with a kind"):
        read_run(tmp_path / "runs" / "a")


def test_pandas_takes_a_table_as_it_is(tmp_path: Path) -> None:
    """Numbers stay numbers, lists stay whole, and gaps are pandas' own."""
    pandas = pytest.importorskip("pandas")
    run = run_in(
        tmp_path / "run",
        {"kind": "balance", "step": 1, "layer": "layer0", "histogram": [1, 2], "cv": None},
        {"kind": "balance", "step": 2, "layer": "layer0", "histogram": [3, 4], "cv": 0.5, "load": {"a.0": 1}},
    )
    frame = pandas.DataFrame(run["balance"])
    assert frame.shape == (2, 5)
    assert frame["step"].sum() == 3
    assert frame["cv"].isna().tolist() == [True, False]
    assert frame.set_index("step").loc[2, "histogram"] == [3, 4]


def test_reading_loads_no_jax(tmp_path: Path) -> None:
    """Results are read on a machine or in a process that is to have no accelerator."""
    run_in(tmp_path, {"kind": "train", "step": 1})
    code = f"""if True:
        import sys, dmoe_jax
        print(dmoe_jax.read_run({str(tmp_path)!r})["train"]["step"].tolist(), "jax" in sys.modules)
        from dmoe_jax import read_run
        print("jax" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[1] False", "False"]


def constants_of(modules: list[ast.Module]) -> dict[str, str]:
    """Name -> string, of all such constants of modules."""
    return {
        target.id: node.value.value
        for module in modules
        for node in module.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value.value, str)
    }


def written_records() -> Iterator[tuple[str, list[str]]]:
    """(kind, columns that stand there) of every place in the code that writes a record of a kind that it names."""
    files = [*(ROOT / "dmoe_jax").rglob("*.py"), *(ROOT / "experiments").rglob("*.py")]
    texts = [file.read_text() for file in files]
    modules = [ast.parse(text) for text in texts if re.search(r'\.log\(|\._write\(|return "\w+", {', text)]
    constants = constants_of(modules)
    for node in (each for module in modules for each in ast.walk(module)):
        is_call = isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("log", "_write") and node.keywords
        if is_call and len(node.args) == 1:
            first = node.args[0]
            kind = first.value if isinstance(first, ast.Constant) else constants.get(getattr(first, "id", ""))
            if isinstance(kind, str):
                yield kind, [keyword.arg for keyword in node.keywords if keyword.arg is not None]
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):  # as of averages
            match node.value.elts:
                case [ast.Constant(value=str(kind)), ast.Dict(keys=keys)]:
                    yield kind, [key.value for key in keys if isinstance(key, ast.Constant)]


def test_every_record_that_the_code_writes_is_documented() -> None:
    """Kinds, and the columns that stand where they are written; those that come from data classes are looked up."""
    written = list(written_records())
    assert {"train", "average", "slice", "headline"} <= {kind for kind, _ in written}  # the walk above finds them
    fields_of = {kind: {name.partition(".")[0] for name in named} for kind, named in documented_columns().items()}
    assert {kind for kind, _ in written} - fields_of.keys() == set()
    lost = [(kind, name) for kind, columns in written for name in columns if name not in fields_of[kind]]
    assert lost == []
    classes = {"train": StepRecord, "balance": Balance, "global_step": GlobalStep}
    assert undocumented({kind: [each.name for each in fields(cls)] for kind, cls in classes.items()}) == []  # type: ignore[arg-type]


def test_the_page_is_read_as_it_stands() -> None:
    """A column that the page does not name is found, and one in capitals stands for any word."""
    assert {"loss", "step", "time_s"} <= documented_columns()["train"]
    columns = {"train": ["loss", "gain"], "calls": ["failures.timeout", "failures"], "nothing": ["loss"]}
    assert undocumented(columns) == ["train: gain", "calls: failures", "nothing: loss"]
