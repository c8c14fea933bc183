"""Ours and blocking sockets in turn, round after round: calls per second, bytes per second, small calls under load."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import trio

from dmoe_net import Address, NetError
from experiments.bench import Experiment, Run
from experiments.blocking_sockets import dial, receive_into, temporary_certificate
from experiments.processes import HelperFailed, open_helpers
from experiments.results import Result
from experiments.rounds import SLICE, Ratio, measure_rounds, round_figures
from experiments.transport_speed.server import ECHO, GIVE, TAKE, open_peer, sizes_of
from experiments.transport_speed.settings import SpeedSettings

RATIOS = (
    Ratio("small_calls_ratio", "calls_per_s", "rpc_tls_calls", "blocking_plain_calls", ">=", 0.5),
    Ratio("tls_ratio", "gigabytes_per_s", "rpc_tls_send", "blocking_tls_send", ">=", 1.0),
    Ratio("tls_receive_ratio", "gigabytes_per_s", "rpc_tls_receive", "blocking_tls_receive", ">=", 1.0),
    Ratio("plain_ratio", "gigabytes_per_s", "rpc_plain_send", "blocking_plain_send", ">=", 0.6),
    Ratio("plain_receive_ratio", "gigabytes_per_s", "rpc_plain_receive", "blocking_plain_receive", ">=", 0.6),
    Ratio("head_of_line_ratio", "p99_ms", "rpc_tls_calls_while_sending", "rpc_tls_one_caller", "<=", 20.0),
    Ratio("head_of_line_receive_ratio", "p99_ms", "rpc_tls_calls_while_receiving", "rpc_tls_one_caller", "<=", 20.0),
)
_SLICES = [
    ("blocking", "plain", "calls", ECHO, 1),
    ("rpc", "tls", "calls", ECHO, 64),
    *(
        (side, network, name, action, 1)
        for network in ("tls", "plain")
        for name, action in (("send", TAKE), ("receive", GIVE))
        for side in ("blocking", "rpc")
    ),
]
"""Side, network, rest of the name, action and callers of the slices of a round, beside calls under load. The two sides
of a ratio stand beside each other."""
_IDLE_CALLS, _LOADED_CALLS = 1000, 400
"""Small calls behind a p99, at least: alone, and under load, where one takes milliseconds."""
_MAX_SLICES = 5
"""A slice that wants more calls than its time allows goes on for at most so many times as long: a machine under load
measures less, but comes to an end."""
_WARM_UP_CALLS, _WARM_UP_TRANSFERS = 100, 3
"""On each fresh connection, before the clock starts: buffers have grown and memory has been touched by then."""

Call = Callable[[], Awaitable[object]]
Slice = dict[str, float]
Slices = dict[str, Slice]


def measure(run: Run[SpeedSettings]) -> None:
    """Measure all rounds."""
    settings, tensor_bytes = run.settings, max(1, int(run.settings.tensor_mib * 2**20))
    slice_s, rounds = (0.8, 3) if settings.quick else (settings.slice_s, settings.rounds)
    with temporary_certificate() as certificate:
        served = {"certificate": str(certificate), "tensor_bytes": tensor_bytes}
        with open_helpers("experiments.transport_speed.server", [served]) as (server,):
            addresses = {name: Address.parse(text) for name, text in server.hello.items()}
            clients = _Clients(addresses, certificate, tensor_bytes, slice_s)
            measurements = [partial(trio.run, clients.slice_of, *each) for each in _SLICES]
            measure_rounds(run, [partial(trio.run, clients.calls_under_load), *measurements], RATIOS, rounds=rounds)


@dataclass(frozen=True, slots=True)
class _Clients:
    """Clients of both sides, ours ("rpc") and blocking sockets, on the networks "plain" and "tls".

    Servers have names such as "rpc_tls". By the certificate clients of the baseline know theirs.
    """

    addresses: dict[str, Address]
    certificate: Path
    tensor_bytes: int
    slice_s: float

    async def slice_of(self, side: str, network: str, name: str, action: str, callers: int) -> Slices:
        """Calls of one kind, each caller's one after the other, on a fresh connection."""
        nbytes, warm_up = (0, _WARM_UP_CALLS) if action == ECHO else (self.tensor_bytes, _WARM_UP_TRANSFERS)
        async with self.opened(side, network) as call_of:
            timed = await self.timed(call_of(action), warm_up, callers=callers, nbytes=nbytes)
            return {f"{side}_{network}_{name}": timed}

    async def calls_under_load(self) -> Slices:
        """Small calls of one caller on one encrypted connection: alone, beside tensors that leave, beside tensors that
        come in."""

        async def load(transfer: Call) -> None:
            while True:
                await transfer()

        async with self.opened("rpc", "tls") as call_of:
            found = {"one_caller": await self.timed(call_of(ECHO), _WARM_UP_CALLS, min_calls=_IDLE_CALLS)}
            for name, action in (("calls_while_sending", TAKE), ("calls_while_receiving", GIVE)):
                async with trio.open_nursery() as nursery:
                    await call_of(action)()
                    for _ in range(2):  # so that another one is there when one ends
                        nursery.start_soon(load, call_of(action))
                    found[name] = await self.timed(call_of(ECHO), 1, min_calls=_LOADED_CALLS)
                    nursery.cancel_scope.cancel()
        return {f"rpc_tls_{name}": timed for name, timed in found.items()}

    async def timed(self, call: Call, warm_up: int, *, callers: int = 1, min_calls: int = 1, nbytes: int = 0) -> Slice:
        """Measure one slice, in the same way for both sides: of transfers of so many bytes gigabytes per second, of
        small calls their number per second and two percentiles."""
        for _ in range(warm_up):
            await call()
        latencies_s: list[float] = []
        started = time.perf_counter()

        async def call_again() -> None:
            while True:
                began = time.perf_counter()
                slices = _MAX_SLICES if len(latencies_s) < min_calls else 1
                if began - started >= slices * self.slice_s:
                    return
                await call()
                latencies_s.append(time.perf_counter() - began)

        async with trio.open_nursery() as nursery:
            for _ in range(callers):
                nursery.start_soon(call_again)
        calls_per_s = len(latencies_s) / (time.perf_counter() - started)
        if nbytes:
            return {"gigabytes_per_s": nbytes * calls_per_s / 1e9}
        p50_s, p99_s = np.percentile(latencies_s, [50, 99], method="inverted_cdf").tolist()
        return {"calls_per_s": calls_per_s, "p50_ms": 1e3 * p50_s, "p99_ms": 1e3 * p99_s}

    @asynccontextmanager
    async def opened(self, side: str, network: str) -> AsyncIterator[Callable[[str], Call]]:
        """Connect to a server; yields what makes calls of an action; on a connection of the baseline all of one."""
        address = self.addresses[f"{side}_{network}"]
        if side == "rpc":
            bodies = {ECHO: {"message": b"\1" * sizes_of(ECHO, 0)[0]}}
            tensors = {TAKE: (np.ones(self.tensor_bytes, np.uint8),)}
            async with open_peer(network) as peer:

                async def ask(action: str) -> None:
                    body = bodies.get(action, {})
                    reply = await peer.call(address, action, body, tensors.get(action, ()), timeout_s=60.0)
                    if reply.body != body or len(reply.tensors) != (action == GIVE):
                        raise ConnectionError(f"the answer to {action} is not what was expected")

                yield lambda action: partial(ask, action)
            return
        with dial(address, certificate=self.certificate if network == "tls" else None) as connection:

            def call_of(action: str) -> Call:
                request_bytes, answer_bytes = sizes_of(action, self.tensor_bytes)
                request, answer = b"\1" * request_bytes, memoryview(bytearray(answer_bytes))
                connection.sendall(action[:1].encode())

                async def call() -> None:
                    connection.sendall(request)
                    if not receive_into(connection, answer):
                        raise ConnectionError("the server has closed the connection")

                return call

            yield call_of


def summarise(run: Run[SpeedSettings]) -> Result | None:
    """Compute the ratios and what they are made of; None before the first round."""
    figures = round_figures(run.records(SLICE), RATIOS, ("gigabytes_per_s", "calls_per_s", "p50_ms", "p99_ms"))
    if figures is None:
        return None
    bars = [ratio.bar for ratio in RATIOS]
    return Result(title="The network layer beside blocking sockets", figures=figures, bars=bars)


EXPERIMENT = Experiment(
    measure=measure, summarise=summarise, expected=(NetError, ConnectionError), causes=(HelperFailed,)
)
