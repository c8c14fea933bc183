"""The mixture over the network: equal to the local one without faults, and calm with them."""

import functools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trio

from dmoe_jax.autodiff import Recording, Value, value_and_grad
from dmoe_jax.experts.feedforward import feedforward
from dmoe_jax.mixture.local import local_mixture
from dmoe_jax.mixture.local_update import init_opt_states, update_experts
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.routing.base import gather_logits
from dmoe_jax.routing.product_key import product_key
from dmoe_net.errors import CallRefused, NoQuorum
from dmoe_net.rpc.base import Reply, Request
from dmoe_net.wire.compression import Compression
from tests.dmoe_jax.small_swarm import SmallSwarm, avoided, close, direct_callers, open_small_swarm, tcp_callers
from tests.net.direct_network import DirectCaller, DirectNetwork

GRID = (2, 3)
K_BEST = 2
EXPERT = feedforward(d_model=8)
OPTIMIZER = optax.adam(1e-2)
ROUTER = product_key(GRID, init_scale=1.0)
PATIENT = {"grace_s": 60.0, "timeout_s": 60.0}
"""For tests in real time without faults: a busy machine is no reason to give an expert up."""
LASTING = NodeConfig(record_lifetime_s=300.0)
"""Nor is it when compiling holds the event loop up for longer than an announcement usually stands."""


def project(params: Any, mixed: Any, targets: Any) -> Any:
    return jnp.mean((mixed @ params["out"] - targets) ** 2)


def make_problem() -> tuple[Any, Any, Any]:
    """Trunk parameters, an input and targets. The input is a parameter, so that its gradient is seen."""
    sizes = {"x": (3, (5, 8)), "out": (5, (8, 3))}
    params = {name: jax.random.normal(jax.random.key(seed), shape) for name, (seed, shape) in sizes.items()}
    return params | {"gate": ROUTER.init(jax.random.key(4), 8)}, jnp.ones((5, 3)), optax.sgd(0.1)


def remote_step(mixture: Any) -> Any:
    async def forward(run: Recording, params: Any, targets: Any) -> Value:
        scores = run(ROUTER.scores, params["gate"], params["x"])
        mixed, _ = await mixture(run, scores, params["x"])
        return run(project, params, mixed, targets)

    return value_and_grad(forward)


def local_loss(params: Any, experts: Any, targets: Any, x: Any = None) -> tuple[Any, Any]:
    """(loss, which experts were used); `x`: the experts' input, if it is another than the gate's."""
    scores = ROUTER.scores(params["gate"], params["x"])
    indices, mask = ROUTER.select(scores, K_BEST)
    weights = ROUTER.combine(gather_logits(scores, indices, ROUTER.grid_size), mask)
    mixed = local_mixture(EXPERT, experts, GRID, indices, mask, weights, params["x"] if x is None else x)
    used = jnp.zeros(GRID, bool).at[indices[..., 0], indices[..., 1]].set(True).reshape(-1)
    return project(params, mixed, targets), used


LOCAL_STEP = jax.jit(jax.value_and_grad(local_loss, argnums=(0, 1), has_aux=True))
UPDATE_EXPERTS = jax.jit(functools.partial(update_experts, OPTIMIZER))


async def test_equals_local_over_tcp() -> None:
    """Loss, gradients of gate, input and head, and expert updates equal one jit to 1e-5 over two steps."""
    async with (
        tcp_callers(3) as callers,
        open_small_swarm(callers, EXPERT, OPTIMIZER, prefixes=["ffn"], grid_size=GRID, node_config=LASTING) as swarm,
    ):
        params, targets, trunk_optimizer = make_problem()
        experts = swarm.stacked_params("ffn", GRID)
        opt_states = init_opt_states(OPTIMIZER, experts)
        step = remote_step(swarm.mixture(EXPERT, ROUTER, "ffn", k_best=K_BEST, **PATIENT))
        trunk_state = trunk_optimizer.init(params)
        for _ in range(2):
            (expected_loss, used), (expected_grads, expert_grads) = LOCAL_STEP(params, experts, targets)
            loss, grads = await step(params, targets)
            np.testing.assert_allclose(loss, expected_loss, atol=1e-5)
            close(grads, expected_grads)
            experts, opt_states = UPDATE_EXPERTS(experts, opt_states, expert_grads, used)
            close(swarm.stacked_params("ffn", GRID), experts)
            updates, trunk_state = trunk_optimizer.update(grads, trunk_state, params)
            params = optax.apply_updates(params, updates)
        assert swarm.statistics.failed == swarm.statistics.late == 0
        assert sum(swarm.statistics.load.values()) == 2 * 5 * K_BEST


@asynccontextmanager
async def direct_swarm(
    optimizer: Any = OPTIMIZER,
) -> AsyncIterator[tuple[SmallSwarm, list[DirectCaller], DirectNetwork]]:
    network = DirectNetwork(latency_s=0.1)
    callers = direct_callers(network, 3)
    async with open_small_swarm(callers, EXPERT, optimizer, prefixes=["ffn"], grid_size=GRID) as swarm:
        yield swarm, callers, network


async def test_dead_node_is_masked_then_avoided(autojump_clock: trio.testing.MockClock) -> None:
    """A node that falls silent costs one grace time; then its experts are no longer chosen. Steps stay finite."""
    async with direct_swarm() as (swarm, callers, network):
        params, targets, _ = make_problem()
        step = remote_step(swarm.mixture(EXPERT, ROUTER, "ffn", k_best=4, k_min=1, grace_s=1.0, timeout_s=5.0))
        await step(params, targets)
        network.take_down(callers[1].address)
        for _ in range(4):
            started = trio.current_time()
            loss, grads = await step(params, targets)
            # Forward and backward each wait at most the calls' timeout, however many experts are silent.
            assert trio.current_time() - started <= 2 * 5.0 + 1.0
            assert np.isfinite(loss)
            assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
        assert avoided(swarm.directory) == [callers[1].peer_id]
        silent = swarm.statistics.failed + swarm.statistics.late
        await step(params, targets)
        assert swarm.statistics.failed + swarm.statistics.late == silent


async def test_nobody_answers_leaves_the_input(autojump_clock: trio.testing.MockClock) -> None:
    """Without any expert a sample passes unchanged, its gradient too; "raise" gives the step up instead."""
    async with direct_swarm() as (swarm, callers, network):
        params, targets, _ = make_problem()
        network.take_down(*(caller.address for caller in callers[:-1]))
        loss, grads = await remote_step(swarm.mixture(EXPERT, ROUTER, "ffn", k_best=2, timeout_s=1.0))(params, targets)
        expected_loss, expected = jax.value_and_grad(lambda p: project(p, p["x"], targets))(params)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
        close({"x": grads["x"], "out": grads["out"]}, {"x": expected["x"], "out": expected["out"]})
        assert swarm.statistics.skipped_samples == 5
        strict = swarm.mixture(EXPERT, ROUTER, "ffn", k_best=2, timeout_s=1.0, on_shortfall="raise")
        with pytest.raises(NoQuorum, match="5 of 5 samples got fewer than k_min=1"):
            await remote_step(strict)(params, targets)


async def test_expert_lost_before_backward_is_a_constant(autojump_clock: trio.testing.MockClock) -> None:
    """Losing the nodes after the forward leaves the gradient of everything but the experts' inputs."""
    async with direct_swarm() as (swarm, callers, network):
        params, targets, _ = make_problem()
        mixture = swarm.mixture(EXPERT, ROUTER, "ffn", k_best=K_BEST, timeout_s=1.0)
        experts = jax.tree.map(jnp.asarray, swarm.stacked_params("ffn", GRID))

        async def forward(run: Recording, params: Any, targets: Any) -> Value:
            scores = run(ROUTER.scores, params["gate"], params["x"])
            mixed, _ = await mixture(run, scores, params["x"])
            network.take_down(*(caller.address for caller in callers[:-1]))
            return run(project, params, mixed, targets)

        def constant_experts(params: Any) -> Any:
            return local_loss(params, experts, targets, jax.lax.stop_gradient(params["x"]))[0]

        loss, grads = await value_and_grad(forward)(params, targets)
        expected_loss, expected = jax.jit(jax.value_and_grad(constant_experts))(params)
        np.testing.assert_allclose(loss, expected_loss, atol=1e-5)
        close(grads, expected)
        close(swarm.stacked_params("ffn", GRID), experts, atol=0)


@pytest.mark.parametrize("lie", ["shape", "nan", "refusal"])
async def test_a_lying_node_counts_as_silent(autojump_clock: trio.testing.MockClock, lie: str) -> None:
    """Answers of the wrong shape, with NaN, or refusals are masked; the other node's experts carry the step."""

    async def liar(request: Request) -> Reply:
        if lie == "refusal":
            raise CallRefused("not today")
        pairs = len(request.tensors[0])
        wrong = np.zeros((pairs, 2), np.float32) if lie == "shape" else np.full((pairs, 8), np.nan, np.float32)
        answers = [{"part": number, "updates": 0} for number in range(len(request.body["parts"]))]
        return Reply(body={"answers": answers}, tensors=(wrong,))

    async with direct_swarm() as (swarm, callers, _):
        callers[0].remove_handler("expert.forward")
        callers[0].add_handler("expert.forward", liar)
        params, targets, _ = make_problem()
        loss, grads = await remote_step(swarm.mixture(EXPERT, ROUTER, "ffn", k_best=6))(params, targets)
        assert np.isfinite(loss)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
        # It is held against the experts, whose neighbours on the same host may be sound.
        reason = {"shape": "bad answer", "nan": "not finite", "refusal": "refused"}[lie]
        assert swarm.statistics.failures == {reason: 3}
        assert sorted(avoided(swarm.directory)) == ["ffn.0.0", "ffn.0.2", "ffn.1.1"]
        # Six experts in turn on two nodes: all six were asked, the honest three learnt.
        assert sorted(backend.update_count for backend in swarm.backends.values()) == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(("max_parts", "expected"), [(64, 2), (2, 4), (1, 6)])
async def test_one_request_per_node_not_per_sample(autojump_clock: Any, max_parts: int, expected: int) -> None:
    """Six experts of two nodes get two requests each way, or as many as are needed for so many experts each."""
    async with direct_swarm() as (swarm, _, network):
        params, targets, _ = make_problem()
        mixture = swarm.mixture(EXPERT, ROUTER, "ffn", k_best=6, max_parts=max_parts)
        await trio.sleep(1.0)  # it looks its grid up, so that the first step asks the DHT for nothing
        network.calls.clear()
        await remote_step(mixture)(params, targets)
        asked = Counter(method for source, _, method in network.calls if source is None)
        assert asked == {"expert.forward": expected, "expert.backward": expected}
        assert swarm.statistics.ok == 12


# Of each value: the documented bounds, for blocks in units of the tensor's root mean square, of which the largest of
# the few dozen values of a block here is at most four times.
LOSSES = {
    Compression.FLOAT16: 2.0**-11,
    Compression.BFLOAT16: 2.0**-8,
    Compression.BLOCKWISE_8BIT: 4 / 254,
}


@pytest.mark.parametrize("compression", LOSSES)
async def test_compression_costs_little_accuracy_and_takes_fewer_bytes(
    autojump_clock: Any, compression: Compression
) -> None:
    """A value takes 2 bytes instead of 4, or 1 and a scale, both ways; a sample goes to a node once."""
    params, targets, _ = make_problem()
    async with direct_swarm(optimizer=None) as (swarm, _, network):
        network_bytes, steps = [], []
        for options in ({}, {"compression": compression}):
            network.tensor_bytes.clear()
            mixture = swarm.mixture(EXPERT, ROUTER, "ffn", k_best=K_BEST, **PATIENT, **options)
            steps.append(await remote_step(mixture)(params, targets))
            network_bytes.append(dict(network.tensor_bytes))
        assert swarm.statistics.failed == swarm.statistics.late == 0
    # The step differs, and by no more than roundings of inputs, outputs and their gradients explain: four on the way,
    # each within the bound for every value, through experts and a loss whose gain is near one: eight times the bound
    # leaves room.
    (exact_loss, exact), (lossy_loss, lossy) = steps
    bound = 8 * LOSSES[compression]
    assert lossy_loss != exact_loss
    np.testing.assert_allclose(lossy_loss, exact_loss, rtol=bound)
    for leaf, lossy_leaf in zip(*map(jax.tree.leaves, (exact, lossy)), strict=True):
        assert 0 < np.linalg.norm(lossy_leaf - leaf) < bound * np.linalg.norm(leaf)
    # Outputs for each pair of a sample and an expert; inputs for each that a node gets; and the index.
    (plainly, lossily), pairs = network_bytes, 5 * K_BEST
    assert 4 * 8 * (pairs + 5) <= plainly["expert.forward"] < 4 * 8 * 2 * pairs + 2 * 128
    share = 0.26 if compression is Compression.BLOCKWISE_8BIT else 0.5
    for method in ("expert.forward", "expert.backward"):
        # The index and the gaps between tensors stay.
        assert lossily[method] < share * plainly[method] + 4 * pairs + 3 * 64 * 4
