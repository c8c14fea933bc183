"""A member's process, a helper of the measurement, of ours or of the baseline.

It says where it listens, and answers each order with what its exchange took.

The baseline are blocking sockets of the standard library that carry what an all-reduce carries, and add up nothing.
Every member sends every other one as many bytes as its part of the vector has, twice: once for the values, once for the
average. There is a connection for each direction between two members, with a thread at either end, so that nothing ever
waits for anything but the network. It is received into a buffer that was made and touched before the clock started.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Thread

import numpy as np

from dmoe_net import Address, AllReduceConfig, Contact
from dmoe_net.averaging.grouping.group import Group, Member
from dmoe_net.averaging.reduction.all_reduce import AllReduce
from experiments.blocking_sockets import Listener, dial, receive_into
from experiments.processes import memory_bytes, orders, run_helper, say
from experiments.transport_speed.server import open_peer


def vector_of(index: int, size: int, seed: int) -> np.ndarray:
    """Vector that the member with this number averages: float32 [size], uniform in [0, 1)."""
    return np.random.default_rng((seed, index)).random(size, dtype=np.float32)


def digest_of(vector: np.ndarray) -> str:
    """Something that tells two averages apart, in hexadecimal."""
    return hashlib.blake2b(vector.data, digest_size=16).hexdigest()


async def take_part(
    side: str, *, index: int, peers: int, size: int, seed: int, expected: str, certificate: str | None
) -> None:
    """Take part in measurements until standard input closes.

    Args:
      side: "rpc", ours, or "blocking", the baseline.
      expected: digest of the mean of all vectors.
      certificate: certificate and key of the baseline, PEM; None for a plain network, of either side.
    """
    if side == "rpc":
        await _serve_rpc(partial(vector_of, index, size, seed), expected, is_encrypted=certificate is not None)
    else:
        await _serve_blocking(4 * size // peers, None if certificate is None else Path(certificate))


async def _serve_rpc(make_vector: Callable[[], np.ndarray], expected: str, *, is_encrypted: bool) -> None:
    """Serve ours: a peer with an `AllReduce`, as in every process that averages.

    Raises:
      ConnectionError: the average is not the mean of all vectors, to the last bit.
    """
    async with open_peer("tls" if is_encrypted else "plain", listen=Address("127.0.0.1", 0)) as peer:
        assert peer.address is not None
        all_reduce = AllReduce(peer, prefix="speed", config=AllReduceConfig())
        say(where=Contact(peer.peer_id, peer.address).full)
        held, vector = memory_bytes(), make_vector()
        async for order in orders():
            members = tuple(
                Member(peer_id=contact.peer_id, address=contact.address, wanted_slot=slot)
                for slot, contact in enumerate(map(Contact.parse, order["members"]))
            )
            group = Group(group_id=bytes.fromhex(order["group"]), members=members, side=len(members))
            cpu_s, started = time.process_time(), time.perf_counter()
            result = await all_reduce.run(group, vector, size=vector.size)
            ended, cpu_s = time.perf_counter(), time.process_time() - cpu_s
            if digest_of(result.average) != expected:
                raise ConnectionError("the average is not the mean of all members' vectors")
            del result  # or its memory would count in the next exchange
            memory = memory_bytes()
            grown_bytes = memory[1] - held[0] if memory and held else None
            say(started=started, ended=ended, cpu_s=cpu_s, grown_bytes=grown_bytes)


async def _serve_blocking(part_bytes: int, certificate: Path | None) -> None:
    """Serve the baseline, encrypted if there is a certificate."""
    listener = Listener(certificate)
    say(where=str(listener.address))
    work: list[Callable[[], object]] = []
    async for order in orders():
        others = [Address.parse(text) for text in order["members"] if text != str(listener.address)]
        work = work or _connected(listener, others, part_bytes, certificate)
        threads = [Thread(target=each) for each in work]
        cpu_s, started = time.process_time(), time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        say(started=started, ended=time.perf_counter(), cpu_s=time.process_time() - cpu_s)


def _connected(
    listener: Listener, others: Sequence[Address], part_bytes: int, certificate: Path | None
) -> list[Callable[[], object]]:
    """Connect with all others, who do the same meanwhile; the threads' work, a direction each."""
    work: list[Callable[[], object]] = []

    def add(move: Callable[[memoryview], object]) -> None:
        touched = memoryview(bytearray(b"\1") * part_bytes)
        work.append(lambda: [move(touched) for _ in range(2)])  # there, and the average back

    def accept() -> None:
        for _ in others:
            add(partial(receive_into, listener.accept()))

    accepting = Thread(target=accept)
    accepting.start()
    for address in others:
        add(dial(address, certificate=certificate).sendall)
    accepting.join()
    return work


if __name__ == "__main__":
    run_helper(take_part)
