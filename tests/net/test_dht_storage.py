"""Storage: bounded, expiring, and rejected stores change nothing."""

import random

from dmoe_net.dht.records import Dictionary, Entry, make_entry
from dmoe_net.dht.storage import RecordStorage


def storage(max_keys: int = 100, max_bytes: int = 10**6) -> RecordStorage:
    return RecordStorage(max_keys=max_keys, max_bytes=max_bytes)


def store(into: RecordStorage, key: int, value: object, expiration: float, now: float = 0.0) -> bool:
    return into.store(key, [(None, make_entry(value, expiration))], now)[0]


def test_a_record_is_there_until_it_expires() -> None:
    """Readable strictly before its expiration, and swept after it."""
    held = storage()
    assert store(held, 1, "x", 10.0)
    found = held.get(1, 9.999)
    assert isinstance(found, Entry)
    assert found.value == "x"
    assert held.get(1, 10.0) is None
    assert held.sweep(9.0) == 0
    assert held.sweep(10.0) == 1
    assert (len(held), held.bytes_held) == (0, 0)


def test_a_rejected_store_does_not_shorten_a_life() -> None:
    """Hivemind's defect X1: a rejected store at +0.2 s made the value of +10 s vanish at +0.2 s. Not here."""
    held = storage()
    assert store(held, 1, "good", 10.0)
    assert not store(held, 1, "older", 0.2)
    assert held.sweep(5.0) == 0
    assert held.get(1, 5.0) == make_entry("good", 10.0)


def test_an_accepted_store_lengthens_a_life() -> None:
    """The old expiration is void once a later one is stored."""
    held = storage()
    store(held, 1, "old", 2.0)
    store(held, 1, "new", 10.0)
    assert held.sweep(5.0) == 0
    assert held.get(1, 5.0) == make_entry("new", 10.0)


def test_what_has_expired_is_not_stored() -> None:
    """A store that ends now or earlier is rejected, also beside good ones, and verdicts keep their order."""
    held = storage()
    updates = [("a", make_entry(1, 5.0)), ("b", make_entry(2, 4.0)), ("c", make_entry(3, 6.0))]
    assert held.store(1, updates, 4.5) == (True, False, True)
    record = held.get(1, 4.5)
    assert isinstance(record, Dictionary)
    assert sorted(record.entries) == ["a", "c"]


def test_an_expired_value_is_no_obstacle() -> None:
    """A dead plain value does not keep a subkey out, although nobody swept."""
    held = storage()
    store(held, 1, "dead", 5.0)
    assert held.store(1, [("a", make_entry(1, 6.0))], 5.5) == (True,)


def test_subkeys_expire_one_by_one() -> None:
    """A dictionary shrinks as its entries end and goes with the last."""
    held = storage()
    held.store(1, [("a", make_entry(1, 5.0)), ("b", make_entry(2, 8.0))], 0.0)
    record = held.get(1, 6.0)
    assert isinstance(record, Dictionary)
    assert list(record.entries) == ["b"]
    assert held.sweep(7.0) == 0
    assert held.sweep(8.0) == 1


def test_the_earliest_expiring_make_room() -> None:
    """Beyond max_keys the record that ends first goes; if it is the newcomer, it is not accepted."""
    held = storage(max_keys=2)
    store(held, 1, "a", 10.0)
    store(held, 2, "b", 5.0)
    assert store(held, 3, "c", 7.0)
    assert sorted(key for key, _ in held.items(0.0)) == [1, 3]
    assert not store(held, 4, "d", 6.0)
    assert sorted(key for key, _ in held.items(0.0)) == [1, 3]


def test_bytes_are_bounded_too() -> None:
    """Beyond max_bytes records go until the rest fits."""
    held = storage(max_bytes=2500)
    for key in range(4):
        store(held, key, b"x" * 1000, 10.0 + key)
    assert sorted(key for key, _ in held.items(0.0)) == [2, 3]
    assert held.bytes_held <= 2500


def test_expired_records_go_before_living_ones() -> None:
    """When room is short, the dead make it."""
    held = storage(max_keys=2)
    store(held, 1, "dead", 1.0)
    store(held, 2, "alive", 9.0)
    assert store(held, 3, "new", 8.0, now=2.0)
    assert sorted(key for key, _ in held.items(2.0)) == [2, 3]


def test_the_books_balance_after_many_stores() -> None:
    """After 3000 random stores, sweeps and evictions the counted bytes are those of what is held."""
    rng = random.Random(0)
    held = storage(max_keys=50, max_bytes=20_000)
    reference: dict[int, float] = {}
    for step in range(3000):
        now = step / 100
        key, expiration = rng.randrange(100), now + rng.random() * 3
        store(held, key, b"x" * rng.randrange(500), expiration, now)
        if step % 50 == 0:
            held.sweep(now)
        reference[key] = max(expiration, reference.get(key, 0.0))
        assert len(held) <= 50
        assert held.bytes_held <= 20_000
    final = list(held.items(30.0))
    assert all(record.expiration <= reference[key] for key, record in final)
    held.sweep(1000.0)
    assert (len(held), held.bytes_held) == (0, 0)
    assert final
