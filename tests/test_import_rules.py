"""The layout of ARCHITECTURE.md holds: no circles, cores stay pure, foreign libraries enter at one place."""

import ast
import re
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PATHS = sorted(path for folder in ("net", "dmoe_jax", "experiments") for path in (ROOT / folder).rglob("*.py"))
SOURCES = [path for path in PATHS if path.relative_to(ROOT).parts[0] != "experiments"]


def modules(words: Mapping[str, str]) -> set[str]:
    """Full names of modules that are listed package by package."""
    return {f"{package}.{name}" for package, names in words.items() for name in names.split()}


# Async modules: they own nurseries, sockets, clocks or devices. Everything else is a core.
SHELLS = modules(
    {
        "dmoe_jax": "averaging checkpoints cli collaboration trainer trunk",
        "dmoe_jax.data": "files mnist wikitext2",
        "dmoe_jax.directory": "directory members",
        "dmoe_jax.live": "feeds recording run_feed server watcher",
        "dmoe_jax.machine": "cache_folder cores device disk freed_memory interrupts xla_threads",
        "dmoe_jax.mesh": "agreement",
        "dmoe_jax.metrics": "http_server monitor trackers",
        "dmoe_jax.mixture": "fan_out flax_layers readiness remote rows statistics",
        "dmoe_jax.node": "backend host_calls lockstep queue requests runner saving server stacked",
        "dmoe_jax.peers": "joining listed peer remembered",
        "dmoe_jax.placement": "averager claimer host learnt replicas state survey watch",
        "dmoe_jax.runs": "command_line endings processes run_folder setting_up speech",
        "dmoe_jax.swarm": "blocking opening serving swarm",
        "dmoe_jax.trained": "completion_server loading patient_layer readers",
        "dmoe_jax.training": "led progress run",
        "dmoe_net": "clock key_files nursery public",
        "dmoe_net.averaging": "assisting averager gathering group_calls opening plan replica window",
        "dmoe_net.averaging.collaboration": "assisting board rounds settlement step_log",
        "dmoe_net.averaging.grouping": "matchmaker",
        "dmoe_net.averaging.reduction": "all_reduce",
        "dmoe_net.averaging.state": "download sharing",
        "dmoe_net.dht": "calls maintenance node reading",
        "dmoe_net.rpc": "base connection connections faults lanes liveness peer service",
        "dmoe_net.transport": "base sockets tcp tls tls_engine",
        "dmoe_net.transport.sim": "agenda calls endpoints flow network simulation transport",
    }
)

IMPURE = {"trio", "time", "secrets", "socket", "ssl", "os", "threading", "logging", "subprocess", "signal"}
ONLY_IN = {
    "cbor2": {"dmoe_net.wire.codec"},
    "orbax": {"dmoe_jax.checkpoints"},
    "cryptography": {"dmoe_net.keys"},
    "numpy": modules({"dmoe_net": "averaging types", "dmoe_net.wire": "compression sinks sparse tensors"}),
    "socket": {"dmoe_net.transport.sockets"},
    "ssl": {"dmoe_net.transport.tls_engine"},
    "prometheus_client": {"dmoe_jax.metrics.families", "dmoe_jax.metrics.monitor"},
    "safetensors": {"dmoe_jax.trained.exporting"},
    "etils": {"dmoe_jax.trained.remote"},
    "pickle": set(),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "net" else parts  # the folder that holds `dmoe_net` is no package
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
    """Name of what a newcomer sees as one thing: dmoe_net, an experiment, or whatever is at the top of dmoe_jax."""
    parts = module.split(".")
    return parts[0] if parts[0] == "dmoe_net" else ".".join(parts[:2])


def belongs(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def test_no_import_circles() -> None:
    """No module imports, by whatever way, a module that imports it; nor does one room another that needs it."""
    graph = {module: own_imports(path) for module, path in MODULES.items()}
    TopologicalSorter(graph).prepare()  # raises `CycleError`, with the circle
    rooms: dict[str, set[str]] = {}
    for module, imported in graph.items():
        # `dmoe_jax` itself shows what its rooms hold, and no room needs it.
        if module != "dmoe_jax":
            rooms.setdefault(room_of(module), set()).update({room_of(each) for each in imported} - {room_of(module)})
    TopologicalSorter(rooms).prepare()


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_import_rules(path: Path) -> None:
    """No module imports what its place forbids."""
    module = module_name(path)
    for imported in imports_of(path):
        top = imported.partition(".")[0]
        if belongs(module, "dmoe_net"):
            assert top not in {"jax", "flax", "optax", "orbax", "dmoe_jax"}, f"{module} imports {imported}"
        assert top != "experiments", f"{module} imports {imported}"
        # A package's face loads everything: asked from inside, it would load in a circle.
        face = imported.rpartition(".")[0]
        assert face not in {"dmoe_jax", "dmoe_net"} or module == face, f"{module} imports {imported}: name its module"
        assert belongs(module, "dmoe_jax.cli") or not belongs(imported, "dmoe_jax.cli"), f"{module} imports {imported}"
        if not any(belongs(module, shell) for shell in SHELLS):
            assert top not in IMPURE, f"core {module} imports {imported}"
            assert not belongs(imported, "dmoe_net.clock"), f"core {module} imports {imported}"
        for library, places in ONLY_IN.items():
            concerns = belongs(module, "dmoe_net") or library != "numpy"
            allowed = any(belongs(module, place) for place in places)
            assert top != library or allowed or not concerns, f"{module} imports {imported}"


def test_the_way_of_a_batch_is_short_and_real() -> None:
    """ARCHITECTURE.md lists at most 25 files in order, and there are such files."""
    files = re.findall(r"^\| \d+ \| `([^`]+)` \|", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    assert 20 <= len(files) <= 25
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_lists_name_real_modules() -> None:
    """A renamed module cannot slip out of the rules."""
    assert {name for name in SHELLS | set().union(*ONLY_IN.values()) if name not in MODULES} == set()


# Guard rails. The exceptions are what stood here when a rule was made: a list may only shrink, so an entry that
# is no longer needed, or needs less, fails too.

MOST_IMPORTS, MOST_FIELDS, MOST_PARAMETERS, LONGEST_FILE = 15, 15, 8, 600

# Lines of Python in each top folder. Raising one wants a sentence in the commit that says what users get for it.
LINE_BUDGETS = {"dmoe_jax": 42_571, "dmoe_net": 18_000, "experiments": 13_500}

# Modules with more own imports than MOST_IMPORTS.
WIDE_MODULES: dict[str, int] = {
    "dmoe_jax.averaging.tree_averager": 21,
    "dmoe_jax.cli.assist": 19,
    "dmoe_jax.cli.trainers": 19,
    "dmoe_jax.cli.up": 16,
    "dmoe_jax.collaboration.collaboration": 17,
    "dmoe_jax.collaboration.replica": 16,
    "dmoe_jax.mixture.remote": 18,
    "dmoe_jax.node.server": 17,
    "dmoe_jax.peers.peer": 16,
    "dmoe_jax.placement.averager": 16,
    "dmoe_jax.swarm.swarm": 19,
    "dmoe_jax.trained.offered": 16,
    "dmoe_jax.trained.saved_model": 17,
    "dmoe_net.averaging.averager": 19,
    "dmoe_net.averaging.collaboration.rounds": 18,
    "dmoe_net.rpc.peer": 17,
}

# Dataclasses with more fields than MOST_FIELDS.
WIDE_CLASSES: dict[str, int] = {"dmoe_jax.cli.demo.DemoCommand": 16, "dmoe_net.dht.config.DhtConfig": 16}

# Public functions with more parameters than MOST_PARAMETERS.
WIDE_FUNCTIONS: dict[str, int] = {
    "dmoe_jax.node.server.open_expert_node": 10,
    "dmoe_jax.optim.peer_axis.moshpit_rounds": 9,
    "dmoe_jax.swarm.opening.open_swarm": 13,
    "dmoe_jax.swarm.swarm.collaborate": 12,
    "dmoe_jax.swarm.swarm.collaboration": 9,
    "dmoe_jax.swarm.swarm.serve": 12,
    "dmoe_net.averaging.grouping.matchmaking.__init__": 10,
    "dmoe_net.averaging.state.download.download_state": 11,
    "dmoe_net.dht.node.open_dht_node": 9,
    "dmoe_net.rpc.lanes.call": 9,
}

# What experiments import beside the faces of packages.
INNER_MODULES_OF_EXPERIMENTS = modules(
    {
        "dmoe_jax": "arrays autodiff layer_config model trainer trunk",
        "dmoe_jax.data": "wikitext2 words",
        "dmoe_jax.directory": "directory grid members",
        "dmoe_jax.emulator": "events order",
        "dmoe_jax.experts": "base dropout feedforward relative_attention transformer_xl",
        "dmoe_jax.machine": "cores device disk environment xla_threads",
        "dmoe_jax.mixture": "expert_calls local local_update remote",
        "dmoe_jax.models": "layers mlp transformer_xl trunk",
        "dmoe_jax.node": "backend programs server",
        "dmoe_jax.optim": "collaborative noloco streaming_diloco",
        "dmoe_jax.peers": "peer",
        "dmoe_jax.routing": "product_key",
        "dmoe_jax.runs": "command_line endings figure flags report run_folder setting_up speech style",
        "dmoe_jax.swarm": "opening",
        "dmoe_jax.training": "engine prepared_run progress run swarm_engine task",
        "dmoe_net": "errors keys",
        "dmoe_net.averaging.collaboration": "assisting",
        "dmoe_net.averaging.grouping": "group group_key",
        "dmoe_net.averaging.reduction": "all_reduce",
        "dmoe_net.averaging.state": "download sharing",
        "dmoe_net.dht": "routing_table",
        "dmoe_net.rpc": "base bulk faults",
        "dmoe_net.transport.sim": "calls links",
        "dmoe_net.wire": "sparse",
    }
)

# Private parts of JAX and trio, each with the test that says what broke.
PRIVATE_PARTS = {
    "dmoe_jax.machine.cluster": "dmoe_jax/test_node_distributed.py::test_jax_tells_where_process_0_is",
    "dmoe_jax.machine.xla_threads": "dmoe_jax/test_xla_threads.py::test_jax_says_whether_it_has_computed",
    "dmoe_net.transport.sim.simulation": "net/test_sim_runs.py::test_run_leaves_the_process_as_it_was",
}


def parsed(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


LIBRARY = [module for module in MODULES if not belongs(module, "experiments")]


def test_modules_need_few_others() -> None:
    """No module of the library imports more than fifteen of ours; faces, which list what others hold, may."""
    counts = {module: len(own_imports(path)) for module, path in MODULES.items() if module in LIBRARY}
    counts = {module: count for module, count in counts.items() if MODULES[module].stem not in ("__init__", "public")}
    assert {module: count for module, count in counts.items() if count > MOST_IMPORTS} == WIDE_MODULES


def test_classes_have_few_fields() -> None:
    """No class of the library declares more than fifteen fields."""
    counts = {
        f"{module}.{node.name}": sum(isinstance(each, ast.AnnAssign) for each in node.body)
        for module in LIBRARY
        for node in ast.walk(parsed(module))
        if isinstance(node, ast.ClassDef)
    }
    assert {name: count for name, count in counts.items() if count > MOST_FIELDS} == WIDE_CLASSES


def test_functions_have_few_parameters() -> None:
    """No function of the library has more than eight parameters, `self` not counted."""
    counts = {
        f"{module}.{node.name}": len([*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs])
        - any(each.arg in ("self", "cls") for each in arguments.args[:1])
        for module in LIBRARY
        for node in ast.walk(parsed(module))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for arguments in [node.args]
    }
    assert {name: count for name, count in counts.items() if count > MOST_PARAMETERS} == WIDE_FUNCTIONS


def test_the_library_has_few_loose_files() -> None:
    """Ten at most lie in no room."""
    assert len(list((ROOT / "dmoe_jax").glob("*.py"))) <= 10


def test_folders_keep_their_line_budgets() -> None:
    """No top folder grows beyond its budget, nor a file beyond what is read in one sitting."""
    lines = {module: len(path.read_text().splitlines()) for module, path in MODULES.items()}
    for folder, budget in LINE_BUDGETS.items():
        assert sum(count for module, count in lines.items() if belongs(module, folder)) <= budget, folder
    assert {module: count for module, count in lines.items() if count > LONGEST_FILE} == {}


def test_experiments_import_faces() -> None:
    """Experiments take the library as its users do: through packages' faces, but for the list above."""
    inner = {
        imported
        for module, path in MODULES.items()
        if belongs(module, "experiments")
        for imported in own_imports(path)
        if not belongs(imported, "experiments") and MODULES[imported].stem != "__init__"
    }
    assert inner == INNER_MODULES_OF_EXPERIMENTS


def test_private_parts_of_others_are_left_alone() -> None:
    """Nothing reaches into JAX or trio but at the places above, and each of these has its test."""
    reaches_in = re.compile(r'\b(jax|trio)(\._(?!_)|, "_)')
    assert {module for module in MODULES if reaches_in.search(MODULES[module].read_text())} == set(PRIVATE_PARTS)
    for file, _, test in (name.partition("::") for name in PRIVATE_PARTS.values()):
        assert f"def {test}(" in (ROOT / "tests" / file).read_text()
