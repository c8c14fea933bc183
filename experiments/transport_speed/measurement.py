"""Ours and blocking sockets in turn, round after round: calls per second, bytes per second, small calls under load."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio
from matplotlib.figure import Figure

from dmoe_net.errors import NetError
from dmoe_net.identity import Address
from experiments.bench import Experiment, Run
from experiments.blocking_sockets import temporary_certificate
from experiments.panels import ratio_figure
from experiments.processes import HelperFailed, HelperProcess, open_helpers
from experiments.results import Result
from experiments.rounds import SLICE, Measurement, Ratio, measure_rounds, round_figures
from experiments.transport_speed import baseline, ours
from experiments.transport_speed.settings import SpeedSettings
from experiments.transport_speed.slices import ECHO, GIVE, TAKE, SliceTimer

_LOADED_CALLS = 400
"""Small calls under load, at least: one takes milliseconds there."""

_WARM_UP_CALLS, _WARM_UP_TRANSFERS = 100, 3
"""On each fresh connection, before the clock starts: buffers have grown and memory has been touched by then."""

RATIOS = (
    Ratio("small_calls_ratio", "calls_per_s", "rpc_tls_calls", "blocking_calls", ">=", 0.5),
    Ratio("tls_ratio", "gigabytes_per_s", "rpc_tls_send", "blocking_tls_send", ">=", 1.0),
    Ratio("tls_receive_ratio", "gigabytes_per_s", "rpc_tls_receive", "blocking_tls_receive", ">=", 1.0),
    Ratio("plain_ratio", "gigabytes_per_s", "rpc_plain_send", "blocking_plain_send", ">=", 0.6),
    Ratio("plain_receive_ratio", "gigabytes_per_s", "rpc_plain_receive", "blocking_plain_receive", ">=", 0.6),
    Ratio("head_of_line_ratio", "p99_ms", "rpc_tls_calls_while_sending", "rpc_tls_one_caller", "<=", 20.0),
    Ratio("head_of_line_receive_ratio", "p99_ms", "rpc_tls_calls_while_receiving", "rpc_tls_one_caller", "<=", 20.0),
)
_PANELS = (
    ("Small calls", ("over TLS",)),
    ("Tensors over TLS", ("sending", "receiving")),
    ("Tensors, plain", ("sending", "receiving")),
    ("Small-call p99 under load", ("sending", "receiving")),
)
"""Titles, and the texts below the ratios, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Both servers, and what is sent to them."""

    settings: SpeedSettings
    """The command line."""
    servers: Mapping[str, HelperProcess]
    """By side, "rpc" and "blocking"."""
    certificate: Path
    """By which clients of the baseline know its server."""
    message: bytes
    """A small call."""
    tensor: bytes
    """A transfer."""

    def address(self, side: str, network: str) -> Address:
        """Return the address at which a side listens on a network."""
        return Address.parse(self.servers[side].hello[network])

    def timer(self, side: str, warm_up_calls: int, *, min_calls: int = 1, nbytes: int = 0) -> SliceTimer:
        """Make a timer for one slice with the server of this side."""
        server = self.servers[side]
        return SliceTimer(
            server_cpu_s=lambda: float(server.ask()["cpu_s"]),
            slice_s=self.settings.chosen_slice_s,
            warm_up_calls=warm_up_calls,
            min_calls=min_calls,
            nbytes=nbytes,
        )


def measure(run: Run[SpeedSettings]) -> None:
    """Measure all rounds, then how far each server's memory has grown."""
    with _open_servers(run.settings) as pair:
        measure_rounds(run, _measurements(pair), RATIOS, rounds=run.settings.chosen_rounds)
        for side, server in pair.servers.items():
            before, peak = server.hello["peak_bytes"], server.ask()["peak_bytes"]
            run.log("memory", side=side, grown_mib=None if before is None else (peak - before) / 2**20)


@contextmanager
def _open_servers(settings: SpeedSettings) -> Iterator[Pair]:
    rng = random.Random(settings.seed)
    with temporary_certificate() as certificate:
        common = {
            "certificate": str(certificate),
            "small_bytes": settings.small_bytes,
            "tensor_bytes": settings.tensor_bytes,
            "seed": settings.seed,
        }
        sides = ("rpc", "blocking")
        each = [common | {"side": side} for side in sides]
        with open_helpers("experiments.transport_speed.server", each) as servers:
            yield Pair(
                settings=settings,
                servers=dict(zip(sides, servers, strict=True)),
                certificate=certificate,
                message=rng.randbytes(settings.small_bytes),
                tensor=rng.randbytes(settings.tensor_bytes),
            )


def _measurements(pair: Pair) -> list[Measurement]:
    """List the measurements of a round; the two sides of a ratio stand beside each other."""
    callers = pair.settings.callers
    return [
        partial(_measure_one, pair, "rpc_plain_calls", "rpc", "plain", ECHO, callers=callers),
        partial(_measure_one, pair, "blocking_calls", "blocking", "plain", ECHO),
        partial(_measure_one, pair, "rpc_tls_calls", "rpc", "tls", ECHO, callers=callers),
        partial(_measure_one, pair, "rpc_plain_one_caller", "rpc", "plain", ECHO),
        partial(_measure_head_of_line, pair),
        *(
            partial(_measure_one, pair, f"{side}_{network}_{direction}", side, network, kind)
            for network in ("tls", "plain")
            for direction, kind in (("send", TAKE), ("receive", GIVE))
            for side in ("blocking", "rpc")
        ),
    ]


Slices = dict[str, dict[str, float]]


def _measure_one(pair: Pair, name: str, side: str, network: str, kind: str, *, callers: int = 1) -> Slices:
    address = pair.address(side, network)
    if kind == ECHO:
        payload, timer = pair.message, pair.timer(side, _WARM_UP_CALLS)
    else:
        payload, timer = pair.tensor, pair.timer(side, _WARM_UP_TRANSFERS, nbytes=len(pair.tensor))
    if side == "rpc":
        calls = partial(ours.measure, address, network, kind, payload=payload, timer=timer, callers=callers)
        return {name: trio.run(calls)}
    certificate = pair.certificate if network == "tls" else None
    return {name: baseline.measure(address, kind, certificate=certificate, payload=payload, timer=timer)}


def _measure_head_of_line(pair: Pair) -> Slices:
    latency_calls = pair.settings.latency_calls
    sending, receiving = (pair.timer("rpc", 1, min_calls=min(latency_calls, _LOADED_CALLS)) for _ in range(2))
    calls = partial(
        ours.measure_head_of_line,
        pair.address("rpc", "tls"),
        message=pair.message,
        tensor=pair.tensor,
        idle=pair.timer("rpc", _WARM_UP_CALLS, min_calls=latency_calls),
        sending=sending,
        receiving=receiving,
    )
    return trio.run(calls)


def summarise(run: Run[SpeedSettings]) -> Result | None:
    """Compute the ratios and what they are made of; None before the first round."""
    quantities = ("gigabytes_per_s", "cpu_s_per_gigabyte", "calls_per_s", "p50_ms", "p99_ms")
    rounds = round_figures(run.records(SLICE), RATIOS, quantities)
    if rounds is None:
        return None
    peaks = {f"{record['side']}_server_peak_growth_mib": record["grown_mib"] for record in run.records("memory")}
    return Result(
        title="The network layer beside blocking sockets",
        figures={**rounds, **peaks},
        bars=[ratio.bar for ratio in RATIOS],
    )


def draw(run: Run[SpeedSettings], result: Result) -> Figure:
    """Draw each ratio with its rounds, beside the bar that it must reach."""
    del result
    slices, ratios = run.records(SLICE), iter(RATIOS)
    panels = []
    for title, labels in _PANELS:
        own = [next(ratios) for _ in labels]
        columns = {label: ratio.of_rounds(slices) for label, ratio in zip(labels, own, strict=True)}
        panels.append((title, columns, own[0].bar))
    return ratio_figure(panels, first_label="ours over the baseline", last_label="loaded over idle")


EXPERIMENT = Experiment(
    measure=measure,
    summarise=summarise,
    draw=draw,
    figure_text="Each ratio to blocking sockets, round by round, beside its bar",
    expected=(NetError, ConnectionError),
    causes=(HelperFailed,),
)
