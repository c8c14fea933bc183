"""Ours: a peer that serves `echo`, `take` and `give`, and the calls that measure it."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio

from experiments.transport_speed.slice_timer import SliceTimer
from net.identity import Address
from net.keys import Identity
from net.rpc.base import Reply, Request
from net.rpc.peer import RpcPeer, open_rpc_peer
from net.transport.tcp import TcpTransport
from net.transport.tls import TlsTransport
from net.wire.tensors import Tensor, plain

ECHO, TAKE, GIVE = "echo", "take", "give"
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
async def open_server(network: str, tensor: Tensor) -> AsyncIterator[Address]:
    """Serve what is measured; the address."""

    async def echo(request: Request) -> Reply:
        return Reply(body=request.body)

    async def take(request: Request) -> Reply:
        return Reply(body={"nbytes": request.tensors[0].nbytes})

    async def give(request: Request) -> Reply:
        del request
        return Reply(tensors=(tensor,))

    async with open_peer(network, listen=True) as peer:
        for method, handler in ((ECHO, echo), (TAKE, take), (GIVE, give)):
            peer.add_handler(method, handler, max_concurrent=_MAX_CONCURRENT)
        assert peer.address is not None
        yield peer.address


async def measure_calls(
    address: Address, network: str, *, callers: int, message: bytes, timer: SliceTimer
) -> dict[str, float]:
    """Let so many callers share one connection; each makes one echo after the other."""
    async with open_peer(network) as peer:
        await _repeat(_echo(peer, address, message), timer, callers=callers)
        return timer.record()


async def measure_transfer(
    address: Address, network: str, method: str, *, tensor: Tensor, timer: SliceTimer
) -> dict[str, float]:
    """Send (`TAKE`) or receive (`GIVE`) tensors one after the other: the next leaves when the last was answered, as in
    the baseline."""
    async with open_peer(network) as peer:
        await _repeat(_transfer(peer, address, method, tensor), timer)
        return timer.record(nbytes=tensor.nbytes)


async def measure_head_of_line(
    address: Address, *, message: bytes, tensor: Tensor, idle: SliceTimer, sending: SliceTimer, receiving: SliceTimer
) -> dict[str, dict[str, float]]:
    """Time small calls of one caller on one encrypted connection: alone, beside tensors that leave, beside tensors that
    come in."""
    async with open_peer("tls") as peer:
        echo = _echo(peer, address, message)
        await _repeat(echo, idle)
        records = {"rpc_tls_one_caller": idle.record()}
        for name, method, timer in (("sending", TAKE, sending), ("receiving", GIVE, receiving)):
            transfer = _transfer(peer, address, method, tensor)
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


def _echo(peer: RpcPeer, address: Address, message: bytes) -> Call:
    body = {"message": message}

    async def call() -> None:
        reply = await peer.call(address, ECHO, body, timeout_s=_TIMEOUT_S)
        if reply.body != body:
            raise ConnectionError("the echo is not what was sent")

    return call


def _transfer(peer: RpcPeer, address: Address, method: str, tensor: Tensor) -> Call:
    async def send() -> None:
        reply = await peer.call(address, TAKE, {}, (tensor,), timeout_s=_TIMEOUT_S)
        if reply.body["nbytes"] != tensor.nbytes:
            raise ConnectionError("the tensor was not acknowledged")

    async def receive() -> None:
        reply = await peer.call(address, GIVE, {}, timeout_s=_TIMEOUT_S)
        if plain(reply.tensors[0]).nbytes != tensor.nbytes:
            raise ConnectionError("the tensor did not come")

    return send if method == TAKE else receive
