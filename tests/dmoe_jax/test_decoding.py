"""A model that reads word by word expects what it expects in whole segments, whatever is routed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmoe_jax.autodiff import without_waiting
from dmoe_jax.data.batches import evaluation_segments
from dmoe_jax.layer_config import LayerConfig
from dmoe_jax.models import transformer_xl as txl
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.layers import dmoe_layer
from dmoe_jax.models.trunk import empty_memory
from dmoe_jax.routing.hash_router import hash_router
from dmoe_jax.routing.product_key import product_key
from dmoe_jax.trained.decoding import make_decoder
from dmoe_jax.trained.evaluation import evaluate_text
from dmoe_jax.trained.readers import LocalReader, pure_log_probs
from dmoe_jax.trained.sampling import Draw, restricted, row_keys, sample
from dmoe_jax.trained.settings import Sampling

GRID = (2, 2)
CONFIG = TransformerXLConfig(
    vocab_size=40,
    num_layers=2,
    grid_size=GRID,
    k_best=2,
    cutoffs=(10, 25),
    layer=LayerConfig(d_model=16, num_heads=2, d_ff=24, seq_len=4, mem_len=6),
)
CASES = {
    "sequences": (CONFIG, product_key(GRID, init_scale=1.0)),
    "tokens": (CONFIG.replace(route="token"), product_key(GRID, init_scale=1.0)),
    "short memory, same length, clamped": (
        CONFIG.replace(mem_len=3, same_length=True, clamp_len=2),
        product_key(GRID, init_scale=1.0),
    ),
    "hashed words": (CONFIG, hash_router(GRID)),
    "hashed words one by one, same length": (CONFIG.replace(route="token", same_length=True), hash_router(GRID)),
}
TEXT = np.random.default_rng(0).integers(0, 40, 23)
LENGTHS = (1, 3, 4, 9, 12)


def make_reader(config: TransformerXLConfig, router: Any, alive: Any = None) -> LocalReader:
    trunk = txl.init_trunk(jax.random.key(1), config, router)
    trunk = jax.tree.map(lambda leaf: 4 * leaf, trunk)  # so that words differ in more than rounding
    return LocalReader(config, router, trunk, txl.init_experts(jax.random.key(2), config), alive)


def whole_log_probs(reader: LocalReader, ids: np.ndarray, alive: Any = None) -> np.ndarray:
    """Log-probabilities after each word of a text, by `local_forward`, a segment and a word of the vocabulary a row."""
    config, router, vocab = reader.decoder.config, reader.decoder.router, reader.decoder.config.vocab_size
    memory, found = empty_memory(config, vocab), []
    for start in range(0, len(ids), config.seq_len):
        words = np.zeros((vocab, config.seq_len), np.int32)
        own = ids[start : start + config.seq_len]
        words[:, : len(own)] = own
        targets = np.tile(np.arange(vocab)[:, None], config.seq_len)
        batch = txl.Batch(words, targets, np.ones_like(words, bool), np.full(vocab, start == 0))
        _, aux = txl.local_forward(reader.trunk, reader._experts, config, router, batch, memory, alive=alive)
        memory = aux.memory
        found.append(-np.asarray(aux.token_nll).T[: len(own)])
    return np.concatenate(found)


@pytest.mark.parametrize("case", CASES)
def test_whole_texts_are_read_as_in_training(case: str) -> None:
    """The distribution after each word is that of which training reads the target."""
    reader = make_reader(*CASES[case])
    expected = whole_log_probs(reader, TEXT)
    found = pure_log_probs(*CASES[case], reader.trunk, reader._experts, TEXT[None], None)[0]
    np.testing.assert_allclose(found, expected, atol=2e-5)
    np.testing.assert_allclose(np.exp(found).sum(axis=1), 1, atol=1e-5)
    assert np.ptp(np.asarray(found), axis=0).max() > 0.1  # or it would say nothing


@pytest.mark.parametrize("whole_segments", [False, True], ids=["words", "whole segments"])
@pytest.mark.parametrize("case", CASES)
def test_a_word_alone_is_read_as_in_its_segment(case: str, whole_segments: bool) -> None:
    """Prompts of all lengths side by side, then word by word across two ends of segments."""
    reader = make_reader(*CASES[case])
    config, router = CASES[case]
    decoder, expert = make_decoder(config, router, whole_segments), config.expert()

    async def run(function: Any, *args: Any) -> Any:
        return function(*args)

    class Mix:
        def __init__(self, params: Any) -> None:
            self._params = params

        async def alive(self) -> None:
            return None

        async def __call__(self, asked: Any) -> Any:
            out, _ = dmoe_layer(expert, self._params, router, 2, asked.scores, None, *asked.inputs)
            if asked.at is None:
                return out
            assert asked.inputs[0].shape[1:] == (config.seq_len, config.d_model)
            return out[np.arange(len(asked.at)), asked.at][:, None]

    mixes = [Mix(params) for params in reader._experts]
    expected = np.asarray(pure_log_probs(config, router, reader.trunk, reader._experts, TEXT[None], None)[0])
    tokens = np.zeros((len(LENGTHS), 12), np.int32)
    for row, length in zip(tokens, LENGTHS, strict=True):
        row[:length] = TEXT[:length]
    lengths = np.array(LENGTHS, np.int32)
    memory = empty_memory(config, len(LENGTHS))
    read = without_waiting(decoder.read_segments(run, mixes, reader.trunk, memory, tokens, lengths))
    state, _ = decoder.state_after(read, tokens, lengths)
    for step in range(10):
        hidden, state = without_waiting(
            decoder.read_word(run, mixes, reader.trunk, state, TEXT[lengths + step].astype(np.int32))
        )
        log_probs = decoder.log_probs(reader.trunk, decoder.last(hidden))
        np.testing.assert_allclose(log_probs, expected[lengths + step], atol=2e-5)


def test_evaluation_is_that_of_training() -> None:
    """Loss over a text in rows, by `local_forward` segment by segment; and by how frequent words are."""
    reader = make_reader(*CASES["sequences"])
    text = np.random.default_rng(1).integers(0, 40, 101)
    config, router = CASES["sequences"]
    memory, total = empty_memory(config, 3), 0.0
    for batch in evaluation_segments(text, batch_size=3, seq_len=4):
        _, aux = txl.local_forward(reader.trunk, reader._experts, config, router, batch, memory)
        memory, nll = aux.memory, np.asarray(aux.token_nll)
        total += float(nll[batch.mask].sum())
    calls: list[tuple[int, int]] = []
    found = without_waiting(evaluate_text(reader, text, rows=3, on_batch=lambda *at: calls.append(at)))
    assert found.loss == pytest.approx(total / 100, abs=1e-6)
    assert found.tokens == 100
    assert found.perplexity == pytest.approx(np.exp(found.loss))
    assert found.bits == pytest.approx(np.log2(found.perplexity))
    assert [(each.first, each.stop, each.tokens) for each in found.by_rank] == [(0, 40, 100)]
    assert calls[-1][0] == calls[-1][1]


def test_lost_experts_are_never_chosen() -> None:
    """With half of the experts gone, words are those of a model without them."""
    alive = jnp.array([[[True, False], [False, True]], [[False, True], [True, True]]])
    config, router = CASES["sequences"]
    reader = make_reader(config, router, alive)
    expected = whole_log_probs(reader, TEXT, alive)
    lengths = np.array([len(TEXT)], np.int32)
    tokens = np.pad(TEXT, (0, 1)).astype(np.int32)[None]
    read = without_waiting(reader.read_segments(empty_memory(config, 1), tokens, lengths))
    found = reader.decoder.log_probs(reader.trunk, read.hidden[0, : len(TEXT)])
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_sampling_keeps_to_its_bounds() -> None:
    """By hand: of 0.5, 0.3, 0.15 and 0.05, the first two have 0.8; top_p counts what top_k has left."""
    logits = jnp.log(jnp.array([[0.15, 0.5, 0.05, 0.3]]))

    def allowed(**bounds: Any) -> list[bool]:
        return np.isfinite(np.asarray(restricted(logits, **{"top_k": 0, "top_p": 1.0, **bounds})))[0].tolist()

    assert allowed() == [True] * 4
    assert allowed(top_k=1) == [False, True, False, False] == allowed(top_p=0.49)
    assert allowed(top_p=0.79) == [False, True, False, True] == allowed(top_k=2)
    assert allowed(top_p=0.81) == [True, True, False, True] == allowed(top_k=3)
    assert allowed(top_k=2, top_p=0.6) == [False, True, False, False]  # 0.5 of 0.8 is 0.625


def test_a_row_draws_what_it_draws_alone() -> None:
    """Words follow from seed and row, not from who else writes; shares are those of the distribution."""
    log_probs = np.tile(np.log([0.6, 0.3, 0.1]).astype(np.float32), (3000, 1))
    sampling = Sampling(temperature=1.0)
    words, own = map(np.asarray, sample(Draw.of(sampling), log_probs, row_keys(5, range(3000)), np.int32(2)))
    alone, _ = sample(Draw.of(sampling), log_probs[:1], row_keys(5, range(7, 8)), np.int32(2))
    assert words[7] == alone[0]
    np.testing.assert_allclose(np.bincount(words) / 3000, [0.6, 0.3, 0.1], atol=0.03)  # three deviations
    np.testing.assert_allclose(own, log_probs[0][words], rtol=1e-6)
    cold, _ = sample(Draw.of(Sampling(temperature=0.0)), log_probs[:4], row_keys(0, range(4)), np.int32(0))
    assert np.asarray(cold).tolist() == [0, 0, 0, 0]
    another, _ = sample(Draw.of(sampling), log_probs, row_keys(5, range(3000)), np.int32(3))
    assert 0.3 < np.mean(np.asarray(another) == words) < 0.6  # 0.46 if the two are independent


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}, {"seed": -1}], ids=str
)
def test_sampling_settings_are_checked(wrong: dict[str, Any]) -> None:
    """The message names the setting and the value."""
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name} must .* got {value}"):
        Sampling(**wrong)
