"""Copies know what each other's states were learnt from: a retry at another copy trains nothing twice."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
import pytest
import trio
import trio.testing

from dmoe_jax.machine.device import CostModel
from dmoe_jax.mixture.expert_calls import BACKWARD
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.node.queue import name_of
from dmoe_jax.placement import learnt
from dmoe_jax.placement.learnt import LEARNT, LearntNames, packed, unpacked
from dmoe_net.errors import CallRefused
from dmoe_net.identity import Address, Contact, PeerId
from dmoe_net.rpc.base import Reply, Request
from tests.dmoe_jax.node_rig import ask_expert, open_rig, rows
from tests.dmoe_jax.test_placement_copies import NUM_EXPERTS, TIMEOUT_S, Scene, on_stage
from tests.net.direct_network import DirectNetwork

SGD = optax.sgd(0.5)
"""One object, so that what one test compiles serves the others."""
UID = "ffn.3"
KNOWN = "has learnt from this request before"


async def backward(it: Scene, host: str, request_id: bytes = b"one") -> None:
    """A trainer's call: the expert is linear, and takes 0.5 off each of its numbers."""
    ones = np.ones((1, 4), np.float32)
    contact = it.world.replicas(host).averager._contact
    body = {"uid": UID, "id": request_id}
    await ask_expert(it.loads[0].swarm.peer.rpc, contact, BACKWARD, body, ones, ones, timeout_s=5.0)


def weights(it: Scene, host: str) -> np.ndarray:
    return np.array(it.world.served[host].backends[UID].params)


def test_a_retry_at_another_copy_is_known_there_once_the_average_is() -> None:
    """Before the average a copy that has not learnt from a request may; after it the retry is refused."""

    async def body(it: Scene) -> None:
        before = weights(it, "a")
        await backward(it, "a")
        await backward(it, "a", b"two")
        await backward(it, "b", b"two")  # as if a's answer had been lost
        np.testing.assert_allclose(weights(it, "a"), before - 1.0, atol=1e-6)
        np.testing.assert_allclose(weights(it, "b"), before - 0.5, atol=1e-6)
        await it.after_round()
        it.world.check_agree("a", "b")
        mean = weights(it, "b")  # two updates and one: by two thirds a's
        np.testing.assert_allclose(mean, before - (2 * 1.0 + 0.5) / 3, atol=1e-6)
        for host, request_id in (("a", b"one"), ("a", b"two"), ("b", b"two")):
            await backward(it, host, request_id)  # answered from memory
        with pytest.raises(CallRefused, match=KNOWN):
            await backward(it, "b", b"one")
        np.testing.assert_array_equal(weights(it, "b"), mean)
        np.testing.assert_array_equal(weights(it, "a"), mean)
        await backward(it, "b", b"three")
        np.testing.assert_allclose(weights(it, "b"), mean - 0.5, atol=1e-6)

    on_stage(body, "a", "b", trainers=1, optimizer=SGD)


def test_a_newcomer_knows_what_the_state_that_it_takes_was_learnt_from() -> None:
    """It refuses a retry of what is in its state, and learns from what is not. States that were fetched make room for
    the next ones at once."""

    async def body(it: Scene) -> None:
        await backward(it, "a")
        started = trio.current_time()
        await it.start("c")
        assert trio.current_time() < started + 8.0
        taken = weights(it, "c")
        np.testing.assert_array_equal(taken, weights(it, "a"))
        with pytest.raises(CallRefused, match=KNOWN):
            await backward(it, "c")
        np.testing.assert_array_equal(weights(it, "c"), taken)
        await backward(it, "c", b"another")
        np.testing.assert_allclose(weights(it, "c"), taken - 0.5, atol=1e-6)

    on_stage(body, "a", trainers=1, optimizer=SGD, average_period_s=600.0)


@pytest.mark.parametrize("lies", [True, False], ids=["lies", "is silent"])
def test_an_average_of_which_it_is_not_known_what_was_learnt_is_not_used(lies: bool) -> None:
    """The copy that was told nothing of use keeps what it has, and counts why; the other one, which was, averages."""

    async def body(it: Scene) -> None:
        await backward(it, "a")
        before, names_of_a = it.world.numbers("b"), it.world.replicas("a").averager.learnt
        honest = names_of_a.offer

        def offer(group_id: bytes, names: Sequence[Sequence[bytes]]) -> None:
            if lies:
                honest(group_id, names[1:])

        names_of_a.offer = offer  # type: ignore[method-assign]
        await it.after_round()
        jax.tree.map(np.testing.assert_array_equal, it.world.numbers("b"), before)
        copies = it.world.copies("b")
        assert copies["averages"] == 0
        assert copies["failed"] == {"another copy did not say what it has learnt from": NUM_EXPERTS}
        assert it.world.copies("a")["averages"] == NUM_EXPERTS
        names_of_a.offer = honest  # type: ignore[method-assign]
        await it.after_round()
        assert it.world.copies("b")["averages"] == NUM_EXPERTS
        with pytest.raises(CallRefused, match=KNOWN):
            await backward(it, "b")

    assert TIMEOUT_S < 9.0  # after which `after_round` looks
    on_stage(body, "a", "b", trainers=1, optimizer=SGD)


async def test_a_request_that_waits_while_its_name_arrives_is_refused(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """When two requests wait to be one batch, the expert learns only from the one that it does not know."""
    uid = "ffn.0.1"
    async with open_rig(cost=CostModel(call_s=1.0), config=NodeConfig(max_batch_rows=4)) as rig:
        outcomes: dict[bytes, str] = {}

        async def ask(request_id: bytes) -> None:
            try:
                await rig.backward(uid, request_id, rows(1), rows(1))
            except CallRefused as refused:
                outcomes[request_id] = str(refused)
            else:
                outcomes[request_id] = "learnt"

        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.forward, "ffn.2.3", rows(4))
            await trio.sleep(0.1)
            for request_id in (b"known", b"new"):
                nursery.start_soon(ask, request_id)
            await trio.sleep(0.1)
            name = name_of(rig.trainer.peer_id.raw, uid, b"known")
            rig.backends[uid].learnt_elsewhere([name], trio.current_time())
        assert outcomes[b"new"] == "learnt"
        assert KNOWN in outcomes[b"known"]
        assert rig.backends[uid].update_count == 1
        with trio.fail_after(5.0):  # it holds up nobody who waits until the expert has no work any more
            await rig.node._runner.finish(uid)


INT, NAMES = np.int64, np.zeros((3, 16), np.uint8)
WRONG: dict[str, tuple[Any, ...]] = {
    "nothing": (),
    "no names": (np.array([1, 2], INT),),
    "counts of another type": (np.array([1.0, 2.0]), NAMES),
    "fewer than nothing": (np.array([-1, 4], INT), NAMES),
    "more than there are": (np.array([1, 3], INT), NAMES),
    "of another number of experts": (np.array([1, 1, 1], INT), NAMES),
    "longer names": (np.array([1, 2], INT), np.zeros((3, 17), np.uint8)),
    "too many": (np.array([0, 65537], INT), np.zeros((65537, 16), np.uint8)),
}


@pytest.mark.parametrize("tensors", WRONG.values(), ids=WRONG)
async def test_what_strangers_say_is_checked(tensors: tuple[Any, ...], autojump_clock: trio.testing.MockClock) -> None:
    """A peer that answers nonsense has said nothing; the names of the others are taken all the same."""

    async def nonsense(request: Request) -> Reply:
        return Reply(tensors=tensors)

    network, group = DirectNetwork(), bytes(16)
    asking, honest, liar = (
        network.caller(Address(name, 1), PeerId(bytes([number]) * 32))
        for number, name in enumerate(("asking", "honest", "liar"))
    )
    others = LearntNames(honest, timeout_s=10.0)
    honest.add_handler(LEARNT, others.serve)
    liar.add_handler(LEARNT, nonsense)
    name = bytes(range(16))
    contacts = [Contact(each.peer_id, each.address) for each in (honest, liar) if each.address is not None]
    async with trio.open_nursery() as nursery:
        found: list[Any] = []

        async def ask() -> None:
            found.extend(await LearntNames(asking, timeout_s=10.0).of_others(group, contacts, 2))

        nursery.start_soon(ask)
        await trio.sleep(1.0)
        others.offer(group, [[], [name]])  # it is waited for
    assert found == [[[], [name]], {liar.peer_id}]


async def test_nobody_waits_for_ever_for_an_average_that_is_not_made(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Strangers could fill the places of the method with groups that they make up."""
    network = DirectNetwork()
    node, stranger = (network.caller(Address(name, 1), PeerId(name.ljust(32).encode())) for name in ("node", "else"))
    node.add_handler(LEARNT, LearntNames(node, timeout_s=10.0).serve)
    with pytest.raises(CallRefused, match="no part in an average of that group"):
        await stranger.call(Address("node", 1), LEARNT, {"group": bytes(16)}, timeout_s=600.0)
    assert 10.0 <= trio.current_time() < 11.0
    with pytest.raises(CallRefused, match="group"):
        await stranger.call(Address("node", 1), LEARNT, {"group": bytes(15)}, timeout_s=600.0)


async def test_of_too_many_names_the_newest_travel(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If three experts have nine names and eight may travel, each tells two at most; an answer with more is refused."""
    monkeypatch.setattr(learnt, "MOST_NAMES", 8)
    network, group = DirectNetwork(), bytes(16)
    asking, told = (network.caller(Address(name, 1), PeerId(name.ljust(32).encode())) for name in ("asking", "told"))
    names = [[bytes([expert, number, *bytes(14)]) for number in range(expert + 2)] for expert in range(3)]
    others, ours = LearntNames(told, timeout_s=1.0), LearntNames(asking, timeout_s=1.0)
    told.add_handler(LEARNT, others.serve)
    others.offer(group, names)
    contacts = [Contact(told.peer_id, Address("told", 1))]
    assert await ours.of_others(group, contacts, 3) == ([each[-2:] for each in names], set())
    monkeypatch.setattr(learnt, "MOST_NAMES", 5)
    assert await ours.of_others(group, contacts, 3) == ([[], [], []], {told.peer_id})


def test_names_travel_as_an_array() -> None:
    """As many as there are, and none."""
    for names in ([], [bytes(range(16)), bytes(16)]):
        assert unpacked(packed(names)) == names
        assert packed(names).shape == (len(names), 16)
