"""A network without a network: a call awaits the target's handler directly, after one sleep, in virtual time.

Nothing is encoded or decoded, but tensors lose what compression would lose. Peers can be taken down, and the network
can be cut in two; both look like silence.
"""

import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import trio

from dmoe_net.clock import SwarmClock
from dmoe_net.dht.entries import Entry, EntryReader, encode_value, sign_entry
from dmoe_net.dht.messages import FIND, STORE, Find, FindReply, find_body, parse_found_untrusted, store_body
from dmoe_net.dht.node import DhtNode, open_dht_node
from dmoe_net.dht.routing_table import key_id, node_id
from dmoe_net.errors import CallFailed, CallRefused, DialFailed, PeerBusy, PeerTimeout, PeerUnavailable, RemoteFailure
from dmoe_net.identity import Address, Contact, PeerId
from dmoe_net.keys import Identity
from dmoe_net.peer_health import PeerHealth
from dmoe_net.rpc.base import Body, Handler, Reply, Request
from dmoe_net.rpc.bulk import BulkTraffic
from dmoe_net.wire.sinks import put_into
from dmoe_net.wire.tensors import Outgoing, Tensor, as_received, describe, layout_untrusted


class DirectNetwork:
    """Callers that reach each other by address, `latency_s` after the call, which may be drawn for each."""

    def __init__(self, *, latency_s: float | Callable[[], float] = 0.05) -> None:
        self._latency_s = latency_s
        self._callers: dict[Address, DirectCaller] = {}
        self._down: set[Address] = set()
        self._island: set[Address] = set()
        self.calls: list[tuple[Address | None, Address, str]] = []
        """Every call placed: from where, to where, method."""
        self.tensor_bytes: Counter[str] = Counter()
        """By method, the bytes that the tensors of requests and replies would have taken on a wire."""

    def caller(self, address: Address | None, peer_id: PeerId) -> "DirectCaller":
        """A new caller; it can be called if it has an address. A second one at an address replaces the first."""
        caller = DirectCaller(self, address, peer_id)
        if address is not None:
            self._callers[address] = caller
        return caller

    def take_down(self, *addresses: Address) -> None:
        """From now on calls to these addresses meet silence, and calls from them too."""
        self._down.update(addresses)

    def bring_up(self, *addresses: Address) -> None:
        """Undo `take_down`."""
        self._down.difference_update(addresses)

    def partition(self, *island: Address) -> None:
        """Cut these addresses off from all others. Without arguments: heal."""
        self._island = set(island)

    def latency(self) -> float:
        return self._latency_s if isinstance(self._latency_s, float) else self._latency_s()

    def hand_over(self, method: str, tensors: Sequence[Outgoing]) -> tuple[Tensor, ...]:
        """The tensors of a request or reply as they arrive at the other end."""
        self.tensor_bytes[method] += layout_untrusted(describe(tensors)).nbytes
        return tuple(map(as_received, tensors))

    async def ask(self, node: DhtNode, method: str, body: Body) -> Body:
        """Answer of a DHT node to a stranger in client mode, at once, whether it can be reached or not."""
        stranger, asked = DirectCaller(self, None, PeerId(bytes(32))), self._callers[node.address]
        return (await asked.serve(method, {**body, "client": True}, (), stranger, None)).body

    def alter(self, node: DhtNode, method: str, answer: Callable[[Handler, Request], Awaitable[Reply]]) -> None:
        """From now on a node answers a method by this function, which is given its own handler."""
        caller = self._callers[node.address]
        caller._handlers[method] = partial(answer, caller._handlers[method])

    def at(self, address: Address) -> "DirectCaller | None":
        """Caller at an address; None if there was never one."""
        return self._callers.get(address)

    def target(self, source: Address | None, address: Address) -> "DirectCaller | None":
        """Caller that gets a call, or None if it is lost in silence; `DialFailed` if nobody was ever at the address."""
        if address not in self._callers:
            raise DialFailed(f"nobody listens at {address}")
        is_cut = (source in self._island) != (address in self._island)
        return None if is_cut or address in self._down or source in self._down else self._callers[address]


class DirectCaller:
    """One peer's end of a `DirectNetwork`; implements `dmoe_net.rpc.base.Caller`."""

    def __init__(self, network: DirectNetwork, address: Address | None, peer_id: PeerId) -> None:
        self._network = network
        self._handlers: dict[str, Handler] = {}
        self.peer_id = peer_id
        self.address = address
        self.health = PeerHealth()
        self.bulk = BulkTraffic()
        self._reached: set[Contact] = set()

    async def written(self, peer_id: PeerId) -> None:
        del peer_id
        await trio.lowlevel.checkpoint()

    def moved_bytes(self, peer_id: PeerId) -> int:
        """Nothing ever: calls are answered by a function."""
        return 0

    def is_reached(self, contact: Contact) -> bool:
        """True if this peer was ever called at its address."""
        return contact in self._reached

    async def reach(self, contact: Contact, *, timeout_s: float) -> None:
        """Sleep once, and look who is there."""
        with trio.move_on_after(timeout_s):
            callee = await self._callee(contact.address)
            if callee.peer_id != contact.peer_id:
                raise DialFailed(f"{callee.peer_id.short} answers at {contact.address}")
            self._reached.add(contact)
            return
        raise DialFailed(f"cannot connect to {contact}")

    async def _callee(self, address: Address) -> "DirectCaller":
        """Sleep once, and return the caller at an address; wait for ever where silence is the answer."""
        await trio.sleep(self._network.latency())
        callee = self._network.target(self.address, address)
        return await trio.sleep_forever() if callee is None else callee

    def add_handler(self, method: str, handler: Handler, *, max_concurrent: int = 64) -> None:
        """Serve a method; the bound on concurrency is kept."""
        limiter = trio.CapacityLimiter(max_concurrent)

        async def limited(request: Request) -> Reply:
            borrower = object()
            try:
                limiter.acquire_on_behalf_of_nowait(borrower)
            except trio.WouldBlock:
                raise PeerBusy(f"too many calls of {method}") from None
            try:
                return await handler(request)
            finally:
                limiter.release_on_behalf_of(borrower)

        if method in self._handlers:
            raise ValueError(f"a handler for {method} is registered already")
        self._handlers[method] = limited

    def remove_handler(self, method: str) -> None:
        del self._handlers[method]

    async def call(
        self,
        target: Contact | Address,
        method: str,
        body: Body,
        tensors: Sequence[Outgoing] = (),
        *,
        timeout_s: float,
        bulk_bytes: int = 0,
        on_partial: Callable[[Reply], None] | None = None,
        into: Tensor | None = None,
    ) -> Reply:
        """Sleep once, then run the target's handler: of whoever sits at a contact's address, for nothing is proven."""
        address = target.address if isinstance(target, Contact) else target
        self._network.calls.append((self.address, address, method))
        started = trio.current_time()
        known = self._network.at(address)
        service = (known.peer_id if known else address, method.partition(".")[0])
        try:
            with trio.move_on_after(timeout_s) as scope:
                callee = await self._callee(address)
                self._reached.add(Contact(callee.peer_id, address))
                reply = await callee.serve(method, body, self._network.hand_over(method, tensors), self, on_partial)
            if scope.cancelled_caught:
                raise PeerTimeout(f"{address} did not answer {method} within {timeout_s} s")
        except PeerUnavailable as error:
            now = trio.current_time()
            self.health.failed(service, now, str(error), together_s=now - started)
            raise
        except CallFailed:
            self.health.succeeded(service)
            raise
        self.health.succeeded(service)
        return reply if into is None else replace(reply, tensors=put_into(into, reply.tensors))

    async def serve(
        self,
        method: str,
        body: Body,
        tensors: tuple[Tensor, ...],
        source: "DirectCaller",
        on_partial: Callable[[Reply], None] | None,
    ) -> Reply:
        """Run a handler the way the RPC layer does: foreign errors become `RemoteFailure`."""
        if method not in self._handlers:
            raise CallRefused(f"unknown method {method}")

        def received(reply: Reply) -> Reply:
            return Reply(body=reply.body, tensors=self._network.hand_over(method, reply.tensors))

        def send_partial(reply: Reply) -> bool:
            on_partial(received(reply))
            return True

        request = Request(
            method=method,
            body=body,
            tensors=tensors,
            peer_id=source.peer_id,
            peer_address=source.address,
            send_partial=None if on_partial is None else send_partial,
        )
        try:
            return received(await self._handlers[method](request))
        except CallFailed:
            raise
        except Exception as error:
            raise RemoteFailure(repr(error)) from error


def address_of(index: int) -> Address:
    return Address("10.0.0.1", 1000 + index)


def exponential_latency(mean_s: float, seed: int) -> Callable[[], float]:
    rng = random.Random(seed)
    return lambda: rng.expovariate(1 / mean_s)


@asynccontextmanager
async def open_swarm(network: DirectNetwork, count: int, **options: Any) -> AsyncIterator[list[DhtNode]]:
    """DHT nodes at `address_of(0)`, `address_of(1)`, ..., joined one by one through the first."""
    async with AsyncExitStack() as stack:
        nodes: list[DhtNode] = []
        for index in range(count):
            node = open_node(network, index, [address_of(0)] if index else [], **options)
            nodes.append(await stack.enter_async_context(node))
        await trio.sleep(1.0)  # the last newcomers get pinged and known
        yield nodes


@asynccontextmanager
async def swarm_of(
    count: int, *, latency_s: float | Callable[[], float] = 0.05, **options: Any
) -> AsyncIterator[tuple[DirectNetwork, list[DhtNode]]]:
    """A network, and nodes on it as of `open_swarm`."""
    network = DirectNetwork(latency_s=latency_s)
    async with open_swarm(network, count, **options) as nodes:
        yield network, nodes


def open_node(
    network: DirectNetwork, index: int, initial: Sequence[Address], *, identity: Identity | None = None, **options: Any
) -> Any:
    """One node at `address_of(index)`, not entered yet; its chance, and its id unless told, are drawn from `index`."""
    rng = random.Random(index)
    identity = identity or Identity.from_seed(rng.randbytes(32))
    caller, options = network.caller(address_of(index), identity.peer_id), {"clock": SwarmClock.virtual(), **options}
    return open_dht_node(caller, identity=identity, rng=rng, initial_peers=initial, **options)


def now() -> float:
    """Swarm time; all nodes of these tests use trio's clock itself."""
    return trio.current_time()


def signed(owner: Identity, key: str, value: object = "junk", **fields: Any) -> Entry:
    """An entry of now, issued by whoever has the key of the owner."""
    known = {"sequence": int(now() * 1000), "issued_at": now(), "life_s": 300.0, **fields}
    return sign_entry(owner, key_id(key), value=encode_value(value), **known)


async def copy_of(network: DirectNetwork, node: DhtNode, key: str) -> FindReply:
    """The copy of a record that a node keeps itself, as it tells a stranger."""
    question = Find(key_id(key), 0, record=True)
    return parse_found_untrusted(await network.ask(node, FIND, find_body(question)), key_id(key), EntryReader())


async def bring(network: DirectNetwork, node: DhtNode, key: str, entry: Entry) -> None:
    """Store an entry at one node alone."""
    await network.ask(node, STORE, store_body(key_id(key), [(entry, entry.life_s)]))


async def holders(network: DirectNetwork, nodes: Sequence[DhtNode], key: str) -> list[DhtNode]:
    """The nodes that keep a record themselves."""
    return [node for node in nodes if (await copy_of(network, node, key)).position is not None]


def nearest(nodes: Sequence[DhtNode], key: str, count: int) -> set[PeerId]:
    """The oracle: who should keep a record."""
    ids = sorted((node.peer_id for node in nodes), key=lambda peer: node_id(peer) ^ key_id(key))
    return set(ids[:count])


async def value_at(node: DhtNode, key: str) -> Any:
    """The only value under a key that a node finds; None if there is none."""
    found = await node.get(key)
    assert len(found) < 2
    return found[0].value if found else None
