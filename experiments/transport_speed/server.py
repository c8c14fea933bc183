"""The server process, a helper of the measurement.

It says where it listens, and answers each order with what it has used so far.
"""

import random
import time
from pathlib import Path
from typing import Literal

from experiments.processes import memory_bytes, orders, run_helper, say
from experiments.transport_speed import baseline, ours


async def serve(
    side: Literal["rpc", "blocking"], *, certificate: str, small_bytes: int, tensor_bytes: int, seed: int
) -> None:
    """Serve one side of the measurement, ours or the baseline, until standard input closes.

    Args:
      side: which.
      certificate: certificate and key of the baseline, PEM.
      small_bytes: length of a small message of the baseline.
      tensor_bytes: length of a tensor.
      seed: of the tensor's bytes.
    """
    tensor = random.Random(seed).randbytes(tensor_bytes)
    if side == "rpc":
        async with ours.open_server("plain", tensor) as plain, ours.open_server("tls", tensor) as tls:
            await _answer(plain=str(plain), tls=str(tls))
    else:
        plain = baseline.serve(None, small_bytes=small_bytes, tensor=tensor)
        tls = baseline.serve(Path(certificate), small_bytes=small_bytes, tensor=tensor)
        await _answer(plain=str(plain), tls=str(tls))


async def _answer(**addresses: str) -> None:
    say(**addresses, **_usage())
    async for _ in orders():
        say(**_usage())


def _usage() -> dict[str, float | None]:
    memory = memory_bytes()
    return {"cpu_s": time.process_time(), "peak_bytes": None if memory is None else memory[1]}


if __name__ == "__main__":
    run_helper(serve)
