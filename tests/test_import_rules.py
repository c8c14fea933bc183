"""The layout of ARCHITECTURE.md holds: no circles, cores stay pure, foreign libraries enter at one place."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PATHS = sorted(path for package in ("net", "dmoe_jax", "experiments") for path in (ROOT / package).rglob("*.py"))
SOURCES = [path for path in PATHS if path.relative_to(ROOT).parts[0] != "experiments"]

# Async modules: they own nurseries, sockets, clocks or devices. Everything else is a core.
SHELLS = {
    "net.clock",
    "net.key_files",
    "net.nursery",
    "net.public",
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
    "net.rpc.dial",
    "net.rpc.faults",
    "net.rpc.lanes",
    "net.rpc.liveness",
    "net.rpc.peer",
    "net.rpc.service",
    "net.dht.calls",
    "net.dht.maintenance",
    "net.dht.node",
    "net.averaging.reduction.all_reduce",
    "net.averaging.grouping.matchmaker",
    "net.averaging.assisting",
    "net.averaging.averager",
    "net.averaging.opening",
    "net.averaging.collaboration.assisting",
    "net.averaging.collaboration.board",
    "net.averaging.collaboration.rounds",
    "net.averaging.collaboration.settlement",
    "net.averaging.collaboration.step_log",
    "net.averaging.gathering.all_gather",
    "net.averaging.gathering.sparse_mean",
    "net.averaging.line.monitor",
    "net.averaging.group_calls",
    "net.averaging.plan",
    "net.averaging.window",
    "net.averaging.reduction.chunk_exchange",
    "net.averaging.state.download",
    "net.averaging.state.sharing",
    "dmoe_jax.data.corpora",
    "dmoe_jax.data.mnist",
    "dmoe_jax.data.wikitext2",
    "dmoe_jax.emulator.recording",
    "dmoe_jax.runs.command_line",
    "dmoe_jax.runs.endings",
    "dmoe_jax.runs.run_folder",
    "dmoe_jax.runs.setting_up",
    "dmoe_jax.runs.speech",
    "dmoe_jax.cache_folder",
    "dmoe_jax.checkpoints",
    "dmoe_jax.disk",
    "dmoe_jax.cores",
    "dmoe_jax.interrupts",
    "dmoe_jax.xla_threads",
    "dmoe_jax.claims.claimer",
    "dmoe_jax.claims.host",
    "dmoe_jax.claims.survey",
    "dmoe_jax.claims.watch",
    "dmoe_jax.directory",
    "dmoe_jax.freed_memory",
    "dmoe_jax.mixture.coverage",
    "dmoe_jax.members",
    "dmoe_jax.metrics.monitor",
    "dmoe_jax.metrics.trackers",
    "dmoe_jax.processes",
    "dmoe_jax.mixture.fan_out",
    "dmoe_jax.mixture.readiness",
    "dmoe_jax.mixture.remote",
    "dmoe_jax.mixture.statistics",
    "dmoe_jax.flax_layers.host_call",
    "dmoe_jax.device",
    "dmoe_jax.node.backend",
    "dmoe_jax.node.host_calls",
    "dmoe_jax.node.lockstep",
    "dmoe_jax.node.runner",
    "dmoe_jax.node.saving",
    "dmoe_jax.node.stacked",
    "dmoe_jax.node.queue",
    "dmoe_jax.node.requests",
    "dmoe_jax.node.server",
    "dmoe_jax.averaging",
    "dmoe_jax.replicas.averaging",
    "dmoe_jax.replicas.learnt",
    "dmoe_jax.replicas.listing",
    "dmoe_jax.replicas.replicas",
    "dmoe_jax.replicas.state",
    "dmoe_jax.collaboration",
    "dmoe_jax.serving",
    "dmoe_jax.trainer",
    "dmoe_jax.blocking",
    "dmoe_jax.training.ledger",
    "dmoe_jax.training.progress",
    "dmoe_jax.training.run",
    "dmoe_jax.trunk",
    "dmoe_jax.cli",
    "dmoe_jax.joining",
    "dmoe_jax.peer",
    "dmoe_jax.swarm",
}

IMPURE = {"trio", "time", "secrets", "socket", "ssl", "os", "threading", "logging", "subprocess", "signal"}
ONLY_IN = {
    "cbor2": {"net.wire.codec"},
    "orbax": {"dmoe_jax.checkpoints"},
    "cryptography": {"net.keys"},
    "numpy": {
        "net.types",
        *(f"net.wire.{each}" for each in ("tensors", "compression", "sinks", "sparse")),
        "net.averaging",
    },
    "socket": {"net.transport.sockets"},
    "ssl": {"net.transport.tls_engine"},
    "prometheus_client": {"dmoe_jax.metrics.families", "dmoe_jax.metrics.monitor"},
    "pickle": set(),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in PATHS}


def imports_of(path: Path) -> Iterator[str]:
    """Every module that the file imports, wherever in it; `from a import b` counts as a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(path: Path) -> set[str]:
    """Our modules that the file imports: `from a import b` is a.b if that is a module, else a."""
    found = {name if name in MODULES else name.rpartition(".")[0] for name in imports_of(path)}
    return {name for name in found if name in MODULES} - {module_name(path)}


def room_of(module: str) -> str:
    """What a newcomer sees as one thing: net, an experiment, or what lies at the top of dmoe_jax."""
    parts = module.split(".")
    return parts[0] if parts[0] == "net" else ".".join(parts[:2])


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """The groups of nodes that reach each other."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        todo = list(graph.get(start, ()))
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                todo += graph.get(node, ())
        return seen

    far = {node: reach(node) for node in graph}
    groups = {tuple(sorted(other for other in far[node] if node in far.get(other, ()))) for node in far}
    return [list(group) for group in sorted(groups) if group]


def belongs(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def test_no_import_circles() -> None:
    """No module imports, by whatever way, a module that imports it; nor does one room another that needs it."""
    graph = {module: own_imports(path) for module, path in MODULES.items()}
    assert circles(graph) == []
    rooms: dict[str, set[str]] = {}
    for module, imported in graph.items():
        # `dmoe_jax` itself shows what its rooms hold, and no room needs it.
        if module != "dmoe_jax":
            rooms.setdefault(room_of(module), set()).update({room_of(each) for each in imported} - {room_of(module)})
    assert circles(rooms) == []


def test_circles_are_seen() -> None:
    """The check above can fail."""
    assert circles({"a": ["b"], "b": ["c"], "c": ["a"], "d": ["a"]}) == [["a", "b", "c"]]


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_import_rules(path: Path) -> None:
    """No module imports what its place forbids."""
    module = module_name(path)
    for imported in imports_of(path):
        top = imported.partition(".")[0]
        if belongs(module, "net"):
            assert top not in {"jax", "flax", "optax", "orbax", "dmoe_jax"}, f"{module} imports {imported}"
        assert top != "experiments", f"{module} imports {imported}"
        # A package's face loads everything: asked from inside, it would load in a circle.
        face = imported.rpartition(".")[0]
        assert face not in {"dmoe_jax", "net"} or module == face, f"{module} imports {imported}: name its module"
        assert belongs(module, "dmoe_jax.cli") or not belongs(imported, "dmoe_jax.cli"), f"{module} imports {imported}"
        if not any(belongs(module, shell) for shell in SHELLS):
            assert top not in IMPURE, f"core {module} imports {imported}"
            assert not belongs(imported, "net.clock"), f"core {module} imports {imported}"
        for library, places in ONLY_IN.items():
            concerns = belongs(module, "net") or library != "numpy"
            allowed = any(belongs(module, place) for place in places)
            assert top != library or allowed or not concerns, f"{module} imports {imported}"


def test_lists_name_real_modules() -> None:
    """A renamed module cannot slip out of the rules."""
    assert {name for name in SHELLS | set().union(*ONLY_IN.values()) if name not in MODULES} == set()
