"""A member's process, a helper of the measurement.

It says where it listens, and answers each order with what its exchange took.
"""

import hashlib
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dmoe_net.averaging.grouping.group import Group, Member
from dmoe_net.averaging.reduction.all_reduce import AllReduce
from dmoe_net.averaging.reduction.partition import AllReduceConfig
from dmoe_net.identity import Address, Contact
from dmoe_net.keys import Identity
from dmoe_net.rpc.peer import open_rpc_peer
from dmoe_net.transport.tcp import TcpTransport
from dmoe_net.transport.tls import TlsTransport
from experiments.allreduce_speed.baseline import BlockingMember
from experiments.processes import memory_bytes, orders, run_helper, say

Vector = npt.NDArray[np.float32]


def vector_of(index: int, size: int, seed: int) -> Vector:
    """Return what the member with this number averages: float32 [size], uniform in [0, 1)."""
    return np.random.default_rng((seed, index)).random(size, dtype=np.float32)


def digest_of(vector: Vector) -> str:
    """Return what tells two averages apart, in hexadecimal."""
    return hashlib.blake2b(vector.data, digest_size=16).hexdigest()


async def take_part(
    side: Literal["rpc", "blocking"],
    *,
    index: int,
    peers: int,
    size: int,
    seed: int,
    certificate: str | None,
    chunk_bytes: int,
    window_bytes: int,
) -> None:
    """Take part in measurements until standard input closes.

    Args:
      side: ours or the baseline.
      index: place among the members.
      peers: members.
      size: numbers in the vector.
      seed: of all vectors.
      certificate: certificate and key of the baseline, PEM; None for a plain network, of either side.
      chunk_bytes, window_bytes: as in `AllReduceConfig`.
    """
    if side == "rpc":
        config = AllReduceConfig(chunk_bytes=chunk_bytes, window_bytes=window_bytes)
        await _serve_rpc(config, (index, size, seed), is_encrypted=certificate is not None)
    else:
        path = None if certificate is None else Path(certificate)
        await _serve_blocking(BlockingMember(4 * size // peers, certificate=path))


async def _serve_rpc(config: AllReduceConfig, own_vector: tuple[int, int, int], *, is_encrypted: bool) -> None:
    """Serve ours: a peer with an `AllReduce`, as in every process that averages.

    Raises:
      ConnectionError: not everybody took part to the end.
    """
    identity = Identity.generate()
    transport = TlsTransport(identity) if is_encrypted else TcpTransport()
    async with open_rpc_peer(transport, peer_id=identity.peer_id, listen=Address("127.0.0.1", 0)) as peer:
        assert peer.address is not None
        all_reduce = AllReduce(peer, prefix="speed", config=config)
        say(where=Contact(peer.peer_id, peer.address).full)
        held = memory_bytes()
        vector = vector_of(*own_vector)
        async for order in orders():
            group = _group_of(order)
            cpu_s, started = time.process_time(), time.perf_counter()
            result = await all_reduce.run(group, vector, size=vector.size)
            ended, cpu_s = time.perf_counter(), time.process_time() - cpu_s
            if not result.complete:
                raise ConnectionError("the average is not that of all members")
            digest, memory = digest_of(result.average), memory_bytes()
            del result  # or its memory would count in the next exchange
            grown_bytes = memory[1] - held[0] if memory and held else None
            say(started=started, ended=ended, cpu_s=cpu_s, digest=digest, grown_bytes=grown_bytes)


def _group_of(order: dict[str, Any]) -> Group:
    contacts = [Contact.parse(text) for text in order["members"]]
    members = tuple(
        Member(peer_id=contact.peer_id, address=contact.address, wanted_slot=slot)
        for slot, contact in enumerate(contacts)
    )
    return Group(group_id=bytes.fromhex(order["group"]), members=members, side=len(members))


async def _serve_blocking(member: BlockingMember) -> None:
    say(where=str(member.address))
    is_connected = False
    async for order in orders():
        if not is_connected:
            addresses = [Address.parse(text) for text in order["members"]]
            member.connect([address for address in addresses if address != member.address])
            is_connected = True
        cpu_s = time.process_time()
        started, ended = member.exchange()
        say(started=started, ended=ended, cpu_s=time.process_time() - cpu_s)


if __name__ == "__main__":
    run_helper(take_part)
