"""The Transformer-XL over a swarm: equal to one jit, compiled once, many trainers at once, faults survived."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trio

from dmoe_jax.data.batches import Batch, SegmentStream, evaluation_segments
from dmoe_jax.device import InlineDevice
from dmoe_jax.layer_config import LayerConfig
from dmoe_jax.mixture.local import init_opt_states, update_experts
from dmoe_jax.models import transformer_xl as txl
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.trunk import empty_memory
from dmoe_jax.routing.combinators import add_noise
from dmoe_jax.routing.product_key import product_key
from dmoe_jax.routing.registry import ROUTERS
from dmoe_jax.trainer import StepRecord, Trainer, loss_and_grads
from dmoe_jax.trunk import SharedTrunk
from net.errors import NetError
from tests.dmoe_jax.small_swarm import SmallSwarm, close, direct_callers, open_small_swarm, tcp_callers
from tests.net.direct_network import DirectNetwork

GRID = (2, 2)
CONFIG = TransformerXLConfig(
    vocab_size=40,
    num_layers=2,
    grid_size=GRID,
    k_best=2,
    cutoffs=(20,),
    layer=LayerConfig(d_model=16, num_heads=2, d_ff=24, seq_len=6, mem_len=6),
)
ROUTER = product_key(GRID, init_scale=1.0)
DROPPING = CONFIG.replace(
    dropout=0.2,
    attention_dropout=0.1,
    position_dropout=0.3,
    embedding_dropout=0.1,
    input_dropout=0.3,
    output_dropout=0.2,
)
NOISY = add_noise(ROUTER, stddev=1.0)
OPTIMIZER = optax.sgd(0.5)
LAYERS = ["layer0", "layer1"]
TEXT = np.random.default_rng(0).integers(0, 40, 400)


def make_model(swarm: SmallSwarm, **options: Any) -> txl.TransformerXL:
    mixtures = [swarm.mixture(CONFIG.expert(), ROUTER, layer, k_best=2, **options) for layer in LAYERS]
    return txl.TransformerXL(CONFIG, ROUTER, mixtures)


def swarm_on(callers: Any) -> Any:
    return open_small_swarm(callers, CONFIG.expert(), OPTIMIZER, prefixes=LAYERS, grid_size=GRID)


def stream(batch_size: int = 3, **kwargs: Any) -> SegmentStream:
    return SegmentStream(TEXT, batch_size=batch_size, seq_len=CONFIG.seq_len, **kwargs)


@functools.partial(jax.jit, static_argnums=(0, 1))
def local_step(config: Any, router: Any, trunk: Any, experts: Any, batch: Any, memory: Any, keys: Any) -> Any:
    def loss(trunk: Any, experts: Any) -> Any:
        return txl.local_forward(trunk, experts, config, router, batch, memory, keys=keys)

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(trunk, experts)


async def check_equals_local(callers: Any, config: Any, router: Any, *, seed: int | None) -> None:
    """Three steps with memory: loss, trunk gradients and expert parameters agree with `local_forward` to 1e-5.

    Args: seed: of the chance in a step; None: without any.
    """
    opened = open_small_swarm(callers, config.expert(), OPTIMIZER, prefixes=LAYERS, grid_size=GRID)
    async with opened as swarm:
        mixtures = [swarm.mixture(config.expert(), router, layer, k_best=2) for layer in LAYERS]
        model = txl.TransformerXL(config, router, mixtures)
        trunk = txl.init_trunk(jax.random.key(1), config, router)
        experts = tuple(swarm.stacked_params(layer, GRID) for layer in LAYERS)
        states = tuple(init_opt_states(OPTIMIZER, params) for params in experts)
        memory = remote_memory = empty_memory(config, 3)
        text = stream()
        for _ in range(3):
            position = text.position
            batch = next(text)
            keys = None if seed is None else model.keys(batch, seed=seed, trainer=0, step=position)
            (expected_total, aux), (expected, expert_grads) = local_step(
                config, router, trunk, experts, batch, memory, keys
            )
            (total, outcome), grads = await loss_and_grads(model)(trunk, batch, remote_memory, keys)
            loss, remote_memory = outcome.reported, outcome.state
            np.testing.assert_allclose([total, loss], [expected_total, aux.nll], atol=1e-5)
            close(grads, expected)
            memory = aux.memory
            close(remote_memory, memory)
            stepped = [
                update_experts(OPTIMIZER, params, state, layer_grads, layer.load > 0)
                for params, state, layer_grads, layer in zip(experts, states, expert_grads, aux.layers, strict=True)
            ]
            experts, states = tuple(s[0] for s in stepped), tuple(s[1] for s in stepped)
            close(tuple(swarm.stacked_params(layer, GRID) for layer in LAYERS), experts)
            trunk = jax.tree.map(lambda p, g: p - 0.1 * g, trunk, grads)


async def test_transformer_xl_equals_one_jit_over_tcp() -> None:
    """Remote equals local over real sockets."""
    async with tcp_callers(3) as callers:
        await check_equals_local(callers, CONFIG, ROUTER, seed=None)


async def test_dropout_and_noise_are_those_of_one_jit(autojump_clock: trio.testing.MockClock) -> None:
    """With every dropout and a noisy router: experts elsewhere drop what one jit drops, forward and backward."""
    await check_equals_local(direct_callers(DirectNetwork(), 3), DROPPING, NOISY, seed=7)


@pytest.mark.parametrize(
    "name",
    # One of each kind always: chosen by samples, chosen by experts, by the words alone.
    [
        name if name in ("noisy_top_k", "expert_choice", "hash") else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted(ROUTERS)
    ],
)
async def test_every_router_routes_alike_locally_and_remotely(
    name: str, autojump_clock: trio.testing.MockClock
) -> None:
    """Per sequence: loss, auxiliary loss, gradients and expert updates are those of one jit, whichever the router."""
    await check_equals_local(direct_callers(DirectNetwork(), 3), CONFIG, ROUTERS[name](GRID), seed=3)


async def test_second_training_step_compiles_nothing(compilations: Any) -> None:
    """One step (with warm nodes) compiles all there is; the next ones, with the same rows, nothing."""
    async with tcp_callers(2) as callers, swarm_on(callers) as swarm:
        for backend in swarm.backends.values():
            backend.warm_up(5)
        trunk = SharedTrunk(txl.init_trunk(jax.random.key(1), CONFIG, ROUTER), optax.adam(1e-3), InlineDevice())
        trainer = Trainer(0, make_model(swarm), trunk, stream(batch_size=5))
        await trainer.step()
        first = compilations.count
        assert first > 0
        await trainer.step()
        await trainer.step()
        assert compilations.count == first


async def test_64_trainers_overlap_their_waits(autojump_clock: trio.testing.MockClock) -> None:
    """With 1 s on every remote call a step of 64 trainers takes the four calls of its critical path, not 256."""
    network = DirectNetwork(latency_s=1.0)
    async with swarm_on(direct_callers(network, 3)) as swarm:
        model = make_model(swarm, grace_s=30.0, timeout_s=30.0)
        trunk = SharedTrunk(txl.init_trunk(jax.random.key(1), CONFIG, ROUTER), optax.adam(1e-3), InlineDevice())
        trainers = [Trainer(i, model, trunk, stream(batch_size=1, shard=i, num_shards=64)) for i in range(64)]
        await trainers[0].step()  # finds the experts, so that what follows is steps alone
        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            for trainer in trainers:
                nursery.start_soon(trainer.step)
        # Two layers, forward and backward, one second each.
        assert trio.current_time() - started == pytest.approx(4.0, rel=0.5)
        assert trunk.step == 65


async def test_training_learns_and_evaluation_trains_nobody(autojump_clock: trio.testing.MockClock) -> None:
    """Perplexity of a repeated text falls; evaluating it leaves the experts alone and counts every target once."""
    async with swarm_on(direct_callers(DirectNetwork(latency_s=0.01), 3)) as swarm:
        model = make_model(swarm)
        trunk = SharedTrunk(txl.init_trunk(jax.random.key(1), CONFIG, ROUTER), optax.adam(1e-2), InlineDevice())
        text = np.tile(TEXT[:30], 12)

        async def perplexity() -> float:
            batches = evaluation_segments(text, batch_size=2, seq_len=CONFIG.seq_len, max_tokens=101)
            evaluation = await model.evaluate(trunk.params, batches)
            np.testing.assert_array_equal(np.sort(evaluation.targets), np.sort(text[1:102]))
            return evaluation.perplexity

        before = await perplexity()
        assert {backend.update_count for backend in swarm.backends.values()} == {0}
        records: list[StepRecord] = []
        lost: list[Exception] = []
        trainers = [
            Trainer(i, model, trunk, SegmentStream(text, batch_size=2, seq_len=6, shard=i, num_shards=3))
            for i in range(3)
        ]
        async with trio.open_nursery() as nursery:
            for trainer in trainers:
                nursery.start_soon(trainer.run, 60, records.append, lambda _, error: lost.append(error))
        assert lost == []
        assert sorted(record.step for record in records) == list(range(1, 61))
        # Three asynchronous trainers: each step misses the updates that the others made meanwhile.
        assert 0 < np.mean([record.staleness for record in records]) < 3
        assert await perplexity() < 0.5 * before


async def test_a_step_without_quorum_is_dropped_and_training_goes_on(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """While the whole swarm is silent steps are lost, not the trainer; when it returns training continues."""
    network = DirectNetwork(latency_s=0.1)
    callers = direct_callers(network, 3)
    async with swarm_on(callers) as swarm:
        model = make_model(swarm, timeout_s=1.0, on_shortfall="raise")
        trunk = SharedTrunk(txl.init_trunk(jax.random.key(1), CONFIG, ROUTER), optax.adam(1e-3), InlineDevice())
        trainer = Trainer(0, model, trunk, stream())
        lost: list[Exception] = []
        records: list[StepRecord] = []
        await trainer.step()
        network.take_down(callers[0].address, callers[1].address)

        def on_lost(_: int, error: Exception) -> None:
            lost.append(error)
            if len(lost) == 3:
                network.bring_up(callers[0].address, callers[1].address)

        await trainer.run(4, records.append, on_lost)
        assert len(lost) >= 3
        assert all(isinstance(error, NetError) for error in lost)
        assert [record.step for record in records] == [2, 3, 4]


async def test_not_a_number_is_not_applied(autojump_clock: trio.testing.MockClock) -> None:
    """A trunk that has gone bad is reported, and the step changes nothing."""
    async with swarm_on(direct_callers(DirectNetwork(latency_s=0.1), 2)) as swarm:
        params = txl.init_trunk(jax.random.key(1), CONFIG, ROUTER)
        params["head"]["bias"] = params["head"]["bias"].at[0].set(jnp.nan)
        trunk = SharedTrunk(params, optax.adam(1e-3), InlineDevice())
        with pytest.raises(FloatingPointError, match="trainer 0"):
            await Trainer(0, make_model(swarm), trunk, stream()).step()
        assert trunk.step == 0
        assert trunk.params is params


def test_batch_of_the_stream_is_what_the_model_reads() -> None:
    """Targets are the tokens one place later, so that the loss is of the next word."""
    batch: Batch = next(stream(batch_size=1))
    np.testing.assert_array_equal(batch.tokens[0, 1:], batch.targets[0, :-1])
