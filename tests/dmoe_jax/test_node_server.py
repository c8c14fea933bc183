"""The expert node: batches what arrives together, refuses what does not fit, trains once, leaves in order."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trio
from flax import linen as nn

from dmoe_jax.directory.directory import find_replicas
from dmoe_jax.directory.grid import all_uids
from dmoe_jax.experts import expert_from_functions, expert_from_linen
from dmoe_jax.experts.dropout import row_keys_of_seed
from dmoe_jax.machine.device import CostModel, InlineDevice
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.node.config import NodeConfig
from dmoe_net.errors import CallRefused, NetError, PeerTimeout
from dmoe_net.wire.compression import Compressed, Compression
from dmoe_net.wire.tensors import as_received
from tests.dmoe_jax.node_rig import EXPERT, SGD, XL, ask_expert, open_rig, rows
from tests.dmoe_jax.small_swarm import direct_callers, open_small_swarm
from tests.net.direct_network import DirectNetwork


class Dropping(nn.Module):
    @nn.compact
    def __call__(self, x: Any, deterministic: bool) -> Any:
        return nn.Dropout(0.5, deterministic=deterministic)(nn.Dense(64)(x))


async def test_backwards_that_meet_are_one_update_on_their_sum(autojump_clock: trio.testing.MockClock) -> None:
    """Two trainers' gradients in one batch step the expert once, by their sum."""
    async with open_rig(cost=CostModel(call_s=1.0)) as rig:
        params = jax.tree.map(jnp.copy, rig.backends["ffn.0.1"].params)
        x, grads = rows(4), rows(4, seed=9)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.forward, "ffn.2.3", rows(1))  # keeps the device busy while the two arrive
            await trio.sleep(0.1)
            nursery.start_soon(rig.backward, "ffn.0.1", b"a", x[:1], grads[:1])
            nursery.start_soon(rig.backward, "ffn.0.1", b"b", x[1:], grads[1:])
        backend = rig.backends["ffn.0.1"]
        assert backend.update_count == 1

        @jax.jit
        def stepped(params: Any) -> Any:
            _, pull = jax.vjp(EXPERT.apply, params, jnp.asarray(x))
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, pull(jnp.asarray(grads))[0])

        expected = stepped(params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), backend.params, expected)


async def test_a_retry_never_trains_twice(autojump_clock: trio.testing.MockClock) -> None:
    """The same request id gets the same gradients and no second update, while in flight and afterwards."""
    async with open_rig(cost=CostModel(call_s=1.0)) as rig:
        x, grads = rows(2), rows(2, seed=5)
        with pytest.raises(PeerTimeout):
            await rig.backward("ffn.0.1", b"id", x, grads, timeout_s=0.5)  # the device works for 1 s
        first = await rig.backward("ffn.0.1", b"id", x, grads)
        again = await rig.backward("ffn.0.1", b"id", x, grads)
        np.testing.assert_array_equal(first.tensors[0], again.tensors[0])
        assert rig.backends["ffn.0.1"].update_count == first.body["updates"] == again.body["updates"] == 1
        assert rig.node.status()["replayed"] == 2
        await rig.backward("ffn.0.1", b"another", x, grads)
        assert rig.backends["ffn.0.1"].update_count == 2


@jax.jit
def xl_output_and_grads(params: Any, hidden: Any, memory: Any, mask: Any, output_grads: Any) -> Any:
    output, pull = jax.vjp(lambda x: XL.apply(params, x, memory, mask), hidden)
    return output, pull(output_grads)[0]


@pytest.mark.parametrize("compression", [kind for kind in Compression if kind is not Compression.NONE])
async def test_answers_are_compressed_on_request(autojump_clock: Any, compression: Compression) -> None:
    """Answers lose what compression loses, no more; without the wish they are exact, however requests came."""
    async with open_rig() as rig:

        def lossy(array: np.ndarray) -> np.ndarray:
            return as_received(Compressed(np.asarray(array), compression))

        rng = np.random.default_rng(1)
        hidden, memory, grads = (rng.normal(size=(2, n, 4)).astype(np.float32) for n in (3, 2, 3))
        mask = np.ones((2, 2), bool)
        wrapped = [Compressed(array, compression) for array in (hidden, memory, grads)]
        params = jax.tree.map(jnp.copy, rig.backends["xl.0"].params)
        expected = xl_output_and_grads(params, lossy(hidden), lossy(memory), mask, lossy(grads))
        for kind, answer, more in (("forward", expected[0], []), ("backward", expected[1], wrapped[2:])):
            body, tensors = {"uid": "xl.0", "id": b"id"}, [*wrapped[:2], mask, *more]
            reply = await rig.call(f"expert.{kind}", body | {"compression": compression.value}, *tensors)
            exact = (await rig.call(f"expert.{kind}", body, *tensors)).tensors[0]  # the same work, this time as it is
            np.testing.assert_allclose(exact, answer, atol=1e-5)
            np.testing.assert_array_equal(reply.tensors[0], lossy(exact))
            assert not np.array_equal(reply.tensors[0], exact)
        assert rig.backends["xl.0"].update_count == 1


async def test_a_caller_that_gave_up_costs_no_batch(autojump_clock: trio.testing.MockClock) -> None:
    """A request whose deadline passes while it waits leaves the queue; its id can be asked again."""
    async with open_rig(cost=CostModel(call_s=1.0)) as rig:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.forward, "ffn.2.3", rows(1))
            await trio.sleep(0.1)
            with pytest.raises(PeerTimeout):
                await rig.backward("ffn.0.1", b"id", rows(1), rows(1), timeout_s=0.3)
        assert rig.node.status()["waiting_rows"] == 0
        assert rig.backends["ffn.0.1"].update_count == 0
        await rig.backward("ffn.0.1", b"id", rows(1), rows(1))
        assert rig.backends["ffn.0.1"].update_count == 1
        assert rig.node.status()["replayed"] == 0


NAN = np.full((1, 4), np.nan, np.float32)
MASKED = [np.zeros((1, *size), np.float32) for size in ((3, 4), (2, 4), (2,))]
HALF = np.ones((2, 4), jnp.bfloat16)
SEEDS = "dropout_seed must be an integer from 0 to"
COMPRESSIONS = "expected a compression among float16, bfloat16, blockwise8, or none at all, got "
REFUSED: list[tuple[dict[str, Any], list[Any], str]] = [
    ({}, [rows(1)], "expected the uid of an expert as a string, got None"),
    ({"uid": "ffn.9.9"}, [rows(1)], r"unknown expert 'ffn.9.9': this node serves 3 experts"),
    ({"uid": "xl.0"}, MASKED, r"input 'memory_mask' as bool\[rows, 2\] with 1 rows, got float32\[1, 2\]"),
    *(
        ({"uid": "ffn.0.1"} | more, tensors, message)
        for more, tensors, message in (
            ({}, [], r"expected 1 to 256 rows in a part of a request, got 0"),
            ({}, [rows(2, 5)], r"input 'x' as float32\[rows, 4\].*got float32\[2, 5\]"),
            ({}, [rows(2).astype(np.float64)], r"got float64\[2, 4\]"),
            ({}, [np.array(1.0, np.float32)], "expected 1 to 256 rows.*got 0"),
            ({}, [rows(257)], "expected 1 to 256 rows in a part of a request, got 257"),
            ({}, [NAN], "got NaN or infinity"),
            ({}, [rows(1)] * 2, r"expected 1 tensors \(input 'x'\) after the index, got 2"),
            ({"id": b"x"}, [rows(1)], "input 'x', gradient of output"),
            ({"id": b"x"}, [rows(2), rows(1)], "with 2 rows, got"),
            ({"id": None}, [rows(1), rows(1)], "id must be 1 to 32 bytes, got None"),
            ({"id": b"x" * 33}, [rows(1), rows(1)], "1 to 32 bytes"),
            *(({"dropout_seed": seed}, [rows(1)], SEEDS) for seed in (-1, 2**63, True, 1.0, "seed")),
            *(
                (more | {"compression": name}, tensors, COMPRESSIONS)
                for more, tensors in (({}, [rows(1)]), ({"id": b"x"}, [rows(1), rows(1)]))
                for name in ("zstd", "none", "BFLOAT16", 8, None)
            ),
        )
    ),
]
"""Body, tensors, and the refusal; what has an id is a backward call."""


async def test_what_does_not_fit_is_refused_and_the_node_lives_on(autojump_clock: trio.testing.MockClock) -> None:
    """The refusal says what was expected; the next request is served and nothing was trained."""
    async with open_rig() as rig:
        for body, tensors, message in REFUSED:
            method = "expert.backward" if "id" in body else "expert.forward"
            with pytest.raises(CallRefused, match=message):
                await rig.call(method, body, *tensors)
            assert (await rig.forward("ffn.0.1", rows(1))).body == {"updates": 0}


@pytest.mark.parametrize("leave_timeout_s", [5.0, 0.0])
async def test_a_node_that_leaves_answers_what_it_accepted(autojump_clock: Any, leave_timeout_s: float) -> None:
    """It answers what waits, and a retry of that, and refuses what comes later; without time it answers none."""
    outcomes: dict[str, str] = {}

    async def ask(name: str, after_s: float, method: Callable[..., Any], *args: Any) -> None:
        await trio.sleep(after_s)
        try:
            await method(*args, timeout_s=10.0)
            outcomes[name] = "answered"
        except NetError as error:
            outcomes[name] = str(error)

    async with trio.open_nursery() as nursery:
        async with open_rig(cost=CostModel(call_s=1.0), config=NodeConfig(leave_timeout_s=leave_timeout_s)) as rig:
            again = rig.backward, "ffn.0.1", b"id", rows(2), rows(2, seed=9)
            nursery.start_soon(ask, "running", 0.0, rig.forward, "ffn.2.3", rows(1))
            nursery.start_soon(ask, "waiting", 0.1, *again)
            nursery.start_soon(ask, "retry", 0.3, *again)
            nursery.start_soon(ask, "late", 0.3, rig.forward, "ffn.0.1", rows(1))
            await trio.sleep(0.2)
            left_at = trio.current_time()
        left_s = trio.current_time() - left_at
    updates = rig.backends["ffn.0.1"].update_count
    if leave_timeout_s:
        assert outcomes.pop("late") == "this node is leaving the swarm"
        assert outcomes == {"running": "answered", "waiting": "answered", "retry": "answered"}
        assert (updates, 1.5 < left_s < 2.5) == (1, True)
    else:
        assert "answered" not in (outcomes["waiting"], outcomes["retry"], outcomes["late"])
        assert updates == 0


async def test_one_poisonous_request_does_not_spoil_the_others(autojump_clock: trio.testing.MockClock) -> None:
    """A batch that would not stay finite is taken apart: the innocent train, the guilty is refused, twice."""
    async with open_rig(cost=CostModel(call_s=1.0)) as rig:
        alone = ExpertBackend(EXPERT, SGD, rig.backends["ffn.0.1"].params)
        x, grads, huge = rows(2), rows(2, seed=9), np.full((1, 4), 1e38, np.float32)
        refusals: list[str] = []

        async def poison() -> None:
            with pytest.raises(CallRefused) as refused:
                await rig.backward("ffn.0.1", b"bad", huge, huge)
            refusals.append(str(refused.value))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.forward, "ffn.2.3", rows(1))  # keeps the device busy while the two arrive
            await trio.sleep(0.1)
            nursery.start_soon(poison)
            nursery.start_soon(rig.backward, "ffn.0.1", b"good", x, grads)
        await poison()
        assert len(refusals) == 2
        assert "its gradient would make expert ffn.0.1 not finite" in refusals[0]
        status = rig.node.status()
        assert status["rejected"] == {"update": 1}
        assert (status["replayed"], status["updates"]["ffn.0.1"], status["failed"]) == (1, 1, 0)
        alone.backward([x], grads)
        jax.tree.map(np.testing.assert_array_equal, rig.backends["ffn.0.1"].params, alone.params)


async def test_inputs_go_by_their_order_and_are_finite(autojump_clock: trio.testing.MockClock) -> None:
    """Several may share a name, which is for people. NaN is refused of bfloat16 too, no floating type to NumPy."""
    expert = expert_from_functions(lambda key: {}, lambda params, x, *more: x - 2 * more[0], *[HALF[:1]] * 2)
    alike = expert._replace(inputs=tuple(dataclasses.replace(spec, name="x") for spec in expert.inputs))
    async with open_rig(backends={"half.0": ExpertBackend(alike, None, {})}) as rig:
        (answer,) = (await rig.forward("half.0", HALF, 3 * HALF)).tensors
        assert answer.dtype == jnp.bfloat16
        assert (answer == -5).all()
        broken = HALF.copy()
        broken[1, 2] = np.nan
        with pytest.raises(CallRefused, match="expected finite numbers in input 'x', got NaN or infinity"):
            await rig.forward("half.0", HALF, broken)


async def test_dropout_masks_belong_to_the_request(autojump_clock: trio.testing.MockClock) -> None:
    """A row drops by its seed and number, backward too; requests without a seed drop nothing and stay apart."""
    expert = expert_from_linen(Dropping(), rows(1))
    params = expert.init(jax.random.key(0))
    backends = {"drop.0": ExpertBackend(expert, optax.sgd(0.0), params)}
    async with open_rig(cost=CostModel(call_s=1.0), backends=backends) as rig:
        answers: dict[int | None, np.ndarray] = {}

        async def ask(seed: int | None) -> None:
            body = {"uid": "drop.0"} if seed is None else {"uid": "drop.0", "dropout_seed": seed}
            answers[seed] = (await rig.call("expert.forward", body, rows(3))).tensors[0]

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, 1)
            await trio.sleep(0.1)
            for seed in (2, 3, None):
                nursery.start_soon(ask, seed)
        assert rig.node.status()["batches"] == 3
        apply = jax.jit(expert.apply)
        for seed, answer in answers.items():
            keys = None if seed is None else row_keys_of_seed(seed, 3)
            np.testing.assert_allclose(answer, apply(params, rows(3), keys=keys), atol=1e-5)
        body = {"uid": "drop.0", "dropout_seed": 3, "id": b"id"}
        (grads,) = (await rig.call("expert.backward", body, rows(3), np.ones((3, 64), np.float32))).tensors
        mask = np.asarray(answers[3]) != 0
        np.testing.assert_allclose(grads, 2 * mask @ np.asarray(params["Dense_0"]["kernel"]).T, atol=1e-4)


async def test_an_expert_that_is_given_up_answers_what_was_accepted(autojump_clock: trio.testing.MockClock) -> None:
    """Further calls are refused, other experts go on, and its announcement alone is withdrawn; it may return."""
    callers = direct_callers(DirectNetwork(latency_s=0.01), 2)
    grid: dict[str, Any] = {"prefixes": ["ffn"], "grid_size": (2,)}
    device = InlineDevice(CostModel(call_s=1.0))
    async with open_small_swarm(callers, EXPERT, SGD, **grid, device=device) as swarm, trio.open_nursery() as nursery:
        (node,), ask = swarm.nodes, functools.partial(ask_expert, callers[1], callers[0].address)

        async def announced() -> list[str]:
            found = await find_replicas(swarm.swarm.dht, all_uids("ffn", (2,)))
            return [str(uid) for uid, replicas in found.items() if replicas]

        nursery.start_soon(ask, "expert.backward", {"uid": "ffn.0", "id": b"runs"}, rows(1), rows(1))
        nursery.start_soon(ask, "expert.forward", {"uid": "ffn.0"}, rows(1))  # waits
        await trio.sleep(0.5)
        nursery.start_soon(node.give_up, "ffn.0")
        await trio.sleep(0.1)
        with pytest.raises(CallRefused, match=r"unknown expert 'ffn\.0': this node serves 1 experts"):
            await ask("expert.forward", {"uid": "ffn.0"}, rows(1))
        assert set(node.status()["updates"]) == {"ffn.1"}
        await ask("expert.forward", {"uid": "ffn.1"}, rows(1))
        status = node.status()
        assert (status["answered"], status["steps"], status["staleness"]) == (3, 1, 0.0)
        assert await announced() == ["ffn.1"]
        node.adopt("ffn.0", ExpertBackend(EXPERT, None, EXPERT.init(jax.random.key(0))))
        assert (await ask("expert.forward", {"uid": "ffn.0"}, rows(1))).tensors[0].shape == (1, 4)
        await node.introduce(["ffn.0"])
        assert await announced() == ["ffn.0", "ffn.1"]
        with pytest.raises(ValueError, match=r"serves ffn\.0 already"):
            node.adopt("ffn.0", swarm.backends["ffn.1"])


async def test_a_caller_that_gave_up_does_not_hold_a_given_up_expert(autojump_clock: trio.testing.MockClock) -> None:
    """The only job that waits for the expert is taken back, and nothing runs for it: then it can go."""
    async with open_rig(cost=CostModel(call_s=5.0)) as rig, trio.open_nursery() as nursery:
        nursery.start_soon(rig.forward, "ffn.2.3", rows(1))
        await trio.sleep(0.1)

        async def give_up_while_it_waits() -> None:
            await trio.sleep(0.5)
            await rig.node.give_up("ffn.0.1")

        nursery.start_soon(give_up_while_it_waits)
        with pytest.raises(PeerTimeout):
            await rig.forward("ffn.0.1", rows(1), timeout_s=1.0)
        assert "ffn.0.1" in rig.backends
        await trio.sleep(0.1)
        assert "ffn.0.1" not in rig.backends
