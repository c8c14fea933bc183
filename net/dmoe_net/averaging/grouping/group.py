"""A group as all of its members know it, alike: who they are, and the slots that they take."""

import enum
from dataclasses import dataclass
from functools import cached_property

from dmoe_net.averaging.grouping.group_key import assign_slots
from dmoe_net.averaging.speeds import UNKNOWN, Speeds
from dmoe_net.identity import Address, Contact, PeerId
from dmoe_net.wire.fields import octets

GROUP_ID_BYTES = 16
GROUP_ID = octets(GROUP_ID_BYTES, GROUP_ID_BYTES)
MAX_GROUP_SIZE = 1024
"""Members. The papers' groups have 4 to 64; the list of them travels in one message."""

WEIGHTS = (1e-9, 1e12)
"""Least and largest weight of a vector, such as its samples: all can be added up, and the least still counts."""


class Role(enum.StrEnum):
    """The part that a member takes, by its name on the wire."""

    NODE = "node"  # sends its vector and reduces a part
    CLIENT = "client"  # cannot be called: sends, and reduces nothing
    AUXILIARY = "auxiliary"  # has no vector of its own: reduces only


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A peer as its group sees it.

    Raises:
      ValueError: the weight is out of range, a client has an address, or another peer has none.
    """

    peer_id: PeerId
    address: Address | None
    """The address at which it is called; None for a client."""
    role: Role = Role.NODE
    wanted_slot: int = 0
    """Its place along the axis of the round, see `group_key`."""
    weight: float = 1.0
    """Weight of its vector in the mean, within `WEIGHTS`; of no meaning for an auxiliary peer."""
    speeds: Speeds = UNKNOWN
    """Speeds of its line and processor, which decide the size of its part."""

    def __post_init__(self) -> None:
        if (self.address is None) != (self.role is Role.CLIENT):
            raise ValueError(f"a client has no address and others have one, got {self.role} at {self.address}")
        lightest, heaviest = WEIGHTS
        if self.sends and not lightest <= self.weight <= heaviest:
            raise ValueError(f"the weight of a vector is from {lightest:g} to {heaviest:g}, got {self.weight:g}")

    @property
    def contact(self) -> Contact:
        """Contact at which it is called; a client is not."""
        assert self.address is not None
        return Contact(self.peer_id, self.address)

    @property
    def sends(self) -> bool:
        """True if it has a vector."""
        return self.role is not Role.AUXILIARY


@dataclass(frozen=True, kw_only=True)
class Group:
    """An assembled group. Every member makes the same plan from it.

    Raises:
      ValueError: two members are one peer, nobody can be called, or a slot is out of range.
    """

    group_id: bytes
    """16 bytes, drawn by the leader: names this all-reduce."""
    members: tuple[Member, ...]
    """In the leader's order."""
    side: int
    """Slots along each axis of the grid."""

    def __post_init__(self) -> None:
        if len(self.group_id) != GROUP_ID_BYTES:
            raise ValueError(f"a group id has {GROUP_ID_BYTES} bytes, got {len(self.group_id)}")
        if not 1 <= len(self.members) <= MAX_GROUP_SIZE:
            raise ValueError(f"a group has 1 to {MAX_GROUP_SIZE} members, got {len(self.members)}")
        if len({member.peer_id for member in self.members}) < len(self.members):
            raise ValueError("a peer is in the group twice")
        if all(member.role is Role.CLIENT for member in self.members):
            raise ValueError("all members of the group are clients: nobody can reduce")
        _ = self.slots

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """The slot that each member takes: its next coordinate."""
        return tuple(assign_slots([member.wanted_slot for member in self.members], self.side))

    def index(self, peer_id: PeerId) -> int:
        """The member's place in `members`. Raises `ValueError` for a stranger."""
        for index, member in enumerate(self.members):
            if member.peer_id == peer_id:
                return index
        raise ValueError(f"peer {peer_id.short} is not in the group")
