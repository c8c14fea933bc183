"""Rules for docstrings that need no reader."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("net", "dmoe_jax", "experiments", "examples", "tests")
FRAGMENTS = {"What", "How", "Of", "Whether", "Who", "Where", "Which"}
"""First words of answers to a question that the reader has to guess."""


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Lines and texts of all strings that stand for themselves: docstrings, also those of fields and constants."""
    for node in ast.walk(ast.parse(path.read_text())):
        body = getattr(node, "body", None)
        for each in body if isinstance(body, list) else ():
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) and type(each.value.value) is str:
                yield each.lineno, each.value.value


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_begin_with_the_thing_or_a_command(folder: str) -> None:
    fragments = [
        f"{path.relative_to(ROOT)}:{line}: {text.strip().splitlines()[0]}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in docstrings(path)
        if text.split() and text.split()[0].strip(".,:") in FRAGMENTS
    ]
    assert fragments == []
