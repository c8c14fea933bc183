"""Kinds and columns of records as `docs/how_to/results.md` documents them."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "results.md"


def documented_columns() -> dict[str, set[str]]:
    """Kind -> the columns that the page names, also in a table of experiments; capitals stand for any word."""
    found: dict[str, set[str]] = {}
    kind = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("#"):
            kind = heading[1] if (heading := re.fullmatch(r"#### `(\w+)`", line)) else ""
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if kind and len(cells) == 2:
            found.setdefault(kind, set()).update(re.findall(r"`([^`]+)`", cells[0]))
        elif len(cells) == 3 and re.fullmatch(r"`\w+`", cells[1]):
            found.setdefault(cells[1].strip("`"), set()).update(re.findall(r"`([^`]+)`", cells[2]))
    return found


def undocumented(columns: Mapping[str, Iterable[str]]) -> list[str]:
    """The columns, as "kind: column", that the page does not name."""
    documented = documented_columns()

    def is_named(kind: str, column: str) -> bool:
        patterns = (re.sub(r"[A-Z]{2,}", ".+", re.escape(name)) for name in documented.get(kind, ()))
        return any(re.fullmatch(pattern, column) for pattern in patterns)

    return [f"{kind}: {name}" for kind, names in columns.items() for name in names if not is_named(kind, name)]
