"""`dmoe inspect` over whole small runs: what it reports is what the model chose, wherever the experts are kept."""

import functools
import json
import re
import runpy
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import trio

from dmoe_jax.checkpoints import Checkpoints
from dmoe_jax.cli import main
from dmoe_jax.cli.train_options import CallOptions, DataOptions, LanguageModelOptions, TrainOptions
from dmoe_jax.data.corpora import Corpus, load_corpus
from dmoe_jax.inspection.reading import cut, read_in_swarm, read_locally
from dmoe_jax.layer_config import Route
from dmoe_jax.models import transformer_xl as txl
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.trunk import empty_memory
from dmoe_jax.routing.base import Router
from dmoe_jax.routing.product_key import product_key
from dmoe_jax.runs.run_folder import RunFolder
from dmoe_jax.trained.saved_model import SavedModel
from dmoe_jax.training.run import Plan
from experiments.transformer_xl.local import LocalEngine
from experiments.transformer_xl.setup import BestValidation, Setup
from experiments.transformer_xl.training import train_in_folder
from tests.dmoe_jax.small_swarm import direct_callers, open_small_swarm
from tests.experiments.small_runs import small_preset
from tests.net.direct_network import DirectNetwork

GRID = (2, 2)
WORDS = 3000
UIDS = [[f"layer{layer}.{i}.{j}" for i in range(2) for j in range(2)] for layer in range(2)]


@dataclass(frozen=True)
class LocalRun:
    """A run on this device, and its model as the engine itself takes it up again."""

    folder: Path
    corpus: Corpus
    setup: Setup
    trunk: Any
    experts: tuple[Any, ...]

    @functools.cached_property
    def shares(self) -> list[np.ndarray]:
        """Shares of each layer's calls that its experts had."""
        assert self.setup.router is not None
        found = loads(self.trunk, self.experts, self.setup.config, self.setup.router, self.corpus.valid)
        return [counts / counts.sum() for counts in found]


def loads(trunk: Any, experts: Any, config: TransformerXLConfig, router: Router, text: np.ndarray) -> list[np.ndarray]:
    """Number of samples that each expert of each layer had, by the model's own forward pass."""
    forward = jax.jit(txl.local_forward, static_argnums=(2, 3))
    memory, load = empty_memory(config, 32), [np.zeros(4), np.zeros(4)]
    for batch, _ in cut(text, config.seq_len, WORDS):
        _, aux = forward(trunk, experts, config, router, batch, memory)
        memory = aux.memory
        assert batch.mask.all()
        load = [counts + layer.load for counts, layer in zip(load, aux.layers, strict=True)]
    return load


@pytest.fixture(scope="module")
def local_run(tmp_path_factory: pytest.TempPathFactory) -> LocalRun:
    """Six updates of the tiny mixture on the embedded corpus."""
    folder, corpus = tmp_path_factory.mktemp("runs") / "local", load_corpus(source="embedded")
    preset = small_preset("dmoe")
    preset = replace(preset, recipe=replace(preset.recipe, warmup_steps=0))
    setup = Setup(preset=preset, corpus=corpus, steps=6, seed=0, router=product_key(GRID))
    plan = Plan(steps=6, eval_every=2, eval_items=200, final_eval_items=200, pause=True)
    train_in_folder(setup, plan, folder, router="product_key")
    engine, checkpoints = BestValidation(LocalEngine(setup)), Checkpoints(folder / "checkpoints")
    step, state, facts = checkpoints.restore_latest(engine.state())
    checkpoints.close()
    engine.load(step, state, facts["engine"])
    trunk, experts = engine.params()
    return LocalRun(folder, corpus, setup, trunk, experts)


def inspect(capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
    """The figures of `dmoe inspect ARGS --json`, all of whose pictures are there."""
    with pytest.raises(SystemExit) as exit_:
        main(["inspect", *map(str, args), "--tokens", str(WORDS), "--json"])
    captured = capsys.readouterr()
    assert not exit_.value.code, captured.err
    figures: dict[str, Any] = json.loads(captured.out)
    folder = Path(figures["run"]) / "inspection"
    assert sorted(path.name for path in folder.iterdir()) == sorted([*figures["pictures"], "report.md"])
    report = (folder / "report.md").read_text()
    for name in figures["pictures"]:
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
        assert f"({name})" in report
    return figures


@pytest.mark.slow
def test_a_local_run_is_inspected_whole(local_run: LocalRun, capsys: pytest.CaptureFixture[str]) -> None:
    """Shares are those of the model's own forward pass; only the place in the article is left out: no headings."""
    figures = inspect(capsys, local_run.folder)
    assert (figures["step"], figures["text"], figures["samples"]) == (6, "embedded, valid", figures["words"] // 6)
    for layer, expected in enumerate(local_run.shares):
        np.testing.assert_allclose(list(figures["layers"][f"layer{layer}"]["shares"].values()), expected, atol=1e-9)
    assert [text.partition(":")[0] for text in figures["left_out"]] == ["the place in the article"]
    assert figures["load"]["layer1"]["windows"] == 3
    assert figures["pictures"] == ["words_layer0.png", "words_layer1.png"]
    assert "| layer1 | 3 |" in (local_run.folder / "inspection" / "report.md").read_text()


@pytest.mark.slow
def test_an_example_makes_further_pictures(
    local_run: LocalRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer's choice tells all of itself; one layer's tells something of the other's, or nothing, but not more."""
    monkeypatch.setattr(sys, "argv", ["inspect_run.py", str(local_run.folder)])
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "inspect_run.py"), run_name="__main__")
    told = np.array(re.findall(r"-?\d+\.\d*|nan", capsys.readouterr().out), float).reshape(2, 2)
    np.testing.assert_allclose(np.diag(told), 1)
    assert abs(told[0, 1]) <= 1
    picture = local_run.folder / "inspection" / "more.png"
    assert picture.stat().st_size > 10_000
    picture.unlink()


def swarm_folder(path: Path, run: LocalRun) -> Path:
    """The folder of `dmoe train` for the same trunk: the experts are not in it."""
    preset = run.setup.preset.config
    language = LanguageModelOptions(layer=preset.layer, num_layers=2, grid_size=GRID, cutoffs=preset.cutoffs)
    options = TrainOptions(
        join=("127.0.0.1:1",), language=language, calls=CallOptions(k_best=2), data=DataOptions(data="embedded")
    )
    folder = RunFolder.create(path, options.settings())
    folder.log("task", name="embedded", unit="tokens")
    folder.log("headline", complete=True)
    save(path / "checkpoints", {"params": run.trunk, "opt_state": {"mu": run.trunk, "count": np.int32(6)}})
    return path


def save(folder: Path, state: Any) -> None:
    checkpoints = Checkpoints(folder)
    checkpoints.save(6, jax.tree.map(np.asarray, state), {})
    checkpoints.close()


@pytest.mark.slow
def test_a_trunk_alone_shows_the_first_layer(
    local_run: LocalRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Layer 0 as the whole model has it; what needs the experts is left out, and how to have it is said."""
    figures = inspect(capsys, swarm_folder(tmp_path / "run", local_run))
    assert list(figures["layers"]) == ["layer0"]
    np.testing.assert_allclose(list(figures["layers"]["layer0"]["shares"].values()), local_run.shares[0], atol=1e-9)
    assert figures["pictures"] == ["words_layer0.png"]
    assert [text.partition(":")[0] for text in figures["left_out"]] == [
        "the load over the training",
        "the place in the article",
        "the choices in layer1, which depend on what earlier experts return",
    ]
    assert "--experts" in figures["left_out"][2]


@pytest.mark.slow
def test_the_nodes_checkpoints_complete_it(
    local_run: LocalRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the folders of two nodes the figures are those of the whole model; with one of them, three experts of four
    are there to choose from."""
    path = swarm_folder(tmp_path / "run", local_run)
    whole = {
        uid: {"params": jax.tree.map(lambda leaf, at=at: leaf[at], experts), "opt_state": {"count": np.int32(at)}}
        for uids, experts in zip(UIDS, local_run.experts, strict=True)
        for at, uid in enumerate(uids)
    }
    last = [uids[-1] for uids in UIDS]
    for uid, state in whole.items():
        folder = tmp_path / ("two" if uid in last else "one") / uid
        Checkpoints(folder).save(6, jax.tree.map(np.asarray, state), {"updates": 6})
    figures = inspect(capsys, path, "--experts", tmp_path / "one", tmp_path / "two")
    for layer, expected in enumerate(local_run.shares):
        np.testing.assert_allclose(list(figures["layers"][f"layer{layer}"]["shares"].values()), expected, atol=1e-9)
    assert figures["pictures"] == ["words_layer0.png", "words_layer1.png"]
    figures = inspect(capsys, path)
    assert figures["pictures"] == ["words_layer0.png"]  # and `inspect` has seen that the others are gone
    figures = inspect(capsys, path, "--experts", tmp_path / "one")
    assert [figures["layers"][f"layer{layer}"]["shares"]["1.1"] for layer in range(2)] == [0, 0]
    assert figures["experts"] == "the 6 of 8 that were saved"


@pytest.mark.slow
@pytest.mark.parametrize("route", ["sequence", "token"])
async def test_a_living_swarm_chooses_alike(autojump_clock: trio.testing.MockClock, route: Route) -> None:
    """The same trunk with experts that are asked and with copies of them here: the same choices."""
    text = np.random.default_rng(0).integers(0, 60, 1 + 2 * 32 * 6).astype(np.int32)
    config, router = replace(small_preset("dmoe").config, vocab_size=60, route=route), product_key(GRID, init_scale=1.0)
    async with open_small_swarm(
        direct_callers(DirectNetwork(), 3), config.expert(), None, prefixes=["layer0", "layer1"], grid_size=GRID
    ) as small:
        trunk = txl.init_trunk(jax.random.key(1), config, router)
        trunk = jax.tree.map(lambda leaf: 10 * leaf, trunk)  # so that the choices differ between segments
        model = SavedModel(
            config=config,
            router=router,
            step=0,
            trunk=trunk,
            experts=tuple(small.stacked_params(f"layer{layer}", GRID) for layer in range(2)),
            known=np.ones((2, *GRID), bool),
        )
        asked = await read_in_swarm(model, small.swarm, cut(text, config.seq_len, 0))
    here = read_locally(model, cut(text, config.seq_len, 0))
    assert here.routes_words == (route == "token")
    for chosen, expected in zip(here.chosen, loads(trunk, model.experts, config, router, text), strict=True):
        np.testing.assert_array_equal(np.bincount(chosen[chosen >= 0], minlength=4), expected)
    for ours, theirs in zip(here.chosen, asked.chosen, strict=True):
        np.testing.assert_array_equal(np.sort(ours), np.sort(theirs))
        assert len(np.unique(ours)) > 2
