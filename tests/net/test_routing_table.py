"""The routing table: which contacts it keeps, and that `nearest` is brute force."""

import random

import pytest

from dmoe_net.dht.routing_table import ID_BITS, NodeId, RoutingTable, key_id, node_id
from dmoe_net.identity import Address, Contact, PeerId

TOP = 1 << 255
"""Begin of the half of the key space that does not have the own id 0: it does not split where `depth_modulo` is 1."""


def contact_at(node: NodeId) -> Contact:
    """A contact whose id is this point of the key space."""
    return Contact(PeerId(node.to_bytes(32, "big")), Address("10.0.0.1", 1000))


def fill(table: RoutingTable, count: int, seed: int) -> list[Contact]:
    rng = random.Random(seed)
    contacts = [Contact(PeerId.draw(rng), Address("10.0.0.1", 1000)) for _ in range(count)]
    for contact in contacts:
        table.add(contact, 0.0)
    return contacts


def test_places_of_keys_and_peers() -> None:
    """A key's place is the SHA-256 of its text ('abc': FIPS 180-2, appendix B.1), a peer's its id, big-endian."""
    assert key_id("abc") == 0xBA7816BF8F01CFEA414140DE5DAE2223B00361A396177A9CB410FF61F20015AD
    assert node_id(PeerId(bytes(31) + b"\x07")) == 7


@pytest.mark.parametrize(
    ("bucket_size", "depth_modulo", "least", "most"),
    [(20, 5, 45, 65), (50, 5, 35, 45), (20, 10, 650, 800), (20, 1, 7, 15)],
)
def test_bucket_counts_for_ten_thousand_peers(bucket_size: int, depth_modulo: int, least: int, most: int) -> None:
    """The number of buckets after 10 000 random ids lies where hivemind's tests put it for each (k, b)."""
    rng = random.Random(0)
    table = RoutingTable(rng.getrandbits(ID_BITS), bucket_size=bucket_size, depth_modulo=depth_modulo)
    fill(table, 10_000, seed=1)
    assert least <= table.bucket_count <= most


@pytest.mark.parametrize("size", [0, 1, 15, 500])
def test_nearest_equals_brute_force(size: int) -> None:
    rng = random.Random(size)
    table = RoutingTable(rng.getrandbits(ID_BITS), bucket_size=8)
    fill(table, size, seed=size + 1)
    everybody = table.contacts()
    targets = [rng.getrandbits(ID_BITS) for _ in range(100)] + [node_id(c.peer_id) for c in everybody[:20]]
    for target in [table.local_id, *targets]:
        count = rng.randint(1, 30)
        expected = sorted(everybody, key=lambda c: node_id(c.peer_id) ^ target)[:count]
        assert table.nearest(target, count) == tuple(expected)


def test_nothing_is_dropped_near_the_own_id() -> None:
    """The k peers nearest to the own id are always kept, since that bucket splits."""
    table = RoutingTable(1 << 255, bucket_size=20)
    contacts = fill(table, 3000, seed=5)
    nearest = sorted(contacts, key=lambda c: node_id(c.peer_id) ^ table.local_id)[:20]
    assert table.nearest(table.local_id, 20) == tuple(nearest)


def test_a_full_bucket_names_its_oldest_contact() -> None:
    """A newcomer to a full bucket waits; the least recently seen contact is named, until refreshed."""
    table = RoutingTable(0, bucket_size=2, depth_modulo=1)
    first, second, newcomer, another = (contact_at(TOP + low) for low in (1, 2, 3, 4))
    assert table.add(first, 1.0) is table.add(second, 2.0) is None
    table.add(contact_at(5), 0.0)  # splits the first bucket
    suspect = table.add(newcomer, 3.0)
    assert (suspect.contact, suspect.last_seen) == (first, 1.0)
    assert newcomer.peer_id not in table
    assert not table.has_room(another.peer_id)
    assert table.add(first, 4.0) is None
    assert table.add(newcomer, 5.0).contact == second


def test_the_latest_replacement_takes_an_empty_place() -> None:
    """When a contact is removed, the most recently added replacement moves up, and not before."""
    table = RoutingTable(0, bucket_size=1, depth_modulo=1)
    first, _, last = contacts = [contact_at(TOP + low) for low in (1, 2, 3)]
    for now, contact in enumerate(contacts):
        table.add(contact, float(now))
    assert table.remove(first.peer_id)
    assert table.contacts() == (last,)  # of the two that waited, the bound of one kept the later
    assert not table.remove(first.peer_id)
    assert table.remove(last.peer_id)
    assert len(table) == 0


def test_a_removed_replacement_does_not_come_back() -> None:
    """Removing a peer removes it from the waiting list too."""
    table = RoutingTable(0, bucket_size=1, depth_modulo=1)
    first, waiting = contact_at(TOP + 1), contact_at(TOP + 2)
    for contact in (first, waiting):
        table.add(contact, 0.0)
    assert not table.remove(waiting.peer_id)
    table.remove(first.peer_id)
    assert len(table) == 0


def test_a_contact_is_there_once_and_never_the_own_one() -> None:
    """Adding a known id with another address replaces the address."""
    table, moved = RoutingTable(7), Contact(contact_at(9).peer_id, Address("10.9.9.9", 9))
    for contact in (contact_at(7), contact_at(9), moved):
        assert table.add(contact, 0.0) is None
    assert table.contacts() == (moved,)


def test_splitting_ends_at_the_last_bit() -> None:
    table = RoutingTable(0, bucket_size=1)
    for node in (1, 2, 3, 4):
        table.add(contact_at(node), 0.0)
    assert contact_at(1) in table.contacts()


def test_stale_buckets_come_oldest_first() -> None:
    """Named are only buckets with room to which no lookup went since the limit, by an id inside them."""
    table = RoutingTable(0, bucket_size=2, depth_modulo=1)
    low, high = 5, TOP + 5
    for node in (low, low + 1, high):
        table.add(contact_at(node), 0.0)
    assert table.bucket_count == 2
    table.remove(contact_at(low + 1).peer_id)
    table.looked_up(low, 20.0)
    table.looked_up(high, 10.0)
    rng = random.Random(0)
    first, second = table.stale_targets(older_than=30.0, rng=rng)
    assert (first >> 255, second >> 255) == (1, 0)
    assert [target >> 255 for target in table.stale_targets(older_than=15.0, rng=rng)] == [1]
    assert table.stale_targets(older_than=10.0, rng=rng) == ()
    table.add(contact_at(low + 1), 0.0)
    assert [target >> 255 for target in table.stale_targets(older_than=30.0, rng=rng)] == [1]
