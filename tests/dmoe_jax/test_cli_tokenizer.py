"""`dmoe train` in pieces of a tokenizer, and with batches of Grain: what a run keeps, and how it goes on."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmoe_jax.checkpoints import read_arrays
from dmoe_jax.cli.training import run_training
from dmoe_jax.cli.up import DataOptions, UpCommand
from dmoe_jax.data import load_corpus, load_vocabulary
from dmoe_jax.data.saved_vocabulary import VOCABULARY
from dmoe_jax.experts.user_file import load_from_file
from dmoe_jax.runs.endings import UsageError
from dmoe_jax.runs.run_folder import read_metrics
from dmoe_jax.trained.saved_model import load_model, open_corpus
from dmoe_jax.trained.saved_run import find_run
from tests.dmoe_jax.tokenizer_files import FILES, LINES, TEXT, json_file
from tests.dmoe_jax.training_rig import command, served_swarm


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "my.txt").write_text(TEXT)
    return str(tmp_path / "my.txt")


async def run(swarm: Any, *args: Any, **flags: Any) -> dict[str, Any]:
    """As the command does it."""
    settings = command(*args, **flags)
    settings.check()
    return await run_training(settings, settings.prepared(), swarm)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "is_own"), [("json", False), ("model", True)])
async def test_a_run_in_pieces(kind: str, is_own: bool, text: str, tmp_path: Path) -> None:
    """It has clusters of rare pieces, bits for each byte, and all that is needed where text and tokenizer are not."""
    out, file, text = tmp_path / "run", FILES[kind](tmp_path), text if is_own else "embedded"
    async with served_swarm() as (_, swarm):
        headline = await run(swarm, out, text, tokenizer=str(file), cutoffs=(16,))
    assert (headline["complete"], headline["steps"], headline["training_tokens"]) == (True, 8, 8 * 2 * 4)
    bits = headline["validation_perplexity"]
    assert 0 < headline["validation_bits_per_byte"] < np.log2(bits)  # most pieces have more than one byte
    corpus = load_corpus(source=text, tokenizer=str(file))
    evaluations = [record for record in read_metrics(out / "metrics.jsonl") if record["kind"] == "final_eval"]
    num_bytes = evaluations[0]["loss"] / np.log(2) * evaluations[0]["items"] / evaluations[0]["bits_per_byte"]
    assert num_bytes == pytest.approx(round(num_bytes))
    saved = out / file.name
    assert saved.read_bytes() == file.read_bytes()
    file.unlink()
    vocabulary = load_vocabulary(out)
    assert vocabulary.meaning == corpus.vocabulary.meaning
    found = find_run(out)
    assert open_corpus(found).vocabulary.meaning == vocabulary.meaning
    assert load_model(found, len(vocabulary)).config.vocab_size == len(vocabulary)


@pytest.mark.slow
async def test_a_run_goes_on_with_its_own_tokenizer_alone(text: str, tmp_path: Path) -> None:
    """Another one of as many pieces, or words, are refused in a sentence, and nothing is lost."""
    out, file = tmp_path / "run", json_file(tmp_path)
    other = json_file(tmp_path, lines=["quite another text", *LINES[:1]], name="other.json")
    async with served_swarm() as (_, swarm):
        await run(swarm, out, text, tokenizer=str(file), steps=4)
        before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
        line = r"begun with vocabulary: 280 pieces, \w+; the data or the model now has vocabulary: "
        for tokenizer in (str(other), None):
            with pytest.raises(UsageError, match=line + ("280 pieces" if tokenizer else r"\d+ words")):
                await run(swarm, out, text, tokenizer=tokenizer, resume=True)
        (out / VOCABULARY).write_text("{}")
        with pytest.raises(UsageError, match=r"cannot keep this vocabulary: .* expected a JSON object with a version"):
            await run(swarm, out, text, tokenizer=str(file), resume=True)
        (out / VOCABULARY).write_bytes(before[out / VOCABULARY])
        assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
        # The run's own copy will do.
        headline = await run(swarm, out, text, tokenizer=str(out / "tokenizer.json"), resume=True)
    assert (headline["steps"], headline["training_tokens"]) == (8, 8 * 2 * 4)


def test_flags_that_cannot_be_meant_are_refused_before_anything_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `dmoe train` and `dmoe up` alike."""
    monkeypatch.chdir(tmp_path)
    file = json_file(tmp_path)
    with pytest.raises(UsageError, match=r"--tokenizer my.json: there is no such file"):
        command(tmp_path / "run", "embedded", tokenizer="my.json").check()
    with pytest.raises(UsageError, match=r"--tokenizer .* would have no effect beside --model mine.py:Mine"):
        command(tmp_path / "run", "embedded", tokenizer=str(file), model="mine.py:Mine").check()
    up = UpCommand(data=DataOptions(data="embedded", tokenizer=str(file)))
    up.check()
    assert ["--tokenizer", str(file)] == [
        word
        for pair in zip(up.flags_of_trainer(0), up.flags_of_trainer(0)[1:], strict=False)
        if pair[0] == "--tokenizer"
        for word in pair
    ]
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UsageError, match=r"pip install 'dmoe_jax\[text\]'"):
        up.check()


PIPELINE = """
import grain, jax.numpy as jnp, numpy as np, optax
from dmoe_jax.model import Model, Outcome

def loss(w, x, y):
    return jnp.mean((x @ w - y) ** 2)

optimizer = optax.adam(0.1)

class Line(Model):
    mixtures = []
    seen = []

    def __init__(self, swarm):
        pass

    def init(self, key):
        return jnp.zeros(3)

    async def forward(self, run, params, batch, state, keys):
        self.seen.append(batch["number"].tolist())
        return Outcome(loss=run(loss, params, batch["x"], batch["y"]), items=len(batch["y"]))

    def batches(self, shard, num_shards, seed):
        rng = np.random.default_rng(0)
        values = enumerate(rng.normal(size=(40, 3)).astype("f"))
        rows = [{"number": n, "x": x, "y": np.float32(x.sum())} for n, x in values]
        return grain.MapDataset.source(rows).shuffle(seed=seed).repeat()[shard::num_shards].batch(3).to_iter_dataset()
"""


def outcome_of(out: Path) -> tuple[int, dict[Any, Any], list[tuple[int, float]]]:
    """Step, arrays of the last checkpoint, and (step, loss) of all steps."""
    step, arrays = read_arrays(out / "checkpoints", lambda names: True)
    records = read_metrics(out / "metrics.jsonl")
    return step, arrays, [(each["step"], each["loss"]) for each in records if each["kind"] == "train"]


@pytest.mark.slow
async def test_a_pipeline_of_grain_goes_on_at_the_very_record(tmp_path: Path) -> None:
    """Bit for bit as the run that was not interrupted."""
    (tmp_path / "mine.py").write_text(PIPELINE)
    flags = {"model": f"{tmp_path / 'mine.py'}:Line", "optimizer": f"{tmp_path / 'mine.py'}:optimizer"}
    async with served_swarm() as (_, swarm):
        for out, stops in (("whole", (9,)), ("parts", (4, 7, 9))):
            for steps in stops:
                resume = steps != stops[0]
                await run(swarm, tmp_path / out, "embedded", num_trainers=1, steps=steps, resume=resume, **flags)
        whole, parts = outcome_of(tmp_path / "whole"), outcome_of(tmp_path / "parts")
        np.testing.assert_equal(parts, whole)
        assert [step for step, _ in whole[2]] == list(range(1, 10))
        facts = json.loads(next((tmp_path / "parts" / "checkpoints" / "9").rglob("metadata")).read_text())["facts"]
        assert facts["engine"]["positions"][0]["read"] == 9


@pytest.mark.slow
async def test_a_collaboration_goes_on_at_the_very_record(tmp_path: Path) -> None:
    """However many micro-batches its steps took: what the two parts have read is what one pipeline gives."""
    (tmp_path / "mine.py").write_text(PIPELINE)
    spec, out = f"{tmp_path / 'mine.py'}:Line", tmp_path / "run"
    flags = {"model": spec, "optimizer": f"{tmp_path / 'mine.py'}:optimizer", "num_trainers": 1, "target_batch_size": 6}
    async with served_swarm() as (_, swarm):
        for steps in (2, 4):
            await run(swarm, out, "embedded", steps=steps, resume=steps == 4, **flags)
    model = load_from_file(spec, kind="model")
    pipeline = iter(model.batches(None, 0, 1, 0))
    assert model.seen == [next(pipeline)["number"].tolist() for _ in model.seen]
    assert len(model.seen) >= 8  # of three records each
