"""What claims and announcements look like in the DHT.

All claims for the experts of a grid share a key, `claims:ffn`, so that one lookup finds them. The subkey is the
expert's coordinates and the claimer, `3.17/PEERID`: claims of several nodes stand beside each other, and each reader
decides by the same rule. The value is the claimer's contact, and whether it has confirmed its claim. Strangers write
these records, so whatever is malformed is left out.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping

from dmoe_jax.claims.claiming import MAX_CLAIMABLE, Listing
from dmoe_jax.directory.grid import ExpertUid, check_prefix, steps
from dmoe_jax.directory.slots import children_of_untrusted
from dmoe_net.dht.messages import contact_to_wire, parse_contact_untrusted
from dmoe_net.dht.node import StoreItem
from dmoe_net.dht.records import Dictionary, Entry, Record, Value
from dmoe_net.errors import RemoteProtocolError
from dmoe_net.identity import Contact, PeerId
from dmoe_net.wire.fields import FLAG

MAX_AHEAD_S = 300.0
"""A claim that would live longer than this is none: nobody may keep an expert from being served for a day."""

MAX_ROWS = 1024
"""Most keys under which the experts of one claimer's patterns are announced: each is a lookup in every scan."""


def check_claimable(uids: Mapping[str, ExpertUid]) -> None:
    """Make sure that a node can look after these experts.

    Raises:
      ValueError: there is none, or there are too many.
    """
    if not 1 <= len(uids) <= MAX_CLAIMABLE:
        raise ValueError(f"a node claims of 1 to {MAX_CLAIMABLE} experts, got patterns of {len(uids)}")
    if (num_rows := len(set(map(row_of, uids.values())))) > MAX_ROWS:
        raise ValueError(
            f"the experts to claim are in {num_rows} rows of their grids, at most {MAX_ROWS} are allowed: "
            "name a part of the grid, or let its last dimension be the largest"
        )


def scope_of(uids: Iterable[str]) -> str:
    """A short name for a set of experts: claimers that may claim the same ones count each other, others do not."""
    return hashlib.blake2b("\n".join(sorted(uids)).encode(), digest_size=8).hexdigest()


def claims_key(prefix: str) -> str:
    """Under which key the claims for the experts of a grid are."""
    return f"claims:{check_prefix(prefix)}"


def claim_item(uid: ExpertUid, claimer: Contact, *, is_confirmed: bool, expiration: float) -> StoreItem:
    """What is stored to claim an expert until `expiration` (swarm time, seconds)."""
    return _item(uid, claimer, [contact_to_wire(claimer), is_confirmed], expiration)


def withdrawal_item(uid: ExpertUid, claimer: Contact, *, expiration: float) -> StoreItem:
    """What is stored to take a claim back; it must end after the claim that it takes back."""
    return _item(uid, claimer, None, expiration)


def read_claims(
    prefix: str, record: Record | None, uids: Collection[str], *, now: float
) -> dict[str, dict[PeerId, bool]]:
    """The well-formed claims for these experts of a grid: uid -> claimer -> whether it is confirmed."""
    found: dict[str, dict[PeerId, bool]] = {}
    for subkey, entry in (record.entries if isinstance(record, Dictionary) else {}).items():
        coordinates, _, claimer = subkey.partition("/")
        uid = f"{prefix}.{coordinates}"
        if uid not in uids or not now < entry.expiration <= now + MAX_AHEAD_S:
            continue
        try:
            peer_id, is_confirmed = _claim_untrusted(entry)
        except RemoteProtocolError:
            continue
        if str(peer_id) == claimer:
            found.setdefault(uid, {})[peer_id] = is_confirmed
    return found


def read_listings(
    key: str, record: Record | None, uids: Collection[str], *, now: float, dead: Collection[PeerId] = ()
) -> dict[str, Listing]:
    """Who announces these experts under a key such as `ffn.3.`, by uid.

    Of the replicas of an expert (`dmoe_jax.directory.slots`) the first that is not among the `dead` stands for all.
    """
    found: dict[str, Listing] = {}
    for coordinate, child in children_of_untrusted(record).items():
        living = child.living(now)
        if living and (uid := f"{key}{coordinate}") in uids:
            first = next((each for each in living if each.contact.peer_id not in dead), living[0])
            found[uid] = Listing(contact=first.contact, expiration=first.expiration)
    return found


def row_of(uid: ExpertUid) -> str:
    """Under which key an expert is announced."""
    return steps(uid)[-1][0]


def _item(uid: ExpertUid, claimer: Contact, value: Value, expiration: float) -> StoreItem:
    coordinates = ".".join(map(str, uid.coordinates))
    subkey = f"{coordinates}/{claimer.peer_id}"
    return StoreItem(key=claims_key(uid.prefix), subkey=subkey, value=value, expiration=expiration)


def _claim_untrusted(entry: Entry) -> tuple[PeerId, bool]:
    if type(entry.value) is not list or len(entry.value) != 2:
        raise RemoteProtocolError(f"a claim is a contact and a flag, got {entry.value!r:.80}")
    contact, is_confirmed = entry.value
    return parse_contact_untrusted(contact).peer_id, FLAG.read_untrusted(is_confirmed, "is_confirmed")
