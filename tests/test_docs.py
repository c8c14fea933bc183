"""The README and the pages of `docs/`: their Python runs as it stands there, and their links lead somewhere."""

import asyncio
import json
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MADE = ("_build", "figures", "reference")  # folders of `docs/` that a build writes
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(page for page in DOCS.rglob("*.md") if page.relative_to(DOCS).parts[0] not in MADE),
    *sorted(ROOT.glob("experiments/**/*.md")),
    *sorted(ROOT.glob("net/**/*.md")),
    *sorted(ROOT.glob("recipes/**/*.md")),
]
NOTEBOOKS = sorted((DOCS / "tutorials").glob("*.ipynb"))
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def python_blocks() -> Iterator[object]:
    """Every Python block, with the page and the line it begins at; the README's are quick tests."""
    for page, text in ((page, page.read_text()) for page in PAGES):
        for found in FENCE.finditer(text):
            if found[1] == "python":
                line, marks = text.count("\n", 0, found.start(2)), [] if page.parent == ROOT else [pytest.mark.slow]
                name = f"{page.relative_to(ROOT)}:{line + 1}"
                yield pytest.param(page, "\n" * line + found[2], id=name, marks=marks)


def cells_of(notebook: Path) -> list[str]:
    """Sources of a notebook's code cells."""
    cells = json.loads(notebook.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def anchors_of(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def links_of(page: Path) -> list[str]:
    """Targets of a page's links and pictures, and of its toctrees."""
    text = page.read_text()
    listed = [
        line.strip()
        for found in re.findall(r"^```\{toctree\}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        for line in found.splitlines()
        if line.strip() and not line.startswith(":")
    ]
    plain = re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))
    return [*re.findall(r"\]\(([^)\s]+)\)", plain), *listed]


def test_there_is_something_to_test() -> None:
    """The tests below have pages, blocks and notebooks to run."""
    assert len(list(python_blocks())) >= 10
    assert len(NOTEBOOKS) == 5
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


@pytest.mark.parametrize(("page", "block"), list(python_blocks()))
def test_block_runs(page: Path, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Python block of the pages, by itself, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    exec(compile(block, str(page), "exec"), {"__name__": "__main__"})


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_notebook_runs_inside_an_event_loop(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cell by cell, with an asyncio loop already running around them, as in Jupyter."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}

    async def run_cells() -> None:
        for number, source in enumerate(cells_of(notebook)):
            exec(compile(source, f"{notebook.name}, code cell {number}", "exec"), names)
            await asyncio.sleep(0)

    asyncio.run(run_cells())


def _is_made(target: Path) -> bool:
    """True for a page that a build of the site makes: of a public module, or of an experiment."""
    if target.parent == DOCS / "reference":
        return target.stem == "index" or target.stem.startswith(("dmoe_jax", "dmoe_net"))
    source = ROOT / "experiments" / ("" if target.stem == "index" else target.stem) / "README.md"
    return target.parent == DOCS / "figures" and source.exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link names a file of the repository or a page of the site, and a heading of it."""
    lost = []
    for link in links_of(page):
        path, _, anchor = link.removeprefix("https://github.com/dmoe-jax/dmoe_jax/blob/main/").partition("#")
        if "://" in path:
            continue
        base = ROOT if link.startswith("https:") else page.parent
        target = (base / path).resolve() if path else page
        found = [each for end in ("", ".md", ".ipynb") if (each := target.with_name(target.name + end)).exists()]
        made = _is_made(target) or _is_made(target.with_name(target.name + ".md"))
        headed = not (anchor and found and found[0].suffix == ".md") or anchor in anchors_of(found[0])
        if not (found or made) or not headed:
            lost.append(link)
    assert lost == []


@pytest.mark.slow
def test_site_builds_without_warnings_and_names_everything_public(tmp_path: Path) -> None:
    """`just docs`, and every public name is an object of the reference."""
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", DOCS, tmp_path]
    built = subprocess.run(command, capture_output=True, text=True, timeout=550)
    assert built.returncode == 0, built.stderr
    _, inventory = (tmp_path / "objects.inv").read_bytes().split(b"zlib.\n", 1)
    documented = {line.split()[0] for line in zlib.decompress(inventory).decode().splitlines()}
    import dmoe_jax
    import dmoe_net

    named = {f"dmoe_jax.{name}" for name in dmoe_jax.__all__ if not hasattr(getattr(dmoe_jax, name), "__path__")}
    named |= {f"dmoe_net.{name}" for name in dmoe_net.__all__}
    for module in ("routing", "experts", "optim", "emulator", "data", "models"):
        named |= {f"dmoe_jax.{module}.{name}" for name in getattr(dmoe_jax, module).__all__}
    text = "".join(page.read_text() for page in (tmp_path / "reference").glob("*.html"))
    assert [
        name for name in sorted(named) if name not in documented and f">{name.rpartition('.')[2]}<" not in text
    ] == []
