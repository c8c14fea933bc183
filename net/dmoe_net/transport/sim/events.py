"""Events of a simulated network, as plain data: a schedule of events is part of a run's configuration."""

from collections.abc import Collection
from dataclasses import dataclass

from dmoe_net.transport.sim.links import HostOptions, Latency


@dataclass(frozen=True, slots=True)
class Partition:
    """The network falls apart. It replaces the partition that was there before.

    Attributes:
      groups: hosts of different groups cannot reach each other; those in no group form one more.
    """

    groups: tuple[frozenset[str], ...]

    def __post_init__(self) -> None:
        named: set[str] = set()
        for group in self.groups:
            if isinstance(group, str):
                raise ValueError(f"a group is a set of host names, got {group!r}")
            if twice := named & set(group):
                raise ValueError(f"hosts in two groups of a partition: {', '.join(sorted(twice))}")
            named |= set(group)


@dataclass(frozen=True, slots=True)
class Heal:
    """The partition ends."""


@dataclass(frozen=True, slots=True)
class HostDown:
    """A host crashes: its links and listeners are gone, its programs are cancelled.

    Attributes:
      silent: as if unplugged, nobody is told: the others' links to it stay, and dials to it hang. Otherwise their
        links are reset after one latency, and dials are refused.
    """

    host: str
    silent: bool = False


@dataclass(frozen=True, slots=True)
class HostUp:
    """A host is there again; its programs start from the beginning."""

    host: str


@dataclass(frozen=True, slots=True)
class SetLatency:
    """All latencies change, for parts that are sent from now on."""

    latency: Latency


@dataclass(frozen=True, slots=True)
class SetHost:
    """A host's connection changes: it becomes slow, or quick again."""

    host: str
    options: HostOptions


NetworkEvent = Partition | Heal | HostDown | HostUp | SetLatency | SetHost


class Reachability:
    """Record of the hosts that can reach each other."""

    def __init__(self) -> None:
        self._group_of: dict[str, int] = {}
        self._unplugged: set[str] = set()
        self.is_whole = True
        """Everybody can reach everybody: to be asked first, for it is quick and nearly always true."""

    def set_groups(self, groups: Collection[frozenset[str]]) -> None:
        """Cut the network into these groups and the rest; none: make it whole."""
        self._group_of = {host: index for index, group in enumerate(groups) for host in group}
        self._update()

    def set_plugged(self, host: str, is_plugged: bool) -> None:
        """Cut a host off, or connect it again."""
        if is_plugged:
            self._unplugged.discard(host)
        else:
            self._unplugged.add(host)
        self._update()

    def between(self, one: str, other: str) -> bool:
        """Return True if parts pass between two hosts."""
        is_one_group = self._group_of.get(one) == self._group_of.get(other)
        return is_one_group and one not in self._unplugged and other not in self._unplugged

    def _update(self) -> None:
        self.is_whole = not self._group_of and not self._unplugged
