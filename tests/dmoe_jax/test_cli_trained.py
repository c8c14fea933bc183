"""`dmoe evaluate`, `dmoe generate` and `dmoe serve` on small runs, and `load_run` from all places that have a model."""

import contextlib
import dataclasses
import functools
import io
import json
import math
import re
import sys
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trio

from dmoe_jax import connect, load_run
from dmoe_jax.checkpoints import Checkpoints
from dmoe_jax.cli import main
from dmoe_jax.cli.evaluate import _table
from dmoe_jax.cli.serve import ServeCommand
from dmoe_jax.cli.train_options import TrainOptions
from dmoe_jax.cli.training import run_training
from dmoe_jax.data import load_corpus, load_vocabulary
from dmoe_jax.data.saved_vocabulary import save_vocabulary
from dmoe_jax.data.vocabulary import Vocabulary
from dmoe_jax.layer_config import LayerConfig
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.transformer_xl import init_experts, init_trunk
from dmoe_jax.peers.security import Plain
from dmoe_jax.routing.product_key import product_key
from dmoe_jax.runs.run_folder import RunFolder, read_metrics
from dmoe_jax.trained.completion_server import open_completions
from dmoe_jax.trained.completions import CompletionLimits
from dmoe_jax.trained.evaluation import _figures
from dmoe_jax.trained.language_model import TrainedModel
from dmoe_jax.trained.settings import Sampling
from dmoe_jax.training.progress import TrainingProgress
from dmoe_net.identity import Address
from tests.dmoe_jax.http_client import ask
from tests.dmoe_jax.training_rig import command, served_swarm

LAYER = LayerConfig(d_model=8, num_heads=2, d_ff=8, seq_len=4, mem_len=4)
TEXT = "the cat sat on the mat .\na dog ran to it !\n" * 60
NUM_WORDS = 14


@functools.cache
def config() -> TransformerXLConfig:
    """The model of all runs of this file."""
    return TransformerXLConfig(vocab_size=NUM_WORDS, num_layers=1, layer=LAYER, grid_size=(2, 2), k_best=2)


@functools.cache
def params(scale: float = 4.0) -> tuple[Any, Any]:
    """Trunk and experts; from a larger scale come distributions that are less even."""
    trunk = init_trunk(jax.random.key(0), config(), product_key((2, 2)))
    trunk = jax.tree.map(lambda leaf: np.asarray(scale * leaf), trunk)
    return trunk, jax.tree.map(lambda leaf: np.asarray(9 * leaf), init_experts(jax.random.key(1), config()))


def save(folder: Path, states: Mapping[int, Any]) -> None:
    checkpoints = Checkpoints(folder)
    for step, state in states.items():
        checkpoints.save(step, state, {})
    checkpoints.close()


def make_run(path: Path, *, has_vocabulary: bool = True, experts: str = "nodes") -> Path:
    """The folder of a run, as its command leaves it.

    Args:
      experts: "nodes", saved by nodes beside the run of `dmoe up`; "run", in the run itself, as trained on one device;
        "none".
    """
    text = path.with_name("my.txt")
    text.write_text(TEXT)
    trunk, layers = params()
    if experts == "run":
        sizes = dataclasses.asdict(config())
        settings = {"model": "dmoe", "corpus": str(text), "config": sizes, "router": "product_key"}
        states = {6: {"trunk": trunk, "experts": layers}}
    else:
        settings = TrainOptions(join=()).settings()
        own = {"layer": dataclasses.asdict(LAYER), "num_layers": 1, "grid_size": (2, 2), "cutoffs": ()}
        settings["language"] = settings["language"] | own
        settings["calls"] = settings["calls"] | {"k_best": 2}
        settings["data"] = settings["data"] | {"data": str(text)}
        states = {step: {"params": params(scale)[0]} for step, scale in ((4, 2.0), (6, 4.0))}
    folder = RunFolder.create(path, settings)
    vocabulary = load_corpus(source=str(text)).vocabulary
    assert len(vocabulary) == NUM_WORDS
    folder.log("task", name="my.txt", unit="tokens", meaning=vocabulary.meaning)
    for step, loss in ((4, 1.0), (6, 3.0)):
        folder.log("eval", step=step, split="valid", items=50, loss=loss)
    save(path / "checkpoints", states)
    if has_vocabulary:
        save_vocabulary(path, vocabulary)
    if experts == "nodes":
        for number in range(4):
            one = jax.tree.map(lambda leaf, number=number: leaf[number], layers[0])
            uid = f"layer0.{number // 2}.{number % 2}"
            save(path.with_name(f"{path.name}.nodes") / f"node{number % 2}" / uid, {3: {"params": one}})
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of `dmoe up`; nothing is written to it."""
    return make_run(tmp_path_factory.mktemp("runs") / "run")


def dmoe(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Exit status, output and errors of a command."""
    with pytest.raises(SystemExit) as exit_:
        main([str(word) for word in words])
    said = capsys.readouterr()
    return int(exit_.value.code or 0), said.out, said.err


def told(capsys: pytest.CaptureFixture[str], *words: object) -> list[Any]:
    """The JSON objects that a command prints."""
    status, out, error = dmoe(capsys, *words, "--json")
    assert status == 0, error
    return [json.loads(line) for line in out.splitlines()]


def test_a_model_is_the_same_from_wherever_it_comes(tmp_path: Path, capsys: Any, folder: Path) -> None:
    """Its run folder with the experts in it, nodes' checkpoints, found or named, and exports in one file and many."""
    run, alone = (make_run(tmp_path / name, experts=name) for name in ("run", "none"))
    nodes = sorted(folder.with_name("run.nodes").iterdir())
    for out, words in ((tmp_path / "m.safetensors", ()), (tmp_path / "parts", ("--split-experts",))):
        assert dmoe(capsys, "export", folder, out, *words)[0] == 0
    models = [load_run(folder), load_run(run), load_run(alone, experts=nodes)]
    models += [load_run(tmp_path / name) for name in ("m.safetensors", "parts")]
    text = "the cat ran to the mat .\na dog sat"
    expected = models[0].log_probs(text)
    assert np.ptp(expected, axis=0).max() > 0.1
    for model in models:
        np.testing.assert_allclose(model.log_probs(text), expected, atol=1e-6)
        assert (model.step, model.vocabulary.words, bool(model.known.all())) == (6, models[0].vocabulary.words, True)
    np.testing.assert_array_equal(models[1].split("test"), models[0].split("test"))
    with pytest.raises(ValueError, match=r"the export .* does not say where its text is: name it with data="):
        models[3].split("test")


def test_a_model_says_what_it_is_and_what_it_lacks(tmp_path: Path, folder: Path, caplog: Any) -> None:
    """A run without experts is told of as it is loaded, in one line; commands have an error of their own for it."""
    sizes = "Transformer-XL, num_layers 1, d_model 8, router product_key, step 6"
    model = load_run(folder)
    assert repr(model) == f"<TrainedModel {folder}: {sizes}, 4 of 4 experts>"
    assert repr(model.with_lengths(mem_len=9)) == repr(model)
    assert not caplog.messages
    alone = make_run(tmp_path / "none", experts="none")
    assert repr(load_run(alone)) == f"<TrainedModel {alone}: {sizes}, 0 of 4 experts>"
    (line,) = caplog.messages
    assert line.startswith(f"{alone} has no experts of layer0: give experts= with the folders")


def test_log_probs_are_pure_and_have_gradients(folder: Path) -> None:
    """Under `jit` and `grad`, what the model gives by itself."""
    model = load_run(folder)
    tokens = model.vocabulary.encode_text("the cat sat")
    expected = model.log_probs("the cat sat")

    def loss(params: Any, experts: Any) -> Any:
        return -jnp.mean(model.model.log_probs(params, experts, tokens[None])[0, :-1][np.arange(2), tokens[1:]])

    found, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(model.params, model.experts)
    assert found == pytest.approx(-expected[np.arange(2), tokens[1:]].mean(), abs=1e-6)
    assert all(np.abs(leaf).max() > 0 for leaf in (gradients[0]["embed"]["table"], gradients[1][0]["ff_in"]["kernel"]))


def test_evaluate_tells_the_perplexity(folder: Path, capsys: Any) -> None:
    """By the distributions after each word; of a part, a file of one's own, and for people."""
    model, text = load_run(folder), folder.with_name("own.txt")
    text.write_text("the cat ran .")
    (found,) = told(capsys, "evaluate", folder, "--text", text, "--rows", 1)
    ids = model.vocabulary.encode_text(text.read_text())
    expected = -model.log_probs(ids)[np.arange(3), ids[1:]]
    assert (found["tokens"], found["step"], found["model"], found["text"]) == (3, 6, "run", str(text))
    assert found["loss"] == pytest.approx(expected.mean(), abs=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["bits"] == pytest.approx(found["loss"] / math.log(2))
    assert [(each["first"], each["stop"], each["tokens"]) for each in found["by_rank"]] == [(0, NUM_WORDS, 3)]
    (test,) = told(capsys, "evaluate", folder)
    assert test["tokens"] == model.split("test").size - 1
    status, out, _ = dmoe(capsys, "evaluate", folder, "--split", "valid")
    assert (status, out.splitlines()[0]) == (0, f"{folder}, last checkpoint, step 6, 4 of 4 experts: valid")
    assert re.search(r"1 to 14 .* all +\d+ +\d+\.?\d*", " ".join(out.split("\n")))


def test_evaluate_says_how_far_it_is(folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the model is loaded, and then batch by batch to the last one; as all commands do that take their time."""
    heard: list[Any] = []

    @contextlib.contextmanager
    def evaluation(self: TrainingProgress, text: str) -> Iterator[Any]:
        heard.append(text)
        yield lambda done, total: heard.append((done, total))
        heard.append("over")

    monkeypatch.setattr(TrainingProgress, "evaluation", evaluation)
    told(capsys, "evaluate", folder, "--rows", 1)
    total = heard[1][1]
    assert heard == ["run on test", *((done, total) for done in range(1, total + 1)), "over"]


def test_evaluate_says_what_it_has_evaluated(folder: Path, tmp_path: Path, capsys: Any) -> None:
    """The checkpoint and its run, or an export, which has one state only; and how many experts were there."""
    text = tmp_path / "own.txt"
    text.write_text("the cat ran .")
    origin = {"run": str(folder), "checkpoint": "best", "step": 4, "experts": 4, "of_experts": 4}
    assert told(capsys, "evaluate", folder, "--text", text, "--checkpoint", "best")[0].items() >= origin.items()
    assert f"{folder}, checkpoint, step 4, 4 of 4" in dmoe(capsys, "evaluate", folder, "--checkpoint", 4)[1]
    export = tmp_path / "m.safetensors"
    assert dmoe(capsys, "export", folder, export)[0] == 0
    origin |= {"run": str(export), "checkpoint": None, "step": 6}
    assert told(capsys, "evaluate", export, "--text", text)[0].items() >= origin.items()
    status, out, _ = dmoe(capsys, "evaluate", export, "--text", text)
    assert (status, out.splitlines()[0]) == (0, f"{export}, step 6, 4 of 4 experts: {text}")


def test_a_class_without_a_target_has_no_figure() -> None:
    """Among frequent and rare words; and a tokenizer's pieces are called so."""
    found = _figures(np.array([3, 5]), np.array([1.0, 2.0]), 200)
    assert math.isnan(found.by_rank[1].perplexity)
    table = _table(found, "pieces")
    assert [[*column.cells] for column in table.columns] == [
        ["1 to 100", "101 to 200", "all"],
        ["2", "0", "2"],
        ["4.482", "-", "4.482"],
        ["2.164", "-", "2.164"],
    ]
    assert table.columns[0].header == "pieces by frequency"


def test_checkpoints_and_lengths_change_the_figure(folder: Path, capsys: Any) -> None:
    """The best one, one by its step, the last; a longer memory, and a clamp."""
    best, first, last = (told(capsys, "evaluate", folder, "--checkpoint", each)[0] for each in ("best", "4", "last"))
    assert [(each["checkpoint"], each["step"]) for each in (best, first, last)] == [("best", 4), (4, 4), ("last", 6)]
    assert best["loss"] == first["loss"] != last["loss"]
    longer, clamped = (told(capsys, "evaluate", folder, flag, 2)[0]["loss"] for flag in ("--mem-len", "--clamp-len"))
    assert len({last["loss"], longer, clamped}) == 3


def test_generate_writes_what_the_model_writes(folder: Path, capsys: Any, tmp_path: Path) -> None:
    """One prompt as it is written, several one after the other, from flags and from a file; and as JSON."""
    model, sampling = load_run(folder), Sampling(temperature=0.5, top_k=5, top_p=0.9, seed=3)
    flags = ["--words", 6, "--temperature", 0.5, "--top-k", 5, "--top-p", 0.9, "--seed", 3]
    prompts = ["the cat", "a dog", "it"]
    expected = model.generate(prompts, words=6, **asdict(sampling))
    status, out, _ = dmoe(capsys, "generate", folder, "--prompt", "the cat", *flags)
    assert (status, out) == (0, f"the cat{expected[0].text}\n")
    file = tmp_path / "prompts.txt"
    file.write_text("a dog\n\n  it \n")
    words = ["generate", folder, "--prompt", "the cat", "--prompts", file, *flags]
    status, out, _ = dmoe(capsys, *words)
    assert out == "".join(f"{prompt}{each.text}\n\n" for prompt, each in zip(prompts, expected, strict=True))
    found = told(capsys, *words)
    assert [each["prompt"] for each in found] == prompts
    assert [(each["text"], tuple(each["ids"])) for each in found] == [(each.text, each.ids) for each in expected]
    assert [tuple(each["log_probs"]) for each in found] == [each.log_probs for each in expected]
    status, out, _ = dmoe(capsys, "generate", folder, "--words", 3)
    assert (status, out) == (0, f"{model.generate([''], words=3)[0].text}\n")


def with_words(run: Path, words: tuple[str, ...]) -> None:
    """Give a run another vocabulary, of these words and the end of a line."""
    vocabulary = Vocabulary((*words, "<eos>"), is_tokenised=True)
    save_vocabulary(run, vocabulary)
    records = [record for record in read_metrics(run / "metrics.jsonl") if record["kind"] != "task"]
    task = {"kind": "task", "name": "my.txt", "unit": "tokens", "meaning": vocabulary.meaning}
    (run / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in [task, *records]))


def test_nothing_that_a_terminal_obeys_is_printed(tmp_path: Path, capsys: Any) -> None:
    """A stranger's word may hold such characters; JSON escapes them."""
    run = make_run(tmp_path / "run", experts="run", has_vocabulary=False)
    evil = ("\x1b[2J", "\x9b31m", "a\x07\x00\x7f\x9f", "b\x1b]0;x\x07")
    with_words(run, (*evil, *(f"w{number}" for number in range(NUM_WORDS - 5))))
    flags = ["--words", 60, "--temperature", 3]
    (found,) = told(capsys, "generate", run, *flags)
    assert "\x1b" in found["text"]
    for prompts in ([], ["--prompt", "w1", "\x1b[2J"]):
        _, out, _ = dmoe(capsys, "generate", run, *flags, *prompts)
        assert {char for char in out if unicodedata.category(char) == "Cc"} <= {"\n", "\t"}
        assert "\ufffd[2J" in out
    assert "\x1b" not in dmoe(capsys, "generate", run, *flags, "--json")[1]


class Pipe(io.StringIO):
    """A pipe whose reader goes after so many writes."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.writes = most, 0

    def write(self, text: str) -> int:
        self.writes += 1
        if self.writes > self.most:
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(text)


def test_what_nobody_reads_is_not_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text ends with its reader, as a process that SIGPIPE ends."""
    pipe = Pipe(5)
    monkeypatch.setattr(sys, "stdout", pipe)
    with pytest.raises(SystemExit) as exit_:
        main(["generate", str(folder), "--prompt", "the", "--words", "100000"])
    assert exit_.value.code == 141
    assert 5 < pipe.writes < 20


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("generate RUN --words 0", "--words must be at least 1, got 0"),
        ("generate RUN --words=-3", "--words must be at least 1, got -3"),
        ("generate RUN --temperature=-1", "--temperature must be finite and not negative, got -1.0"),
        ("generate RUN --top-p 0", "--top-p must be above 0 and at most 1, got 0.0"),
        ("generate RUN --seed=-1", "seed must be from 0"),
        ("generate", "expected RUN, the folder of a run, or --join"),
        ("evaluate", "expected RUN, the folder of a run, or --join"),
        ("serve", "expected RUN, the folder of a run, or --join"),
        ("generate RUN --join 127.0.0.1:1 --experts .", "--experts would have no effect beside --join"),
        ("evaluate --join 127.0.0.1:1 --text one.txt --checkpoint best", "--checkpoint best would have no effect"),
        ("evaluate RUN --join 127.0.0.1:1 --mem-len 9", "--mem-len 9 beside --join: experts of a swarm keep"),
        ("evaluate RUN --join 127.0.0.1:1 --clamp-len 9", "--clamp-len 9 beside --join: experts of a swarm keep"),
        ("generate nowhere", "there is no run folder nowhere"),
        ("generate DENSE", "DENSE is a run of a dense model, 'small': it has no experts"),
        ("generate NONE", "no expert of layer0 was saved with the run: name the folders"),
        ("evaluate RUN --checkpoint 999", "there is no checkpoint 999 in .*; those that are there: 4, 6"),
        ("evaluate RUN --checkpoint first", "--checkpoint"),
        ("evaluate RUN --rows 0", "--rows must be at least 1, got 0"),
        (
            "evaluate RUN --rows 99999999999999999999",
            "rows must be at least 1, and 262,144 states of a layer in all",
        ),
        ("evaluate RUN --mem-len 999999", "a segment of 4 and a memory of 999,999; got 16 rows"),
        ("evaluate RUN --mem-len 9999999", "lengths are at most 1,048,576, got mem_len 9999999"),
        ("evaluate RUN --clamp-len 9999999999", "lengths are at most 1,048,576, got clamp_len 9999999999"),
        ("evaluate RUN --mem-len 0", "mem_len must be a positive integer, got 0"),
        ("evaluate RUN --text missing.txt", "--text missing.txt: No such file or directory"),
        ("evaluate RUN --text latin.txt", "--text latin.txt: 'utf-8' codec can't decode"),
        ("evaluate RUN --text one.txt", "at least|target"),
        ("evaluate BARE --text strange.txt", "'zebra' is not in the vocabulary of 14 words, which has no <unk>"),
        ("generate BARE --prompt zebra", "'zebra' is not in the vocabulary of 14 words, which has no <unk>"),
        ("generate RUN --prompts missing.txt", "--prompts missing.txt: No such file or directory"),
        ("generate RUN --prompts empty.txt", "--prompts empty.txt: the file has no line with a prompt"),
        ("generate RUN --router switch", "router 'switch' would have no effect: that of the run is 'product_key'"),
        ("evaluate EXPORT", "the export .* does not say where its text is: name it with --data, or a text of your own"),
        ("evaluate --join 127.0.0.1:1", "a swarm does not say where its text is: name it with --data, or a text of"),
        (
            "evaluate EXPORT --checkpoint best --text one.txt",
            "a checkpoint would have no effect: EXPORT.safetensors",
        ),
        (
            "generate EXPORT --experts .",
            "experts and a checkpoint would have no effect: EXPORT.safetensors is an",
        ),
        ("evaluate LOST", r"my\.txt"),
        ("generate LOST", r"my\.txt"),
        ("serve RUN --port=-1", "--port must be from 0 to 65535, got -1"),
        ("serve RUN --at-once 0", "--at-once must be at least 1, got 0"),
        ("serve RUN --most-words 0", "--most-words must be at least 1, got 0"),
        ("serve RUN --host 192.0.2.1", "--port: "),
    ],
)
def test_mistakes_are_told_in_one_line(
    words: str, line: str, tmp_path: Path, folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status 2, the last line says what is wrong, and there is no traceback."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"RUN": folder, "EXPORT": "EXPORT.safetensors"}
    if "DENSE" in words:
        dense = {"model": "small", "corpus": "wikitext-2", "config": {"grid_size": [], "num_layers": 2}}
        RunFolder.create(tmp_path / "DENSE", dense)
        (tmp_path / "DENSE" / "checkpoints" / "7").mkdir(parents=True)
    if "NONE" in words:
        make_run(tmp_path / "NONE", experts="none")
    if "BARE" in words:
        with_words(make_run(tmp_path / "BARE", has_vocabulary=False), tuple(f"w{number}" for number in range(13)))
    if "EXPORT" in words:
        assert dmoe(capsys, "export", folder, "EXPORT.safetensors")[0] == 0
    if "LOST" in words:  # a text of one's own that has gone, and no vocabulary in the folder
        make_run(tmp_path / "LOST", has_vocabulary=False)
        (tmp_path / "my.txt").unlink()
    (tmp_path / "empty.txt").write_text(" \n\n")
    (tmp_path / "one.txt").write_text("the")
    (tmp_path / "strange.txt").write_text("zebra\n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    status, out, error = dmoe(capsys, *(names.get(word, word) for word in words.split()))
    assert (status, out) == (2, ""), error
    assert re.search(line, error), error
    assert error.splitlines()[-1].startswith("dmoe: error: ")
    assert len(error.splitlines()) == 1 or "--help" in error


def test_a_run_without_its_text_writes_and_reads_texts_of_ones_own(tmp_path: Path, capsys: Any) -> None:
    """Its folder has the words. What it was trained on is needed for its parts alone, and may be elsewhere."""
    run, text = make_run(tmp_path / "run"), tmp_path / "my.txt"
    (tmp_path / "elsewhere").mkdir()
    elsewhere = text.rename(tmp_path / "elsewhere" / "my.txt")
    (tmp_path / "own.txt").write_text("a dog sat .")
    assert told(capsys, "generate", run, "--prompt", "the", "--words", 2)[0]["ids"]
    assert told(capsys, "evaluate", run, "--text", tmp_path / "own.txt")[0]["tokens"] == 3
    status, _, error = dmoe(capsys, "evaluate", run)
    assert (status, len(error.splitlines()), "my.txt" in error) == (2, 1, True)
    assert told(capsys, "evaluate", run, "--data", elsewhere)[0]["tokens"] > 10


async def test_a_run_is_served(folder: Path) -> None:
    """Over HTTP: what the model writes by itself."""
    model = load_run(folder)
    (expected,) = model.generate(["the cat"], words=4, temperature=0.0)
    body = json.dumps({"prompt": "the cat", "max_tokens": 4, "temperature": 0}).encode()
    address = Address("127.0.0.1", 0)
    async with open_completions(
        address, model.under_trio(), name="run", limits=CompletionLimits(), at_once=1
    ) as listening:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {listening}\r\nContent-Length: {len(body)}\r\n\r\n"
        status, answer = await ask(listening, head.encode() + body)
    assert status == 200
    assert json.loads(answer)["choices"][0]["text"] == expected.text


async def test_the_server_says_where_it_is_and_ends_when_told(folder: Path, capsys: Any) -> None:
    """The command, with a port that the system chooses."""
    serve = ServeCommand(run_folder=folder, port=0)

    class Ended:
        def body(self) -> Any:
            scope = trio.CancelScope()
            scope.cancel()
            return scope

    stop: Any = Ended()
    assert await serve._serve(stop) == 130
    assert re.fullmatch(r"completions at http://127\.0\.0\.1:\d+/v1/completions\n", capsys.readouterr().out)


@pytest.mark.slow
def test_the_commands_ask_a_living_swarm(folder: Path, capsys: Any) -> None:
    """Text and figures are those of the experts at hand, here of a node that has them from its seeds."""
    expert = config().expert()
    with connect(listen="127.0.0.1:0", security=Plain(), seed=0) as swarm:
        swarm.serve({"layer0.[0:2].[0:2]": expert}, optimizer=optax.sgd(0.1), seed=0)
        words = ["--join", swarm.contact, "--insecure-loopback"]
        model = load_run(folder).on(swarm)
        text, sampling = "the cat sat on the mat .", Sampling(temperature=0.0)
        (expected,) = swarm.generate(load_run(folder), ["the cat"], words=5, **asdict(sampling))
        assert model.generate(["the cat"], words=5, **asdict(sampling)) == [expected]
        (found,) = told(capsys, "generate", folder, *words, "--prompt", "the cat", "--words", 5, "--temperature", 0)
        assert tuple(found["ids"]) == expected.ids
        own = folder.with_name("swarm.txt")
        own.write_text(text)
        (figures,) = told(capsys, "evaluate", folder, *words, "--text", own)
        assert figures["loss"] == pytest.approx(model.evaluate(text).loss, abs=1e-6)
        status, _, error = dmoe(capsys, "generate", *words, "--prompt", "the")
        assert (status, "nobody in swarm 'dmoe' gives its model" in error) == (1, True)


@pytest.mark.slow
async def test_a_run_of_the_command_itself_is_loaded(tmp_path: Path) -> None:
    """Trained by trainers over a swarm; evaluated through the swarm, it has the loss that the run ended with."""
    text = tmp_path / "my.txt"
    text.write_text(TEXT * 4)
    async with served_swarm() as (_, swarm):
        settings = command(tmp_path / "run", str(text), cutoffs=(), final_eval_tokens=0)
        settings.check()
        await run_training(settings, settings.prepared(), swarm)
        model: TrainedModel = load_run(tmp_path / "run")
        assert load_vocabulary(tmp_path / "run").words == model.vocabulary.words
        found = await model.on(swarm).evaluate(model.split("valid"))
    ended = [each for each in read_metrics(tmp_path / "run" / "metrics.jsonl") if each["kind"] == "final_eval"]
    loss = next(each["loss"] for each in ended if each["split"] == "valid")
    assert found.loss == pytest.approx(loss, abs=1e-4)


@pytest.mark.slow
def test_the_page_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Its blocks run where its run folder and its swarm are."""
    page = Path(__file__).parents[2] / "docs" / "how_to" / "use.md"
    texts = re.findall(r"^```py\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    assert len(texts) == 4
    (tmp_path / "runs").mkdir()
    make_run(tmp_path / "runs" / "first")
    monkeypatch.chdir(tmp_path)
    with connect() as swarm:
        swarm.serve({"layer0.[0:2].[0:2]": config().expert()}, optimizer=optax.sgd(0.1), seed=0)
        for text in texts:
            exec(compile(text.replace('"PEER"', repr(swarm.contact)), str(page), "exec"), {"__name__": "__main__"})
    said = capsys.readouterr().out.splitlines()
    assert said[1] == f"6 {NUM_WORDS} 4 experts"
    assert sorted(line[:5] for line in said if line.startswith(("the cat", "a dog"))) == ["a dog", "the c"]


def test_the_page_has_all_flags(capsys: Any) -> None:
    """The flags of the three commands, but for those that all commands of a swarm share."""
    page = (Path(__file__).parents[2] / "docs" / "how_to" / "use.md").read_text()
    for name in ("evaluate", "generate", "serve"):
        _, out, _ = dmoe(capsys, name, "--help")
        flags = {*re.findall(r"^  (--[\w-]+)", out.partition("\nnetwork:")[0], re.MULTILINE)}
        assert len(flags) > 8
        missing = {flag for flag in flags if not re.search(rf"{flag}\b", page)}
        assert missing <= {"--config", "--trust-run"}
