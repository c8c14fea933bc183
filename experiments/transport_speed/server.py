"""The servers, a helper process of the measurement: ours, and blocking sockets, on a plain and an encrypted network."""

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from dmoe_net import Address, Identity, Reply, Request, RpcPeer, TcpTransport, TlsTransport, open_rpc_peer
from experiments.blocking_sockets import Listener, receive_into
from experiments.processes import orders, run_helper, say

ECHO, TAKE, GIVE = "echo", "take", "give"
"""Actions of a server: echo a small message, take a tensor, or give one."""


def sizes_of(action: str, tensor_bytes: int) -> tuple[int, int]:
    """Bytes of a request and of its answer, on blocking sockets: so there need be no headers."""
    return {ECHO: (200, 200), TAKE: (tensor_bytes, 8), GIVE: (8, tensor_bytes)}[action]


@asynccontextmanager
async def open_peer(network: str, *, listen: Address | None = None) -> AsyncIterator[RpcPeer]:
    """Open a peer with a fresh identity, on the network "tls" or "plain"."""
    identity = Identity.generate()
    transport = TlsTransport(identity) if network == "tls" else TcpTransport()
    async with open_rpc_peer(transport, peer_id=identity.peer_id, listen=listen) as peer:
        yield peer


@asynccontextmanager
async def _open_server(network: str, tensor: np.ndarray) -> AsyncIterator[str]:
    """Serve ours; yields the address."""

    async def answer(request: Request) -> Reply:
        return Reply(body=request.body)

    async def give(request: Request) -> Reply:
        return Reply(tensors=(tensor,))

    async with open_peer(network, listen=Address("127.0.0.1", 0)) as peer:
        for method, handler in ((ECHO, answer), (TAKE, answer), (GIVE, give)):
            peer.add_handler(method, handler, max_concurrent=256)  # nobody is told that the server is busy
        yield str(peer.address)


def _serve_blocking(certificate: Path | None, tensor_bytes: int) -> str:
    """Serve the baseline, encrypted if there is a certificate, in a thread that ends with the process; return where.

    One connection does one thing, named by its first byte, until the client closes it. A message is received into one
    buffer, made before the first.
    """
    listener = Listener(certificate)
    actions = {action[:1].encode(): action for action in (ECHO, TAKE, GIVE)}

    def accept() -> None:
        while True:
            with listener.accept() as connection:
                request_bytes, answer_bytes = sizes_of(actions[connection.recv(1)], tensor_bytes)
                request, answer = memoryview(bytearray(request_bytes)), b"\1" * answer_bytes
                while receive_into(connection, request):
                    connection.sendall(answer)

    threading.Thread(target=accept, daemon=True).start()
    return str(listener.address)


async def serve(*, certificate: str, tensor_bytes: int) -> None:
    """Say where the servers listen, and serve until standard input closes. The certificate is the baseline's."""
    blocking = {
        "blocking_plain": _serve_blocking(None, tensor_bytes),
        "blocking_tls": _serve_blocking(Path(certificate), tensor_bytes),
    }
    tensor = np.ones(tensor_bytes, np.uint8)
    async with _open_server("plain", tensor) as plain, _open_server("tls", tensor) as tls:
        say(rpc_plain=plain, rpc_tls=tls, **blocking)
        async for _ in orders():
            pass


if __name__ == "__main__":
    run_helper(serve)
