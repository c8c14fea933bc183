"""Ours: a peer that serves echo, take and give, and the calls that measure it."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import numpy as np
import trio

from dmoe_net.identity import Address
from dmoe_net.keys import Identity
from dmoe_net.rpc.base import Reply, Request
from dmoe_net.rpc.peer import RpcPeer, open_rpc_peer
from dmoe_net.transport.tcp import TcpTransport
from dmoe_net.transport.tls import TlsTransport
from dmoe_net.wire.tensors import plain
from experiments.transport_speed.slices import ECHO, GIVE, TAKE, SliceTimer

_ANY_PORT = Address("127.0.0.1", 0)
_MAX_CONCURRENT = 256
"""More than any number of callers here: nobody is to be told that the server is busy."""

_TIMEOUT_S = 60.0
_LOAD_IN_FLIGHT = 2
"""Transfers under way while small calls are timed: a new one is always there when one ends."""

Call = Callable[[], Awaitable[None]]


@asynccontextmanager
async def open_peer(network: str, *, listen: bool = False) -> AsyncIterator[RpcPeer]:
    """Open a peer on loopback with a fresh identity, on the network "tls" or "plain"."""
    identity = Identity.generate()
    transport = TlsTransport(identity) if network == "tls" else TcpTransport()
    async with open_rpc_peer(transport, peer_id=identity.peer_id, listen=_ANY_PORT if listen else None) as peer:
        yield peer


@asynccontextmanager
async def open_server(network: str, tensor: bytes) -> AsyncIterator[Address]:
    """Serve what is measured; yields the address."""
    array = np.frombuffer(tensor, np.uint8)

    async def echo(request: Request) -> Reply:
        return Reply(body=request.body)

    async def take(request: Request) -> Reply:
        return Reply(body={"nbytes": request.tensors[0].nbytes})

    async def give(request: Request) -> Reply:
        del request
        return Reply(tensors=(array,))

    async with open_peer(network, listen=True) as peer:
        for method, handler in ((ECHO, echo), (TAKE, take), (GIVE, give)):
            peer.add_handler(method, handler, max_concurrent=_MAX_CONCURRENT)
        assert peer.address is not None
        yield peer.address


async def measure(
    address: Address, network: str, kind: str, *, payload: bytes, timer: SliceTimer, callers: int = 1
) -> dict[str, float]:
    """Let so many callers share one connection; each makes one call after the other: the next leaves when the last was
    answered, as in the baseline."""
    async with open_peer(network) as peer:
        await _repeat(_call(peer, address, kind, payload), timer, callers=callers)
        return timer.record()


async def measure_head_of_line(
    address: Address, *, message: bytes, tensor: bytes, idle: SliceTimer, sending: SliceTimer, receiving: SliceTimer
) -> dict[str, dict[str, float]]:
    """Time small calls of one caller on one encrypted connection: alone, beside tensors that leave, beside tensors that
    come in."""
    async with open_peer("tls") as peer:
        echo = _call(peer, address, ECHO, message)
        await _repeat(echo, idle)
        records = {"rpc_tls_one_caller": idle.record()}
        for name, kind, timer in (("sending", TAKE, sending), ("receiving", GIVE, receiving)):
            transfer = _call(peer, address, kind, tensor)
            records[f"rpc_tls_calls_while_{name}"] = await _calls_beside(transfer, echo, timer)
        return records


async def _calls_beside(transfer: Call, call: Call, timer: SliceTimer) -> dict[str, float]:
    is_over = trio.Event()

    async def load() -> None:
        while not is_over.is_set():
            await transfer()

    async with trio.open_nursery() as nursery:
        await transfer()
        for _ in range(_LOAD_IN_FLIGHT):
            nursery.start_soon(load)
        await _repeat(call, timer)
        record = timer.record()
        is_over.set()
    return record


async def _repeat(call: Call, timer: SliceTimer, *, callers: int = 1) -> None:
    async def call_again() -> None:
        while timer.goes_on():
            started = time.perf_counter()
            await call()
            timer.latencies_s.append(time.perf_counter() - started)

    for _ in range(timer.warm_up_calls):
        await call()
    timer.start()
    async with trio.open_nursery() as nursery:
        for _ in range(callers):
            nursery.start_soon(call_again)


def _call(peer: RpcPeer, address: Address, kind: str, payload: bytes) -> Call:
    body = {"message": payload} if kind == ECHO else {}
    tensors = (np.frombuffer(payload, np.uint8),) if kind == TAKE else ()

    def is_answer(reply: Reply) -> bool:
        if kind == ECHO:
            return reply.body == body
        nbytes = reply.body["nbytes"] if kind == TAKE else plain(reply.tensors[0]).nbytes
        return nbytes == len(payload)

    async def call() -> None:
        if not is_answer(await peer.call(address, kind, body, tensors, timeout_s=_TIMEOUT_S)):
            raise ConnectionError(f"the answer to {kind} is not what was expected")

    return call
