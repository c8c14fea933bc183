"""The simulated network itself: its hosts, their programs, and what befalls them."""

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import trio

from dmoe_net.errors import NetError
from dmoe_net.identity import PeerId
from dmoe_net.transport.sim.endpoints import SimLink, Topology
from dmoe_net.transport.sim.events import Heal, HostDown, HostUp, NetworkEvent, Partition, SetHost, SetLatency
from dmoe_net.transport.sim.links import HostOptions, SimHost, model_between
from dmoe_net.transport.sim.transport import SimTransport

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Traffic of a network so far, and its open links.

    Attributes:
      parts: delivered.
      nbytes: their bytes.
      frames: completed by them.
      dials: attempted.
      links: open now, at one end at least.
    """

    parts: int
    nbytes: int
    frames: int
    dials: int
    links: int


class SimNetwork:
    """A simulated network. Made by `simulate`."""

    def __init__(
        self,
        topology: Topology,
        nursery: trio.Nursery,
        *,
        hosts: HostOptions | Callable[[str], HostOptions],
        give_up_s: float,
    ) -> None:
        self._topology = topology
        self._nursery = nursery
        self._host_options = hosts
        self._give_up_s = give_up_s
        self._num_changes = 0  # of who can reach whom
        self._programs: dict[str, list[trio.CancelScope]] = {}  # running, by host
        self._came_up: dict[str, trio.Event] = {}  # for programs of hosts that are down

    def transport(self, host: str, peer_id: PeerId) -> SimTransport:
        """A peer's access to the network.

        Args:
          host: where it is; the `host` of its addresses. Several peers may share one.
          peer_id: who it is; the network vouches for it.
        """
        return SimTransport(self._topology, self._host(host), peer_id)

    def start(self, host: str, main: Callable[..., Awaitable[object]], *args: Any) -> None:
        """Run `await main(*args)` as a program of `host`, as long as the network lives.

        Where the host is down, a warning in the log says that the program waits for it. When it goes down, the program
        is cancelled; when it comes up again, the program starts again from the beginning, unless it had returned. What
        it raises ends the simulation, except for network errors while it is being cancelled.
        """
        if self._host(host).is_down:
            _log.warning("host %r is down at %.1f s: its program waits for a HostUp", host, trio.current_time())
        self._nursery.start_soon(self._run_program, host, main, *args)

    def apply(self, event: NetworkEvent) -> None:
        """Let an event happen now."""
        match event:
            case Partition(groups=groups):
                self._topology.medium.reachability.set_groups(groups)
                self._reach_changed(self._topology.links)
            case Heal():
                self._topology.medium.reachability.set_groups(())
                self._reach_changed(self._topology.links)
            case HostDown(host=host, silent=silent):
                self._take_down(self._host(host), silent=silent)
            case HostUp(host=host):
                self._bring_up(self._host(host))
            case SetLatency(latency=latency):
                self._topology.latency = latency
                for link in self._topology.links.values():
                    for end in (link, link.other):
                        end.flow.model = model_between(latency, end.host.name, end.other.host.name)
            case SetHost(host=host, options=options):
                self._host(host).set_options(options)
            case _:
                raise ValueError(f"not an event of a network: {event!r}")

    def statistics(self, host: str | None = None) -> Statistics:
        """Traffic so far; for one host, the parts delivered to it, the dials made by it and its open links."""
        hosts = list(self._topology.hosts.values()) if host is None else [self._host(host)]
        return Statistics(
            parts=sum(each.num_parts for each in hosts),
            nbytes=sum(each.num_bytes for each in hosts),
            frames=sum(each.num_frames for each in hosts),
            dials=sum(each.num_dials for each in hosts),
            links=sum(
                host is None or host in (link.host.name, link.other.host.name) for link in self._topology.links.values()
            ),
        )

    def _host(self, name: str) -> SimHost:
        host = self._topology.hosts.get(name)
        if host is None:
            options = self._host_options(name) if callable(self._host_options) else self._host_options
            host = self._topology.hosts[name] = SimHost(name, options)
        return host

    async def _run_program(self, host: str, main: Callable[..., Awaitable[object]], *args: Any) -> None:
        while True:
            if self._host(host).is_down:
                await self._came_up.setdefault(host, trio.Event()).wait()
                continue
            scope = trio.CancelScope()
            running = self._programs.setdefault(host, [])
            running.append(scope)
            try:
                with scope:
                    await main(*args)
            except (NetError, BaseExceptionGroup) as exc:
                was_stopped = scope.cancel_called or self._topology.is_closed
                if not was_stopped or (isinstance(exc, BaseExceptionGroup) and exc.split(NetError)[1] is not None):
                    raise
            finally:
                running.remove(scope)
            if not scope.cancel_called:
                return

    def _take_down(self, host: SimHost, *, silent: bool) -> None:
        if host.is_down:
            return
        host.is_down = True
        # Cancelled before their links end: a crashed program does not get to see that.
        for scope in self._programs.get(host.name, ()):
            scope.cancel()
        for address, listener in list(self._topology.listeners.items()):
            if address.host == host.name:
                listener.close()
        for link in list(self._topology.links_of.get(host.name, {}).values()):
            for end in (link, link.other):
                if end.host is host:
                    end.crash(silent=silent)
        if silent:
            self._topology.medium.reachability.set_plugged(host.name, False)
            self._reach_changed(self._topology.links_of.get(host.name, {}))

    def _bring_up(self, host: SimHost) -> None:
        host.is_down = False
        self._topology.medium.reachability.set_plugged(host.name, True)
        self._reach_changed(self._topology.links_of.get(host.name, {}))
        came_up = self._came_up.pop(host.name, None)
        if came_up is not None:
            came_up.set()

    def _reach_changed(self, links: Mapping[int, SimLink]) -> None:
        """Note which of the links that a change may concern are cut now, and let the others go on."""
        self._num_changes += 1
        reachability, cut = self._topology.medium.reachability, list[SimLink]()
        for link in links.values():
            if not reachability.between(link.host.name, link.other.host.name):
                if not link.cut_number:
                    link.cut_number = self._num_changes
                    cut.append(link)
                continue
            link.cut_number = 0
            link.flow.resume()
            link.other.flow.resume()
        if cut:
            when_s = trio.current_time() + self._give_up_s
            self._topology.medium.agenda.at(when_s, self._give_up, cut, self._num_changes)

    def _give_up(self, cut: Iterable[SimLink], cut_number: int) -> None:
        for link in cut:
            if link.cut_number == cut_number:
                link.break_off(f"no way there for {self._give_up_s:g} s")

    def close(self) -> None:
        """End all links and listeners. `simulate` calls it."""
        self._topology.is_closed = True
        for link in list(self._topology.links.values()):
            link.break_off("the simulation is over")
        for listener in list(self._topology.listeners.values()):
            listener.close()
