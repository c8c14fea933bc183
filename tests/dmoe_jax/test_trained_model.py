"""A trained model writes: alone, and through a swarm whose nodes die."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import trio

from dmoe_jax.data.pieces import PieceVocabulary
from dmoe_jax.data.tokenizers import load_tokenizer
from dmoe_jax.data.vocabulary import Vocabulary
from dmoe_jax.directory.grid import layer_prefix
from dmoe_jax.models import transformer_xl as txl
from dmoe_jax.swarm.opening import open_swarm
from dmoe_jax.trained.language_model import MOST_AT_ONCE, TrainedModel
from dmoe_jax.trained.saved_model import SavedModel
from dmoe_jax.trained.settings import Sampling
from dmoe_net.errors import NoQuorum
from dmoe_net.transport.sim import Constant, HostDown, HostUp, run, simulate
from tests.dmoe_jax.test_decoding import CASES, CONFIG
from tests.dmoe_jax.tokenizer_files import FILES, TEXT

VOCABULARY = Vocabulary((*(f"w{number}" for number in range(CONFIG.vocab_size - 1)), "<eos>"), is_tokenised=True)
GREEDY, DRAWN = Sampling(temperature=0.0), Sampling(temperature=1.5, seed=3)
PROMPTS = ("w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w10 w11 w12 w13", "w14 w15")
ROUND_TRIP_S = 0.1
ROUTER = CASES["sequences"][1]


def no_text(split: str) -> np.ndarray:
    raise AssertionError(split)


def make_model(case: str = "sequences", known: np.ndarray | None = None) -> TrainedModel:
    """A model whose experts are those that nodes make from seed 0."""
    config, router = CASES[case]
    trunk = jax.tree.map(lambda leaf: 4 * leaf, txl.init_trunk(jax.random.key(1), config, router))
    experts = txl.init_experts(jax.random.key(0), config)
    known = np.ones((config.num_layers, *config.grid_size), bool) if known is None else known
    saved = SavedModel(config=config, router=router, step=7, trunk=trunk, experts=experts, known=known)
    return TrainedModel(saved, VOCABULARY, no_text)


def test_greedy_text_is_the_likeliest_word_each_time() -> None:
    """By `log_probs` over the whole text so far, which knows nothing of caches; and the pieces make up the text."""
    model, pieces = make_model(), dict[int, str]()
    written = model.generate(
        PROMPTS,
        words=11,
        **asdict(GREEDY),
        on_piece=lambda row, piece: pieces.update({row: pieces.get(row, "") + piece}),
    )
    for row, (prompt, each) in enumerate(zip(PROMPTS, written, strict=True)):
        ids = model.vocabulary.encode_text(prompt).tolist()
        for word, log_prob in zip(each.ids, each.log_probs, strict=True):
            expected = model.log_probs(ids)[-1]
            assert word == expected.argmax()
            assert log_prob == pytest.approx(expected.max(), abs=1e-4)
            ids.append(word)
        assert each.text == pieces[row] == model.vocabulary.decode(ids)[len(prompt) :]


def test_many_prompts_are_written_as_they_are_alone() -> None:
    """More than are read at once; drawn, so that each has chance of its own."""
    model = make_model()
    prompts = [[number % 39, 3] for number in range(MOST_AT_ONCE + 3)]
    sampling = Sampling(temperature=1.5, top_k=10, seed=4)
    together = model.generate(prompts, words=3, **asdict(sampling))
    assert len(together) == len(prompts)
    alone = model.generate(prompts[:3], words=3, **asdict(sampling))
    assert [each.ids for each in together[:3]] == [each.ids for each in alone]
    assert len({each.ids for each in together}) > MOST_AT_ONCE // 2
    assert together != model.generate(prompts, words=3, temperature=1.5, top_k=10, seed=5)


def test_a_text_ends_when_it_is_told_to() -> None:
    """A listener's True ends one text and not the others."""
    written = make_model().generate(PROMPTS[:2], words=9, **asdict(GREEDY), on_piece=lambda row, piece: row == 0)
    assert [len(each.ids) for each in written] == [1, 9]


@pytest.mark.parametrize("prompt", [[40], [3, -1]], ids=str)
def test_prompts_that_are_none_are_refused(prompt: Any) -> None:
    """The message says what tokens are."""
    with pytest.raises(ValueError, match="tokens are ids from 0 to 39"):
        make_model().generate([prompt])


def test_an_empty_prompt_begins_a_text() -> None:
    """It is the end of a line."""
    model = make_model()
    assert model.generate([""], words=4, **asdict(GREEDY)) == model.generate([[39]], words=4, **asdict(GREEDY))


def test_a_model_without_saved_experts_says_where_to_get_them() -> None:
    """Its parameters are there all the same."""
    model = make_model(known=np.zeros((2, 2, 2), bool))
    assert "embed" in model.params
    with pytest.raises(ValueError, match="no expert of layer0, layer1 was saved"):
        model.generate(["w1"])


@pytest.mark.parametrize("wrong", [0, -3])
def test_lengths_are_checked(wrong: int) -> None:
    """Continuations and memories have a word at least."""
    with pytest.raises(ValueError, match=f"words must be at least 1, got {wrong}"):
        make_model().generate(["w1"], words=wrong)
    with pytest.raises(ValueError, match="mem_len must be"):
        make_model().with_lengths(mem_len=wrong)


def test_a_longer_memory_is_another_distribution() -> None:
    """The same parameters, and words further back that count."""
    model, text = make_model(), list(range(20))
    assert np.abs(model.with_lengths(mem_len=12).log_probs(text) - model.log_probs(text))[12:].max() > 1e-3
    np.testing.assert_array_equal(model.with_lengths(mem_len=6).log_probs(text), model.log_probs(text))


async def serve(network: Any, host: str, join: Any, patterns: Sequence[str], config: Any) -> None:
    """A node of some experts, until its host goes down."""
    async with open_swarm(join, network=network, host=host, seed=0) as swarm:
        await swarm.serve(dict.fromkeys(patterns, config.expert()), optimizer=None, seed=0)
        await trio.sleep_forever()


def written_in_swarm(
    case: str, homes: dict[str, Sequence[str]], schedule: Sequence[Any] = (), *, words: int = 12, **options: Any
) -> tuple[list[Any], float, Any]:
    """(what a swarm writes to the prompts; virtual seconds from the first word on; its layers).

    Args:
      homes: host -> patterns of its experts. schedule: what befalls the hosts.
    """
    model = make_model(case)
    config = CASES[case][0]

    async def main() -> tuple[list[Any], float, Any]:
        async with (
            simulate(seed=1, latency=Constant(ROUND_TRIP_S / 2), schedule=schedule) as network,
            open_swarm(network=network, host="reader", seed=9) as swarm,
        ):
            for host, patterns in homes.items():
                network.start(host, serve, network, host, swarm.contact, patterns, config)
            await trio.sleep(20)
            reading = model.on(swarm, **options)
            times: list[float] = []
            written = await reading.generate(
                PROMPTS, words=words, **asdict(DRAWN), on_piece=lambda row, piece: times.append(trio.current_time())
            )
            return written, times[-1] - times[0], reading.reader.layers

    result: tuple[list[Any], float, Any] = run(main, seed=1)
    return result


ALL = [f"{layer_prefix(layer)}.[0:2].[0:2]" for layer in range(2)]
HALF = [[f"{layer_prefix(layer)}.{row}.[0:2]" for layer in range(2)] for row in range(2)]


@pytest.mark.parametrize("case", ["sequences", "tokens", "hashed words"])
def test_a_swarm_writes_what_one_machine_writes(case: str) -> None:
    """Word for word, in one round trip a layer and word."""
    expected = make_model(case).generate(PROMPTS, words=12, **asdict(DRAWN))
    written, seconds, layers = written_in_swarm(case, {"node0": HALF[0], "node1": HALF[1]})
    assert [each.ids for each in written] == [each.ids for each in expected]
    assert seconds == pytest.approx(11 * 2 * ROUND_TRIP_S, rel=0.02)
    assert [(layer.asked_again, layer.replaced) for layer in layers] == [(0, 0)] * 2


def test_a_node_that_dies_costs_time_and_no_word() -> None:
    """Every expert has a copy; the node that is asked dies in the middle of a word."""
    expected = make_model().generate(PROMPTS, words=30, **asdict(DRAWN))
    homes = {"node0": ALL, "node1": ALL}
    written, _, _ = written_in_swarm("sequences", homes, [(22.03, HostDown("node0"))], words=30)
    assert [each.ids for each in written] == [each.ids for each in expected]


def test_an_expert_without_a_copy_is_waited_for() -> None:
    """Its node comes back after a while, and the text is the same."""
    expected = make_model().generate(PROMPTS, words=20, **asdict(DRAWN))
    schedule = [(21.0, HostDown("node0")), (45.0, HostUp("node0"))]
    written, seconds, layers = written_in_swarm("sequences", {"node0": HALF[0], "node1": HALF[1]}, schedule, words=20)
    assert [each.ids for each in written] == [each.ids for each in expected]
    assert seconds > 20
    assert sum(layer.asked_again for layer in layers) > 0
    assert sum(layer.replaced for layer in layers) == 0


def test_a_text_goes_on_without_an_expert_that_never_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    """After the patience that was asked for, and with a word of warning."""
    homes = {"node0": HALF[0], "node1": HALF[1]}
    written, seconds, layers = written_in_swarm(
        "sequences", homes, [(21.0, HostDown("node0"))], words=20, patience_s=8.0, timeout_s=2.0
    )
    assert [len(each.ids) for each in written] == [20] * 4
    assert 8 < seconds < 40
    assert sum(layer.replaced for layer in layers) > 0
    assert "the text goes on with other experts" in caplog.text


def test_a_swarm_without_experts_is_an_error() -> None:
    """All nodes gone, in the end there is nobody to wait for."""
    schedule = [(21.0, HostDown("node0"))]
    with pytest.RaisesGroup(
        pytest.RaisesExc(NoQuorum, match="no expert has answered for 8 s"), allow_unwrapped=True, flatten_subgroups=True
    ):
        written_in_swarm("sequences", {"node0": ALL}, schedule, words=20, patience_s=8.0, timeout_s=2.0)


@pytest.mark.parametrize("kind", FILES)
def test_pieces_of_a_tokenizer_make_up_the_text(kind: str, tmp_path: Path) -> None:
    """Bytes of which several make a character come as one piece; no space is lost where a piece begins."""
    tokenizer = load_tokenizer(str(FILES[kind](tmp_path)))
    vocabulary = PieceVocabulary.build(tokenizer, tokenizer.encode(TEXT))
    config = CONFIG.replace(vocab_size=len(vocabulary), cutoffs=())
    experts, trunk = (
        make(jax.random.key(0), config) for make in (txl.init_experts, partial(txl.init_trunk, router=ROUTER))
    )
    known = np.ones((2, *config.grid_size), bool)
    saved = SavedModel(config=config, router=ROUTER, step=0, trunk=trunk, experts=experts, known=known)
    pieces = dict[int, str]()
    prompts = ["the cat", "a dog ran", ""]
    written = TrainedModel(saved, vocabulary, no_text).generate(
        prompts, words=40, seed=2, on_piece=lambda row, piece: pieces.update({row: pieces.get(row, "") + piece})
    )
    for row, (prompt, each) in enumerate(zip(prompts, written, strict=True)):
        assert each.text.startswith(pieces[row])
        before = vocabulary.encode_text(prompt or "\n").tolist()
        whole = vocabulary.decode([*before, *each.ids])
        if "\ufffd" not in whole + each.text:
            assert each.text == whole[len(vocabulary.decode(before)) :]
    assert any(each.text.strip("\ufffd ") for each in written)
