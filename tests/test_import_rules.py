"""The layout of DESIGN's section 2 holds: imports point down, cores stay pure, foreign libraries enter at one place."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for package in ("net", "dmoe_jax") for path in (ROOT / package).rglob("*.py"))

# Async modules: they own nurseries, sockets, clocks or devices. Everything else is a core.
SHELLS = {
    "net.clock",
    "net.key_files",
    "net.nursery",
    "net.transport.base",
    "net.transport.sim.agenda",
    "net.transport.sim.endpoints",
    "net.transport.sim.flow",
    "net.transport.sim.network",
    "net.transport.sim.simulation",
    "net.transport.sim.transport",
    "net.transport.sockets",
    "net.transport.tcp",
    "net.transport.tls",
    "net.transport.tls_engine",
    "net.rpc.base",
    "net.rpc.connection",
    "net.rpc.fault_acts",
    "net.rpc.own_calls",
    "net.rpc.peer",
    "net.dht.calls",
    "net.dht.maintenance",
    "net.dht.node",
    "net.dht.service",
    "net.averaging.reduction.all_reduce",
    "net.averaging.grouping.assembly",
    "net.averaging.averager",
    "net.averaging.reduction.chunk_exchange",
    "net.averaging.grouping.search",
    "net.averaging.state.download",
    "net.averaging.state.sharing",
    "dmoe_jax.data.corpora",
    "dmoe_jax.data.wikitext2",
    "dmoe_jax.runs.run_folder",
    "dmoe_jax.directory",
    "dmoe_jax.mixture.coverage",
    "dmoe_jax.mixture.fan_out",
    "dmoe_jax.mixture.readiness",
    "dmoe_jax.mixture.remote",
    "dmoe_jax.mixture.statistics",
    "dmoe_jax.device",
    "dmoe_jax.node.saving",
    "dmoe_jax.node.server",
    "dmoe_jax.averaging",
    "dmoe_jax.trainer",
    "dmoe_jax.trunk",
    "dmoe_jax.trunk_averaging",
    "dmoe_jax.cli",
}

# Lower may not import higher. A module belongs to the longest prefix that fits.
LAYERS = [
    {"net"},
    {
        "dmoe_jax.checks",
        "dmoe_jax.layer_config",
        "dmoe_jax.model",
        "dmoe_jax.types",
        "dmoe_jax.device",
        "dmoe_jax.grid",
        "dmoe_jax.data",
        "dmoe_jax.runs",
        "dmoe_jax.autodiff",
        "dmoe_jax.checkpoints",
        "dmoe_jax.optim",
    },
    {"dmoe_jax.routing", "dmoe_jax.experts", "dmoe_jax.averaging"},
    {"dmoe_jax.directory", "dmoe_jax.members", "dmoe_jax.models", "dmoe_jax.mixture.local", "dmoe_jax.mixture.quorum"},
    {"dmoe_jax.node"},
    {"dmoe_jax.mixture"},
    {"dmoe_jax.node.server", "dmoe_jax.trainer", "dmoe_jax.trunk", "dmoe_jax.trunk_averaging"},
    {"dmoe_jax.cli"},
]
NET_LAYERS = [
    {
        "net.errors",
        "net.identity",
        "net.clock",
        "net.chance",
        "net.keys",
        "net.key_files",
        "net.nursery",
        "net.peer_health",
        "net.types",
    },
    {"net.wire"},
    {"net.transport"},
    {"net.rpc"},
    {"net.dht"},
    {"net.averaging"},
]

IMPURE = {"trio", "time", "secrets", "socket", "ssl", "os", "threading", "logging", "subprocess", "signal"}
ONLY_IN = {
    "cbor2": {"net.wire.codec"},
    "orbax": {"dmoe_jax.checkpoints"},
    "cryptography": {"net.keys"},
    "numpy": {"net.types", "net.wire.tensors", "net.wire.compression", "net.averaging"},
    "socket": {"net.transport.sockets"},
    "ssl": {"net.transport.tls_engine"},
    "pickle": set(),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[str]:
    """Every module that the file imports, wherever in it; `from a import b` counts as a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def belongs(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def layer_of(module: str, layers: list[set[str]]) -> int | None:
    fits = [(len(prefix), rank) for rank, layer in enumerate(layers) for prefix in layer if belongs(module, prefix)]
    return max(fits)[1] if fits else None


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_import_rules(path: Path) -> None:
    """No module imports what its place forbids."""
    module = module_name(path)
    for imported in imports_of(path):
        top = imported.partition(".")[0]
        if belongs(module, "net"):
            assert top not in {"jax", "flax", "optax", "orbax", "dmoe_jax"}, f"{module} imports {imported}"
        if not any(belongs(module, shell) for shell in SHELLS):
            assert top not in IMPURE, f"core {module} imports {imported}"
            assert not belongs(imported, "net.clock"), f"core {module} imports {imported}"
        for library, places in ONLY_IN.items():
            concerns = belongs(module, "net") or library != "numpy"
            allowed = any(belongs(module, place) for place in places)
            assert top != library or allowed or not concerns, f"{module} imports {imported}"
        for layers in (LAYERS, NET_LAYERS):
            here, there = layer_of(module, layers), layer_of(imported, layers)
            assert here is None or there is None or there <= here, f"{module} imports {imported}, which is above it"


def test_lists_name_real_modules() -> None:
    """A renamed module cannot slip out of the rules."""
    names = {module_name(path) for path in SOURCES}
    listed = SHELLS | {prefix for layer in LAYERS + NET_LAYERS for prefix in layer} | set().union(*ONLY_IN.values())
    assert {name for name in listed if name not in names} == set()
