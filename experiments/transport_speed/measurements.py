"""What one round consists of."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import trio

from experiments.transport_speed import blocking_side, rpc_side
from experiments.transport_speed.ratios import Slice
from experiments.transport_speed.server_process import ServerProcess
from experiments.transport_speed.stopwatch import Pace, Stopwatch
from net.wire.tensors import Tensor

_LOADED_CALLS = 400
"""Small calls under load, at least: one takes milliseconds there."""

_WARM_UP_CALLS, _WARM_UP_TRANSFERS = 100, 3
"""On each fresh connection, before the clock starts: buffers have grown and memory has been touched by then."""

Measurement = Callable[[], dict[str, Slice]]
"""Measures once; slices by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What all measurements share.

    Attributes:
      rpc, blocking: the servers.
      certificate: by which clients of the baseline know its server.
      message: of a small call.
      tensor: of a transfer.
      callers: of small calls at once.
      slice_s: least duration of a measurement, seconds.
      latency_calls: least number of small calls behind a percentile of the idle connection.
    """

    rpc: ServerProcess
    blocking: ServerProcess
    certificate: Path
    message: bytes
    tensor: bytes
    callers: int
    slice_s: float
    latency_calls: int

    @property
    def array(self) -> Tensor:
        """The tensor as ours are sent."""
        return np.frombuffer(self.tensor, np.uint8)

    def pace(self, warm_up_calls: int, *, min_calls: int = 1) -> Pace:
        """The pace of a measurement."""
        return Pace(slice_s=self.slice_s, min_calls=min_calls, warm_up_calls=warm_up_calls)


def measurements_of(bench: Bench) -> list[Measurement]:
    """All of a round in order; the two sides of a ratio stand beside each other."""
    measurements: list[Measurement] = [
        partial(_rpc_calls, bench, encrypted=False, callers=bench.callers, name="rpc_plain_calls"),
        partial(_blocking_calls, bench),
        partial(_rpc_calls, bench, encrypted=True, callers=bench.callers, name="rpc_tls_calls"),
        partial(_rpc_calls, bench, encrypted=False, callers=1, name="rpc_plain_one_caller"),
        partial(_head_of_line, bench),
    ]
    for encrypted, network in ((True, "tls"), (False, "plain")):
        for is_sent, direction in ((True, "send"), (False, "receive")):
            measurements += [
                partial(
                    _blocking_transfer,
                    bench,
                    encrypted=encrypted,
                    is_sent=is_sent,
                    name=f"blocking_{network}_{direction}",
                ),
                partial(_rpc_transfer, bench, encrypted=encrypted, is_sent=is_sent, name=f"rpc_{network}_{direction}"),
            ]
    return measurements


def _blocking_calls(bench: Bench) -> dict[str, Slice]:
    measured = blocking_side.measure_calls(
        bench.blocking.plain,
        message=bench.message,
        pace=bench.pace(_WARM_UP_CALLS),
        stopwatch=Stopwatch(bench.blocking.cpu_s),
    )
    return {"blocking_calls": measured}


def _rpc_calls(bench: Bench, *, encrypted: bool, callers: int, name: str) -> dict[str, Slice]:
    measure = partial(
        rpc_side.measure_calls,
        bench.rpc.encrypted if encrypted else bench.rpc.plain,
        encrypted=encrypted,
        callers=callers,
        message=bench.message,
        pace=bench.pace(_WARM_UP_CALLS),
        stopwatch=Stopwatch(bench.rpc.cpu_s),
    )
    return {name: trio.run(measure)}


def _blocking_transfer(bench: Bench, *, encrypted: bool, is_sent: bool, name: str) -> dict[str, Slice]:
    measured = blocking_side.measure_transfer(
        bench.blocking.encrypted if encrypted else bench.blocking.plain,
        blocking_side.TAKE if is_sent else blocking_side.GIVE,
        tensor=bench.tensor,
        certificate=bench.certificate if encrypted else None,
        pace=bench.pace(_WARM_UP_TRANSFERS),
        stopwatch=Stopwatch(bench.blocking.cpu_s),
    )
    return {name: measured}


def _rpc_transfer(bench: Bench, *, encrypted: bool, is_sent: bool, name: str) -> dict[str, Slice]:
    measure = partial(
        rpc_side.measure_transfer,
        bench.rpc.encrypted if encrypted else bench.rpc.plain,
        rpc_side.TAKE if is_sent else rpc_side.GIVE,
        encrypted=encrypted,
        tensor=bench.array,
        pace=bench.pace(_WARM_UP_TRANSFERS),
        stopwatch=Stopwatch(bench.rpc.cpu_s),
    )
    return {name: trio.run(measure)}


def _head_of_line(bench: Bench) -> dict[str, Slice]:
    measure = partial(
        rpc_side.measure_head_of_line,
        bench.rpc.encrypted,
        message=bench.message,
        tensor=bench.array,
        idle=bench.pace(_WARM_UP_CALLS, min_calls=bench.latency_calls),
        loaded=bench.pace(1, min_calls=min(bench.latency_calls, _LOADED_CALLS)),
        stopwatch=Stopwatch(bench.rpc.cpu_s),
    )
    names = ("rpc_tls_one_caller", "rpc_tls_calls_while_sending", "rpc_tls_calls_while_receiving")
    return dict(zip(names, trio.run(measure), strict=True))
