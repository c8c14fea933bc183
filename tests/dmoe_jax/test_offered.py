"""A model that a swarm gives to whoever asks: taken over to the bit, and refused in a sentence where it is a lie."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import trio

from dmoe_jax.data.pieces import AnyVocabulary, PieceVocabulary
from dmoe_jax.data.saved_vocabulary import MOST_BYTES, packed_vocabulary
from dmoe_jax.data.tokenizers import open_tokenizer
from dmoe_jax.data.vocabulary import Vocabulary
from dmoe_jax.machine.device import InlineDevice
from dmoe_jax.models import transformer_xl as txl
from dmoe_jax.runs.run_folder import plain
from dmoe_jax.swarm.opening import open_swarm
from dmoe_jax.trained.loading import fetch_run
from dmoe_jax.trained.offered import NoModelOffered, RouterNotNamed, fetch_model, offer_model
from dmoe_net.averaging.state.sharing import SharedState, StateSharing, StateSharingConfig, StateSource
from dmoe_net.transport.sim import Constant, run, simulate
from tests.dmoe_jax.test_decoding import CASES, CONFIG
from tests.dmoe_jax.test_trained_model import ALL, DRAWN, PROMPTS, VOCABULARY, make_model, serve
from tests.dmoe_jax.tokenizer_files import TEXT, byte_pairs

ROUTER = "product_key"
Offer = Callable[[Any], Any]
"""A coroutine function of a swarm, which offers until it is cancelled."""


def trunk_of(config: Any, seed: int = 1) -> Any:
    """Parameters that are no expert's."""
    return txl.init_trunk(jax.random.key(seed), config, CASES["sequences"][1])


def honest(vocabulary: AnyVocabulary = VOCABULARY, *, step: int = 7, router: str = ROUTER) -> Offer:
    """Offer a model, as a trainer does."""
    config = CONFIG.replace(vocab_size=len(vocabulary))
    trunk = trunk_of(config)

    async def offer(swarm: Any) -> None:
        await offer_model(swarm.peer, swarm.name, config, router, vocabulary, lambda: (step, trunk), InlineDevice())

    return offer


def lying(change: Callable[[SharedState], SharedState], *, step: int = 7) -> Offer:
    """Offer a changed state, as a trainer that lies."""
    words = tuple(np.frombuffer(part, np.uint8) for part in packed_vocabulary(VOCABULARY))
    leaves = tuple(np.asarray(leaf) for leaf in jax.tree.leaves(trunk_of(CONFIG)))
    facts = {"config": plain(asdict(CONFIG)), "router": ROUTER}
    state = change(SharedState(version=step, tensors=(*words, *leaves), facts=facts))

    async def snapshot() -> SharedState:
        return state

    async def offer(swarm: Any) -> None:
        source = StateSource(lambda: step, snapshot)
        sharing = StateSharing(
            swarm.peer.rpc, swarm.peer.dht, prefix=f"{swarm.name}.model", source=source, config=StateSharingConfig()
        )
        await sharing.run()

    return offer


def fetched(*offers: Offer, **options: Any) -> Any:
    """The model that a newcomer gets of a swarm in which these are offered."""

    async def offering(network: Any, host: str, join: Any, offer: Offer) -> None:
        async with open_swarm(join, network=network, host=host, seed=0) as swarm:
            await offer(swarm)

    async def main() -> Any:
        async with (
            simulate(seed=1, latency=Constant(0.01)) as network,
            open_swarm(network=network, host="newcomer", seed=9) as swarm,
        ):
            for number, offer in enumerate(offers):
                network.start(f"donor{number}", offering, network, f"donor{number}", swarm.contact, offer)
            await trio.sleep(20)
            return await fetch_model(swarm.peer, swarm.name, **options)

    return run(main, seed=1)


def check_refused(offer: Offer, line: str, error: type[Exception] = NoModelOffered) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(error, match=line), allow_unwrapped=True, flatten_subgroups=True):
        fetched(offer)


def test_a_model_arrives_to_the_bit() -> None:
    """Trunk, sizes, router, step and words; no expert comes with it."""
    saved, vocabulary = fetched(honest())
    jax.tree.map(lambda *both: np.testing.assert_array_equal(*both, strict=True), saved.trunk, trunk_of(CONFIG))
    assert (saved.config, saved.router.name, saved.step) == (CONFIG, ROUTER, 7)
    assert (saved.experts, saved.known.shape, saved.known.any()) == ((), (2, 2, 2), False)
    assert (vocabulary.words, vocabulary.is_tokenised) == (VOCABULARY.words, True)


def test_pieces_of_a_tokenizer_arrive() -> None:
    """The tokenizer's file, its order of pieces, and so a text's ids."""
    tokenizer = open_tokenizer(byte_pairs().to_str().encode(), "tokenizer.json")
    pieces = PieceVocabulary.build(tokenizer, tokenizer.encode(TEXT))
    saved, vocabulary = fetched(honest(pieces))
    assert isinstance(vocabulary, PieceVocabulary)
    assert (vocabulary.meaning, saved.config.vocab_size) == (pieces.meaning, len(pieces))
    np.testing.assert_array_equal(vocabulary.encode_text("the cat !"), pieces.encode_text("the cat !"))


def test_the_model_that_is_furthest_is_taken() -> None:
    """Two trainers offer theirs."""
    assert fetched(honest(step=3), honest(step=8))[0].step == 8


def test_a_swarm_without_an_offer_says_who_gives_one() -> None:
    """Nobody is asked in vain for long."""
    with pytest.raises(NoModelOffered, match=r"nobody in swarm 'dmoe' gives its model: trainers do .*--average-every"):
        fetched()


def of_config(layer: Mapping[str, Any] = {}, **changes: Any) -> Callable[[SharedState], SharedState]:
    """Say that the model has other sizes."""

    def change(state: SharedState) -> SharedState:
        config = {**state.facts["config"], **changes}
        return replace(state, facts={**state.facts, "config": {**config, "layer": {**config["layer"], **layer}}})

    return change


def of_facts(**changes: Any) -> Callable[[SharedState], SharedState]:
    """Say something else beside the arrays."""
    return lambda state: replace(state, facts={**state.facts, **changes})


def of_tensors(change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Callable[[SharedState], SharedState]:
    """Give other arrays."""
    return lambda state: replace(state, tensors=change(state.tensors))


def with_words(words: Any, **changes: Any) -> Callable[[SharedState], SharedState]:
    """Give another vocabulary."""
    record, _ = packed_vocabulary(Vocabulary(tuple(words)))
    return of_tensors(lambda own: (np.frombuffer(record, np.uint8), *own[1:]))


def with_nan(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*tensors[:-1], np.full_like(tensors[-1], np.nan))


LIES = {
    "another shape": (of_tensors(lambda own: (*own[:-1], own[-1][..., :1])), "other shapes than its sizes say"),
    "another type": (of_tensors(lambda own: (*own[:2], *(leaf.astype(np.float16) for leaf in own[2:]))), "shapes"),
    "one array less": (of_tensors(lambda own: own[:-1]), "other shapes than its sizes say"),
    "not finite": (of_tensors(with_nan), "numbers are not all finite"),
    "no words": (of_tensors(lambda own: (np.zeros(0, np.uint8), *own[1:])), "is damaged"),
    "no text": (of_tensors(lambda own: (np.frombuffer(b"\xff{", np.uint8), *own[1:])), "is damaged"),
    "no bytes": (of_tensors(lambda own: (np.zeros(3, np.float32), *own[1:])), "cannot be had"),
    "too many bytes": (of_tensors(lambda own: (np.zeros(MOST_BYTES + 1, np.uint8), *own[1:])), "cannot be had"),
    "arrays of nothing": (of_tensors(lambda own: own[:2]), "cannot be had"),
    "another number of words": (with_words(VOCABULARY.words[:-1]), "vocabulary has 40 words, that of the text 39"),
    "huge width": (of_config({"d_model": 2**20}), "other shapes than its sizes say"),
    "width beyond reason": (of_config({"d_model": 2**60}), "d_model is 1152921504606846976"),
    "long segments": (of_config({"seq_len": 2**30}), "segments of 1073741824 words"),
    "long memory": (of_config({"mem_len": 2**30}), "a memory of 1073741824 is beyond all reason"),
    "clamp beyond reason": (of_config({"clamp_len": 2**60}), "clamp_len is 1152921504606846976"),
    "many layers": (of_config(num_layers=2**30), "beyond all reason"),
    "many experts": (of_config(grid_size=[2**12, 2**12]), "too many"),
    "many dimensions": (of_config(grid_size=[1] * 50, k_best=1), "a grid of 50 dimensions has too many"),
    "dense": (of_config(grid_size=[], k_best=0), "grid_size must be"),
    "a word for a number": (of_config(num_layers="2"), "num_layers is '2'"),
    "a negative number": (of_config(k_best=-1), "k_best is -1"),
    "a list for a truth": (of_config({"same_length": [1]}), r"same_length is \[1\]"),
    "a rate that is none": (of_config(input_dropout=1.5), "input_dropout must be a probability"),
    "an unknown size": (of_config(colour=3), "made by another version"),
    "no sizes": (of_facts(config={}), "expected the model's sizes"),
    "sizes that are a word": (of_facts(config="big"), "expected the model's sizes"),
    "an unknown router": (of_facts(router="none"), "unknown router 'none'"),
    "a router that is no name": (of_facts(router=["product_key"]), "expected the router's name"),
    "a router without end": (of_facts(router="x" * 2000), "expected the router's name"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused_in_a_sentence(lie: str) -> None:
    """Whatever a peer says: one error, whose message tells what is wrong."""
    change, line = LIES[lie]
    check_refused(lying(change), line)


@pytest.mark.parametrize("router", ["mine.py:evil", "mine.py", "other/x.py:y"])
def test_no_code_is_run_because_a_peer_names_it(router: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the file is there. Named by oneself it is run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("raise SystemExit('it ran')\n")
    line = f"is out of a file of its trainers, '{re.escape(router)}'; name a file of your own"
    check_refused(lying(of_facts(router=router)), line, RouterNotNamed)
    (tmp_path / "own.py").write_text("from dmoe_jax.routing import product_key as own\n")
    saved, _ = fetched(lying(of_facts(router=router)), router="own.py:own")
    assert saved.router.name == ROUTER


def test_who_lies_does_not_hide_who_does_not() -> None:
    """A liar says that it is furthest, another names a file; the honest trainer's model is taken."""
    liar, other = lying(of_config(num_layers="2"), step=10**9), lying(of_facts(router="x.py:y"), step=10**8)
    assert fetched(liar, other, honest(step=5))[0].step == 5


@pytest.mark.slow
def test_text_of_a_model_that_a_swarm_gave() -> None:
    """It is that of the model itself, with the experts of the same swarm; where its text is, nobody says."""
    expected = make_model().generate(PROMPTS, words=5, **asdict(DRAWN))
    trunk = make_model().params

    async def train(network: Any, join: Any) -> None:
        async with open_swarm(join, network=network, host="trainer", seed=0) as swarm:
            await offer_model(swarm.peer, swarm.name, CONFIG, ROUTER, VOCABULARY, lambda: (7, trunk), InlineDevice())

    async def main() -> Any:
        async with (
            simulate(seed=1, latency=Constant(0.01)) as network,
            open_swarm(network=network, host="reader", seed=9) as swarm,
        ):
            network.start("node", serve, network, "node", swarm.contact, ALL, CONFIG)
            network.start("trainer", train, network, swarm.contact)
            await trio.sleep(20)
            model = await fetch_run(swarm)
            with pytest.raises(ValueError, match="swarm 'dmoe' does not say where its text is: name it with data="):
                model.split("test")
            return await swarm.generate(model, PROMPTS, words=5, **asdict(DRAWN))

    written = run(main, seed=1)
    assert [each.ids for each in written] == [each.ids for each in expected]


UP = """--nodes 2 --trainers 2 --average-every 5 --num-layers 1 --grid-size 2 2 --d-model 16 --num-heads 2 --d-ff 16
 --seq-len 8 --mem-len 8 --steps 1000000 --data embedded --cutoffs none"""


@pytest.mark.slow
def test_a_swarm_writes_while_it_trains(tmp_path: Path) -> None:
    """`dmoe up` and `dmoe generate --join`, as processes; then the run folder is evaluated."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    options: dict[str, Any] = {"env": environment, "text": True}

    def dmoe(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "dmoe_jax.cli", *words]
        return subprocess.run(command, capture_output=True, timeout=120, check=False, **options)

    up = [sys.executable, "-m", "dmoe_jax.cli", "up", "--out", str(tmp_path / "run"), *UP.split()]
    with open(tmp_path / "out", "w") as out, subprocess.Popen(up, stdout=out, stderr=out, **options) as process:
        try:
            deadline = time.monotonic() + 180
            peer, done = None, None
            while time.monotonic() < deadline and (done is None or done.returncode):
                assert process.poll() is None, (tmp_path / "out").read_text()
                peer = peer or re.search(r"--join (\S+)", (tmp_path / "out").read_text())
                if peer is None:
                    time.sleep(0.5)
                else:  # until a trainer has come so far as to offer its model
                    done = dmoe("generate", "--join", peer[1], "--prompt", "the", "--words", "12")
            assert done is not None, (tmp_path / "out").read_text()
            assert done.returncode == 0, done.stderr
            assert done.stdout.startswith("the ")
            assert len(done.stdout.split()) > 5
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(100)
    told = dmoe("evaluate", str(tmp_path / "run"), "--json")
    assert told.returncode == 0, told.stderr
