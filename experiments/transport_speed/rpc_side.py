"""Ours: a peer that serves `echo`, `take` and `give`, and the calls that measure it."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio

from experiments.transport_speed.ratios import Slice
from experiments.transport_speed.stopwatch import Pace, Stopwatch
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


@asynccontextmanager
async def open_peer(*, encrypted: bool, listen: bool = False) -> AsyncIterator[RpcPeer]:
    """A peer on loopback with a fresh identity."""
    identity = Identity.generate()
    transport = TlsTransport(identity) if encrypted else TcpTransport()
    async with open_rpc_peer(transport, peer_id=identity.peer_id, listen=_ANY_PORT if listen else None) as peer:
        yield peer


def add_handlers(peer: RpcPeer, tensor: Tensor) -> None:
    """Serve what is measured."""

    async def echo(request: Request) -> Reply:
        return Reply(body=request.body)

    async def take(request: Request) -> Reply:
        return Reply(body={"nbytes": request.tensors[0].nbytes})

    async def give(request: Request) -> Reply:
        del request
        return Reply(tensors=(tensor,))

    for method, handler in ((ECHO, echo), (TAKE, take), (GIVE, give)):
        peer.add_handler(method, handler, max_concurrent=_MAX_CONCURRENT)


async def measure_calls(
    address: Address, *, encrypted: bool, callers: int, message: bytes, pace: Pace, stopwatch: Stopwatch
) -> Slice:
    """So many callers share one connection; each makes one echo after the other."""
    async with open_peer(encrypted=encrypted) as peer:
        call = _echo(peer, address, message)
        for _ in range(pace.warm_up_calls):
            await call()
        latencies: list[float] = []
        stopwatch.start()
        async with trio.open_nursery() as nursery:
            for _ in range(callers):
                nursery.start_soon(_repeat, call, latencies, pace, stopwatch)
        return stopwatch.stop(latencies, nbytes=0, calls=len(latencies))


async def measure_transfer(
    address: Address, method: str, *, encrypted: bool, tensor: Tensor, pace: Pace, stopwatch: Stopwatch
) -> Slice:
    """Tensors one after the other: the next leaves when the last was answered, as in the baseline."""
    async with open_peer(encrypted=encrypted) as peer:
        transfer = _transfer(peer, address, method, tensor)
        for _ in range(pace.warm_up_calls):
            await transfer()
        latencies: list[float] = []
        stopwatch.start()
        await _repeat(transfer, latencies, pace, stopwatch)
        return stopwatch.stop(latencies, nbytes=tensor.nbytes * len(latencies), calls=len(latencies))


async def measure_head_of_line(
    address: Address, *, message: bytes, tensor: Tensor, idle: Pace, loaded: Pace, stopwatch: Stopwatch
) -> tuple[Slice, Slice, Slice]:
    """Small calls of one caller on one encrypted connection: alone, beside tensors that leave, beside tensors that
    come in."""
    async with open_peer(encrypted=True) as peer:
        call = _echo(peer, address, message)
        slices = [await _calls_beside(None, call, idle, stopwatch)]
        for method in (TAKE, GIVE):
            slices.append(await _calls_beside(_transfer(peer, address, method, tensor), call, loaded, stopwatch))
        return slices[0], slices[1], slices[2]


async def _calls_beside(
    transfer: Callable[[], Awaitable[None]] | None,
    call: Callable[[], Awaitable[None]],
    pace: Pace,
    stopwatch: Stopwatch,
) -> Slice:
    is_over = trio.Event()

    async def load() -> None:
        assert transfer is not None
        while not is_over.is_set():
            await transfer()

    async with trio.open_nursery() as nursery:
        if transfer is not None:
            await transfer()
            for _ in range(_LOAD_IN_FLIGHT):
                nursery.start_soon(load)
        for _ in range(pace.warm_up_calls):
            await call()
        latencies: list[float] = []
        stopwatch.start()
        await _repeat(call, latencies, pace, stopwatch)
        measured = stopwatch.stop(latencies, nbytes=0, calls=len(latencies))
        is_over.set()
    return measured


async def _repeat(
    call: Callable[[], Awaitable[None]], latencies: list[float], pace: Pace, stopwatch: Stopwatch
) -> None:
    """Call again and again; `latencies` is shared by all who do."""
    while pace.goes_on(started := stopwatch.elapsed_s(), len(latencies)):
        await call()
        latencies.append(stopwatch.elapsed_s() - started)


def _echo(peer: RpcPeer, address: Address, message: bytes) -> Callable[[], Awaitable[None]]:
    body = {"message": message}

    async def call() -> None:
        reply = await peer.call(address, ECHO, body, timeout_s=_TIMEOUT_S)
        if reply.body != body:
            raise ConnectionError("the echo is not what was sent")

    return call


def _transfer(peer: RpcPeer, address: Address, method: str, tensor: Tensor) -> Callable[[], Awaitable[None]]:
    async def send() -> None:
        reply = await peer.call(address, TAKE, {}, (tensor,), timeout_s=_TIMEOUT_S)
        if reply.body["nbytes"] != tensor.nbytes:
            raise ConnectionError("the tensor was not acknowledged")

    async def receive() -> None:
        reply = await peer.call(address, GIVE, {}, timeout_s=_TIMEOUT_S)
        if plain(reply.tensors[0]).nbytes != tensor.nbytes:
            raise ConnectionError("the tensor did not come")

    return send if method == TAKE else receive
