"""Remote mixtures inside Flax models under jit: equal to the local mixture, never standing still, and clear in refusal.

The swarm is a real one, over TCP on loopback, with its expert node in this very process.
"""

import functools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trio
from flax import linen as nn
from flax import nnx

from dmoe_jax.directory.grid import all_uids
from dmoe_jax.experts.base import Expert
from dmoe_jax.experts.feedforward import feedforward
from dmoe_jax.machine.xla_threads import MAX_WAITING_CALLS, make_room
from dmoe_jax.mixture.flax_layers import MAX_RESIDUALS, AuxiliaryLoss, BlockingMixture
from dmoe_jax.models.layers import dmoe_layer
from dmoe_jax.peers.security import Plain
from dmoe_jax.routing import flat_top_k, hash_router, noisy_top_k, product_key, with_balancing_loss
from dmoe_jax.routing.base import Router, score
from dmoe_jax.swarm.blocking import BlockingSwarm, connect
from dmoe_net.rpc.base import Reply, Request
from tests.dmoe_jax.small_swarm import close

GRID, PATTERN = (2, 2), "[0:2].[0:2]"
D_MODEL = 4
ROWS = 5
EXPERT = feedforward(d_model=D_MODEL)
ROUTER = with_balancing_loss(product_key(GRID, init_scale=1.0))
X = jax.random.normal(jax.random.key(0), (5, D_MODEL))
STEP_SIZE = 0.1
NO_EXPERTS = "nowhere"


class Served:
    """A node with four experts, and a client that has joined it."""

    def __init__(self, node: BlockingSwarm, swarm: BlockingSwarm, expert: Expert) -> None:
        self.node, self.swarm, self.expert = node, swarm, expert
        self.served = node.serve({f"ffn.{PATTERN}": expert}, optimizer=optax.sgd(STEP_SIZE))

    def mixture(self, router: Router = ROUTER, prefix: str = "ffn", *, k_best: int = 2, **options: Any) -> Any:
        """A layer over all four experts unless told otherwise."""
        return self.swarm.mixture(prefix, self.expert, router, k_best=k_best, **options)

    def params(self) -> Any:
        """Copies of the experts' parameters, stacked as `mixture.local` keeps them."""
        params = [self.served.backends[str(uid)].params for uid in all_uids("ffn", GRID)]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *params)

    def updates(self) -> int:
        return sum(backend.update_count for backend in self.served.backends.values())

    @contextmanager
    def held_up(self) -> Iterator[threading.Event]:
        """Until the block ends, the node answers no forward call; the event is set once `MAX_WAITING_CALLS` wait."""
        full, go, waiting = threading.Event(), trio.Event(), 0
        served, rpc = self.served.node.handlers["expert.forward"], self.node.swarm.rpc

        async def hold(request: Request) -> Reply:
            nonlocal waiting
            waiting += 1
            if waiting == MAX_WAITING_CALLS:
                full.set()
            await go.wait()
            return await served(request)

        async def swap(handler: Any, *, opens: bool = False) -> None:
            rpc.remove_handler("expert.forward")
            rpc.add_handler("expert.forward", handler)
            if opens:
                go.set()

        self.node.run(swap, hold)
        try:
            yield full
        finally:
            self.node.run(functools.partial(swap, served, opens=True))


@contextmanager
def open_served(expert: Expert = EXPERT) -> Iterator[Served]:
    with (
        connect(security=Plain(), listen="127.0.0.1:0", seed=0) as node,
        connect(node.contact, security=Plain(), listen=None, seed=1) as swarm,
    ):
        yield Served(node, swarm, expert)


@pytest.fixture(scope="module")
def swarm() -> Iterator[Served]:
    with open_served() as served:
        yield served


class LinenModel(nn.Module):
    layer: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return self.layer.linen(name="experts")(jnp.tanh(x))


class NnxModel(nnx.Module):
    def __init__(self, layer: BlockingMixture, gate: Any, *, rngs: nnx.Rngs) -> None:
        self.experts = layer.nnx(rngs=rngs)
        nnx.update(self, nnx.State({"experts": {"gate": jax.tree.map(nnx.Param, gate)}}))

    def __call__(self, x: Any) -> Any:
        return self.experts(jnp.tanh(x))


def total(y: Any, penalty: Any) -> Any:
    return jnp.mean(jnp.sin(3 * y)) + 0.5 * penalty


def local_loss(gate: Any, experts: Any, x: Any, router: Router) -> Any:
    hidden = jnp.tanh(x)
    mixed, aux = dmoe_layer(EXPERT, experts, router, 2, score(router, gate, hidden), None, hidden)
    return total(mixed, aux.aux_loss)


def linen_grads(layer: BlockingMixture, gate: Any) -> Any:
    """(loss, (gate gradients, anchor's gradient, input gradients)) of a Linen model."""
    model = LinenModel(layer)

    def loss(params: Any, x: Any) -> Any:
        y, sown = model.apply({"params": params}, x, mutable=["losses"])
        return total(y, sum(jax.tree.leaves(sown["losses"])))

    params = model.init(jax.random.key(1), X)["params"]
    assert jax.tree.structure(params["experts"]["gate"]) == jax.tree.structure(gate)
    params = {"experts": {**params["experts"], "gate": gate}}
    value, (grads, x_grad) = jax.jit(jax.value_and_grad(loss, (0, 1)))(params, X)
    return value, (grads["experts"]["gate"], grads["experts"]["anchor"], x_grad)


def nnx_grads(layer: BlockingMixture, gate: Any) -> Any:
    """The same of an NNX model."""

    def loss(model: NnxModel, x: Any) -> Any:
        y = model(x)
        return total(y, sum(jax.tree.leaves(nnx.state(model, AuxiliaryLoss))))

    @nnx.jit
    def step(model: NnxModel, x: Any) -> Any:
        return nnx.value_and_grad(loss, argnums=(0, 1))(model, x)

    model = NnxModel(layer, gate, rngs=nnx.Rngs(1))
    value, (grads, x_grad) = step(model, X)
    assert np.isfinite(model.experts.aux_loss[...])
    pure = nnx.to_pure_dict(grads)["experts"]
    return value, (pure["gate"], pure["anchor"], x_grad)


@pytest.mark.parametrize("flax", [linen_grads, nnx_grads], ids=["linen", "nnx"])
@pytest.mark.parametrize("router", [ROUTER, flat_top_k(GRID)], ids=["beam search", "whole grid"])
def test_equals_local_under_jit(swarm: Served, flax: Any, router: Router) -> None:
    """Loss, gradients of gate and input, and the experts after one step of SGD, to 1e-5."""
    gate = router.init(jax.random.key(7), D_MODEL)
    experts = swarm.params()
    value, (gate_grad, anchor_grad, x_grad) = flax(swarm.mixture(router), gate)
    of_all = jax.jit(jax.value_and_grad(local_loss, (0, 1, 2)), static_argnums=3)
    expected, (gate_expected, expert_grads, x_expected) = of_all(gate, experts, X, router)
    np.testing.assert_allclose(value, expected, atol=1e-5)
    close((gate_grad, x_grad), (gate_expected, x_expected))
    assert float(anchor_grad) == 0.0
    moved = jax.tree.map(lambda p, g: p - STEP_SIZE * g, experts, expert_grads)
    assert not np.allclose(jax.tree.leaves(moved)[0], jax.tree.leaves(experts)[0], atol=1e-4)
    close(swarm.params(), moved)
    assert swarm.swarm.statistics.failures == {}


@pytest.mark.parametrize("router", [hash_router(GRID), ROUTER], ids=["hash", "product key"])
def test_experts_that_are_fed_with_data_learn(swarm: Served, router: Router) -> None:
    """Only parameters are differentiated, of which a hash router has none but the layer's anchor."""
    layer = swarm.mixture(router).linen()
    ids = jnp.arange(5, dtype=jnp.int32)
    params = layer.init(jax.random.key(1), X, ids=ids)["params"]
    before = swarm.updates()
    grads = jax.jit(jax.grad(lambda p: jnp.sum(layer.apply({"params": p}, X, ids=ids))))({"gate": {}, **params})
    jax.block_until_ready(grads)
    assert swarm.updates() > before


def test_initialising_calls_nobody(swarm: Served) -> None:
    """Not even where the swarm has no such experts: shapes alone are enough, `eval_shape` included."""
    blocking = swarm.mixture(prefix=NO_EXPERTS, max_skipped=0.0)
    shapes = jax.eval_shape(blocking.linen().init, jax.random.key(0), X)
    assert set(shapes["params"]) == {"gate", "anchor"}
    y, _ = blocking.linen().init_with_output(jax.random.key(0), X)
    np.testing.assert_array_equal(y, X)
    assert isinstance(blocking.nnx(rngs=nnx.Rngs(0)).gate, dict)


def test_routers_draw_from_their_own_stream(swarm: Served) -> None:
    """With a stream "router" scores are noisy, in Linen and NNX; without it, and after `eval()`, nothing is random."""
    noisy = noisy_top_k(GRID)
    layer = swarm.mixture(noisy, k_best=4).linen()
    params = layer.init(jax.random.key(1), X)
    apply = jax.jit(layer.apply)
    still = [apply(params, X) for _ in range(2)]
    drawn = [apply(params, X, rngs={"router": jax.random.key(seed)}) for seed in (0, 1)]
    np.testing.assert_allclose(*still, atol=1e-6)
    assert not np.allclose(*drawn, atol=1e-4)
    module = swarm.mixture(noisy, k_best=4).nnx(rngs=nnx.Rngs(0, router=1))
    run = nnx.jit(lambda module, x: module(x))
    assert not np.allclose(run(module, X), run(module, X), atol=1e-4)
    model = nnx.Sequential(module)
    model.eval()
    np.testing.assert_allclose(run(model, X), run(model, X), atol=1e-6)
    model.train()
    assert not np.allclose(run(model, X), run(model, X), atol=1e-4)


def eight_loops(width: int, rows: int, steps: int) -> None:
    """Training loops that somebody already had, in eight threads over one layer: jitted SGD steps."""
    with open_served(feedforward(d_model=width)) as swarm:
        layer = swarm.mixture(timeout_s=200.0, grace_s=200.0)

        def train(seed: int) -> float:
            model, x = layer.linen(), jax.random.normal(jax.random.key(seed), (rows, width))
            params = model.init(jax.random.key(seed), x)

            @jax.jit
            def step(params: Any) -> Any:
                value, grads = jax.value_and_grad(lambda p: jnp.mean((model.apply(p, x) - 1.0) ** 2))(params)
                return value, jax.tree.map(lambda p, g: p - 0.05 * g, params, grads)

            for _ in range(steps):
                value, params = step(params)
            return float(value)

        with ThreadPoolExecutor(8) as pool:
            losses = list(pool.map(train, range(8)))
        assert np.isfinite(losses).all()
        assert swarm.swarm.statistics.failures == {}
        assert swarm.swarm.statistics.staleness_calls >= 8 * steps * 2


def test_eight_loops_at_once_do_not_stand_still() -> None:
    """Their experts compute in this process; every backward call arrives."""
    eight_loops(D_MODEL, ROWS, 4)


@pytest.mark.slow
def test_eight_loops_with_large_arrays() -> None:
    """As in a user's process, where XLA shares out large products among its threads: experts compute while all wait."""
    environment = {name: text for name, text in os.environ.items() if name not in ("NPROC", "XLA_FLAGS")}
    program = "from dmoe_jax.machine.xla_threads import make_room; assert make_room()\n"
    program += "import tests.dmoe_jax.test_flax_layers as here; here.eight_loops(128, 128, 3)"
    command, folder = [sys.executable, "-c", program], Path(__file__).parents[2]
    subprocess.run(command, check=True, timeout=280, env=environment, cwd=folder)


def test_the_seventeenth_waiting_call_is_an_error(swarm: Served) -> None:
    """It comes at once while the others wait; they then finish as if nothing had been."""
    layer = swarm.mixture(k_best=1)
    model = layer.linen()
    params = model.init(jax.random.key(1), X[:1])
    apply = jax.jit(model.apply)
    apply(params, X[:1]).block_until_ready()
    with ThreadPoolExecutor(MAX_WAITING_CALLS) as pool:
        with swarm.held_up() as full:
            waiting = [pool.submit(lambda: np.asarray(apply(params, X[:1]))) for _ in range(MAX_WAITING_CALLS)]
            assert full.wait(30)
            with pytest.raises(jax.errors.JaxRuntimeError, match="'ffn': 16 calls of remote layers are waiting"):
                apply(params, X[:1]).block_until_ready()
        assert len({call.result(timeout=30).tobytes() for call in waiting}) == 1
    assert np.isfinite(apply(params, X[:1])).all()


def test_a_forward_pass_has_one_backward_pass(swarm: Served) -> None:
    """A second one, or one that comes too late, is told that; evaluation keeps nothing and teaches nobody."""
    layer = swarm.mixture().linen()
    params = layer.init(jax.random.key(1), X)
    forward = jax.jit(lambda params: jax.vjp(layer.apply, params, X)[1])
    backward, evaluate = jax.jit(lambda pull_back: pull_back(X)), jax.jit(layer.apply)
    first, *others = [jax.block_until_ready(forward(params)) for _ in range(MAX_RESIDUALS + 1)]
    before = swarm.updates()
    for _ in range(MAX_RESIDUALS):
        assert not np.allclose(evaluate(params, X), X)
    assert swarm.updates() == before
    gone = f"its forward pass kept for this backward pass is gone; .* at most {MAX_RESIDUALS} may be outstanding"
    with pytest.raises(jax.errors.JaxRuntimeError, match=gone):
        jax.block_until_ready(backward(first))
    jax.block_until_ready(backward(others[0]))
    with pytest.raises(jax.errors.JaxRuntimeError, match=gone):
        jax.block_until_ready(backward(others[0]))


def test_transformations_that_cannot_work_are_refused(swarm: Served) -> None:
    """vmap with a sentence of ours, checkpoint by JAX; inputs of another shape where the program is traced."""
    blocking = swarm.mixture()
    layer = blocking.linen()
    params = layer.init(jax.random.key(1), X)

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(layer.apply(params, x))

    many = jnp.stack([X, X])
    with pytest.raises(NotImplementedError, match="'ffn' cannot be used under vmap; its inputs have a batch"):
        jax.vmap(loss, (None, 0))(params, many)
    with pytest.raises(NotImplementedError, match="'ffn' cannot be used under vmap"):
        jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(params, many)
    with pytest.raises(NotImplementedError, match="Effects not supported"):
        jax.grad(jax.checkpoint(loss))(params, X)
    with pytest.raises(ValueError, match=r"experts take x float32\[4\]; got the batch float32\[5, 3\]"):
        jax.jit(layer.init)(jax.random.key(1), X[:, :3])
    with pytest.raises(ValueError, match=r"got the batch float32\[5, 4\], float32\[5, 4\]"):
        layer.apply(params, X, X)


def test_errors_inside_come_out_with_their_message(swarm: Served) -> None:
    """Too few answers, a router whose scores are no numbers, a layer that finds too few experts."""
    cases = {
        r"'nowhere': 5 of 5 samples got fewer than k_min=1": swarm.mixture(prefix=NO_EXPERTS, on_shortfall="raise"),
        r"TooFewExperts.*max_skipped allows 0%": swarm.mixture(prefix=NO_EXPERTS, max_skipped=0.0),
    }
    params = swarm.mixture().linen().init(jax.random.key(1), X)
    for message, blocking in cases.items():
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(jax.jit(blocking.linen().apply)(params, X))
    for router in (ROUTER, flat_top_k(GRID)):
        layer = swarm.mixture(router).linen()
        broken = jax.tree.map(lambda leaf: leaf * jnp.nan, layer.init(jax.random.key(1), X))
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"RouterError: router .* are NaN"):
            jax.block_until_ready(jax.jit(layer.apply)(broken, X))


def test_without_room_large_arrays_come_in_pieces(swarm: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once JAX has computed, the client's threads are what they are; what a layer returns is the same."""
    assert make_room()  # tests/conftest.py sees to it
    layer = swarm.mixture(k_best=1, timeout_s=60.0).linen()
    x = jax.random.normal(jax.random.key(0), (5000, D_MODEL))  # of over 64 KiB
    params = layer.init(jax.random.key(1), x)
    whole = jax.jit(layer.apply)(params, x)
    try:
        for threads, has_room in (("17", True), ("16", False), ("2", False)):
            monkeypatch.setenv("NPROC", threads)
            make_room.cache_clear()
            assert make_room() is has_room
        close(jax.jit(lambda params: layer.apply(params, x))(params), whole)
        assert np.isfinite(jax.jit(jax.grad(lambda params: layer.apply(params, x).sum()))(params)["params"]["anchor"])
    finally:
        make_room.cache_clear()
