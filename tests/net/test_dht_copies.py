"""Memory of holders, and the time for which a peer's silence is borne."""

import pytest

from dmoe_net.dht.copies import MAX_RECORDS, Copies, Position, nearest
from dmoe_net.dht.patience import Patience
from dmoe_net.identity import Address, Contact, PeerId


def contact(node: int) -> Contact:
    return Contact(PeerId(node.to_bytes(32)), Address("10.0.0.1", 1 + node % 60_000))


def test_holders_are_remembered_for_a_while_nearest_first() -> None:
    """A walk's holders stand for a minute; what replaces them without a walk does not live longer."""
    copies = Copies(life_s=60.0)
    assert copies.holders(4, 0.0) == ()
    copies.walked(4, [contact(1), contact(5), contact(6)], 10.0)
    assert copies.holders(4, 69.9) == (contact(5), contact(6), contact(1))
    copies.changed(4, [contact(6), contact(7)])
    assert copies.holders(4, 69.9) == (contact(6), contact(7))
    assert copies.holders(4, 70.0) == ()
    copies.walked(4, [contact(1)], 80.0)
    copies.forget(4)
    assert copies.holders(4, 80.0) == ()


def test_positions_outlive_the_minute_as_long_as_the_holder_is_found_again() -> None:
    """So a new walk to the same holders brings their changes and not the whole record."""
    copies = Copies(life_s=60.0)
    copies.read(4, contact(5).peer_id, Position(7, 1))
    copies.read(4, contact(6).peer_id, Position(8, 2))
    copies.walked(4, [contact(5), contact(6)], 0.0)
    copies.read(4, contact(5).peer_id, Position(7, 3))
    assert copies.position(4, contact(5).peer_id) == Position(7, 3)
    copies.walked(4, [contact(5)], 100.0)
    assert copies.position(4, contact(5).peer_id) == Position(7, 3)
    assert copies.position(4, contact(6).peer_id) is None


def test_the_least_recently_used_records_are_forgotten() -> None:
    """At most `MAX_RECORDS` of them."""
    copies = Copies(life_s=60.0)
    for key in range(MAX_RECORDS):
        copies.walked(key, [contact(5)], 0.0)
    copies.walked(0, [contact(6)], 0.0)
    copies.walked(MAX_RECORDS, [contact(5)], 0.0)
    assert copies.holders(0, 1.0) == (contact(6),)
    assert copies.holders(1, 1.0) == ()
    assert copies.holders(MAX_RECORDS, 1.0) == (contact(5),)


def test_a_peer_counts_once_among_the_nearest() -> None:
    """With the address that was named last."""
    moved = Contact(contact(5).peer_id, Address("10.9.9.9", 9))
    assert nearest([contact(5), contact(1), moved], 4) == (moved, contact(1))
    assert nearest([contact(5), contact(1)], 4, 1) == (contact(5),)


def test_patience_is_the_time_of_calls_and_four_deviations() -> None:
    """RFC 6298, section 2, by hand: 0.2 s, then 0.3 s."""
    patience, peer = Patience(), contact(1).peer_id
    assert patience.of(peer, 0.0) == 1.0, "of nobody is anything known"
    patience.note(peer, 0.5, 0.5)  # a first call, with its dial: for others who are new
    patience.note(peer, 0.2, 1.0)
    # smoothed 0.2, deviation 0.1
    assert patience.of(peer, 1.0) == pytest.approx(0.2 + 4 * 0.1)
    patience.note(peer, 0.3, 2.0)
    # deviation 0.1 + (|0.3 - 0.2| - 0.1) / 4 = 0.1; smoothed 0.2 + 0.1 / 8 = 0.2125
    assert patience.of(peer, 2.0) == pytest.approx(0.2125 + 4 * 0.1)
    assert patience.of(contact(2).peer_id, 2.0) == 1.0, "first calls took 0.5 s, with a deviation of 0.25 s"


def test_patience_has_bounds_and_forgets_peers_that_were_not_called() -> None:
    """From 0.1 to 1 s; after a minute without calls a peer has to be dialled again, as one that is new."""
    patience, near, far = Patience(), contact(1).peer_id, contact(2).peer_id
    for peer, seconds in ((near, 0.001), (far, 5.0)):
        for number in range(100):
            patience.note(peer, seconds, float(number) / 10)
    assert patience.of(near, 10.0) == 0.1
    assert patience.of(far, 10.0) == 1.0
    for number in range(3, 40):
        patience.note(contact(number).peer_id, 0.15, 10.0)
    first = patience.of(contact(99).peer_id, 10.0)
    assert 0.1 < first < 1.0
    assert patience.of(near, 80.0) == first
