"""Remote mixtures with unusual experts and routers, and their warnings and errors when experts are missing."""

import logging
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trio

from dmoe_jax.autodiff import Recording, Value, value_and_grad
from dmoe_jax.experts.base import Expert, TensorSpec
from dmoe_jax.experts.feedforward import feedforward
from dmoe_jax.mixture import statistics as counts
from dmoe_jax.mixture.local import local_mixture
from dmoe_jax.mixture.readiness import ExpertMismatch
from dmoe_jax.mixture.statistics import CallStatistics, Coverage, TooFewExperts, reason_of
from dmoe_jax.routing.base import gather_logits
from dmoe_jax.routing.product_key import product_key
from dmoe_net import errors
from dmoe_net.errors import NoQuorum, VersionMismatch
from dmoe_net.rpc.base import Reply, Request
from dmoe_net.wire.versions import CALLS
from tests.dmoe_jax.small_swarm import SmallSwarm, close, direct_callers, open_small_swarm
from tests.net.direct_network import DirectCaller, DirectNetwork

GRID = (2, 2)
ROUTER = product_key(GRID, init_scale=1.0)
GATE = ROUTER.init(jax.random.key(4), 4)
X = jax.random.normal(jax.random.key(3), (5, 4))


def spec(name: str, shape: tuple[int, ...], dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype=dtype, differentiable=True)


MIXED = Expert(
    name="mixed",
    init=lambda key: {"w": jax.random.normal(key, (4, 4)), "v": jax.random.normal(key, (2, 4))},
    apply=lambda params, x, side: x + x @ params["w"] + side.astype(jnp.float32) @ params["v"],
    inputs=(spec("x", (4,)), spec("side", (2,), "bfloat16")),
    output=spec("y", (4,)),
)
"""Two differentiable inputs of different types."""

PLAIN = feedforward(d_model=4)
NARROW = Expert(
    "narrow", lambda key: jax.random.normal(key, (4, 3)), lambda w, x: x @ w, (spec("x", (4,)),), spec("y", (3,))
)
"""Its output has another shape than its input."""


def sine(mixed: Any) -> Any:
    return jnp.sum(jnp.sin(mixed))


def remote_loss(mixture: Any, router: Any) -> Any:
    async def forward(run: Recording, params: Any) -> Value:
        scores = run(router.scores, params["gate"], params["inputs"][0])
        mixed, _ = await mixture(run, scores, *params["inputs"])
        return run(sine, mixed)

    return value_and_grad(forward)


def local_loss(params: Any, experts: Any, expert: Expert, router: Any) -> Any:
    scores = router.scores(params["gate"], params["inputs"][0])
    indices, mask = router.select(scores, 2)
    weights = router.combine(gather_logits(scores, indices, GRID), mask)
    return sine(local_mixture(expert, experts, GRID, indices, mask, weights, *params["inputs"]))


@asynccontextmanager
async def served(
    expert: Expert, *, nodes: int = 1, prefixes: Sequence[str] = ("ffn",), learns: bool = False
) -> AsyncIterator[tuple[SmallSwarm, list[DirectCaller], DirectNetwork]]:
    """A swarm that serves the grid, its callers and its network."""
    network = DirectNetwork(latency_s=0.1)
    callers, optimizer = direct_callers(network, nodes + 1), optax.sgd(0.1) if learns else None
    async with open_small_swarm(callers, expert, optimizer, prefixes=prefixes, grid_size=GRID) as swarm:
        yield swarm, callers, network


def twice(scores: Any, k: int, alive: Any = None) -> Any:
    indices, mask = ROUTER.select(scores, 1, alive)
    return jnp.repeat(indices, k, axis=1), jnp.repeat(mask, k, axis=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("expert", "router", "atol"),
    [
        # Two bfloat16 gradients of size below 2 are summed in another order: half a unit in the last place, 2^-7.
        pytest.param(MIXED, ROUTER, 2**-7, id="inputs of different types"),
        pytest.param(NARROW, ROUTER, 1e-5, id="an output of another shape"),  # there is no input to pass through
        # `check_router` refuses such a router, but a mixture keeps its mathematics.
        pytest.param(PLAIN, ROUTER._replace(select=twice, whole_grid=True), 1e-5, id="an expert selected twice"),
    ],
)
async def test_equals_the_local_mixture(expert: Expert, router: Any, atol: float, autojump_clock: Any) -> None:
    """Loss, gradients of all inputs and of the gate, each of its own type, and one SGD step of the experts."""
    params = {"gate": GATE, "inputs": (X, jnp.ones((5, 2), jnp.bfloat16))[: len(expert.inputs)]}
    async with served(expert, learns=True) as (swarm, _, _):
        experts = swarm.stacked_params("ffn", GRID)
        mixture = swarm.mixture(expert, router, "ffn", k_best=2)
        loss, grads = await remote_loss(mixture, router)(params)
        of_both = jax.jit(jax.value_and_grad(local_loss, argnums=(0, 1)), static_argnums=(2, 3))
        expected_loss, (expected, expert_grads) = of_both(params, experts, expert, router)
        np.testing.assert_allclose(loss, expected_loss, atol=atol)
        assert jax.tree.map(lambda leaf: leaf.dtype, grads) == jax.tree.map(lambda leaf: leaf.dtype, expected)
        as_floats = [jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), tree) for tree in (grads, expected)]
        close(*as_floats, atol=atol)
        close(swarm.stacked_params("ffn", GRID), jax.tree.map(lambda p, g: p - 0.1 * g, experts, expert_grads), atol)
        assert swarm.statistics.failures == {}


async def test_without_answers_another_shape_gives_zeros(autojump_clock: trio.testing.MockClock) -> None:
    async with served(NARROW) as (swarm, callers, network):
        await swarm.directory.living("ffn", GRID)
        network.take_down(callers[0].address)
        mixture = swarm.mixture(NARROW, ROUTER, "ffn", k_best=2, timeout_s=1.0)
        loss, grads = await remote_loss(mixture, ROUTER)({"gate": GATE, "inputs": (X,)})
        assert float(loss) == 0.0
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(grads))
        assert swarm.statistics.failures == {"timeout": 4}


def noisy(params: Any, x: Any, keys: Any = None) -> Any:
    chance = 1.0 if keys is None else jax.vmap(lambda key: jax.random.uniform(jax.random.wrap_key_data(key)))(keys)
    return x + params * jnp.reshape(chance, (-1, 1))


NOISY = Expert("noisy", lambda key: jnp.ones(()), noisy, (spec("x", (4,)),), spec("y", (4,)), takes_key=True)


@asynccontextmanager
async def seeds_of(expert: Expert) -> AsyncIterator[Any]:
    """A function that gives the dropout seeds which two steps of a new mixture send, by method."""
    sent: list[tuple[str, int | None]] = []
    async with served(expert) as (swarm, callers, _):
        for method in ("expert.forward", "expert.backward"):

            async def spy(request: Request, answer: Any = swarm.nodes[0].handlers[method]) -> Reply:
                sent.append((request.method, request.body.get("dropout_seed")))
                return await answer(request)

            callers[0].remove_handler(method)
            callers[0].add_handler(method, spy)

        async def seeds(seed: int, *, differentiate: bool) -> list[tuple[str, int | None]]:
            sent.clear()
            mixture = swarm.mixture(expert, ROUTER, "ffn", k_best=4, seed=seed)
            for _ in range(2):
                run = Recording(differentiate=differentiate)
                mixed, _ = await mixture(run, run(ROUTER.scores, GATE, Value(X)), Value(X))
                if differentiate:
                    await run.backward(run(sine, mixed))
            return list(dict.fromkeys(sent))

        yield seeds


async def test_dropout_seeds(autojump_clock: trio.testing.MockClock) -> None:
    """One for each layer call, the same forward and backward, decided by the mixture's seed; none in evaluation."""
    async with seeds_of(NOISY) as seeds:
        first = await seeds(0, differentiate=True)
        assert await seeds(0, differentiate=True) == first
        assert await seeds(1, differentiate=True) != first
        assert await seeds(0, differentiate=False) == [("expert.forward", None)]
    (_, one), (_, same), (_, other), (_, again) = first
    assert [method for method, _ in first] == ["expert.forward", "expert.backward"] * 2
    assert (one, other) == (same, again)
    assert one != other
    assert all(isinstance(seed, int) and 0 <= seed < 2**63 for seed in (one, other))
    async with seeds_of(PLAIN) as seeds:
        assert await seeds(0, differentiate=True) == [("expert.forward", None), ("expert.backward", None)]


async def test_a_layer_without_experts_warns_and_at_last_raises(autojump_clock: Any, caplog: Any) -> None:
    """It warns once; ten seconds beyond the allowed share of the last 32 calls the step raises."""
    async with served(PLAIN) as (swarm, _, _):
        mixture = swarm.mixture(PLAIN, ROUTER, "nowhere", k_best=2, max_skipped=0.1)
        step = remote_loss(mixture, ROUTER)
        for _ in range(3):
            await step({"gate": GATE, "inputs": (X,)})
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert warnings == [
            "layer 'nowhere': no expert for 5 of 5 samples (0 experts were found alive and asked, 0 of them answered); "
            "such samples pass unchanged, until experts come back"
        ]
        await step({"gate": GATE, "inputs": (X,)})
        await trio.sleep(counts.HOLD_S)
        with pytest.raises(TooFewExperts, match=r"'nowhere': no expert for 16% of the samples .* allows 10%") as caught:
            await step({"gate": GATE, "inputs": (X,)})
        assert not isinstance(caught.value, NoQuorum)
        assert swarm.statistics.skipped_samples == 5 * 5


async def test_quick_steps_beside_a_node_that_was_late_once_go_on(autojump_clock: trio.testing.MockClock) -> None:
    """Its pause of a second takes more than half of 32 calls again and again; for ten seconds on end it must not."""
    coverage = Coverage("ffn", max_skipped=0.5, instead="")

    async def calls(seconds: float, skipped: int) -> None:
        for _ in range(round(50 * seconds)):
            coverage.note(skipped, 4, found=1, answered=1)
            await trio.sleep(0.02)

    for _ in range(20):
        await calls(1.0, 4)
        await calls(1.0, 0)
    with pytest.raises(TooFewExperts, match="no expert for 100% of the samples of the last 32 calls"):
        await calls(11.0, 4)


def test_a_layer_that_has_recovered_warns_anew(caplog: pytest.LogCaptureFixture) -> None:
    """After as many complete calls as the window holds; with gaps in between it is silent."""
    caplog.set_level(logging.INFO)
    coverage = Coverage("ffn", max_skipped=1.0, instead="such samples give zeros")
    for skipped in (1, 0, 2, *[0] * counts.WINDOW_CALLS, 3):
        coverage.note(skipped, 4, found=2, answered=1)
    kinds = [record.levelname for record in caplog.records]
    assert kinds == ["WARNING", "INFO", "WARNING"]
    strict = Coverage("ffn", max_skipped=0.0, instead="")
    strict.note(0, 4, found=1, answered=1)
    with pytest.raises(TooFewExperts):
        strict.note(1, 4, found=1, answered=1)


FAILURES = {
    "timeout": errors.PeerTimeout,
    "unreachable": errors.DialFailed,
    "connection lost": errors.ConnectionLost,
    "busy": errors.PeerBusy,
    "refused": errors.RemoteFailure,
    "bad answer": errors.RemoteProtocolError,
    "not sent": errors.LocalProtocolError,
}


def test_failures_have_reasons(caplog: pytest.LogCaptureFixture) -> None:
    """Every error has one; the first failure of a reason is a warning with its text, then every hundredth."""
    statistics = CallStatistics()
    assert [reason_of(error("x")) for error in (*FAILURES.values(), errors.CallRefused)] == [*FAILURES, "refused"]
    assert set(counts.REASONS) == {*FAILURES, "not finite", "late"}
    for number in range(200):
        statistics.note_failure("timeout", f"expert ffn.0 at somewhere: call {number}")
    statistics.note_failure("late", "expert ffn.1")
    assert (statistics.failed, statistics.late, statistics.failures) == (200, 1, {"timeout": 200, "late": 1})
    warned = [record.args[:2] for record in caplog.records if record.levelno == logging.WARNING]
    assert warned == [("timeout", 1), ("timeout", 100), ("timeout", 200), ("late", 1)]


async def test_check_waits_for_experts_and_compares_them(autojump_clock: trio.testing.MockClock) -> None:
    """It tells how many are alive, without those of a node that has just died; an error names both shapes."""
    async with served(PLAIN, nodes=2) as (swarm, callers, network):
        said: list[str] = []
        check = swarm.mixture(PLAIN, ROUTER, "ffn", k_best=2).check
        assert await check(say=said.append) == 4
        told = r"is a feedforward with float32\[4\], float32\[4\], .* needs float32\[4\], float32\[3\]"
        with pytest.raises(ExpertMismatch, match=told):
            await swarm.mixture(NARROW, ROUTER, "ffn", k_best=2).check()
        network.take_down(callers[1].address)
        assert await check(timeout_s=20.0, say=said.append) == 2
        assert said == ["ffn: 4 of 4 experts alive", "ffn: 2 of 4 experts alive"]
        network.take_down(callers[0].address)
        with pytest.raises(NoQuorum, match=r"none answered within 8 s; the last one: .* did not answer expert.info"):
            await check(timeout_s=8.0)


@pytest.mark.parametrize("version", [CALLS - 1, CALLS + 1, None, "two"])
async def test_check_tells_of_nodes_of_another_version(version: Any, autojump_clock: Any, caplog: Any) -> None:
    """A sentence with both versions, at once; where others fit they are used, and the log has the sentence."""
    async with served(PLAIN, nodes=2) as (swarm, callers, _):

        def speaks_otherwise(number: int) -> None:
            info = swarm.nodes[number].handlers["expert.info"]

            async def other(request: Request) -> Reply:
                return Reply(body={**(await info(request)).body, "calls": version})

            callers[number].remove_handler("expert.info")
            callers[number].add_handler("expert.info", other)

        mixture = swarm.mixture(PLAIN, ROUTER, "ffn", k_best=2)
        sentence = f"speaks (version {version!r}|no version) of calls and records, this peer version {CALLS} "
        speaks_otherwise(0)
        assert await mixture.check() == 2
        assert re.search(sentence, caplog.text)
        speaks_otherwise(1)
        with pytest.raises(VersionMismatch, match=sentence):
            await mixture.check(timeout_s=300.0)


async def test_check_says_what_the_swarm_serves_instead(autojump_clock: trio.testing.MockClock) -> None:
    """After the time it was given, with news once a second in between."""
    async with served(PLAIN, prefixes=["layer0", "b"]) as (swarm, _, _):
        said: list[str] = []
        mixture = swarm.mixture(PLAIN, ROUTER, "layer1", k_best=2)
        with pytest.raises(NoQuorum, match=r"'layer1' was announced within 3 s; this swarm serves 'b', 'layer0'$"):
            await mixture.check(timeout_s=3.0, say=said.append)
        assert said == ["waiting for experts of 'layer1' (1 s)", "waiting for experts of 'layer1' (2 s)"]
