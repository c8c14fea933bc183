"""The expert node: batches what arrives together, refuses what does not fit, trains once, announces and withdraws."""

import dataclasses
import functools
import random
from collections.abc import Awaitable, Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trio
from flax import linen as nn

from dmoe_jax.directory import directory
from dmoe_jax.directory.grid import parse_uid
from dmoe_jax.directory.members import list_members
from dmoe_jax.experts import expert_from_functions, expert_from_linen
from dmoe_jax.experts.dropout import row_keys_of_seed
from dmoe_jax.machine.device import CostModel, InlineDevice
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.node.server import open_expert_node
from dmoe_net.clock import SwarmClock
from dmoe_net.dht.node import open_dht_node
from dmoe_net.errors import CallRefused, NetError, PeerBusy, PeerTimeout, RemoteFailure
from dmoe_net.identity import Address
from dmoe_net.rpc.base import Reply
from dmoe_net.wire.compression import Compressed, Compression
from dmoe_net.wire.tensors import as_received
from tests.dmoe_jax.node_rig import EXPERT, HOST, SGD, XL, open_rig, rows
from tests.dmoe_jax.small_swarm import find_experts, identity_of
from tests.net.direct_network import DirectNetwork

KNOWN_COMPRESSIONS = "expected a compression among float16, bfloat16, blockwise8, or none at all, got "


class Dropping(nn.Module):
    """An expert with ordinary dropout."""

    @nn.compact
    def __call__(self, x: Any, deterministic: bool) -> Any:
        return nn.Dropout(0.5, deterministic=deterministic)(nn.Dense(64)(x))


async def test_requests_that_meet_share_one_batch(autojump_clock: trio.testing.MockClock) -> None:
    """While the device is busy the others' requests gather: five calls make two batches, each answer its own."""
    async with open_rig(cost=CostModel(call_s=1.0)) as rig:
        answers: dict[int, np.ndarray] = {}

        async def ask(index: int) -> None:
            answers[index] = (await rig.forward("ffn.0.1", rows(index + 1, seed=index))).tensors[0]

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, 0)
            await trio.sleep(0.1)  # the device works on the first for a second
            for index in range(1, 5):
                nursery.start_soon(ask, index)
        assert rig.node.status()["batches"] == 2
        assert rig.node.status()["forward"] == 5
        asked = np.concatenate([rows(index + 1, seed=index) for index in range(5)])
        expected = jax.jit(EXPERT.apply)(rig.backends["ffn.0.1"].params, asked)
        np.testing.assert_allclose(np.concatenate([answers[index] for index in range(5)]), expected, atol=1e-5)


async def test_backwards_that_meet_are_one_update_on_the_summed_gradient(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Two trainers' gradients in one batch step the expert once, by their sum."""
    async with open_rig(cost=CostModel(call_s=1.0)) as rig:
        params = jax.tree.map(jnp.copy, rig.backends["ffn.0.1"].params)
        x, grads = rows(4), rows(4, seed=9)

        async def ask(part: slice, request_id: bytes) -> None:
            await rig.backward("ffn.0.1", request_id, x[part], grads[part])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.forward, "ffn.2.3", rows(1))  # keeps the device busy while the two arrive
            await trio.sleep(0.1)
            nursery.start_soon(ask, slice(0, 1), b"a")
            nursery.start_soon(ask, slice(1, 4), b"b")
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
async def test_answers_are_compressed_on_request(
    autojump_clock: trio.testing.MockClock, compression: Compression
) -> None:
    """Output and gradients lose what compression loses, no more; without the wish they are exact, however the request
    came. Boolean inputs travel beside compressed ones."""
    async with open_rig() as rig:

        def lossy(array: np.ndarray) -> np.ndarray:
            return as_received(Compressed(np.asarray(array), compression))

        body = {"uid": "xl.0", "compression": compression.value}
        rng = np.random.default_rng(1)
        hidden, memory, grads = (rng.normal(size=(2, n, 4)).astype(np.float32) for n in (3, 2, 3))
        mask = np.ones((2, 2), bool)
        wrapped = [Compressed(array, compression) for array in (hidden, memory, grads)]
        params = jax.tree.map(jnp.copy, rig.backends["xl.0"].params)
        output, input_grads = xl_output_and_grads(params, lossy(hidden), lossy(memory), mask, lossy(grads))

        exact = (await rig.forward("xl.0", wrapped[0], wrapped[1], mask)).tensors[0]
        np.testing.assert_allclose(exact, output, atol=1e-5)
        reply = await rig.call("expert.forward", body, wrapped[0], wrapped[1], mask)
        np.testing.assert_array_equal(reply.tensors[0], lossy(exact))
        assert not np.array_equal(reply.tensors[0], exact)

        tensors = [wrapped[0], wrapped[1], mask, wrapped[2]]
        reply = await rig.call("expert.backward", {**body, "id": b"id"}, *tensors)
        again = await rig.backward("xl.0", b"id", *tensors)  # the same work, and this time as it is
        np.testing.assert_allclose(again.tensors[0], input_grads, atol=1e-5)
        np.testing.assert_array_equal(reply.tensors[0], lossy(again.tensors[0]))
        assert not np.array_equal(reply.tensors[0], again.tensors[0])
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


async def test_a_full_queue_says_busy(autojump_clock: trio.testing.MockClock) -> None:
    """Rows beyond the bound are turned away at once while those that fit are served."""
    config = NodeConfig(max_batch_rows=4, max_waiting_rows=8)
    async with open_rig(cost=CostModel(call_s=1.0), config=config) as rig:
        outcomes: list[str] = []

        async def ask() -> None:
            try:
                await rig.forward("ffn.0.1", rows(4))
                outcomes.append("ok")
            except PeerBusy as busy:
                outcomes.append(str(busy))

        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(ask)
        # All six arrive in one moment of virtual time; trio runs the node's task before, among or after them, so that
        # the first batch has left the queue or not: one or two fit into what forward requests may take of it.
        assert outcomes.count("ok") in (1, 2)
        refusals = [outcome for outcome in outcomes if outcome != "ok"]
        assert set(refusals) == {"the node is busy: 4 rows of forward requests wait already, at most 6 may"}
        assert rig.node.status()["busy"] == len(refusals) == 6 - outcomes.count("ok")


REFUSED: list[tuple[str, dict[str, Any], list[Any], str]] = [
    ("expert.forward", {}, [rows(1)], "expected the uid of an expert as a string, got None"),
    ("expert.forward", {"uid": "ffn.9.9"}, [rows(1)], r"unknown expert 'ffn.9.9': this node serves 3 experts"),
    ("expert.forward", {"uid": "ffn.0.1"}, [], r"expected 1 to 256 rows in a part of a request, got 0"),
    ("expert.forward", {"uid": "ffn.0.1"}, [rows(2, 5)], r"input 'x' as float32\[rows, 4\].*got float32\[2, 5\]"),
    ("expert.forward", {"uid": "ffn.0.1"}, [rows(2).astype(np.float64)], r"got float64\[2, 4\]"),
    ("expert.forward", {"uid": "ffn.0.1"}, [np.array(1.0, np.float32)], "expected 1 to 256 rows.*got 0"),
    ("expert.forward", {"uid": "ffn.0.1"}, [rows(257)], "expected 1 to 256 rows in a part of a request, got 257"),
    ("expert.forward", {"uid": "ffn.0.1"}, [np.full((1, 4), np.nan, np.float32)], "got NaN or infinity"),
    *(
        (
            "expert.forward",
            {"uid": "ffn.0.1", "dropout_seed": seed},
            [rows(1)],
            "dropout_seed must be an integer from 0 to",
        )
        for seed in (-1, 2**63, True, 1.0, "seed")
    ),
    ("expert.forward", {"uid": "ffn.0.1"}, [rows(1)] * 2, r"expected 1 tensors \(input 'x'\) after the index, got 2"),
    ("expert.backward", {"uid": "ffn.0.1", "id": b"x"}, [rows(1)], "input 'x', gradient of output"),
    ("expert.backward", {"uid": "ffn.0.1", "id": b"x"}, [rows(2), rows(1)], "with 2 rows, got"),
    ("expert.backward", {"uid": "ffn.0.1"}, [rows(1), rows(1)], "id must be 1 to 32 bytes, got None"),
    *(
        (method, {"uid": "ffn.0.1", "id": b"x", "compression": name}, tensors, KNOWN_COMPRESSIONS)
        for method, tensors in (("expert.forward", [rows(1)]), ("expert.backward", [rows(1), rows(1)]))
        for name in ("zstd", "none", "BFLOAT16", 8, None)
    ),
    ("expert.backward", {"uid": "ffn.0.1", "id": b"x" * 33}, [rows(1), rows(1)], "1 to 32 bytes"),
    (
        "expert.forward",
        {"uid": "xl.0"},
        [np.zeros((1, 3, 4), np.float32), np.zeros((1, 2, 4), np.float32), np.zeros((1, 2), np.float32)],
        r"input 'memory_mask' as bool\[rows, 2\] with 1 rows, got float32\[1, 2\]",
    ),
]


async def test_what_does_not_fit_is_refused_and_the_node_lives_on(autojump_clock: trio.testing.MockClock) -> None:
    """The refusal says what was expected; the next request is served and nothing was trained."""
    async with open_rig() as rig:
        for method, body, tensors, message in REFUSED:
            with pytest.raises(CallRefused, match=message):
                await rig.call(method, body, *tensors)
            assert (await rig.forward("ffn.0.1", rows(1))).body == {"updates": 0}


async def test_a_crash_in_a_batch_is_that_batch_s_alone(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of the device reaches its callers as RemoteFailure; other experts go on."""
    async with open_rig() as rig:

        def broken(inputs: Any, keys: Any) -> Any:
            raise MemoryError("out of device memory")

        monkeypatch.setattr(rig.backends["ffn.0.1"], "forward", broken)
        with pytest.raises(RemoteFailure, match=r"expert ffn\.0\.1 failed to compute"):
            await rig.forward("ffn.0.1", rows(1))
        await rig.forward("ffn.2.3", rows(1))
        assert rig.node.status()["failed"] == 1
        assert "out of device memory" in caplog.text


async def test_info_describes_the_expert(autojump_clock: trio.testing.MockClock) -> None:
    """A trainer can check shapes before it trains."""
    async with open_rig() as rig:
        body = (await rig.call("expert.info", {"uid": "xl.0"})).body
        assert body["kind"] == "transformer_xl"
        assert [(spec["name"], spec["shape"], spec["differentiable"]) for spec in body["inputs"]] == [
            ("hidden", [3, 4], True),
            ("memory", [2, 4], False),
            ("memory_mask", [2], False),
        ]
        assert body["output"]["shape"] == [3, 4]


async def test_experts_are_announced_renewed_and_withdrawn(autojump_clock: trio.testing.MockClock) -> None:
    """Found while the node lives, beyond the life of one record, and gone at once after a clean end."""
    uids = [parse_uid(uid) for uid in ("ffn.0.1", "ffn.2.3", "xl.0")]
    network = DirectNetwork(latency_s=0.01)
    keys = identity_of(0), identity_of(1)
    meeting, host = (
        network.caller(Address(name, 1), key.peer_id) for name, key in zip(("meeting", "node"), keys, strict=True)
    )
    clock = SwarmClock(start_s=50.0)
    backends = {
        str(uid): ExpertBackend(EXPERT, None, EXPERT.init(jax.random.key(0))) for uid in uids if uid.prefix == "ffn"
    }
    config = NodeConfig(announce_period_s=10.0, record_lifetime_s=30.0)
    async with (
        open_dht_node(meeting, identity=keys[0], clock=clock, rng=random.Random(5)) as observer,
        open_dht_node(
            host, identity=keys[1], clock=clock, rng=random.Random(6), initial_peers=[Address("meeting", 1)]
        ) as host_dht,
    ):
        async with open_expert_node(host, host_dht, backends, device=InlineDevice(), config=config):
            for _ in range(2):
                async with directory.open_expert_directory(observer) as reader:
                    found = await find_experts(reader, uids)
                assert [uid for uid, contact in found.items() if contact is not None] == uids[:2]
                assert [member.contact.address for member in await list_members(observer, "dmoe")] == [HOST]
                await trio.sleep(100.0)
        async with directory.open_expert_directory(observer) as reader:
            assert set((await find_experts(reader, uids)).values()) == {None}
        assert await list_members(observer, "dmoe") == ()


@pytest.mark.parametrize("leave_timeout_s", [5.0, 0.0])
async def test_a_node_that_leaves_answers_what_it_accepted(
    autojump_clock: trio.testing.MockClock, leave_timeout_s: float
) -> None:
    """A request that waits is computed and answered, its retry too; a later one is refused at once with a word. Without
    time for leaving, none of these is answered."""
    outcomes: dict[str, str] = {}
    x, grads = rows(2), rows(2, seed=9)

    async def ask(name: str, call: Callable[[], Awaitable[Reply]], *, after_s: float = 0.0) -> None:
        await trio.sleep(after_s)
        try:
            await call()
            outcomes[name] = "answered"
        except NetError as error:
            outcomes[name] = str(error)

    async with trio.open_nursery() as nursery:
        async with open_rig(cost=CostModel(call_s=1.0), config=NodeConfig(leave_timeout_s=leave_timeout_s)) as rig:
            again = functools.partial(rig.backward, "ffn.0.1", b"id", x, grads, timeout_s=10.0)
            nursery.start_soon(ask, "running", functools.partial(rig.forward, "ffn.2.3", rows(1), timeout_s=10.0))
            await trio.sleep(0.1)
            nursery.start_soon(ask, "waiting", again)
            await trio.sleep(0.1)
            nursery.start_soon(functools.partial(ask, "retry", again, after_s=0.1))
            late = functools.partial(rig.forward, "ffn.0.1", rows(1), timeout_s=10.0)
            nursery.start_soon(functools.partial(ask, "late", late, after_s=0.1))
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
    """A joined batch that would not stay finite is taken apart: the innocent train, the guilty is refused by name, and
    a retry of it is refused again without a second look."""
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


async def test_inputs_may_share_a_name(autojump_clock: trio.testing.MockClock) -> None:
    """Names are for people; the order of the tensors says which is which."""
    expert = expert_from_functions(lambda key: {}, lambda params, x, *more: x + more[0], rows(1), rows(1))
    alike = expert._replace(inputs=tuple(dataclasses.replace(spec, name="x") for spec in expert.inputs))
    async with open_rig(backends={"sum.0": ExpertBackend(alike, None, {})}) as rig:
        (answer,) = (await rig.forward("sum.0", rows(2), rows(2))).tensors
        np.testing.assert_array_equal(answer, 2 * rows(2))


async def test_nan_of_any_floating_type_is_refused(autojump_clock: trio.testing.MockClock) -> None:
    """bfloat16 too, which NumPy does not count as floating."""
    expert = expert_from_functions(lambda key: {}, lambda params, x: x, jnp.zeros((1, 4), jnp.bfloat16))
    backends = {"half.0": ExpertBackend(expert, None, {})}
    async with open_rig(backends=backends) as rig:
        sound = np.ones((2, 4), jnp.bfloat16)
        (answer,) = (await rig.forward("half.0", sound)).tensors
        assert answer.dtype == jnp.bfloat16
        sound[1, 2] = np.nan
        with pytest.raises(CallRefused, match="expected finite numbers in input 'x', got NaN or infinity"):
            await rig.forward("half.0", sound)


async def test_dropout_masks_belong_to_the_request(autojump_clock: trio.testing.MockClock) -> None:
    """Row r of a request drops by its seed and r, whatever it is batched with; backward drops the same; without a seed
    nothing is dropped, and such requests are not joined with the others."""
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
