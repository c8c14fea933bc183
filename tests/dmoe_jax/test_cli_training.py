"""`dmoe train` from corpus to report, over TCP: what a run leaves behind, how it goes on, what it refuses."""

import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import trio

from dmoe_jax.arrays import PyTree
from dmoe_jax.cli.averaging_options import AveragingOptions
from dmoe_jax.cli.sources import Given
from dmoe_jax.cli.train import TrainCommand
from dmoe_jax.cli.train_options import LanguageModelOptions, TrainOptions, check_changes
from dmoe_jax.cli.training import run_training
from dmoe_jax.data import load_vocabulary
from dmoe_jax.experts.user_file import load_from_file
from dmoe_jax.models.transformer_xl import init_trunk
from dmoe_jax.peers.security import Plain
from dmoe_jax.runs.command_line import parse_command_line
from dmoe_jax.runs.endings import UsageError
from dmoe_jax.runs.flags import as_flags
from dmoe_jax.runs.run_folder import plain, read_metrics
from dmoe_jax.runs.tables import read_run
from dmoe_jax.swarm.opening import open_swarm
from dmoe_jax.trained.exporting import facts_of, words_of_checkpoint, write_export
from dmoe_jax.trained.saved_model import load_model
from dmoe_jax.trained.saved_run import find_run
from dmoe_net.wire.compression import Compression
from tests.dmoe_jax.documented_records import undocumented
from tests.dmoe_jax.training_rig import OPTIMIZER, SIZES, command, parsed, served_swarm, text_of_few_words


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A text of few words. For them there is a plain softmax: its missing clusters leave arrays without elements."""
    return text_of_few_words(tmp_path_factory.mktemp("text"))


async def run(settings: TrainCommand, swarm: Any) -> dict[str, Any]:
    """As the command does it: flags and folder are looked at, then the run begins."""
    return await run_training(settings, settings.prepared(), swarm)


@pytest.fixture(scope="module")
def trained(text: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder and the headline of a run of eight steps. To change it, copy it."""
    out = tmp_path_factory.mktemp("trained") / "run"

    async def train() -> dict[str, Any]:
        async with served_swarm() as (_, swarm):
            return await run(command(out, text), swarm)

    return out, trio.run(train)


def test_a_run_leaves_a_whole_folder(trained: tuple[Path, dict[str, Any]]) -> None:
    """Settings, records of every kind, figure, report and checkpoints; the headline counts what was done."""
    out, headline = trained
    assert (headline["corpus"], headline["complete"], headline["steps"]) == ("my.txt", True, 8)
    assert headline["training_tokens"] == 8 * 2 * 4
    assert headline["evaluated_tokens"] == 128
    assert (headline["calls_failed"], headline["failures"]) == (0, {})
    assert headline["perplexity_over_unigram"] > 0
    files = "config.json metrics.jsonl figure.png report.md vocabulary.json checkpoints"
    assert {*os.listdir(out)} == {*files.split()}
    assert load_vocabulary(out).words[:1] == ("the",)
    assert "your own text" in (out / "report.md").read_text()
    metrics = read_metrics(out / "metrics.jsonl")
    kinds = "task baseline train eval final_eval calls experts balance headline"
    assert {record["kind"] for record in metrics} == {*kinds.split()}
    # Every point of the curve is over the same 64 words; the headline is over 128.
    assert {record["items"] for record in metrics if record["kind"] == "eval"} == {64}
    assert {record["items"] for record in metrics if record["kind"] == "final_eval"} == {128}
    baselines = [record["unigram_perplexity"] for record in metrics if record["kind"] == "baseline"]
    assert headline["unigram_perplexity"] == baselines[-1]  # the text repeats itself: any part of it is like the whole
    balances = [record for record in metrics if record["kind"] == "balance"]
    assert {record["layer"] for record in balances} == {"layer0"}
    # Eight steps of two sequences, each through two experts; what one record counts, the next one does not.
    load = [record for record in metrics if record["kind"] == "experts"][-1]["load"]
    assert sum(sum(record["histogram"]) for record in balances) == sum(load.values()) == 8 * 2 * 2
    last = balances[-1]["histogram"]  # of the last window, as the figure shows it
    assert headline["dead_experts"] == last.count(0)
    assert headline["load_cv"] == pytest.approx(np.std(last) / np.mean(last))
    assert headline["share_lost"] == 0


def test_every_kind_and_column_of_a_run_is_documented(trained: tuple[Path, dict[str, Any]]) -> None:
    """The page on results explains each column that a user finds in a table."""
    found = read_run(trained[0])
    assert {"train", "eval", "final_eval", "calls", "experts", "balance", "headline"} <= {*found.kinds}
    assert undocumented(found) == []


async def test_a_run_is_resumed(trained: tuple[Path, dict[str, Any]], text: str, tmp_path: Path, capsys: Any) -> None:
    """To twelve steps, now compressed and whatever the staleness, it goes on in model, text and totals."""
    out = tmp_path / "run"
    shutil.copytree(trained[0], out)
    async with served_swarm() as (_, swarm):
        changes: dict[str, Any] = {"compression": Compression.BFLOAT16, "staleness_power": 0.0}
        await run(command(out, text, steps=12, resume=True, json=True, **changes), swarm)
    captured = capsys.readouterr()
    assert "another setting than before: trunk.staleness_power: 0.5 -> 0.0" in captured.err
    assert "another setting than before: run_length.steps: 8 -> 12" in captured.err
    headline = json.loads(captured.out.splitlines()[-1])
    assert (headline["steps"], headline["training_tokens"]) == (12, 12 * 2 * 4)
    steps = [record["step"] for record in read_metrics(out / "metrics.jsonl") if record["kind"] == "train"]
    assert sorted(steps) == list(range(1, 13))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"resume": False}, "not empty"),
        ({"route": "token"}, "begun with --route 'sequence' and cannot be resumed with 'token'"),
        ({"router": "switch"}, "begun with --router 'product_key' and cannot be resumed with 'switch'"),
        ({"average_every": 5}, "begun with --average-every 0 and cannot be resumed with 5"),
        ({"weight_decay": 0.1}, "begun with --weight-decay 0.0 and cannot be resumed with 0.1"),
        ({"grad_clip": math.inf}, "begun with --grad-clip 0.5 and cannot be resumed with None"),
    ],
)
def test_what_a_resumed_run_cannot_change(
    changes: dict[str, Any], line: str, trained: tuple[Path, dict[str, Any]], text: str
) -> None:
    """Changes of the model, its data and the optimiser's state are refused by the flag's name; nothing is written."""

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in trained[0].iterdir() if path.is_file()}

    before = files()
    with pytest.raises(UsageError, match=line):
        command(trained[0], text, **{"resume": True, **changes}).prepared()
    assert files() == before


@pytest.mark.parametrize("left", [(), ("checkpoints",), ("checkpoints/.unfinished-4.x", "checkpoints/set-aside-3")])
def test_a_run_without_a_checkpoint_says_what_to_do(left: tuple[str, ...], text: str, tmp_path: Path) -> None:
    """It was killed before it saved: nothing, or nothing whole, is there to go on from."""
    command(tmp_path / "run", text).prepared().begin()
    for each in left:
        (tmp_path / "run" / each).mkdir(parents=True)
    line = f"there is no checkpoint in {tmp_path / 'run'} to resume from; to begin anew, leave --resume out and"
    with pytest.raises(UsageError, match=line):
        command(tmp_path / "run", text, resume=True).prepared()


def test_a_run_from_before_a_flag_had_its_default() -> None:
    """A config.json without the route is of a run that routed sequences."""
    saved = plain(TrainOptions(join=()).settings())
    del saved["language"]["route"]
    check_changes(Path("run"), saved, TrainOptions(join=()).settings())
    now = TrainOptions(join=(), language=LanguageModelOptions(route="token"))
    with pytest.raises(UsageError, match="begun with --route 'sequence' and cannot be resumed with 'token'"):
        check_changes(Path("run"), saved, now.settings())


def test_a_resumed_run_cannot_begin_or_cease_to_keep_values_for_later() -> None:
    """They are in the checkpoint with top-k, and only then; other compressions may change."""

    def settings(compression: Any, **wishes: Any) -> dict[str, Any]:
        options = parsed(TrainOptions, join=(), average_every=5, average_compression=compression, **wishes)
        return plain(options.settings())

    check_changes(Path("run"), settings("none"), settings("float16"))
    check_changes(Path("run"), settings("top-k"), settings("top-k", average_kept=32))
    for then, now in (("none", "top-k"), ("top-k", "float16")):
        with pytest.raises(UsageError, match=f"--average-compression '{then}' and cannot be resumed with '{now}'"):
            check_changes(Path("run"), settings(then), settings(now))


def resumed_in(out: Path, *more: str) -> TrainCommand:
    """The command that goes on with the run in a folder, where these further flags are typed."""
    words = ["--join", "127.0.0.1:9", "--out", str(out), "--resume", *more]
    return parse_command_line(TrainCommand, prog="dmoe train", args=words).resumed(Given(typed=words))


def test_a_resumed_run_has_its_own_flags(tmp_path: Path) -> None:
    """A flag that is not typed is as it was, in every group; one that is typed counts, even if it is the default."""
    out, averaging = tmp_path / "run", {"average_every": 9, "average_by_samples": False}
    flags: dict[str, Any] = {"data_seed": 2, "cutoffs": "none", "wait_s": 7.5, "grad_clip": math.inf, "json": True}
    began = command(out, "embedded", steps=200, **flags, **averaging)
    began.prepared().begin()
    resumed = resumed_in(out, "--steps", "600", "--average-every", "5", "--average-client")
    assert resumed == replace(
        began,
        join=("127.0.0.1:9",),
        folder=replace(began.folder, resume=True),
        report=replace(began.report, json=False),
        run_length=replace(began.run_length, steps=600),
        averaging=parsed(AveragingOptions, average_every=5, average_client=True, average_by_samples=False),
    )


@pytest.mark.parametrize(("flag", "value"), [("--router", "mine.py:router"), ("--model", "mine.py:model")])
def test_a_run_folder_runs_no_code_by_itself(flag: str, value: str, tmp_path: Path, monkeypatch: Any) -> None:
    """A file that only its config names must be named again, or the folder trusted; nothing of it has run by then."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("open('ran', 'w').close()\nrouter = model = None\n")
    out = tmp_path / "run"
    command(out, "embedded", **{flag.strip("-"): value}).prepared().begin()
    line = rf"would run code out of {tmp_path / 'mine.py'}, .*name {value} again, or give --trust-run"
    with pytest.raises(UsageError, match=line):
        resumed_in(out)
    for words in ((flag, value), ("--trust-run",)):
        found = resumed_in(out, *words)
        assert value in (found.model, found.language.router)
    # What is typed instead is the user's own wish; whether the run can go on with it is looked at later.
    assert resumed_in(out, flag, "./other.py:mine").folder.resume
    assert not (tmp_path / "ran").exists()
    with pytest.raises(UsageError, match="--trust-run would have no effect without --resume or --config"):
        command(out, "embedded", trust_run=True).check()


@pytest.mark.parametrize(("words", "cutoffs"), [(["none"], "none"), ([], ()), (["20", "40"], (20, 40))])
def test_cutoffs_can_be_none(words: list[str], cutoffs: object) -> None:
    """As the help says."""
    typed = parse_command_line(TrainCommand, prog="dmoe train", args=["--join", "a:9", "--cutoffs", *words])
    assert typed.language.cutoffs == cutoffs
    assert typed.language.cutoffs_below(30) == tuple(cutoff for cutoff in (20,) if cutoffs == (20, 40))


OWN_MODEL = """
import jax, jax.numpy as jnp, numpy as np
from dmoe_jax.experts import expert_from_functions
from dmoe_jax.model import Model, Outcome
from dmoe_jax.routing import score
from dmoe_jax.routing.product_key import product_key

ROUTER = product_key((2, 2))
EXPERT = expert_from_functions(
    lambda key: jax.random.normal(key, (4, 4)) / 2, lambda params, x: x + jnp.tanh(x @ params), np.zeros((1, 4), "f")
)
gate = lambda params, x: score(ROUTER, params, x)
def loss(head, hidden, labels, penalty):
    return jnp.mean((hidden @ head - labels) ** 2) + penalty

class Regression(Model):
    name = "regression"
    unit = "rows"

    def __init__(self, swarm):
        self.mixtures = [swarm.mixture("own", EXPERT, ROUTER, k_best=2, timeout_s=120.0)]

    def init(self, key):
        return {"gate": ROUTER.init(key, 4), "head": jnp.zeros(4)}

    async def forward(self, run, params, batch, state, keys):
        x, labels = batch
        hidden, penalty = await self.mixtures[0](run, run(gate, params["gate"], x), x)
        return Outcome(loss=run(loss, params["head"], hidden, labels, penalty), items=len(x))

    def batches(self, shard, num_shards, seed):
        rng = np.random.default_rng([seed, shard])
        while True:
            x = rng.normal(size=(4, 4)).astype("f")
            yield x, x.sum(1)

    def validation(self):
        batches = self.batches(9, 10, 0)
        return [next(batches) for _ in range(3)]
"""


def test_flags_of_the_language_model_are_refused_beside_another_one(tmp_path: Path) -> None:
    """A report of the run does not name them either."""
    for flag, value in {"router": "switch", "grid_size": (2, 2), "d_model": 8, "k_best": 2}.items():
        words = ["--join", "127.0.0.1:1", "--model", "mine.py:M", *as_flags({flag: value})]
        wrong = parse_command_line(TrainCommand, prog="dmoe train", args=words)
        with pytest.raises(
            UsageError, match=rf"--{flag.replace('_', '-')} would have no effect beside --model mine.py:M"
        ):
            wrong.check()
    own = command(tmp_path / "run", "embedded", model="mine.py:M", max_skipped=0.1)
    own.check()
    settings = own.settings()
    assert "language" not in settings
    assert settings["calls"] == {"max_skipped": 0.1, "wait_s": 60.0}


def test_a_file_may_import_its_neighbours(tmp_path: Path) -> None:
    """As a script may; a module of the program is not hidden by one beside the file."""
    (tmp_path / "neighbour_of_mine.py").write_text("answer = 42\n")
    (tmp_path / "wave.py").write_text("raise RuntimeError\n")
    (tmp_path / "mine.py").write_text("import wave\nfrom neighbour_of_mine import answer\nfound = wave.open\n")
    assert load_from_file(f"{tmp_path / 'mine.py'}:answer", kind="model") == 42
    assert callable(load_from_file(f"{tmp_path / 'mine.py'}:found", kind="model"))


async def test_a_model_of_the_users_own_trains(text: str, tmp_path: Path) -> None:
    """A file with a class: its batches, its validation data, its unit, and its layers' balance."""
    (tmp_path / "mine.py").write_text(OWN_MODEL)
    spec, out = f"{tmp_path / 'mine.py'}:Regression", tmp_path / "run"
    async with open_swarm(listen="127.0.0.1:0", security=Plain(), seed=0) as node:
        expert = load_from_file(f"{tmp_path / 'mine.py'}:EXPERT", kind="expert")
        await node.serve({"own.[0:2].[0:2]": expert}, optimizer=OPTIMIZER, warm_up_rows=2)
        async with open_swarm(node.contact, listen=None, security=Plain(), seed=0) as swarm:
            headline = await run(command(out, text, model=spec), swarm)
            with pytest.raises(UsageError, match=r"ROUTER'.*expected a .*function"):
                await run(command(tmp_path / "other", text, model=f"{tmp_path / 'mine.py'}:ROUTER"), swarm)
    assert (headline["training_rows"], headline["evaluated_rows"]) == (8 * 4, 12)
    assert headline["validation_loss"] > 0
    assert headline["load_cv"] is not None
    assert {record["layer"] for record in read_metrics(out / "metrics.jsonl") if record["kind"] == "balance"} == {"own"}


async def test_what_does_not_fit_the_swarm_is_refused_before_anything_is_written(text: str, tmp_path: Path) -> None:
    """Other shapes than the nodes', sizes that contradict each other, a resumption of nothing: one sentence each."""
    out = tmp_path / "run"
    async with served_swarm() as (_, swarm):
        for changes, line in (
            ({"layer": replace(SIZES, d_model=32)}, r"other shapes: .*float32\[4, 8\].*needs float32\[4, 32\]"),
            ({"k_best": 5}, "k_best is at most the number of cells"),
            ({"batch_size": 100_000}, "whole segment for each"),
            ({"resume": True}, "no checkpoint in"),
        ):
            assert not out.exists()
            with pytest.raises(UsageError, match=line):
                await run(command(out, text, **changes), swarm)


@pytest.mark.slow
async def test_experts_that_drop_need_a_trainer_that_drops(text: str, tmp_path: Path) -> None:
    """With a rate of its own it trains with them; where only one side drops, a line says which flag to give."""
    dropping = replace(SIZES, dropout=0.5)
    changes: dict[str, Any] = {"embedding_dropout": 0.1, "input_dropout": 0.1, "output_dropout": 0.1, "cutoffs": (4,)}
    out = tmp_path / "run"
    async with served_swarm(dropping) as (served, swarm):
        with pytest.raises(UsageError, match=r"--dropout, .* above 0: the nodes' experts take dropout keys"):
            await run(command(out, text), swarm)
        ours = replace(SIZES, dropout=0.3)
        await run(command(out, text, layer=ours, steps=2, eval_every=2, weight_decay=1e-4, **changes), swarm)
        metrics = read_metrics(out / "metrics.jsonl")
        assert [record["step"] for record in metrics if record["kind"] == "train"] == [1, 2]
        assert sum(backend.update_count for backend in served.backends.values()) > 0
    async with served_swarm() as (_, swarm):
        with pytest.raises(UsageError, match=r"no --dropout, .*: the nodes' experts take no dropout keys"):
            await run(command(tmp_path / "other", text, layer=dropping), swarm)


DIVERGING_ROUTER = """
import jax.numpy as jnp
from dmoe_jax.routing import Scores
from dmoe_jax.routing.base import top_k_router

def diverging(grid_size):
    # Its auxiliary loss drives a number up, a learning rate at each update; the schedule's first one is 0.
    def scores(params, x, **_):
        logits = x @ params["w"] + jnp.where(params["clock"] > 1.5e-3, jnp.nan, 0.0)
        return Scores((logits,), (params["clock"],))
    init = lambda key, d_model: {"w": jnp.zeros((d_model, 4)), "clock": jnp.zeros(())}
    loss = lambda scores, indices, mask: -scores.extras[0]
    return top_k_router("diverging", grid_size, init, scores, flat=True, aux_loss=loss)
"""


async def test_scores_that_become_nan_end_the_run(text: str, tmp_path: Path) -> None:
    """A router of the user's own trains; its NaN are told in one line, after the report and a checkpoint."""
    (tmp_path / "routers.py").write_text(DIVERGING_ROUTER)
    out, spec = tmp_path / "run", f"{tmp_path / 'routers.py'}:diverging"
    async with served_swarm() as (_, swarm):
        with pytest.raises(
            UsageError, match=r"'diverging': .* scores in layer0 are NaN.*; stopped at step 3$"
        ) as failed:
            await run(command(out, text, router=spec, num_trainers=1), swarm)
    assert failed.value.status == 1  # it would again
    assert json.loads((out / "config.json").read_text())["settings"]["language"]["router"] == spec
    metrics = read_metrics(out / "metrics.jsonl")
    assert [record["step"] for record in metrics if record["kind"] == "train"] == [1, 2, 3]
    events = [(record["name"], record["step"]) for record in metrics if record["kind"] == "event"]
    assert events == [("failed", 3)]
    assert "scores in layer0 are NaN" in (out / "report.md").read_text()
    assert any((out / "checkpoints").iterdir())


async def test_a_trainer_is_listed_while_it_waits(text: str, tmp_path: Path) -> None:
    """Whoever looks sees it before there are experts."""
    async with (
        open_swarm(listen="127.0.0.1:0", security=Plain(), seed=0) as first,
        open_swarm(first.contact, listen=None, security=Plain(), seed=0) as swarm,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(run, command(tmp_path / "run", text, wait_s=60.0), swarm)
        with trio.fail_after(30):
            members = await first.members()
            while not members:
                await trio.sleep(0.1)
                members = await first.members()
        assert [(each.role, each.info["state"], each.info["step"]) for each in members] == [("trainer", "waiting", 0)]
        nursery.cancel_scope.cancel()


def exported(run_folder: Path, out: Path) -> PyTree:
    """The trunk of a run, which is exported."""
    found = find_run(run_folder)
    model = load_model(found, words_of_checkpoint(found))
    write_export(model, facts_of(found, model), out, split=False, vocabulary=run_folder)
    return model.trunk


@pytest.mark.slow
async def test_training_begins_with_an_export(trained: tuple[Path, dict[str, Any]], text: str, tmp_path: Path) -> None:
    """A run that hardly learns has the trunk of the other at its end; it goes on when the export is gone."""
    trunk = exported(trained[0], export := tmp_path / "model.safetensors")
    wishes: dict[str, Any] = {"init": export, "learning_rate": 1e-12, "eval_every": 8}
    async with served_swarm() as (_, swarm):
        await run(command(out := tmp_path / "run", text, steps=2, **wishes), swarm)
        export.unlink()
        await run(command(out, text, steps=4, resume=True, **wishes), swarm)
    found = load_model(find_run(out), words_of_checkpoint(find_run(out)))
    assert found.step == 4
    jax.tree.map(lambda own, other: np.testing.assert_allclose(own, other, atol=1e-6), found.trunk, trunk)
    other = init_trunk(jax.random.key(0), found.config, found.router)
    assert np.abs(other["embed"]["table"] - trunk["embed"]["table"]).max() > 1e-4


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"router": "switch"}, "model.safetensors was trained with other flags; give --router product_key"),
        ({"data": "other"}, "the words of the model in .*model.safetensors are others"),
        ({"init": Path("/nowhere/x.safetensors")}, "there is no export /nowhere/x.safetensors"),
    ],
)
@pytest.mark.slow
async def test_training_does_not_begin_with_another_model(
    changes: dict[str, Any], line: str, trained: tuple[Path, dict[str, Any]], text: str, tmp_path: Path
) -> None:
    """The error names the export and what differs; nothing is written."""
    exported(trained[0], export := tmp_path / "model.safetensors")
    (tmp_path / "other.txt").write_text("the cat sat on the hat .\n" * 1000)
    if changes.get("data"):
        changes, text = {}, str(tmp_path / "other.txt")
    async with served_swarm() as (_, swarm):
        with pytest.raises(UsageError, match=line):
            await run(command(tmp_path / "run", text, **{"init": export} | changes), swarm)
    assert not (tmp_path / "run").exists()
