"""The server process: `python -m experiments.transport_speed.server rpc|blocking ...`, started by `server_process`.

It prints its two addresses, answers each line on standard input with what it has used so far, and ends with its
standard input.
"""

import json
import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import trio
import tyro

from experiments.transport_speed import blocking_side, rpc_side
from net.identity import Address


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
    """Entry point."""
    settings = tyro.cli(ServerSettings)
    tensor = random.Random(settings.seed).randbytes(settings.tensor_bytes)
    if settings.side == "rpc":
        trio.run(_serve_rpc, tensor)
        return
    plain, encrypted = blocking_side.serve(
        certificate=settings.certificate, small_bytes=settings.small_bytes, tensor=tensor
    )
    _announce(plain, encrypted)
    for _ in sys.stdin:
        _tell_usage()


async def _serve_rpc(tensor: bytes) -> None:
    async with (
        rpc_side.open_peer(encrypted=False, listen=True) as plain,
        rpc_side.open_peer(encrypted=True, listen=True) as encrypted,
    ):
        for peer in (plain, encrypted):
            rpc_side.add_handlers(peer, np.frombuffer(tensor, np.uint8))
        assert plain.address is not None
        assert encrypted.address is not None
        _announce(plain.address, encrypted.address)
        # A duplicate: closing standard input itself would surprise the interpreter's end.
        async with trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())) as lines:
            async for chunk in lines:
                for _ in range(chunk.count(b"\n")):
                    _tell_usage()


def _announce(plain: Address, encrypted: Address) -> None:
    print(json.dumps({"plain": str(plain), "encrypted": str(encrypted)}), flush=True)


def _tell_usage() -> None:
    print(json.dumps({"cpu_s": time.process_time(), "peak_bytes": _peak_bytes()}), flush=True)


def _peak_bytes() -> int | None:
    """The most memory that this process ever held; None where the system does not say.

    Not `getrusage`: on Linux its figure begins with that of the process that started this one.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    peaks = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]
    return peaks[0] if peaks else None


if __name__ == "__main__":
    main()
