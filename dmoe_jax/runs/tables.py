"""A run folder read as tables, for NumPy and pandas. Imports no JAX.

`docs/how_to/results.md` lists the kinds of records and their columns.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dmoe_jax.runs.run_folder import CONFIG, METRICS, RunFolder, flat, records_in

Table = dict[str, np.ndarray]
"""Column -> its values, one for each record."""

_LARGEST_INT = 2**63 - 1
_MAX_NAMED = 4
"""Runs that a message names at most."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class RunTables(Mapping[str, Table]):
    """A run that was read: kind of record -> table. Made by `read_run`.

    A table maps each column to a NumPy array with one value for each record of the kind, in the order in which they
    were written. A field inside a field has a column of its own: `failures.timeout`. A column is float64, with NaN for
    what is missing, if its values are numbers; int64 or bool, if nothing is missing. Otherwise it is an array of
    objects, such as strings and lists, with None for what is missing.
    """

    path: Path
    """The run folder."""
    config: Mapping[str, Any]
    """Content of config.json: settings, command, started, versions, commit, platform."""
    tables: Mapping[str, Table]
    """Kind -> its table; the mapping itself is the same."""
    lines_left_out: int
    """1 if the last line of metrics.jsonl is not whole, because its writer was killed or is writing; else 0."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of the run, as config.json has them."""
        found: Mapping[str, Any] = self.config["settings"]
        return found

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of records that the run has, in order of their first record."""
        return tuple(self.tables)

    def __getitem__(self, kind: str) -> Table:
        if kind not in self.tables:
            raise KeyError(f"the run in {self.path} has no records {kind!r}; it has {', '.join(self.kinds) or 'none'}")
        return self.tables[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tables)

    def __len__(self) -> int:
        return len(self.tables)

    def __repr__(self) -> str:
        shapes = {kind: (len(next(iter(table.values()), ())), len(table)) for kind, table in self.tables.items()}
        sizes = (f"{kind} {records} x {columns}" for kind, (records, columns) in shapes.items())
        return f"RunTables({self.path}: {', '.join(sizes) or 'no records'})"


def read_run(path: str | Path) -> RunTables:
    """Read the run folder of `dmoe train`, `dmoe demo`, `dmoe up` or an experiment, complete or not.

    It reads while the run goes on, too, and loads no JAX. For pandas: `pandas.DataFrame(read_run(path)["train"])`.

    Args:
      path: the folder with config.json and metrics.jsonl.

    Returns:
      A mapping from each kind of record, such as "train", to its table: column -> NumPy array [records]. Its attributes
      are `settings`, `config`, `kinds`, `path` and `lines_left_out`. `docs/how_to/results.md` lists kinds and columns.

    Raises:
      ValueError: there is no run folder at the path, or one of its two files is damaged; the message says which.
      OSError: metrics.jsonl cannot be read.
    """
    folder = Path(path)
    try:
        config = RunFolder(folder).config()
        if not isinstance(config["settings"], dict):
            raise TypeError("the settings are no object")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(_no_run(folder)) from error
    try:
        data = (folder / METRICS).read_bytes()
    except FileNotFoundError:  # killed before its first record
        data = b""
    whole, line_feed, rest = data.rpartition(b"\n")
    tables = tables_of(records_in(whole + line_feed, folder / METRICS))
    return RunTables(path=folder, config=config, tables=tables, lines_left_out=int(bool(rest)))


def tables_of(records: Iterable[Mapping[str, Any]]) -> dict[str, Table]:
    """The table of each kind of the records; see `RunTables`."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        fields = {name: value for name, value in record.items() if name != "kind"}
        rows.setdefault(str(record["kind"]), []).append(flat(fields))
    tables = {}
    for kind, of_kind in rows.items():
        names = dict.fromkeys(name for row in of_kind for name in row)
        tables[kind] = {name: _column([row.get(name) for row in of_kind]) for name in names}
    return tables


def _column(values: Sequence[Any]) -> np.ndarray:
    known = [value for value in values if value is not None]
    types, is_whole = {type(value) for value in known}, len(known) == len(values)
    # JSON knows integers that no number of NumPy holds.
    are_numbers = types <= {int, float} and all(type(each) is float or abs(each) <= _LARGEST_INT for each in known)
    if is_whole and (types == {bool} or (types == {int} and are_numbers)):
        return np.array(values, dtype=np.bool_ if types == {bool} else np.int64)
    if are_numbers:
        return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    column = np.empty(len(values), dtype=object)
    column[:] = values  # lists of one length would become rows of a matrix in `np.array`
    return column


def _no_run(folder: Path) -> str:
    below = [each.parent.name for each in sorted(folder.glob(f"*/{CONFIG}"))]
    named = ", ".join(below[:_MAX_NAMED]) + (", ..." if len(below) > _MAX_NAMED else "")
    return (
        f"{folder} is no run folder: expected a folder with {CONFIG} and {METRICS}, as dmoe train, dmoe demo, dmoe up "
        f"and the experiments leave it{f'; it holds the runs {named}' if below else ''}"
    )
