"""The vectors of the specification, checked by code that knows the specification alone, and against the library."""

import hashlib
import re
from pathlib import Path

import cbor2
import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from dmoe_net.dht.entries import EntryReader, encode_value, entry_to_wire, sign_entry
from dmoe_net.dht.routing_table import key_id
from dmoe_net.errors import RemoteProtocolError
from dmoe_net.keys import OPEN_SWARM, Identity, Membership

README = Path(__file__).parents[2] / "net" / "dmoe_net" / "dht" / "README.md"


def vectors() -> dict[str, bytes]:
    """The named values of the page's last section."""
    section = README.read_text().partition("## Vectors")[2]
    found: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if match := re.fullmatch(r"    (\S.*?)(?:  +([0-9a-f]+))?", line):
            name = match[1]
            found[name] = match[2] or ""
        elif match := re.fullmatch(r"        ([0-9a-f]+)", line):
            found[name] += match[1]
    return {name: bytes.fromhex(value) for name, value in found.items()}


def signed_bytes(tag: bytes, key: bytes, row: list[object]) -> bytes:
    """Bytes that are signed, written anew after the page."""
    public_key, suffix, sequence, issued_ms, life_ms, value, *_ = row
    assert isinstance(public_key, bytes)
    assert isinstance(suffix, str)
    assert isinstance(sequence, int)
    assert isinstance(issued_ms, int)
    assert isinstance(life_ms, int)
    assert isinstance(value, bytes)
    return b"".join(
        (
            b"dmoe dht entry 1\0", tag, key, public_key, bytes([len(suffix)]), suffix.encode(),
            sequence.to_bytes(8, "big"), issued_ms.to_bytes(8, "big"), life_ms.to_bytes(4, "big"), b"\0", value,
        )
    )  # fmt: skip


def test_the_page_agrees_with_the_standards() -> None:
    """Hashes by hashlib, signatures by RFC 8032's own curve, rows by a CBOR library."""
    page = vectors()
    key = Ed25519PrivateKey.from_private_bytes(page["seed of the key"])
    assert key.public_key().public_bytes_raw() == page["public key"]
    assert hashlib.sha256(page["public key"]).digest() == page["peer id"]
    assert hashlib.sha256(b"layer0.2d3").digest() == page['key "layer0.2d3"']
    row = cbor2.loads(page["row in CBOR"])
    assert row[:5] == [page["public key"], "claim", 1_700_000_000_123, 1_700_000_000_123, 30_000]
    assert row[5:] == [page["value"], page["signature"], 12_500]
    assert cbor2.loads(page["value"]) == [["10.0.0.1", 31337], True]
    signed = signed_bytes(page["swarm tag, no secret"], page['key "layer0.2d3"'], row)
    assert signed == page["signed, after the purpose"]
    assert key.sign(b"dmoe_jax signed data v1\0" + signed) == page["signature"]
    other = signed_bytes(page["swarm tag, that secret"], page['key "layer0.2d3"'], row)
    with pytest.raises(InvalidSignature):
        Ed25519PublicKey.from_public_bytes(page["public key"]).verify(
            page["signature"], b"dmoe_jax signed data v1\0" + other
        )


def test_the_library_agrees_with_the_page() -> None:
    """It makes the same bytes, and refuses the forgeries that the page names."""
    page = vectors()
    identity = Identity.from_seed(page["seed of the key"])
    assert identity.peer_id.raw == page["peer id"]
    assert page["swarm tag, no secret"] == OPEN_SWARM
    assert Membership(secret=page["secret"]).tag == page["swarm tag, that secret"]
    key = key_id("layer0.2d3")
    entry = sign_entry(
        identity,
        key,
        suffix="claim",
        value=encode_value([["10.0.0.1", 31337], True]),
        sequence=1_700_000_000_123,
        issued_at=1_700_000_000.123,
        life_s=30.0,
    )
    row = entry_to_wire(entry, left_s=12.5)
    assert cbor2.dumps(row) == page["row in CBOR"]
    reader = EntryReader()
    assert reader.read_untrusted(key, row) == (entry, 12.5)
    changed = [
        [*row[:place], other, *row[place + 1 :]]
        for place, other in enumerate([bytes(32), "Claim", 0, 0, 1, b"\x01", bytes(64)])
    ]
    forgeries = [*changed, [row[0], "clai", (ord("m") << 56) + (1_700_000_000_123 >> 8), *row[3:]]]
    for forgery in forgeries:
        with pytest.raises(RemoteProtocolError, match="is not signed by it"):
            reader.read_untrusted(key, forgery)
    with pytest.raises(RemoteProtocolError, match="is not signed by it"):
        reader.read_untrusted(key + 1, row)
    with pytest.raises(RemoteProtocolError, match="is not signed by it"):
        EntryReader(Membership(secret=page["secret"]).tag).read_untrusted(key, row)
