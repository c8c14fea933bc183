"""Format of the announcements of experts in the DHT.

A node has one entry for each group of rows in which it serves experts, whatever their number: under `ffn.2d3`, for rows
24 to 31 of the grid `ffn` of two dimensions, its address, the coordinates of its experts there, and the time that calls
take. So a reader needs no record that says which rows there are, and a group of rows is one look. Grids of one
dimension are cut into groups of `COLUMNS` experts, `ffn.1d0`. Several nodes may serve one expert: each has its own
entry, and they do not disturb each other.

    DHT, PREFIX.DIMSdGROUP     [host, port, [u0, u1, ..., u0, u1, ...], call_s]

Everything here is pure. Strangers write what `experts_in_untrusted` reads: whatever is malformed is left out.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dmoe_jax.directory.grid import MAX_COORDINATE, Coordinates, ExpertUid
from dmoe_net.dht.entries import Found, Value
from dmoe_net.errors import RemoteProtocolError
from dmoe_net.identity import Address, Contact, PeerId
from dmoe_net.wire.fields import HOST, PORT, Field, integer, optional, real, row_untrusted, several

ROWS = 8
"""Rows of a grid that share a record."""

COLUMNS = 256
"""Experts of a grid of one dimension that share a record."""

MAX_NUMBERS = 3072
"""Most coordinates of one entry, of all its experts together: as many as a value has room for, however large they are.
A node with more has several entries."""

_MAX_READ = 2**18
"""Most coordinates that are read of one record: 160 nodes that serve 8 rows of 100 experts, in a tenth of a second."""

_ENTRY: dict[str, Field[Any]] = {
    "host": HOST,
    "port": PORT,
    "coordinates": several(integer(0, MAX_COORDINATE), MAX_NUMBERS),
    "call_s": optional(real(0.0)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A node that serves an expert, as it announced itself."""

    contact: Contact
    """Contact under which the node is called."""
    ends_at: float
    """Time until which the announcement lives, seconds of `SwarmClock.ticks`."""
    due_at: float = math.inf
    """Time by which it should have announced itself again: nodes do so every third of an announcement's life."""
    call_s: float | None = None
    """Mean seconds that a call has lately spent there; None: it had none."""


Replicas = tuple[Replica, ...]
"""The nodes that serve one expert, each once."""


def group_key(prefix: str, coordinates: Sequence[int]) -> str:
    """Key of the record in which an expert is announced."""
    dims = len(coordinates)
    return f"{prefix}.{dims}d{coordinates[0] // (COLUMNS if dims == 1 else ROWS)}"


def key_of(uid: ExpertUid) -> str:
    """Key of the record that lists an expert."""
    return group_key(uid.prefix, uid.coordinates)


def grid_keys(prefix: str, grid_size: Sequence[int]) -> tuple[str, ...]:
    """Keys of all records of a grid, in the order of rows."""
    rest = (0,) * (len(grid_size) - 1)
    return tuple(dict.fromkeys(group_key(prefix, (row, *rest)) for row in range(grid_size[0])))


def announcements(uids: Iterable[ExpertUid], address: Address, call_s: float | None = None) -> dict[str, list[Value]]:
    """Values that announce experts of a node: for each key one, or several for very many experts; see `Replica`."""
    flat: dict[str, list[int]] = {}
    dims: dict[str, int] = {}
    for uid in sorted(uids):
        key = key_of(uid)
        flat.setdefault(key, []).extend(uid.coordinates)
        dims[key] = len(uid.coordinates)

    def value(numbers: list[int]) -> Value:
        return [address.host, address.port, numbers, call_s]

    return {
        key: [value(numbers[start : start + most]) for start in range(0, len(numbers), most)]
        for key, numbers in flat.items()
        for most in [MAX_NUMBERS - MAX_NUMBERS % dims[key]]
    }


def experts_in_untrusted(key: str, record: Iterable[Found]) -> dict[Coordinates, Replicas]:
    """The experts that are announced under a key, and who serves each, in the order of coordinates.

    A node that announces an expert twice counts once, with what lives longer: it would otherwise draw several shares of
    the load.
    """
    prefix, _, group = key.rpartition(".")
    dims = int(group.partition("d")[0])
    found: dict[Coordinates, dict[PeerId, Replica]] = {}
    num_read = 0
    for entry in record:
        try:
            host, port, flat, call_s = row_untrusted(entry.value, "an announcement", **_ENTRY)
        except RemoteProtocolError:
            continue
        num_read += len(flat)
        if num_read > _MAX_READ:
            break
        contact = Contact(entry.owner, Address(host, port))
        replica = Replica(
            contact=contact, ends_at=entry.ends_at, due_at=entry.ends_at - entry.life_s / 3, call_s=call_s
        )
        for coordinates in zip(*[iter(flat)] * dims, strict=False):
            if group_key(prefix, coordinates) == key:
                replicas = found.setdefault(coordinates, {})
                if entry.owner not in replicas or replicas[entry.owner].ends_at < entry.ends_at:
                    replicas[entry.owner] = replica
    return {
        coordinates: tuple(replicas[peer_id] for peer_id in sorted(replicas))
        for coordinates, replicas in sorted(found.items())
    }
