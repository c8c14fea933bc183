"""Ours and blocking sockets in turn, round after round: calls per second, bytes per second, small calls under load."""

import random
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import trio
from matplotlib.figure import Figure

from dmoe_jax.runs.style import GREY
from experiments.bench import Experiment, Run
from experiments.blocking_sockets import write_certificate
from experiments.panels import draw_ratios
from experiments.processes import HelperFailed, HelperProcess, open_helpers
from experiments.results import Result
from experiments.rounds import SLICE, Measurement, Ratio, measure_rounds, median_figures, ratio_figures
from experiments.transport_speed import baseline, ours
from experiments.transport_speed.settings import SpeedSettings
from experiments.transport_speed.slice_timer import SliceTimer
from net.errors import NetError
from net.identity import Address

_LOADED_CALLS = 400
"""Small calls under load, at least: one takes milliseconds there."""

_WARM_UP_CALLS, _WARM_UP_TRANSFERS = 100, 3
"""On each fresh connection, before the clock starts: buffers have grown and memory has been touched by then."""

_SIDES = ("rpc", "blocking")
_DIRECTIONS = {"send": (baseline.TAKE, ours.TAKE), "receive": (baseline.GIVE, ours.GIVE)}

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
    ("Small calls", {"small_calls_ratio": "over TLS"}),
    ("Tensors over TLS", {"tls_ratio": "sending", "tls_receive_ratio": "receiving"}),
    ("Tensors, plain", {"plain_ratio": "sending", "plain_receive_ratio": "receiving"}),
    ("Small-call p99 under load", {"head_of_line_ratio": "sending", "head_of_line_receive_ratio": "receiving"}),
)


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
        """Where a side listens on a network."""
        return Address.parse(self.servers[side].hello[network])

    def timer(self, side: str, warm_up_calls: int, *, min_calls: int = 1) -> SliceTimer:
        """Make a timer for one slice with the server of this side."""
        server = self.servers[side]
        return SliceTimer(
            server_cpu_s=lambda: float(server.ask()["cpu_s"]),
            slice_s=self.settings.chosen_slice_s,
            warm_up_calls=warm_up_calls,
            min_calls=min_calls,
        )


def measure(run: Run[SpeedSettings]) -> None:
    """Measure all rounds, then how far each server's memory has grown."""
    with _open_servers(run.settings) as pair:
        measure_rounds(run, _measurements(pair), RATIOS, rounds=run.settings.chosen_rounds)
        for side, server in pair.servers.items():
            before, peak = server.hello["peak_bytes"], server.ask()["peak_bytes"]
            run.log("memory", side=side, grown_mib=None if before is None else (peak - before) / 2**20)


def _measurements(pair: Pair) -> list[Measurement]:
    """List the measurements of a round; the two sides of a ratio stand beside each other."""
    measurements: list[Measurement] = [
        lambda: _our_calls(pair, "plain", pair.settings.callers, "rpc_plain_calls"),
        lambda: _blocking_calls(pair),
        lambda: _our_calls(pair, "tls", pair.settings.callers, "rpc_tls_calls"),
        lambda: _our_calls(pair, "plain", 1, "rpc_plain_one_caller"),
        lambda: _head_of_line(pair),
    ]
    for network in ("tls", "plain"):
        for direction in _DIRECTIONS:
            measurements += [
                partial(transfer, pair, network, direction) for transfer in (_blocking_transfer, _our_transfer)
            ]
    return measurements


Slices = dict[str, dict[str, float]]


def _blocking_calls(pair: Pair) -> Slices:
    address, timer = pair.address("blocking", "plain"), pair.timer("blocking", _WARM_UP_CALLS)
    return {"blocking_calls": baseline.measure_calls(address, message=pair.message, timer=timer)}


def _our_calls(pair: Pair, network: str, callers: int, name: str) -> Slices:
    address, timer = pair.address("rpc", network), pair.timer("rpc", _WARM_UP_CALLS)
    call = partial(ours.measure_calls, address, network, callers=callers, message=pair.message, timer=timer)
    return {name: trio.run(call)}


def _blocking_transfer(pair: Pair, network: str, direction: str) -> Slices:
    record = baseline.measure_transfer(
        pair.address("blocking", network),
        _DIRECTIONS[direction][0],
        certificate=pair.certificate if network == "tls" else None,
        tensor=pair.tensor,
        timer=pair.timer("blocking", _WARM_UP_TRANSFERS),
    )
    return {f"blocking_{network}_{direction}": record}


def _our_transfer(pair: Pair, network: str, direction: str) -> Slices:
    transfer = partial(
        ours.measure_transfer,
        pair.address("rpc", network),
        network,
        _DIRECTIONS[direction][1],
        tensor=np.frombuffer(pair.tensor, np.uint8),
        timer=pair.timer("rpc", _WARM_UP_TRANSFERS),
    )
    return {f"rpc_{network}_{direction}": trio.run(transfer)}


def _head_of_line(pair: Pair) -> Slices:
    latency_calls = pair.settings.latency_calls
    sending, receiving = (pair.timer("rpc", 1, min_calls=min(latency_calls, _LOADED_CALLS)) for _ in range(2))
    calls = partial(
        ours.measure_head_of_line,
        pair.address("rpc", "tls"),
        message=pair.message,
        tensor=np.frombuffer(pair.tensor, np.uint8),
        idle=pair.timer("rpc", _WARM_UP_CALLS, min_calls=latency_calls),
        sending=sending,
        receiving=receiving,
    )
    return trio.run(calls)


@contextmanager
def _open_servers(settings: SpeedSettings) -> Iterator[Pair]:
    rng = random.Random(settings.seed)
    with tempfile.TemporaryDirectory() as folder:
        certificate = Path(folder) / "certificate.pem"
        write_certificate(certificate)
        options = [
            *("--certificate", str(certificate), "--small-bytes", str(settings.small_bytes)),
            *("--tensor-bytes", str(settings.tensor_bytes), "--seed", str(settings.seed)),
        ]
        arguments = [["--side", side, *options] for side in _SIDES]
        with open_helpers("experiments.transport_speed.server", arguments) as servers:
            yield Pair(
                settings=settings,
                servers=dict(zip(_SIDES, servers, strict=True)),
                certificate=certificate,
                message=rng.randbytes(settings.small_bytes),
                tensor=rng.randbytes(settings.tensor_bytes),
            )


def summarise(run: Run[SpeedSettings]) -> Result | None:
    """Compute the ratios and what they are made of; None before the first round."""
    slices = run.records(SLICE)
    ratios = ratio_figures(RATIOS, slices)
    if ratios is None:
        return None
    quantities = ("gigabytes_per_s", "cpu_s_per_gigabyte", "calls_per_s", "p50_ms", "p99_ms")
    peaks = {f"{record['side']}_server_peak_growth_mib": record["grown_mib"] for record in run.records("memory")}
    return Result(
        title="The network layer beside blocking sockets",
        figures={**ratios, **median_figures(slices, quantities), **peaks},
        bars=[ratio.bar for ratio in RATIOS],
    )


def draw(run: Run[SpeedSettings], result: Result) -> Figure:
    """Draw each ratio with its rounds, beside the bar that it must reach."""
    del result
    slices = run.records(SLICE)
    by_name = {ratio.name: ratio for ratio in RATIOS}
    picture = Figure(figsize=(10.5, 3.6), layout="constrained")
    panels = picture.subplots(1, len(_PANELS), width_ratios=[1 + len(labels) for _, labels in _PANELS])
    for axes, (title, labels) in zip(panels, _PANELS, strict=True):
        columns = [(label, by_name[name].of_rounds(slices)) for name, label in labels.items()]
        draw_ratios(axes, title, columns, by_name[next(iter(labels))].bar)
    panels[0].set_ylabel("ours over the baseline", fontsize=9, color=GREY)
    panels[-1].set_ylabel("loaded over idle", fontsize=9, color=GREY)
    return picture


EXPERIMENT = Experiment(
    measure=measure,
    summarise=summarise,
    draw=draw,
    figure_text="Each ratio to blocking sockets, round by round, beside its bar",
    expected=(NetError, ConnectionError),
    causes=(HelperFailed,),
)
