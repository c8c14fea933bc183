"""A trained model leaves as safetensors and comes back to the bit; files that are damaged or lie are refused."""

import dataclasses
import functools
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from dmoe_jax.checkpoints import Checkpoints, numbers_in
from dmoe_jax.cli import main
from dmoe_jax.cli.init_flags import _setting_untrusted
from dmoe_jax.cli.node_options import KindOptions, SavingOptions
from dmoe_jax.cli.train_options import DataOptions, FolderOptions, LanguageModelOptions, TrainOptions
from dmoe_jax.cli.up import UpCommand
from dmoe_jax.data.vocabulary import Vocabulary
from dmoe_jax.layer_config import LayerConfig, Recipe, Route
from dmoe_jax.machine.disk import CheckpointError
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.transformer_xl import init_experts, init_trunk
from dmoe_jax.node.backend import make_backends
from dmoe_jax.optim.recipe import make_optimizer
from dmoe_jax.routing.base import RouterError
from dmoe_jax.routing.product_key import product_key
from dmoe_jax.runs.endings import UsageError
from dmoe_jax.runs.run_folder import RunFolder
from dmoe_jax.trained.export_files import ExportFacts, is_export, read_facts, read_header, vocabulary_folder
from dmoe_jax.trained.exporting import write_export
from dmoe_jax.trained.imported import begin_experts, read_export, read_trunk_for
from dmoe_jax.trained.language_model import TrainedModel
from dmoe_jax.trained.saved_model import SavedModel
from tests.dmoe_jax.training_rig import outcome

PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "export.md"
GRID = (2, 2)
WORDS = "vocabulary: 20 words, 0123456789abcdef"
LAYER = LayerConfig(d_model=8, num_heads=2, d_ff=12, seq_len=4, mem_len=4)
UIDS = [[f"layer{layer}.{i}.{j}" for i in range(2) for j in range(2)] for layer in range(2)]


@functools.cache
def trained(route: Route = "sequence", *, cutoffs: tuple[int, ...] = (10,)) -> SavedModel:
    """A small model with all of its experts."""
    sizes: dict[str, Any] = {"vocab_size": 20, "num_layers": 2, "grid_size": GRID, "k_best": 2, "cutoffs": cutoffs}
    config, router = TransformerXLConfig(layer=LAYER, route=route, **sizes), product_key(GRID)
    return SavedModel(
        config=config,
        router=router,
        step=7,
        trunk=jax.tree.map(np.asarray, init_trunk(jax.random.key(0), config, router)),
        experts=jax.tree.map(np.asarray, init_experts(jax.random.key(1), config)),
        known=np.ones((2, *GRID), bool),
    )


def facts_of(model: SavedModel, **changes: Any) -> ExportFacts:
    sizes = dataclasses.asdict(model.config)
    facts = ExportFacts(sizes=sizes, router="product_key", step=model.step, meaning=WORDS, corpus="my.txt")
    return dataclasses.replace(facts, **changes)


def export(model: SavedModel, out: Path, *, split: bool = False, **changes: Any) -> Path:
    """The export of a model, in a folder without a vocabulary."""
    write_export(model, facts_of(model, **changes), out, split=split, vocabulary=out.parent)
    return out


def check_equal(found: Any, expected: Any) -> None:
    """Equal structures, and arrays of equal types, to the bit."""
    jax.tree.map(functools.partial(np.testing.assert_array_equal, strict=True), found, expected)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    "model", [trained, lambda: trained("token"), lambda: trained(cutoffs=())], ids=["sequence", "token", "plain"]
)
def test_an_export_is_read_back_to_the_bit(model: Callable[[], SavedModel], split: bool, tmp_path: Path) -> None:
    """Trunk, experts, sizes and facts; also arrays without elements, which a plain softmax has."""
    whole = model()
    out = export(whole, tmp_path / ("parts" if split else "model.safetensors"), split=split)
    assert is_export(out)
    assert not is_export(tmp_path)
    assert len(list(tmp_path.rglob("*.safetensors"))) == (9 if split else 1)
    found = read_export(out)
    check_equal((found.trunk, found.experts, found.known), (whole.trunk, whole.experts, whole.known))
    assert (found.config, found.router, found.step) == (whole.config, whole.router, 7)
    assert read_facts(out).metadata() == facts_of(whole).metadata()


def test_experts_that_are_not_known_are_zeros(tmp_path: Path) -> None:
    """One of four in a layer is missing, or a whole layer is: then its arrays are left out, and take no memory."""
    whole = trained()
    known = whole.known.copy()
    known[0, 1, 0] = known[1] = False
    some = dataclasses.replace(whole, known=known)
    for split in (False, True):
        out = export(some, tmp_path / ("parts" if split else "model.safetensors"), split=split)
        found = read_export(out)
        np.testing.assert_array_equal(found.known, known)
        kernel, expected = (each.experts[0]["ff_in"]["kernel"] for each in (found, whole))
        np.testing.assert_array_equal(kernel[[0, 1, 3]], expected[[0, 1, 3]])
        assert split is not kernel[2].any()  # in one file they are what the model had there
        assert not any(leaf.any() for leaf in jax.tree.leaves(found.experts[1]))
        arrays, _ = read_header(out / "trunk.safetensors" if split else out)
        assert not any(name.startswith("experts.layer1") for name in arrays)


def blocks(page: Path) -> list[str]:
    """The blocks of a page that are run here and not in `tests/test_docs.py`, since they need files."""
    return re.findall(r"^```py\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def test_the_page_reads_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """With the package, with twenty lines of NumPy, with the library, and Orbax's checkpoints by their names."""
    model = trained()
    export(model, tmp_path / "model.safetensors")
    as_state = {"params": model.trunk, "opt_state": make_optimizer(Recipe()).init(model.trunk)}
    save(tmp_path / "runs" / "first" / "checkpoints", {9: as_state, 10: as_state})
    begin_experts(tmp_path / "model.safetensors", tmp_path / "experts", UIDS[0], model.config.expert(), None)
    monkeypatch.chdir(tmp_path)
    texts = blocks(PAGE)
    assert len(texts) == 5
    assert len(texts[1].split("\n\n\narrays, ")[0].splitlines()) <= 20
    named: list[dict[str, Any]] = []
    for text in texts:
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(text, str(PAGE), "exec"), names)
        named.append(names)
    by_package, by_numpy, by_library, trainers, nodes = named
    check_equal(by_numpy["arrays"], by_package["arrays"])
    check_equal(by_package["arrays"], load_file("model.safetensors"))
    table = model.trunk["embed"]["table"]
    np.testing.assert_array_equal(by_package["arrays"]["trunk.embed.table"], table)
    check_equal(by_library["model"].trunk, model.trunk)
    np.testing.assert_array_equal(trainers["state"]["params"]["embed"]["table"], table)
    np.testing.assert_array_equal(nodes["state"]["params"]["ff_in"]["kernel"], model.experts[0]["ff_in"]["kernel"][3])
    assert capsys.readouterr().out.splitlines()[1] == "layer0.1.1 (8, 12)"


@pytest.mark.parametrize("route", ["sequence", "token"])
def test_the_page_has_all_names_and_no_others(route: Route, tmp_path: Path) -> None:
    """Arrays and metadata."""
    section = PAGE.read_text().partition("## Names")[2].partition("## Train on")[0]
    rows = [re.findall(r"`([^`]+)`", row.split(" | ")[0]) for row in section.splitlines() if row.startswith("| `")]
    promised = {full(first, name) for first, *more in rows for name in (first, *more)}
    arrays, metadata = read_header(export(trained(route), tmp_path / "model.safetensors"))
    found = {re.sub(r"(gates\.|attention\.|layer)\d", r"\1L", name) for name in arrays} | {*metadata}
    # Attention that is the trunk's has the names that it has in an expert.
    found = {name.replace("trunk.attention.L", "experts.layerL") for name in found}
    assert found == promised - {"trunk.gates.L.*", "uid"}


def full(first: str, name: str) -> str:
    """The name that a cell of the page stands for: one that begins with a dot has the beginning of the cell's first."""
    parts = name.split(".")[1:]
    return ".".join([*first.split(".")[: -len(parts)], *parts]) if name.startswith(".") else name


def rewritten(
    file: Path, change: Callable[[dict[str, Any]], object], *, data: Callable[[bytes], bytes] = lambda data: data
) -> None:
    """Change a file's header, and what follows it."""
    whole = file.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data(whole[8 + size :]))


def of_config(**changes: Any) -> Callable[[dict[str, Any]], object]:
    """Change the configuration in a header, fields of the layer too."""

    def change(header: dict[str, Any]) -> None:
        sizes = json.loads(header["__metadata__"]["config"])
        for name, value in changes.items():
            (sizes["layer"] if name in sizes["layer"] else sizes)[name] = value
        header["__metadata__"]["config"] = json.dumps(sizes)

    return change


def of_metadata(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda header: header["__metadata__"].update(changes)


def of_table(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda header: header["trunk.embed.table"].update(changes)


def swapped(header: dict[str, Any]) -> None:
    """Two arrays of equal size have each other's name, and one overlaps with the other."""
    header["trunk.gates.0.norm.scale"]["data_offsets"] = header["trunk.gates.0.norm.bias"]["data_offsets"]


LIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another format": (of_metadata(format="pt"), "have format 'pt', expected 'dmoe_jax'"),
    "a later version": (of_metadata(version="2"), "have version '2', expected '1'"),
    "no metadata": (lambda header: header.pop("__metadata__"), "its metadata are missing"),
    "metadata of numbers": (of_metadata(step=7), "metadata are missing, or no strings"),
    "no step": (lambda header: header["__metadata__"].pop("step"), "not those of one: 'step'"),
    "a step that is none": (of_metadata(step="-7"), "step '-7'"),
    "a step without end": (of_metadata(step="9" * 5000), "step '999"),
    "no JSON": (of_metadata(config="{"), "metadata are not those of one"),
    "deep JSON": (of_metadata(config="[" * 100_000), "metadata are not those of one"),
    "a list as configuration": (of_metadata(config="[]"), r"config \[\]"),
    "a text that cannot be printed": (of_metadata(router="\x1b[2J"), "its router is"),
    "a text without end": (of_metadata(corpus="x" * 9000), "its corpus is"),
    "a meaning without end": (of_metadata(meaning="x" * 9000), "its meaning is"),
    "another width": (of_config(d_model=16), r"must have the shapes \(20, 16\)"),
    "another vocabulary": (of_config(vocab_size=21), r"must have the shapes \(21, 8\)"),
    "another grid": (of_config(grid_size=[4, 1]), r"shapes .* and \(2, 4, 1\)"),
    "no grid": (of_config(grid_size=[]), r"shapes .* and \(2,\)"),
    "layers without end": (of_config(num_layers=10**9), "must have the shapes"),
    "a feed-forward network without end": (of_config(d_ff=10**9), r"expected float32\[4, 1000000000\]"),
    "a width beyond all": (of_config(d_ff=10**400), "no configuration of a model: d_ff is 1000"),
    "half an expert": (of_config(k_best=1.5), "k_best is 1.5"),
    "a word as number": (of_config(num_heads="2"), "num_heads is '2'"),
    "heads that do not fit": (of_config(num_heads=3), "no configuration of a model: .*num_heads"),
    "a field of another version": (of_config(depth=3), "another version"),
    "a missing field": (lambda header: of_metadata(config='{"layer": {}}')(header), "no configuration of a model"),
    "a layer that is none": (of_config(layer="small"), "no configuration of a model"),
    "another router": (of_metadata(router="uniform_random"), "'trunk.gates.0.keys.bias' is .*, expected nothing"),
    "no router": (of_metadata(router="nobody"), "unknown router 'nobody'"),
    "an unknown type": (of_table(dtype="F8_E4M3"), "'trunk.embed.table' is"),
    "a type of another size": (of_table(dtype="F16"), "has 640 bytes"),
    "a type of equal size": (of_table(dtype="I32"), r"'trunk.embed.table' is int32\[20, 8\], expected float32"),
    "another shape": (of_table(shape=[8, 20]), r"must have the shapes \(20, 8\)"),
    "a negative shape": (of_table(shape=[-20, -8]), "'trunk.embed.table' is"),
    "a true shape": (of_table(shape=[True, 160]), "'trunk.embed.table' is"),
    "fields beside": (of_table(more=1), "'trunk.embed.table' is"),
    "an array that is none": (lambda header: header.update({"trunk.embed.table": 3}), "'trunk.embed.table' is 3"),
    "an overlap": (swapped, "have a gap, or overlap"),
    "an array less": (lambda header: header.pop("trunk.head.bias"), "have a gap, or overlap"),
    "another name": (
        lambda header: header.update({"trunk.head.b": header.pop("trunk.head.bias")}),
        "'trunk.head.b' is float32.*, expected nothing of that name",
    ),
    "another name of an expert": (
        lambda header: header.update({"experts.x": header.pop("experts.layer0.ff_in.bias")}),
        "'experts.layer0.ff_in.bias' is absent, expected float32",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_file_that_lies_is_refused(lie: str, tmp_path: Path) -> None:
    """A sentence names the file and what is wrong; nothing is as large as the file claims."""
    file = export(trained(), tmp_path / "model.safetensors")
    change, line = LIES[lie]
    rewritten(file, change)
    with pytest.raises(ValueError, match=line) as error:
        read_export(file)
    assert len(str(error.value)) < 600
    assert str(file) in str(error.value) or isinstance(error.value, RouterError)


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda whole: b"", "a header of 0 bytes in a file of 0"),
    "seven bytes": (lambda whole: whole[:7], "in a file of 7"),
    "half a header": (lambda whole: whole[:200], "in a file of 200"),
    "half the arrays": (lambda whole: whole[: len(whole) // 2], "its arrays end at byte"),
    "a byte less": (lambda whole: whole[:-1], "its arrays end at byte"),
    "a byte more": (lambda whole: whole + b"x", "its arrays end at byte"),
    "a huge header": (lambda whole: b"\xff" * 8 + whole[8:], "a header of 18446744073709551615 bytes"),
    "a header beyond the bound": (lambda whole: (17 << 20).to_bytes(8, "little") + bytes(20 << 20), "at most 16777216"),
    "a header of another kind": (lambda whole: (2).to_bytes(8, "little") + b"[]", "got list"),
    "a deep header": (lambda whole: (10**5).to_bytes(8, "little") + b"[" * 10**5, "no whole safetensors file"),
    "no UTF-8": (lambda whole: (4).to_bytes(8, "little") + b'{"\xff"', "no whole safetensors file"),
    "a name twice": (lambda whole: (15).to_bytes(8, "little") + b'{"a": 1,"a": 2}', "a name is there twice"),
    "a pickle": (lambda whole: b"\x80\x04\x95cposix\nsystem\n", "no whole safetensors file"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused(damage: str, tmp_path: Path) -> None:
    """Whatever was cut off, added or written over."""
    file = export(trained(), tmp_path / "model.safetensors")
    change, line = DAMAGES[damage]
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ValueError, match=line):
        read_export(file)


def test_garbage_in_a_header_raises_one_error(tmp_path: Path) -> None:
    """Whichever bytes are wrong: the facts are read, or a ValueError says that they cannot be."""
    file = export(trained(), tmp_path / "model.safetensors")
    whole, rng = file.read_bytes(), np.random.default_rng(0)
    size, refused = int.from_bytes(whole[:8], "little"), 0
    for _ in range(100):
        data = bytearray(whole)
        for at in rng.integers(0, 8 + size, rng.integers(1, 4)):
            data[at] = rng.integers(256)
        file.write_bytes(data)
        try:
            read_facts(file)
        except ValueError:
            refused += 1
    assert refused > 60


def test_an_expert_of_another_name_or_none_is_refused(tmp_path: Path) -> None:
    """A folder whose files were exchanged, or lost, is not read."""
    out = export(trained(), tmp_path / "parts", split=True)
    first, second = (out / f"{uid}.safetensors" for uid in UIDS[1][:2])
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    with pytest.raises(ValueError, match=r"have uid 'layer1.0.1', expected 'layer1.0.0'"):
        read_export(out)
    first.unlink()
    with pytest.raises(FileNotFoundError, match=r"layer1\.0\.0"):
        read_export(out)
    first.write_bytes(kept)
    assert read_export(out).known.all()


def test_a_file_of_another_tool_is_refused(tmp_path: Path) -> None:
    """It is a sound safetensors file, but no model of ours; a text file is neither; other tools read ours."""
    save_file({"weight": np.ones(3)}, tmp_path / "other.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"other.safetensors: its metadata have format 'pt', expected 'dmoe_jax'"):
        read_export(tmp_path / "other.safetensors")
    with safe_open(export(trained(), tmp_path / "model.safetensors"), framework="np") as opened:
        assert opened.metadata()["router"] == "product_key"


def test_no_code_is_run_that_only_an_export_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its router's file must be named again, or trusted; the name of another router is refused."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("raise ValueError('it ran')\n")
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    export(trained(), ours)
    export(trained(), theirs, router="mine.py:router")
    with pytest.raises(ValueError, match=r"would run code out of .*mine.py, .*name mine.py:router again"):
        read_export(theirs)
    for options in ({"router": "mine.py:router"}, {"trust": True}):
        with pytest.raises(RouterError, match="it ran"):
            read_export(theirs, **options)
    check_equal(read_export(theirs, router="product_key").trunk, trained().trunk)
    with pytest.raises(ValueError, match="is product_key, not switch"):
        read_export(ours, router="switch")


@pytest.mark.parametrize("split", [False, True])
def test_an_export_is_whole_or_absent(split: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full in the middle leaves nothing behind, not even a hidden file."""
    written: list[Path] = []

    def failing(arrays: Mapping[str, Any], file: Path, metadata: Any) -> None:
        if len(written) == (3 if split else 0):
            raise SafetensorError("I/O error: No space left on device")
        written.append(file)

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "vocabulary.json").write_text("[]")
    monkeypatch.setattr("safetensors.numpy.save_file", failing)
    out = tmp_path / ("parts" if split else "model.safetensors")
    with pytest.raises(OSError, match=f"No space left on device: '{out}'$"):
        write_export(trained(), facts_of(trained()), out, split=split, vocabulary=tmp_path / "run")
    assert list(tmp_path.iterdir()) == [tmp_path / "run"]


def test_a_type_that_the_form_does_not_know_is_refused(tmp_path: Path) -> None:
    """As a router of the user's own may have it; bfloat16 has a name."""
    model = trained()

    def with_gates(dtype: Any) -> SavedModel:
        gates = jax.tree.map(lambda leaf: leaf.astype(dtype), model.trunk["gates"])
        return dataclasses.replace(model, trunk={**model.trunk, "gates": gates})

    with pytest.raises(ValueError, match=r"no type for complex128, that of trunk.gates.0.keys.bias"):
        export(with_gates(np.complex128), tmp_path / "model.safetensors")
    arrays, _ = read_header(export(with_gates(jax.numpy.bfloat16), tmp_path / "model.safetensors"))
    assert arrays["trunk.gates.1.norm.bias"].dtype == jax.numpy.bfloat16


def save(folder: Path, states: Mapping[int, Any]) -> None:
    checkpoints = Checkpoints(folder)
    for step, state in states.items():
        checkpoints.save(step, jax.tree.map(np.asarray, state), {})
    checkpoints.close()


@pytest.mark.slow
def test_nodes_begin_with_the_experts_of_an_export(tmp_path: Path) -> None:
    """Their checkpoints have its parameters and a fresh optimiser; what a node has learnt itself stays."""
    model, optimizer = trained(), make_optimizer(Recipe(learning_rate=0.1, warmup_steps=0, total_steps=None))
    backends = make_backends({"layer1.[0:2].[0:2]": model.config.expert()}, optimizer, seed=3)
    begin = functools.partial(begin_experts, folder=tmp_path / "experts", uids=UIDS[1], expert=model.config.expert())
    for split in (False, True):
        out = export(model, tmp_path / ("parts" if split else "model.safetensors"), split=split)
        kept = jax.tree.map(np.asarray, backends["layer1.0.1"].state)
        save(tmp_path / "experts" / "layer1.0.1", {5: kept})
        assert begin(out, optimizer=optimizer) == 3
        assert begin(out, optimizer=optimizer) == 0
        for number, (uid, backend) in enumerate(backends.items()):
            found = Checkpoints(tmp_path / "experts" / uid).restore_or_begin(backend.state)
            assert found is not None
            expected = jax.tree.map(lambda leaf, at=number: leaf[at], model.experts[1])
            if uid == "layer1.0.1":
                check_equal((found[0], found[1]), (5, kept))
            else:
                check_equal((found[0], found[1]["params"]), (0, expected))
                check_equal(found[1]["opt_state"], jax.tree.map(np.asarray, backend.state["opt_state"]))
        for uid in UIDS[1]:
            for path in sorted((tmp_path / "experts" / uid).rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()


def test_nodes_refuse_the_experts_of_another_model(tmp_path: Path) -> None:
    """Other names or shapes; nothing is written then."""
    out, folder = export(trained(), tmp_path / "model.safetensors"), tmp_path / "experts"

    def refusal(uids: list[str], **sizes: Any) -> str:
        expert = trained().config.replace(**sizes).expert()
        with pytest.raises(ValueError, match=r"model\.safetensors") as error:
            begin_experts(out, folder, uids, expert, None)
        return str(error.value)

    assert "has none of the experts ffn.0, ffn.1 ..." in refusal(["ffn.0", "ffn.1"])
    assert "is of another model: 'ff_in.bias' is float32[12], expected float32[16]" in refusal(UIDS[0], d_ff=16)
    assert "'content_bias' is float32[2, 4], expected float32[4, 2]" in refusal(UIDS[0], num_heads=4)
    assert not folder.exists()


def test_two_nodes_may_write_the_same_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that comes second leaves what is there; a disk that is full is an error."""
    out, model = export(trained(), tmp_path / "model.safetensors"), trained()
    folder, looks = tmp_path / "experts", 0

    def first_without(path: Path) -> list[int]:
        nonlocal looks
        looks += 1
        return [] if looks == 1 else numbers_in(path)

    save(folder / UIDS[0][0], {0: {"w": np.ones(2)}})
    monkeypatch.setattr("dmoe_jax.trained.imported.numbers_in", first_without)
    assert begin_experts(out, folder, UIDS[0][:1], model.config.expert(), None) == 1
    monkeypatch.setattr("dmoe_jax.trained.imported.numbers_in", lambda path: [])
    with pytest.raises(CheckpointError, match="is there already"):
        begin_experts(out, folder, UIDS[0][:1], model.config.expert(), None)


def test_trainers_begin_with_the_trunk_of_the_same_model_alone(tmp_path: Path) -> None:
    """The first size, the words or the router that differ are named."""
    out, config = export(trained(), tmp_path / "model.safetensors"), trained().config
    read = functools.partial(read_trunk_for, out, router="product_key", words=WORDS)
    check_equal(read(config), trained().trunk)
    check_equal(read(config.replace(d_ff=99, dropout=0.5, seq_len=9), words=""), trained().trunk)
    for changes, line in (
        ({"d_model": 16}, "has d_model 8, expected 16"),
        ({"num_layers": 3}, "has num_layers 2, expected 3"),
        ({"cutoffs": ()}, r"has cutoffs \(10,\), expected \(\)"),
        ({"route": "token"}, "has route sequence, expected token"),
    ):
        with pytest.raises(ValueError, match=line):
            read(config.replace(**changes))
    with pytest.raises(ValueError, match=r"are others: vocabulary: 20 words, 0123\w+ of the text 'my.txt'"):
        read(config, words="vocabulary: 20 words, 9876543210fedcba")
    with pytest.raises(ValueError, match="is product_key, not switch"):
        read(config, router="switch")
    token = export(trained("token"), tmp_path / "token.safetensors")
    with pytest.raises(ValueError, match="has 2 heads, expected 4"):
        read_trunk_for(token, trained("token").config.replace(num_heads=4), router="product_key", words="")


def test_commands_say_which_flags_fit_an_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`dmoe up` before anything starts; a node and a trainer where the export is not theirs, and only then."""
    out = export(trained("token"), tmp_path / "token.safetensors")
    monkeypatch.chdir(tmp_path)
    up = UpCommand(data=DataOptions(data="embedded", init=out), folder=FolderOptions(out=Path("run")))
    with pytest.raises(UsageError) as error:
        up.check()
    flags = "--route token --d-model 8 --num-heads 2 --d-ff 12 --grid-size 2 2"
    assert str(error.value) == f"the model in {out} was trained with other flags; give {flags}"
    layer = trained("token").config.layer
    fits = LanguageModelOptions(layer=layer, route="token", grid_size=(2, 2))
    dataclasses.replace(up, language=fits).check()
    with pytest.raises(UsageError, match=r"give --router product_key$"):
        dataclasses.replace(up, language=dataclasses.replace(fits, router="switch")).check()
    dataclasses.replace(up, folder=FolderOptions(out=Path("run"), resume=True)).check()
    saving = SavingOptions(checkpoint_dir=tmp_path / "experts", init=out)
    other = KindOptions(kind="feedforward")
    for kind, line in ((KindOptions(expert=layer), r"give --route token$"), (other, r"is of another model")):
        with pytest.raises((UsageError, ValueError), match=line):
            saving.begin(UIDS[0], kind.make(), None, kind.settings)
    kind = KindOptions(expert=layer, route="token")
    assert saving.begin(UIDS[0], kind.make(), None, kind.settings) == 4


def test_only_flags_are_offered_of_an_export(tmp_path: Path) -> None:
    """Words of a stranger's file in place of a size or a name are not repeated; nor is a file of Python."""
    for theirs in ("x; rm -rf /", "evil.py:router", "\x1b[31m", -1, True, {"a": 1}, [1, "x"], [], None, 1.5):
        assert _setting_untrusted(theirs) is None, theirs
    assert [_setting_untrusted(each) for each in (4, [4, 4], "switch+balance=0.1")] == [4, (4, 4), "switch+balance=0.1"]


def swarm_run(path: Path, states: Mapping[int, Any], losses: Mapping[int, float]) -> Path:
    """The folder of a run of `dmoe train` with these checkpoints, and with evaluations of these losses."""
    settings = TrainOptions(join=()).settings()
    sizes = dataclasses.asdict(trained().config)
    language = settings["language"] | {name: sizes[name] for name in ("layer", "num_layers", "grid_size", "cutoffs")}
    folder = RunFolder.create(path, {**settings, "language": language, "calls": {**settings["calls"], "k_best": 2}})
    folder.log("task", name="my.txt", unit="tokens", meaning=WORDS)
    for step, loss in losses.items():
        folder.log("eval", step=step, split="valid", items=50, loss=loss)
    save(path / "checkpoints", states)
    return path


def scaled(factor: float) -> dict[str, Any]:
    """The state of a trainer with other numbers in its trunk."""
    params = jax.tree.map(lambda leaf: factor * leaf, trained().trunk)
    return {"params": params, "opt_state": {"mu": params}}


@pytest.mark.slow
def test_the_command_exports_the_checkpoint_that_is_asked_for(tmp_path: Path, capsys: Any) -> None:
    """The last, the best and one by its step; with the experts of two nodes, and without; again from the export."""
    run = swarm_run(tmp_path / "run", {4: scaled(4.0), 6: scaled(6.0)}, {4: 2.0, 5: 1.0, 6: 3.0})
    for number, uids in enumerate(UIDS):
        for at, uid in enumerate(uids):
            params = jax.tree.map(lambda leaf, at=at: leaf[at], trained().experts[number])
            save(tmp_path / f"node{number}" / uid, {3: {"params": params, "opt_state": ()}})
    experts = ["--experts", str(tmp_path / "node0"), str(tmp_path / "node1")]

    def exported(source: Path, out: Path, *words: str) -> SavedModel:
        status, error = outcome(["export", str(source), str(out), *words], capsys)
        assert status == 0, error
        return read_export(out)

    for checkpoint, step in (("last", 6), ("best", 4), ("4", 4)):
        out = tmp_path / f"{checkpoint}.safetensors"
        model = exported(run, out, "--checkpoint", checkpoint, *experts)
        assert model.step == step
        check_equal((model.trunk, model.experts), (scaled(float(step))["params"], trained().experts))
        assert model.known.all()
        assert read_facts(out).meaning == WORDS
    assert not exported(run, tmp_path / "alone.safetensors").known.any()
    parts = exported(out, tmp_path / "parts", "--split-experts")
    check_equal((parts.trunk, parts.experts), (model.trunk, model.experts))
    assert read_facts(tmp_path / "parts") == read_facts(out)


def test_the_command_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers for programs, a line for people, and the vocabulary and its tokenizer beside the file."""
    run = swarm_run(tmp_path / "run", {4: scaled(1.0)}, {})
    (run / "vocabulary.json").write_text('["a"]')
    (run / "tokenizer.json").write_text("{}")
    out = tmp_path / "new" / "model.safetensors"
    with pytest.raises(SystemExit) as exit_:
        main(["export", str(run), str(out), "--json"])
    captured = capsys.readouterr()
    assert exit_.value.code == 0, captured.err
    told = json.loads(captured.out)
    assert told == {
        "out": str(out),
        "step": 4,
        "experts": 0,
        "of_experts": 8,
        "arrays": told["arrays"],
        "files": 1,
        "bytes": out.stat().st_size,
        "vocabulary": str(tmp_path / "new" / "model.vocabulary" / "vocabulary.json"),
    }
    assert "its experts are not here: --experts FOLDER" in captured.err
    assert out.stat().st_mode == (run / "config.json").stat().st_mode
    assert sorted(path.name for path in vocabulary_folder(out).iterdir()) == ["tokenizer.json", "vocabulary.json"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("RUN model.bin", "OUT must end in .safetensors, got .*model.bin"),
        ("RUN model.safetensors --split-experts", "OUT must be a name for a folder, got"),
        ("RUN there.safetensors", "there.safetensors is there already"),
        ("RUN gs://bucket/model.safetensors", "an export cannot be written to gs://bucket/model.safetensors"),
        ("RUN new.safetensors --checkpoint 5", "there is no checkpoint 5 in .*; those that are there: 4"),
        ("RUN new.safetensors --checkpoint best", "no checkpoint in .* was evaluated"),
        ("RUN new.safetensors --checkpoint first", "--checkpoint"),
        ("RUN new.safetensors --router switch", "--router would have no effect: that of the run is product_key"),
        ("RUN new.safetensors --experts .", "there is no checkpoint of an expert in"),
        ("there.safetensors new.safetensors --checkpoint best", "is an export"),
        ("nothing new.safetensors", "there is no run folder"),
        ("RUN", "Missing from dmoe export: OUT.safetensors"),
    ],
)
def test_the_command_refuses_in_one_line(
    words: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written."""
    monkeypatch.chdir(tmp_path)
    swarm_run(tmp_path / "RUN", {4: scaled(1.0)}, {5: 1.0})
    export(trained(), tmp_path / "there.safetensors")
    before = sorted(tmp_path.iterdir())
    status, error = outcome(["export", *words.split()], capsys)
    assert status == 2
    assert re.search(line, error), error
    assert error.splitlines()[-1].startswith("dmoe: error: ")
    assert sorted(tmp_path.iterdir()) == before


def test_without_the_package_the_extra_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is read; to read an export needs no package."""
    out = export(trained(), tmp_path / "model.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert read_export(out).step == 7
    monkeypatch.setattr("dmoe_jax.cli.export.find_spec", lambda name: None)
    status, error = outcome(["export", str(out), str(tmp_path / "new.safetensors")], capsys)
    line = "dmoe: error: dmoe export writes with safetensors, which is missing: pip install 'dmoe_jax[export]'\n"
    assert (status, error) == (2, line)


def numpy_log_probs(a: dict[str, np.ndarray], config: dict[str, Any], words: np.ndarray) -> np.ndarray:
    """Log-probabilities after each word, out of the arrays of an export by their names, with NumPy alone."""
    sizes, (rows, _), table = config["layer"], config["grid_size"], a["trunk.embed.table"].astype(np.float64)
    d, pasts, outputs = sizes["d_model"], [np.zeros((0, sizes["d_model"]))] * config["num_layers"], []

    def softmax(x: np.ndarray) -> np.ndarray:
        return np.exp(x - x.max(-1, keepdims=True)) / np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)

    def norm(x: np.ndarray, p: dict[str, np.ndarray], name: str, epsilon: float = 1e-5) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt(x.var(-1, keepdims=True) + epsilon) * p[f"{name}.scale"] + p[f"{name}.bias"]

    def expert(p: dict[str, np.ndarray], x: np.ndarray, past: np.ndarray) -> np.ndarray:
        seen = np.concatenate([past, x])
        away = np.arange(len(past), len(seen))[:, None] - np.arange(len(seen))
        angles = np.maximum(away, 0)[..., None] / 10000 ** (np.arange(0, d, 2) / d)
        places = np.concatenate([np.sin(angles), np.cos(angles)], -1) @ p["position.kernel"].reshape(d, d)
        sources = {"query": x, "key": seen, "value": seen}
        query, key, value = (np.einsum("td,dhe->the", z, p[f"{name}.kernel"]) for name, z in sources.items())
        by_place = np.einsum("the,tjhe->htj", query + p["position_bias"], places.reshape(*away.shape, *key.shape[1:]))
        logits = (np.einsum("the,jhe->htj", query + p["content_bias"], key) + by_place) / np.sqrt(key.shape[-1])
        weights = softmax(np.where(away >= 0, logits, -1e30))
        y = norm(x + np.einsum("htj,jhe,hed->td", weights, value, p["output.kernel"]), p, "attention_norm")
        inner = np.maximum(y @ p["ff_in.kernel"] + p["ff_in.bias"], 0)
        return norm(y + inner @ p["ff_out.kernel"] + p["ff_out.bias"], p, "ff_norm")

    for start in range(0, len(words), sizes["seq_len"]):
        x = table[words[start : start + sizes["seq_len"]]] * np.sqrt(d)
        for layer in range(config["num_layers"]):
            past, pasts[layer] = pasts[layer][-sizes["mem_len"] :], np.concatenate([pasts[layer], x])
            gate = {n.split(".", 3)[3]: v for n, v in a.items() if n.startswith(f"trunk.gates.{layer}.")}
            feature = norm(np.concatenate([past, x[:1]]).mean(0), gate, "norm", 1e-6)
            scores = feature @ gate["keys.kernel"] + gate["keys.bias"]
            total = (scores[:rows, None] + scores[rows:]).ravel()
            best = np.argsort(-total)[: config["k_best"]]
            own = {n.split(".", 2)[2]: v for n, v in a.items() if n.startswith(f"experts.layer{layer}.")}
            parts = [expert({n: v[number] for n, v in own.items()}, x, past) for number in best]
            x = np.einsum("k,ktd->td", softmax(total[best]), parts)
        outputs.append(x)
    hidden, (first,) = np.concatenate(outputs), config["cutoffs"]
    logits = hidden @ table.T + a["trunk.head.bias"]
    clusters = hidden @ a["trunk.head.cluster_w"].T + a["trunk.head.cluster_b"]
    head = np.log(softmax(np.concatenate([logits[:, :first], clusters], axis=1)))
    return np.concatenate([head[:, :first], head[:, first:] + np.log(softmax(logits[:, first:]))], axis=1)


def test_numpy_alone_gives_the_same_log_probabilities(tmp_path: Path) -> None:
    """The names and shapes of the file are enough to compute with; its words across the ends of segments."""
    model = dataclasses.replace(trained(), trunk=jax.tree.map(lambda leaf: 4 * leaf, trained().trunk))
    export(model, tmp_path / "model.safetensors")
    words = np.random.default_rng(0).integers(0, 20, 14)
    config = json.loads(json.dumps(dataclasses.asdict(model.config)))
    found = numpy_log_probs(load_file(tmp_path / "model.safetensors"), config, words)
    expected = TrainedModel(model, Vocabulary(tuple(map(str, range(20)))), lambda split: words).log_probs(words)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.ptp(expected, axis=0).max() > 0.1
