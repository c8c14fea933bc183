"""The Transformer-XL over a swarm: equal to one jit, compiled once, many trainers at once, faults survived."""

import functools
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trio
from trio.testing import MockClock

from dmoe_jax.autodiff import Recording
from dmoe_jax.data.batches import SegmentStream, evaluation_segments
from dmoe_jax.layer_config import LayerConfig
from dmoe_jax.machine.device import InlineDevice, ThreadDevice
from dmoe_jax.mixture.local_update import init_opt_states, update_experts
from dmoe_jax.model import Model, Outcome
from dmoe_jax.models import transformer_xl as txl
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.trunk import empty_memory
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.routing.combinators import add_noise, drop_experts, with_balancing_loss
from dmoe_jax.routing.product_key import product_key
from dmoe_jax.routing.registry import ROUTERS
from dmoe_jax.trainer import StepRecord, Trainer, loss_and_grads
from dmoe_jax.trunk import SharedTrunk
from dmoe_net.errors import NetError
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
ONE_LAYER = CONFIG.replace(num_layers=1)
DROPPING = CONFIG.replace(dropout=0.2, attention_dropout=0.1, position_dropout=0.3).replace(
    embedding_dropout=0.1, input_dropout=0.3, output_dropout=0.2
)
NOISY = add_noise(ROUTER, stddev=1.0)
OPTIMIZER, ADAM = optax.sgd(0.5), optax.adam(1e-3)
LAYERS = ["layer0", "layer1"]
CASES = {**ROUTERS, "a stack": lambda grid: with_balancing_loss(drop_experts(add_noise(product_key(grid), 1.0), 0.3))}
TEXT = np.random.default_rng(0).integers(0, 40, 400)


def make_model(swarm: SmallSwarm, config: Any = CONFIG, router: Any = ROUTER, **options: Any) -> txl.TransformerXL:
    layers = LAYERS[: config.num_layers]
    mixtures = [swarm.mixture(config.expert(), router, layer, k_best=2, **options) for layer in layers]
    return txl.TransformerXL(config, router, mixtures)


def make_trunk(optimizer: optax.GradientTransformation = ADAM) -> SharedTrunk:
    return SharedTrunk(txl.init_trunk(jax.random.key(1), CONFIG, ROUTER), optimizer, InlineDevice())


def swarm_on(callers: Any, config: Any = CONFIG, optimizer: Any = OPTIMIZER, **options: Any) -> Any:
    layers = LAYERS[: config.num_layers]
    return open_small_swarm(callers, config.expert(), optimizer, prefixes=layers, grid_size=GRID, **options)


def stream(batch_size: int = 3, **kwargs: Any) -> SegmentStream:
    return SegmentStream(TEXT, batch_size=batch_size, seq_len=CONFIG.seq_len, **kwargs)


@functools.partial(jax.jit, static_argnums=(0, 1))
def local_step(config: Any, router: Any, trunk: Any, experts: Any, batch: Any, memory: Any, keys: Any) -> Any:
    def loss(trunk: Any, experts: Any) -> Any:
        return txl.local_forward(trunk, experts, config, router, batch, memory, keys=keys)

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(trunk, experts)


update = jax.jit(update_experts, static_argnums=0)


async def check_equals_local(
    callers: Any, config: Any, router: Any, *, seed: int | None, max_rows: int = 1024, optimizer: Any = OPTIMIZER
) -> None:
    """Two steps with memory are those of `local_forward` to 1e-5; seed: of chance; max_rows: that nodes take."""
    layers, calls = LAYERS[: config.num_layers], 0
    # Experts stay listed while a busy machine compiles the reference on the event loop.
    node_config = NodeConfig(announce_period_s=100.0, record_lifetime_s=300.0, max_batch_rows=max_rows)
    async with swarm_on(callers, config, optimizer, node_config=node_config) as swarm:
        model = make_model(swarm, config, router, max_rows=max_rows)
        trunk = txl.init_trunk(jax.random.key(1), config, router)
        experts = tuple(swarm.stacked_params(layer, GRID) for layer in layers)
        states = tuple(init_opt_states(optimizer, params) for params in experts)
        memory = remote_memory = empty_memory(config, 3)
        text = stream()
        for _ in range(2):
            position, batch = text.position, next(text)
            keys = None if seed is None else model.keys(batch, seed=seed, trainer=0, step=position)
            (total, aux), (expected, expert_grads) = local_step(config, router, trunk, experts, batch, memory, keys)
            (found, outcome), grads = await loss_and_grads(model)(trunk, batch, remote_memory, keys)
            memory, remote_memory = aux.memory, outcome.state
            np.testing.assert_allclose([found, outcome.reported], [total, aux.nll], atol=1e-5)
            close((grads, remote_memory), (expected, memory))
            stepped = [
                update(optimizer, *each, layer.load > 0)
                for *each, layer in zip(experts, states, expert_grads, aux.layers, strict=True)
            ]
            experts, states = zip(*stepped, strict=True)
            close(tuple(swarm.stacked_params(layer, GRID) for layer in layers), experts)
            trunk = jax.tree.map(lambda p, g: np.asarray(p) - np.float32(0.1) * np.asarray(g), trunk, grads)
            loads = [int(load) for layer in aux.layers for load in layer.load]
            calls += 2 * sum(-(-load // max_rows) for load in loads)  # forward and backward
        assert (swarm.statistics.ok, swarm.statistics.failed, swarm.statistics.late) == (calls, 0, 0)


async def test_transformer_xl_equals_one_jit_over_tcp() -> None:
    """Remote equals local over real sockets."""
    async with tcp_callers(3) as callers:
        await check_equals_local(callers, ONE_LAYER, ROUTER, seed=None)


@pytest.mark.slow
async def test_dropout_and_noise_are_those_of_one_jit(autojump_clock: MockClock) -> None:
    """Experts elsewhere drop what one jit drops, forward and backward, for routed sequences and for tokens."""
    for config in (DROPPING, DROPPING.replace(route="token")):
        await check_equals_local(direct_callers(DirectNetwork(), 3), config, NOISY, seed=7)


@pytest.mark.slow
async def test_large_calls_are_split(autojump_clock: MockClock) -> None:
    """Nodes take three rows at once of 18. As several calls are several updates, equal are loss and gradients."""
    callers, config = direct_callers(DirectNetwork(), 3), ONE_LAYER.replace(route="token")
    await check_equals_local(callers, config, ROUTER, seed=None, max_rows=3, optimizer=optax.sgd(0.0))


@pytest.mark.parametrize(
    "name",
    # One of each kind always: chosen by samples, chosen by experts, by the words alone.
    [
        name if name in ("noisy_top_k", "expert_choice", "hash") else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted(CASES)
    ],
)
async def test_every_router_routes_alike_locally_and_remotely(name: str, autojump_clock: MockClock) -> None:
    """Loss, auxiliary loss, gradients and expert updates are those of one jit, whichever the router."""
    await check_equals_local(direct_callers(DirectNetwork(), 3), ONE_LAYER, CASES[name](GRID), seed=3)


async def test_second_training_step_compiles_nothing(compilations: Any) -> None:
    """One step (with warm nodes) compiles all there is; the next ones, with the same rows, nothing."""
    async with tcp_callers(2) as callers, swarm_on(callers) as swarm:
        for backend in swarm.backends.values():
            backend.warm_up(3)
        trainer = Trainer(0, make_model(swarm), make_trunk(), stream())
        counts = []
        for _ in range(3):
            await trainer.step()
            counts.append(compilations.count)
        assert 0 < counts[0] == counts[1] == counts[2]


async def test_trainers_overlap_their_waits(autojump_clock: MockClock) -> None:
    """With 1 s on every remote call a step of 16 trainers takes the four calls of its critical path, not 64."""
    async with swarm_on(direct_callers(DirectNetwork(latency_s=1.0), 3)) as swarm:
        model, trunk = make_model(swarm, grace_s=30.0, timeout_s=30.0), make_trunk()
        trainers = [Trainer(i, model, trunk, stream(shard=i, num_shards=16)) for i in range(16)]
        await trainers[0].step()  # finds the experts, so that what follows is steps alone
        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            for trainer in trainers:
                nursery.start_soon(trainer.step)
        # Two layers, forward and backward, one second each.
        assert trio.current_time() - started == pytest.approx(4.0, rel=0.5)
        assert trunk.step == 17


async def test_training_learns_and_evaluation_trains_nobody(autojump_clock: MockClock) -> None:
    """Perplexity of a repeated text falls; evaluating it leaves the experts alone and counts every target once."""
    async with swarm_on(direct_callers(DirectNetwork(latency_s=0.01), 3)) as swarm:
        model, trunk, text = make_model(swarm), make_trunk(optax.adam(1e-2)), np.tile(TEXT[:30], 12)

        async def perplexity() -> float:
            batches = evaluation_segments(text[:102], batch_size=3, seq_len=CONFIG.seq_len)
            evaluation = await model.evaluate(trunk.params, batches)
            np.testing.assert_array_equal(np.sort(evaluation.targets), np.sort(text[1:102]))
            return evaluation.perplexity

        before = await perplexity()
        assert {backend.update_count for backend in swarm.backends.values()} == {0}
        records, lost = list[StepRecord](), list[Exception]()
        async with trio.open_nursery() as nursery:
            for i in range(3):
                own = SegmentStream(text, batch_size=3, seq_len=6, shard=i, num_shards=3)
                trainer = Trainer(i, model, trunk, own)
                nursery.start_soon(trainer.run, 60, records.append, lambda _, error: lost.append(error))
        assert lost == []
        assert sorted(record.step for record in records) == list(range(1, 61))
        # Three asynchronous trainers: each step misses the updates that the others made meanwhile.
        assert 0 < np.mean([record.staleness for record in records]) < 3
        assert await perplexity() < 0.5 * before


async def test_a_step_without_quorum_is_dropped_and_training_goes_on(autojump_clock: MockClock) -> None:
    """While the whole swarm is silent steps are lost, not the trainer; when it returns training continues."""
    network = DirectNetwork(latency_s=0.1)
    callers = direct_callers(network, 3)
    nodes = [caller.address for caller in callers[:2]]
    async with swarm_on(callers) as swarm:
        trainer = Trainer(0, make_model(swarm, timeout_s=1.0, on_shortfall="raise"), make_trunk(), stream())
        records, lost = list[StepRecord](), list[Exception]()
        await trainer.step()
        network.take_down(*nodes)

        def on_lost(_: int, error: Exception) -> None:
            lost.append(error)
            if len(lost) == 3:
                network.bring_up(*nodes)

        await trainer.run(4, records.append, on_lost)
        assert len(lost) >= 3
        assert all(isinstance(error, NetError) for error in lost)
        assert [record.step for record in records] == [2, 3, 4]


async def test_not_a_number_is_not_applied(autojump_clock: MockClock) -> None:
    """A trunk that has gone bad is reported, and the step changes nothing."""
    async with swarm_on(direct_callers(DirectNetwork(latency_s=0.1), 2)) as swarm:
        params = txl.init_trunk(jax.random.key(1), CONFIG, ROUTER)
        params["head"]["bias"] = params["head"]["bias"].at[0].set(jnp.nan)
        trunk = SharedTrunk(params, ADAM, InlineDevice())
        before = trunk.params
        with pytest.raises(FloatingPointError, match="trainer 0"):
            await Trainer(0, make_model(swarm), trunk, stream()).step()
        assert trunk.step == 0
        assert trunk.params is before


class Quadratic(Model):
    """One number that is to become the batch's; no expert."""

    def __init__(self, reported: Any = None) -> None:
        self.reported = reported

    def init(self, key: Any) -> Any:
        return jnp.zeros(())

    async def forward(self, run: Recording, params: Any, batch: Any, state: Any, keys: Any) -> Outcome:
        return Outcome(loss=run(optax.squared_error, params, batch), items=2, reported=self.reported)


class Noted:
    """A loss that notes who waits for it."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def __float__(self) -> float:
        self.threads.append(threading.current_thread())
        return 1.0


async def test_the_device_waits_for_a_step() -> None:
    """The loss is waited for off the event loop, which stays free meanwhile."""
    noted = Noted()
    trunk = SharedTrunk(jnp.zeros(()), optax.sgd(0.25), ThreadDevice())
    record = await Trainer(0, Quadratic(noted), trunk, iter([jnp.ones(())])).step()
    assert (record.loss, float(trunk.params)) == (1.0, 0.5)
    assert noted.threads
    assert threading.current_thread() not in noted.threads


async def test_evaluation_reads_one_batch_after_the_other() -> None:
    """Data of a user's own may be larger than memory: a batch is asked for once the one before is done."""
    events = list[str]()

    def batches() -> Iterator[Any]:
        for _ in range(3):
            events.append("asked")
            yield jnp.ones(())

    evaluation = await Quadratic().evaluate(jnp.zeros(()), batches(), lambda: events.append("done"))
    assert (evaluation.loss, evaluation.items, events) == (1.0, 6, ["asked", "done"] * 3)
