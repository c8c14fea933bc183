"""The entries that one node keeps: owners, changes, ends of lives, and who pays for what does not fit."""

import math
import random
import tracemalloc
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from dmoe_net.dht.entries import Entry, Subkey
from dmoe_net.dht.storage import MAX_ENTRIES, MAX_OF_OWNER, NO_ROOM, EntryStorage, Held
from dmoe_net.identity import PeerId

PEERS = [PeerId(bytes([number]) * 32) for number in range(250)]
_numbers = count(1)


def entry(owner: int = 0, sequence: int = 1, *, suffix: str = "", size: int = 10, value: bytes | None = b"") -> Entry:
    """An entry of a peer by its number; storage looks at no signature, only whether two are the same."""
    return Entry(
        subkey=Subkey(PEERS[owner % 250] if owner < 250 else PeerId(owner.to_bytes(32)), suffix),
        sequence=sequence,
        issued_at=0.0,
        life_s=300.0,
        raw_value=None if value is None else b"x" * size,
        public_key=bytes(32),
        signature=next(_numbers).to_bytes(64),
    )


def stored(
    storage: EntryStorage,
    *entries: Entry,
    key: int = 1,
    account: int | None = None,
    left_s: float = 30.0,
    now: float = 0.0,
) -> list[bool]:
    """Store entries of one owner; True for each that was taken."""
    who = entries[0].owner if account is None else PEERS[account]
    return [each is None for each in storage.store(key, [(e, left_s) for e in entries], account=who, now=now)]


def living(storage: EntryStorage, key: int = 1, now: float = 0.0) -> list[Entry]:
    return [held.entry for held in storage.get(key, now)]


def test_a_higher_sequence_of_the_same_owner_replaces_and_nothing_else() -> None:
    """Others have subkeys of their own, lower sequences are refused with what stands, the same one is no conflict."""
    storage = EntryStorage(max_bytes=10**6)
    first, other, third = entry(0, 5), entry(1, 1), entry(0, 6)
    assert stored(storage, first) == stored(storage, other) == [True]
    assert living(storage) == [first, other]
    assert stored(storage, first) == [True]
    for sequence in (4, 5):  # of two entries of one sequence the first one stands
        (refused,) = storage.store(1, [(entry(0, sequence), 30.0)], account=PEERS[0], now=0.0)
        assert refused.held == first
    assert stored(storage, third) == [True]
    assert living(storage) == [other, third]
    assert stored(storage, entry(0, 7, value=None)) == [True]
    assert [each.is_withdrawn for each in living(storage)] == [False, True]
    assert stored(storage, first) == [False], "what was withdrawn does not come back"


def test_entries_end_by_the_steady_clock() -> None:
    """An ended entry is remembered while it could be taken for a new one: 300 s from its issue at 0, and 120 s."""
    storage = EntryStorage(max_bytes=10**6)
    stored(storage, entry(0, 9), left_s=10.0, now=100.0)
    stored(storage, entry(1, 1), left_s=20.0, now=100.0)
    assert len(living(storage, now=109.9)) == 2
    assert [each.owner for each in living(storage, now=110.0)] == [PEERS[1]]
    assert stored(storage, entry(0, 2), now=110.0) == [False]
    assert storage.sweep(419.0) == 0
    assert storage.sweep(420.0) == 2
    assert (len(storage), storage.bytes_held) == (0, 0)


def test_a_later_sight_never_makes_an_entry_live_longer_than_from_its_first() -> None:
    """Whoever brings an entry first with little time left cannot end it; who brings it last cannot revive it."""
    storage = EntryStorage(max_bytes=10**6)
    one = entry(0, 1)
    stored(storage, one, account=7, left_s=1.0, now=0.0)
    assert stored(storage, one, left_s=300.0, now=10.0) == [True]
    (held,) = storage.get(1, 299.0)
    assert (held.ends_at, held.account) == (300.0, PEERS[0]), "its owner is charged once it comes itself"
    stored(storage, one, left_s=300.0, now=299.0)
    assert storage.get(1, 300.0) == ()


def test_only_what_changed_since_is_read() -> None:
    """Numbers of changes go over all records, so that they stay good when a record was forgotten."""
    storage = EntryStorage(max_bytes=10**6)
    stored(storage, entry(0, 1))
    stored(storage, entry(1, 1))
    (_, second) = storage.get(1, 0.0)
    assert storage.since(1, 0, 0.0) == storage.get(1, 0.0)
    assert storage.since(1, second.change, 0.0) == ()
    renewed = entry(0, 2)
    stored(storage, renewed)
    assert [held.entry for held in storage.since(1, second.change, 0.0)] == [renewed]
    stored(storage, entry(0, 2), key=2)
    assert [held.entry for held in storage.since(1, second.change, 0.0)] == [renewed]
    storage.sweep(1000.0)
    again = entry(1, 2)
    stored(storage, again, now=1000.0)
    assert [held.entry for held in storage.since(1, second.change, 1000.0)] == [again]


def test_an_owner_has_few_entries_in_a_record() -> None:
    """Its oldest one makes room for one more than `MAX_OF_OWNER`; in other records it has as many again."""
    storage = EntryStorage(max_bytes=10**6)
    for number in range(MAX_OF_OWNER + 1):
        assert stored(storage, entry(0, 1, suffix=str(number)))[0]
    assert [each.suffix for each in living(storage)] == [str(n) for n in range(1, MAX_OF_OWNER + 1)]
    assert stored(storage, entry(0, 1), key=2) == [True]


def test_a_flood_of_a_record_costs_the_flooders_entries() -> None:
    """Ten thousand junk entries of as many owners, brought by one peer, and the honest ones are there."""
    storage = EntryStorage(max_bytes=10**9)
    honest = [entry(number, 1) for number in range(5)]
    for each in honest:
        assert stored(storage, each) == [True]
    flooder = 200
    for number in range(10_000):
        assert stored(storage, entry(1000 + number), account=flooder) == [True]
        if number % 1000 == 0:
            assert set(honest) <= set(living(storage))
    assert set(honest) <= set(living(storage))
    assert len(living(storage)) <= MAX_ENTRIES
    late = entry(6, 1)
    assert stored(storage, late) == [True], "and there is room for honest ones that come after it"
    assert late in living(storage)


def test_a_record_full_of_owners_that_pay_for_themselves_refuses_one_more() -> None:
    """Nobody of those holds more than the newcomer would: the first come stay until they end."""
    storage, owners = EntryStorage(max_bytes=10**9), range(1000, 1000 + MAX_ENTRIES)
    assert all(stored(storage, entry(owner)) == [True] for owner in owners)
    assert storage.store(1, [(entry(9), 30.0)], account=PEERS[9], now=0.0) == [NO_ROOM]
    assert stored(storage, entry(1003, 2)) == [True], "renewals need no room"
    assert stored(storage, entry(9), now=30.0) == [True]


def test_a_flood_of_keys_costs_the_flooders_entries() -> None:
    """Beyond the bound of all records the account that holds most gives up its oldest ones."""
    size = entry(size=1000).size_bytes
    storage = EntryStorage(max_bytes=100 * size)
    honest = [entry(number, size=1000) for number in range(20)]
    for key, each in enumerate(honest):
        stored(storage, each, key=key)
    for number in range(1000):
        assert stored(storage, entry(1000 + number, size=1000), key=10_000 + number, account=99) == [True]
        assert storage.bytes_held <= 100 * size
    for key, each in enumerate(honest):
        assert living(storage, key) == [each]
    newest = [key for key in range(10_000, 11_000) if living(storage, key)]
    assert newest[-1] == 10_999, "of the flood the newest ones are left"


def contents(storage: EntryStorage) -> list[Held]:
    """All entries, those too that have ended and are remembered."""
    return [held for _, record in storage.items(-math.inf) for held in record]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(1, 6), st.integers(0, 40)), max_size=60))
def test_sums_stay_true(steps: list[tuple[int, int, int, int]]) -> None:
    """The sum is what counting anew gives; once all has ended, the same steps do what they do in a fresh storage."""
    used, now = EntryStorage(max_bytes=1500), 0.0
    for storages in ([used], [used, EntryStorage(max_bytes=1500)]):
        for key, owner, sequence, wait in steps:
            now, new = now + wait, entry(owner, sequence, size=100)
            for storage in storages:
                stored(storage, new, key=key, account=owner // 2, left_s=50.0, now=now)
                if wait % 3 == 0:
                    storage.sweep(now)
                assert storage.bytes_held == sum(each.entry.size_bytes for each in contents(storage)) <= 1500
        kept = [[(each.entry, each.ends_at, each.account) for each in contents(storage)] for storage in storages]
        assert kept[0] == kept[-1]
        now += 1000.0
        used.sweep(now)
        assert (len(used), used.bytes_held) == (0, 0)


def test_renewals_leave_no_memory_behind() -> None:
    """Three thousand renewals of ten entries: of each 200 bytes would be 600 kB."""
    storage, rng = EntryStorage(max_bytes=10**6), random.Random(0)
    tracemalloc.start()
    try:
        for sequence in range(1, 3001):
            stored(storage, entry(rng.randrange(10), sequence), now=float(sequence))
        assert tracemalloc.get_traced_memory()[0] < 100_000
    finally:
        tracemalloc.stop()
