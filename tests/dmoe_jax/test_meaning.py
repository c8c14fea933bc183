"""Numbers of different meaning are not mixed, though their names and shapes are equal: everybody is told."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax
import pytest
import trio

from dmoe_jax.averaging import MISSED_BEFORE_CATCHING_UP, TreeAverager
from dmoe_jax.cli.training import run_training
from dmoe_jax.collaboration import Collaboration, CollaborationConfig, open_collaboration
from dmoe_jax.data.vocabulary import Vocabulary
from dmoe_jax.machine.device import InlineDevice
from dmoe_jax.mixture import statistics
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.transformer_xl import TransformerXL
from dmoe_jax.optim import moshpit_average
from dmoe_jax.optim.collaborative import collaborative
from dmoe_jax.routing.registry import make_router
from dmoe_jax.runs.endings import CommandFailed, TryAgain, UsageError
from dmoe_jax.trained.saved_model import open_corpus
from dmoe_jax.trained.saved_run import find_run
from dmoe_net.meaning import check_meaning, differing
from tests.dmoe_jax.averaging_peers import CONFIG, Loop, peer_at, start, swarm_lived
from tests.dmoe_jax.training_rig import SIZES, command, served_swarm
from tests.net.averaging_swarm import Swarm, in_swarm, open_place

TEXT = "the cat sat on the mat .\n" * 500
CATS, DOGS = Vocabulary(("the", "cat")).meaning, Vocabulary(("the", "dog")).meaning


def test_words_and_their_order_are_the_meaning_of_a_vocabulary() -> None:
    """As many words, others or elsewhere, mean something else; the same words in a new object do not."""
    found = {Vocabulary(words).meaning for words in (("a", "b"), ("b", "a"), ("a", "c"), ("ab", ""), ("a", "b"))}
    assert len(found) == 4
    assert all(meaning.startswith("vocabulary: 2 words, ") for meaning in found)


@pytest.mark.parametrize("change", [{"cutoffs": (3,)}, {"router": "flat_top_k"}, {"heads": 4}, {"words": DOGS}])
def test_what_a_language_model_of_equal_shapes_may_differ_in(change: dict[str, Any]) -> None:
    """Each of these gives the same parameters another meaning, and the text names it."""

    async def nobody(*_: Any) -> Any:
        raise AssertionError("nothing is computed")

    def meaning(*, cutoffs: Any = (4,), router: str = "switch", heads: int = 2, words: str = CATS) -> str:
        layer = replace(SIZES, num_heads=heads)
        config = TransformerXLConfig(vocab_size=8, num_layers=1, layer=layer, grid_size=(2,), k_best=1, cutoffs=cutoffs)
        return TransformerXL(config, make_router(router, (2,)), [nobody], words=words).meaning

    theirs, ours = differing(meaning(**change), meaning())
    assert theirs != ours
    ((name, value),) = change.items()
    assert (value if name == "words" else str(value).strip("(),")) in theirs


def test_a_meaning_is_a_text_that_can_be_shown() -> None:
    """Facts a line; no control characters, which a terminal would obey, and not a page of them."""
    assert check_meaning("labels: cat, dog\nheads: 2") == "labels: cat, dog\nheads: 2"
    for bad in ("\x1b[2J", "x" * 2001, 5):
        with pytest.raises(ValueError, match="is a text of at most 2000 printable characters, got"):
            check_meaning(bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is a text"):
        CollaborationConfig(meaning="\x07")


def test_averagers_of_another_meaning_do_not_meet_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    """Neither averages nor takes the other's state, though it is ahead; rounds and logs name both meanings."""
    optimizer = moshpit_average(optax.sgd(1.0))
    cats, dogs = Loop(optimizer, 1.0), Loop(optimizer, 7.0)
    cats.steps = 50
    rounds: list[str] = []

    async def averages(averager: TreeAverager, loop: Loop) -> None:
        for _ in range(MISSED_BEFORE_CATCHING_UP):
            await loop.step(averager, 0.0, wait=True)
        rounds.append(averager.why_not)
        assert averager.totals.done == 0
        assert averager.totals.reasons == {"nobody was met, others average something else": 3}
        assert await averager.catch_up(*loop.state) is None

    async def body(swarm: Swarm) -> None:
        for name, loop, meaning in (("cats", cats, CATS), ("dogs", dogs, DOGS)):
            config = replace(CONFIG, meaning=f"{meaning}\nheads: 2")
            start(swarm, name, loop, averages, config=config, state=lambda loop=loop: loop.state)
        await swarm_lived(swarm, "cats", "dogs")

    with caplog.at_level(logging.WARNING):
        in_swarm(body)
    for theirs, ours in ((CATS, DOGS), (DOGS, CATS)):
        told = f"1 peer averages something else under the name 'run': {theirs}; this one: {ours}. They do not meet"
        assert f"nobody was met: {told}" in rounds
        assert told in caplog.text
    assert (cats.values.tolist(), dogs.values.tolist()) == ([1.0] * 3, [7.0] * 3)


@pytest.mark.slow
def test_collaborations_of_another_meaning_are_two(caplog: pytest.LogCaptureFixture) -> None:
    """Each peer counts its own samples alone and takes no state; who has the same meaning is met as ever."""
    found: dict[str, Collaboration] = {}

    async def live(swarm: Swarm, name: str, value: float, meaning: str) -> None:
        config = CollaborationConfig(target_batch_size=8, lead_s=2.0, meaning=meaning)
        options = {"together": collaborative(optax.sgd(0.0), shared="gradients"), "name": "run", "config": config}
        async with (
            open_place(swarm, name) as place,
            open_collaboration(peer_at(place), {"w": jnp.full(3, value)}, device=InlineDevice(), **options) as peer,
        ):
            found[name] = peer
            while True:
                await trio.sleep(1.0)
                await peer.gather({"w": jnp.zeros(3)}, samples=4)
                await peer.gathered(4, 1.0)

    async def body(swarm: Swarm) -> None:
        for name, value, meaning in (("cats", 1.0, CATS), ("more", 1.0, CATS), ("dogs", 7.0, DOGS)):
            swarm.network.start(name, lambda *each: live(swarm, *each), name, value, meaning)
        await trio.sleep(40.0)
        assert {name: len(peer.board.view.peers) for name, peer in found.items()} == {"cats": 2, "more": 2, "dogs": 1}
        assert all(peer.step > 2 for peer in found.values())
        assert {name: float(peer.params["w"][0]) for name, peer in found.items()} == {"cats": 1, "more": 1, "dogs": 7}

    with caplog.at_level(logging.WARNING):
        in_swarm(body)
    assert f"2 peers average something else under the name 'run': {CATS}; this one: {DOGS}" in caplog.text


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "my.txt"
    file.write_text(TEXT)
    return file


@pytest.mark.slow
async def test_a_run_goes_on_with_its_own_words_alone(text: Path, tmp_path: Path) -> None:
    """As many words, of which two have changed places: neither resumed nor inspected, and nothing is lost."""
    out, write = tmp_path / "run", text.write_text
    async with served_swarm() as (_, swarm):

        async def run(**changes: Any) -> dict[str, Any]:
            settings = command(out, str(text), **changes)
            return await run_training(settings, settings.prepared(), swarm)

        await run(steps=2, eval_every=2)
        before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
        write(TEXT + "mat mat\n" * 600)
        with pytest.raises(UsageError, match=r"begun with vocabulary: 8 words, \w+; .* now has vocabulary: 8 words,"):
            await run(steps=4, eval_every=2, resume=True)
        with pytest.raises(ValueError, match="begun with vocabulary: 8 words"):
            open_corpus(find_run(out))
        assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
        write(TEXT)
        assert open_corpus(find_run(out)).vocabulary.words[0] == "the"
        assert (await run(steps=4, eval_every=2, resume=True))["steps"] == 4


async def test_nodes_whose_experts_compute_otherwise_do_not_fit(text: Path, tmp_path: Path) -> None:
    """Two heads and four have parameters of the same shapes."""
    async with served_swarm() as (_, swarm):
        settings = command(tmp_path / "run", str(text), layer=replace(SIZES, num_heads=4))
        with pytest.raises(UsageError, match=r"compute otherwise: .* has heads: 2, .* needs heads: 4; .*num-heads"):
            await run_training(settings, settings.prepared(), swarm)


async def test_a_run_whose_samples_had_no_expert_ends_with_an_error(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes refuse every call: a short run ends with its report and an error, a longer one on the way."""
    async with served_swarm() as (served, swarm):
        served.node.refuse_calls()
        short: dict[str, Any] = {"steps": 2, "eval_every": 2, "num_trainers": 1, "timeout_s": 2.0}

        async def run(name: str, **changes: Any) -> dict[str, Any]:
            settings = command(tmp_path / name, str(text), **short | changes)
            return await run_training(settings, settings.prepared(), swarm)

        with pytest.raises(
            CommandFailed, match=r"no expert answered for (\d+) of \1 samples of the run.* allows 50%"
        ) as failed:
            await run("short")
        assert failed.value.status == 1
        assert (tmp_path / "short" / "report.md").exists()
        assert (await run("never", max_skipped=1.0))["complete"]
        monkeypatch.setattr(statistics, "HOLD_S", 0.1)
        with pytest.raises(TryAgain, match=r"of the last 32 calls; .* stopped at step \d+$"):
            await run("long", steps=100, eval_every=100)
    with pytest.raises(ValueError, match=r"max_skipped is a share from 0 to 1, got 1.5"):
        command(tmp_path / "none", str(text), max_skipped=1.5)
