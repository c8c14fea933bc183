"""The server process: `python -m experiments.transport_speed.server --side rpc|blocking ...`.

It says where it listens, and answers each order with what it has used so far.
"""

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import trio
import tyro

from experiments.processes import async_orders, memory_bytes, orders, say
from experiments.transport_speed import baseline, ours


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Serve one side of the measurement until standard input closes."""

    side: Literal["rpc", "blocking"]
    """Ours or the baseline."""
    certificate: Path
    """Certificate and key of the baseline, PEM."""
    small_bytes: int
    """Length of a small message of the baseline."""
    tensor_bytes: int
    """Length of a tensor."""
    seed: int
    """Of the tensor's bytes."""


def main() -> None:
    """Serve until standard input closes."""
    settings = tyro.cli(ServerSettings)
    tensor = random.Random(settings.seed).randbytes(settings.tensor_bytes)
    if settings.side == "rpc":
        trio.run(_serve_rpc, tensor)
        return
    addresses = baseline.serve(certificate=settings.certificate, small_bytes=settings.small_bytes, tensor=tensor)
    say(**{network: str(address) for network, address in addresses.items()}, **_usage())
    for _ in orders():
        say(**_usage())


async def _serve_rpc(tensor: bytes) -> None:
    array = np.frombuffer(tensor, np.uint8)
    async with ours.open_server("plain", array) as plain, ours.open_server("tls", array) as tls:
        say(plain=str(plain), tls=str(tls), **_usage())
        async for _ in async_orders():
            say(**_usage())


def _usage() -> dict[str, float | None]:
    memory = memory_bytes()
    return {"cpu_s": time.process_time(), "peak_bytes": None if memory is None else memory[1]}


if __name__ == "__main__":
    main()
