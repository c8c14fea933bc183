"""Names of peers: texts that people copy are read back exactly, and whatever else they paste is named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmoe_net.identity import Address, Contact, PeerId

ID = "0123456789abcdef" * 4

contacts = st.builds(
    Contact,
    peer_id=st.binary(min_size=32, max_size=32).map(PeerId),
    address=st.builds(
        Address,
        host=st.sampled_from(["127.0.0.1", "::1", "fe80::1%eth0", "seed.example.org", "localhost"]),
        port=st.integers(0, 65535),
    ),
)


@given(contacts)
def test_full_text_names_the_same_contact(contact: Contact) -> None:
    """`parse` undoes `full`, also with white space around it."""
    assert Contact.parse(contact.full) == contact
    assert Contact.parse(f" {contact.full}\n") == contact


def test_text_for_logs_is_short() -> None:
    """`str` has eight digits of the id; `full` all of them."""
    contact = Contact.parse(f"{ID.upper()}@[::1]:4000")
    assert str(contact) == "01234567@[::1]:4000"
    assert contact.full == f"{ID}@[::1]:4000"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("127.0.0.1:4000", "there is no @"),
        ("", "there is no @"),
        ("@127.0.0.1:4000", "64 hexadecimal digits, got ''"),
        (f"{ID[:-1]}@127.0.0.1:4000", "64 hexadecimal digits"),
        (f"{ID[:-2]}0x@127.0.0.1:4000", "64 hexadecimal digits"),
        (f"{ID[:-1]} @127.0.0.1:4000", "64 hexadecimal digits"),
        (f"{ID}@127.0.0.1", "an address as HOST:PORT, got '127.0.0.1'"),
        (f"{ID}@:4000", "host must be a non-empty string"),
        (f"{ID}@127.0.0.1:70000", "port must be an integer from 0 to 65535, got 70000"),
        (f"{ID}@::1:4000", r"an IPv6 address as \[HOST\]:PORT"),
    ],
)
def test_what_is_no_contact_is_named(text: str, why: str) -> None:
    """The error has the whole text, the form that was expected, and the part that is wrong."""
    with pytest.raises(ValueError, match=f"expected a peer as PEERID@HOST:PORT, got .*{why}") as error:
        Contact.parse(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("text", ["", "ab", ID + "00", "0x" + ID[2:], ID[:-1] + "g", ID[:-2] + " 0", "٠" * 64])
def test_a_peer_id_is_64_hexadecimal_digits(text: str) -> None:
    """Neither shorter nor longer, nor with what `bytes.fromhex` or `int` would let pass."""
    assert PeerId.parse(ID).raw.hex() == ID
    with pytest.raises(ValueError, match="expected a peer id of 64 hexadecimal digits"):
        PeerId.parse(text)
