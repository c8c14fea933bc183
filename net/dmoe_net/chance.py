"""Chance that can be repeated: one number in [0, 1) for each key.

Simulations draw for a message of a link, or a call of a peer, by naming it: nothing depends on who draws first, and
there is no generator to keep for each of a hundred thousand links.
"""

import hashlib

Key = int | str | bytes


def uniform(*key: Key) -> float:
    """A number in [0, 1) that depends on the key alone; uniform and independent over different keys."""
    # Types and lengths are part of what is hashed, so that ("ab", "c"), ("a", "bc") and (b"ab", "c") differ.
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53
