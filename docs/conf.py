"""Sphinx settings of the documentation, and the pages that are made from the code: the reference and the figures."""

import ast
import importlib
import inspect
import itertools
import re
import sys
import typing
import zlib
from importlib.metadata import version as installed_version
from pathlib import Path

from sphinx.application import Sphinx

DOCS = Path(__file__).parent
ROOT = DOCS.parent
SOURCE = "https://github.com/dmoe-jax/dmoe_jax/blob/main/"

project = "dmoe_jax"
author = "the dmoe_jax authors"
project_copyright = author
version = release = installed_version("dmoe_jax")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "llms.txt"]
html_theme = "furo"
html_title = "dmoe_jax"
html_extra_path = ["llms.txt"]
html_theme_options = {"source_repository": "https://github.com/dmoe-jax/dmoe_jax", "source_directory": "docs/"}

nb_execution_mode = "off"  # tests/test_docs.py executes notebooks and blocks
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

default_role = "py:obj"  # `Swarm.serve` in a docstring is a link where that name is documented
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
suppress_warnings = ["ref.python"]  # a word in backticks that several classes have as an attribute stays plain
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 100

# Inventories of our own: a build asks no other machine, and names that are not here stay plain text.
LINKED = {
    "jax": ("https://docs.jax.dev/en/latest", "_autosummary/{name}.html"),
    "optax": ("https://optax.readthedocs.io/en/latest", "search.html?q={name}"),
    "flax": ("https://flax.readthedocs.io/en/latest", "search.html?q={name}"),
    "trio": ("https://trio.readthedocs.io/en/stable", "search.html?q={name}"),
    "numpy": ("https://numpy.org/doc/stable", "reference/generated/{name}.html"),
}
NAMES = {
    "jax": ("jax.Array", "jax.Device", "jax.ShapeDtypeStruct", "jax.jit", "jax.grad", "jax.value_and_grad"),
    "optax": (
        "optax.GradientTransformation",
        "optax.GradientTransformationExtraArgs",
        "optax.Params",
        "optax.OptState",
    ),
    "flax": ("flax.linen.Module", "flax.nnx.Module", "flax.nnx.Rngs"),
    "trio": ("trio.Nursery", "trio.CancelScope"),
    "numpy": ("numpy.ndarray", "numpy.dtype", "numpy.random.Generator"),
}


def _write_inventory(name: str, place: str) -> str:
    """Write the inventory of one library's names, and return its path relative to this folder."""
    lines = "".join(f"{each} py:class 1 {place.format(name=each)} -\n" for each in NAMES[name])
    head = f"# Sphinx inventory version 2\n# Project: {name}\n# Version: \n# The rest is compressed with zlib.\n"
    path = DOCS / "_build" / "inventories" / f"{name}.inv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head.encode() + zlib.compress(lines.encode()))
    return str(path.relative_to(DOCS))


intersphinx_mapping = {name: (url, _write_inventory(name, place)) for name, (url, place) in LINKED.items()}

MODULES = {
    "dmoe_jax": "What most scripts need.",
    "dmoe_jax.routing": "Routers, and what they are composed of.",
    "dmoe_jax.experts": "Experts: functions, Linen and NNX modules.",
    "dmoe_jax.optim": "Optax transformations: averaging, staleness, the recipe of the demonstration.",
    "dmoe_jax.models": "Transformer-XL and an MLP.",
    "dmoe_jax.data": "Texts, vocabularies, batches and MNIST.",
    "dmoe_jax.emulator": "An asynchronous swarm as one compiled program.",
    "dmoe_net": "Networking without JAX: RPC, DHT, averaging of flat vectors, the simulator.",
}


def public_names(module: str) -> dict[str, object]:
    """Names that a module promises and what they are, modules last, without those that have a page."""
    loaded = importlib.import_module(module)
    named = {name: getattr(loaded, name) for name in loaded.__all__ if f"{module}.{name}" not in MODULES}
    return dict(sorted(named.items(), key=lambda item: (inspect.ismodule(item[1]), item[0])))


def _comment_of(name: str, module: str) -> str:
    """The string below the assignment of a public constant, in whichever module of the package makes it."""
    package = module.partition(".")[0]
    for loaded in [each for key, each in sys.modules.items() if key.partition(".")[0] == package]:
        body = ast.parse(inspect.getsource(loaded)).body if name in vars(loaded) else []
        for node, following in itertools.pairwise(body):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return str(ast.literal_eval(following.value))  # type: ignore[attr-defined]
    raise LookupError(f"{module}.{name} has no string below its assignment")


def _directive(module: str, name: str) -> str:
    """The directive of one public name; what an earlier page documents is only named."""
    thing = public_names(module)[name]
    if inspect.ismodule(thing):
        return f".. py:module:: {module}.{name}\n\n`{module}.{name}`: {' '.join((thing.__doc__ or '').split())}\n"
    if inspect.isclass(thing) and not typing.get_origin(thing):
        first = next(each for each in MODULES if thing in public_names(each).values())
        if first != module:
            return f"`{name}` is :py:obj:`{first}.{name}`.\n"
        return f".. autoclass:: {module}.{name}\n   :members:\n"
    if inspect.isfunction(thing):
        return f".. autofunction:: {module}.{name}\n"
    return f".. py:data:: {module}.{name}\n\n   {' '.join(_comment_of(name, module).split())}\n"


def _empty(folder: Path) -> None:
    """Make a folder of pages that are written anew, without those of an earlier version."""
    folder.mkdir(exist_ok=True)
    for page in folder.glob("*.md"):
        page.unlink()


def write_reference(folder: Path) -> None:
    """Write a page for each public module, each public name on it from its docstring."""
    _empty(folder)
    for module, sentence in MODULES.items():
        names = "\n".join(_directive(module, name) for name in public_names(module))
        (folder / f"{module}.md").write_text(
            f"# {module}\n\n{sentence}\n\n```{{eval-rst}}\n.. currentmodule:: {module}\n\n{names}```\n"
        )
    listed = "\n".join(MODULES)
    (folder / "index.md").write_text(
        f"# Reference\n\nEvery name that is promised; everything else may move.\n\n```{{toctree}}\n{listed}\n```\n"
    )


def _on_the_site(page: Path, link: str) -> str:
    """A link of an experiment's README as it is from the experiment's page."""
    path, _, anchor = link.partition("#")
    if "://" in link or not path:
        return link
    target = (page.parent / path).resolve()
    anchor = f"#{anchor}" if anchor else ""
    if target.suffix == ".png":
        return "../" + str(Path("..") / target.relative_to(ROOT))
    if target.name == "README.md" and target.parent.parent == ROOT / "experiments":
        return f"{target.parent.name}.md{anchor}"
    if target == ROOT / "experiments" / "README.md":
        return "index.md"
    return f"{SOURCE}{target.relative_to(ROOT)}{anchor}"


def write_figures(folder: Path) -> None:
    """Write a page for each experiment, which is its README, and the table of experiments before them."""
    _empty(folder)
    pages = sorted((ROOT / "experiments").glob("*/README.md"))
    for page in [ROOT / "experiments" / "README.md", *pages]:
        text = re.sub(r"(?<=\]\()[^)\s]+", lambda link, page=page: _on_the_site(page, link[0]), page.read_text())
        if page.parent.name == "experiments":
            listed = "\n".join(each.parent.name for each in pages)
            (folder / "index.md").write_text(f"{text}\n```{{toctree}}\n:hidden:\n\n{listed}\n```\n")
        else:
            (folder / f"{page.parent.name}.md").write_text(text)


def _as_meant(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Take a docstring as it is meant: `*` and `|` are themselves, and an indented passage after a colon is code."""
    for number, line in enumerate(lines):
        parts = re.split(r"(`[^`]*`)", line)
        parts[::2] = [re.sub(r"(?<!\\)[*|]", r"\\\g<0>", part) for part in parts[::2]]
        lines[number] = re.sub(r"`e(s|d)\b", r"`\\ e\1", "".join(parts))
    for number in range(len(lines) - 2):
        indent = len(lines[number]) - len(lines[number].lstrip())
        if lines[number].endswith(":") and not lines[number].endswith("::") and not lines[number + 1].strip():
            following = lines[number + 2]
            if following.strip() and len(following) - len(following.lstrip()) > indent:
                lines[number] += ":"


def setup(app: Sphinx) -> None:
    """Write the pages that are made from the code before Sphinx looks for pages."""
    app.connect("autodoc-process-docstring", _as_meant, priority=400)  # before napoleon's own, which is 500
    write_reference(DOCS / "reference")
    write_figures(DOCS / "figures")
