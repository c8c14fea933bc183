"""`run` and `simulate`: a simulated network and the virtual time it lives in; see the package."""

import gc
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import trio
import trio.testing

from dmoe_net.transport.sim.agenda import Agenda
from dmoe_net.transport.sim.endpoints import Topology
from dmoe_net.transport.sim.events import NetworkEvent
from dmoe_net.transport.sim.flow import Medium
from dmoe_net.transport.sim.links import Constant, HostOptions, Latency, Loss
from dmoe_net.transport.sim.network import SimNetwork

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

_TELL_PERIOD_S = 10.0
"""Seconds of real time between two lines of a simulation in the log."""

_LATENCY = Constant(0.05)
_HOST = HostOptions()

_STUCK_AFTER_S = 1e9
"""30 years of virtual time. When every task waits for ever, the clock jumps to this deadline at once."""

_COLLECT_AFTER = 250_000
"""New objects. What is in flight between a thousand hosts is looked at again and again, and is no garbage: at Python's
own 700 this takes 40 % of the time, at 50,000 next to nothing, for some 10 MB of garbage that lives longer."""


def run(main: Callable[..., Awaitable[_T]], *args: Any, seed: int = 0) -> _T:
    """Run `await main(*args)` in virtual time, with deterministic scheduling; the counterpart of `trio.run`.

    The log (INFO, of `dmoe_net.transport.sim.simulation`) tells every ten seconds how much virtual time has passed.

    Args:
      seed: of the order in which tasks run that are ready at the same time.

    Raises:
      RuntimeError: this trio cannot schedule deterministically, or the simulation is stuck: every task waits, and
        nothing is due.
    """

    async def until_stuck() -> _T:
        with trio.move_on_after(_STUCK_AFTER_S):
            return await main(*args)
        raise RuntimeError("the simulation is stuck: every task waits, and nothing is due")

    clock = trio.testing.MockClock(autojump_threshold=0)
    with _deterministic_scheduling(seed), _rare_collections(), _virtual_time_told(clock):
        return trio.run(until_stuck, clock=clock)


@contextmanager
def _virtual_time_told(clock: trio.testing.MockClock) -> Iterator[None]:
    """Tell the log (INFO) every ten seconds of real time how far the block has come in virtual time."""
    done, began = threading.Event(), time.monotonic()

    def tell() -> None:
        while not done.wait(_TELL_PERIOD_S):
            virtual_s = clock.current_time() - start_s
            _log.info("%.1f s of virtual time in %.0f s of real time", virtual_s, time.monotonic() - began)

    start_s = clock.current_time()
    threading.Thread(target=tell, daemon=True).start()
    try:
        yield
    finally:
        done.set()


@contextmanager
def _deterministic_scheduling(seed: int) -> Iterator[None]:
    """Make trio's scheduling deterministic, as its own plugin for Hypothesis does, and undo that afterwards."""
    scheduler: Any = getattr(getattr(trio, "_core", None), "_run", None)
    if not (hasattr(scheduler, "_ALLOW_DETERMINISTIC_SCHEDULING") and hasattr(scheduler, "_r")):
        raise RuntimeError(
            f"trio {trio.__version__} has no trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING and ._r; "
            "reproducible simulations need a version that has them, such as 0.35"
        )
    was_allowed, state = scheduler._ALLOW_DETERMINISTIC_SCHEDULING, scheduler._r.getstate()
    scheduler._ALLOW_DETERMINISTIC_SCHEDULING = True
    scheduler._r.seed(seed)
    try:
        yield
    finally:
        scheduler._ALLOW_DETERMINISTIC_SCHEDULING = was_allowed
        scheduler._r.setstate(state)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Let Python's collector of cyclic garbage look less often, if it looks at all."""
    thresholds = gc.get_threshold()
    if thresholds[0]:
        gc.set_threshold(max(_COLLECT_AFTER, thresholds[0]), *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


@asynccontextmanager
async def simulate(
    *,
    seed: int = 0,
    latency: Latency = _LATENCY,
    hosts: HostOptions | Callable[[str], HostOptions] = _HOST,
    loss: float | Loss = 0.0,
    schedule: Sequence[tuple[float, NetworkEvent]] = (),
    tick_s: float = 0.001,
    give_up_s: float = 60.0,
    check_frames: bool = False,
) -> AsyncIterator[SimNetwork]:
    """A network that lives as long as the block. At its end programs are cancelled and all links and listeners closed.

    Args:
      seed: of latencies and losses.
      latency: one-way, of every part that is sent. Links within a host take 0.1 ms and no bandwidth.
      hosts: every host's connection, or a function of its name.
      loss: probability of losing a part, or all about it.
      schedule: events and their times, seconds from now.
      tick_s: deliveries are rounded up to multiples of it, so that many share one turn of the event loop; 0: exact. A
        line that carries more than `SEND_BUFFER_BYTES` in a tick is not used to the full.
      give_up_s: a link whose hosts have not been able to reach each other for so long breaks.
      check_frames: send the frames' bytes through the parser of real links, and raise in `send` what it refuses. Slow,
        for tests.

    Raises:
      ValueError: an argument is out of range.
      Exception: what a program raised (`SimNetwork.start`); what the block raised comes out as it is.
    """
    if not 0 <= tick_s < math.inf:
        raise ValueError(f"tick_s must be a finite number of at least 0, got {tick_s!r}")
    if not give_up_s > 0:
        raise ValueError(f"give_up_s must be positive, got {give_up_s!r}")
    for when_s, _ in schedule:
        if not 0 <= when_s < math.inf:
            raise ValueError(f"a scheduled time must be a finite number of at least 0, got {when_s!r}")
    agenda = Agenda(tick_s=tick_s)
    medium = Medium(agenda=agenda, loss=loss if isinstance(loss, Loss) else Loss(probability=loss))
    topology = Topology(medium=medium, seed=seed, latency=latency, check_frames=check_frames)
    try:
        async with trio.open_nursery() as nursery:
            network = SimNetwork(topology, nursery, hosts=hosts, give_up_s=give_up_s)
            for when_s, event in schedule:
                agenda.at(trio.current_time() + when_s, network.apply, event)
            nursery.start_soon(agenda.run)
            try:
                yield network
            finally:
                nursery.cancel_scope.cancel()
                network.close()
    except BaseExceptionGroup as group:
        # The nursery is ours and not the caller's: a single error comes out as it is.
        if len(group.exceptions) > 1:
            raise
        raise group.exceptions[0] from group.exceptions[0].__cause__
