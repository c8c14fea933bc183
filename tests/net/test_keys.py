"""Identities, their files, and certificates; and names of peers, which are read back exactly as people copy them."""

import datetime
import hashlib
import multiprocessing
import os
import signal
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from dmoe_net.errors import RemoteProtocolError
from dmoe_net.identity import Address, Contact, PeerId
from dmoe_net.key_files import (
    create_identity,
    hold_identity,
    load_allow_list,
    load_identity,
    load_or_create_identity,
    load_swarm_secret,
)
from dmoe_net.keys import (
    Identity,
    IdentityError,
    Membership,
    certificate_chain,
    peer_id_of,
    peer_id_of_certificate_untrusted,
    verify,
)

ALICE = Identity.from_seed(b"a" * 32)
BOB = Identity.from_seed(b"b" * 32)
SECRET = b"correct horse battery staple"


def private(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_an_identity_follows_from_its_seed() -> None:
    """This seed has this public key (RFC 8032, section 7.1, test 1); the peer id is its SHA-256."""
    seed = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    public_key = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
    identity = Identity.from_seed(seed)
    assert identity.public_key == public_key
    assert identity.peer_id == peer_id_of(public_key) == PeerId(hashlib.sha256(public_key).digest())
    assert Identity.generate().peer_id != Identity.generate().peer_id


def test_a_seed_of_another_length_is_refused() -> None:
    """The message does not repeat it: it may be somebody's key."""
    for seed in (b"", b"x" * 31, b"x" * 33, "x" * 32):
        with pytest.raises(ValueError, match=r"is 32 bytes$"):
            Identity.from_seed(seed)


def test_nothing_secret_is_printed() -> None:
    chain = certificate_chain(ALICE, Membership(secret=SECRET))
    text = repr((ALICE, Membership(secret=SECRET), chain))
    assert [word in text for word in ("PRIVATE", "horse", str(ALICE.peer_id))] == [False, False, True]


def test_signatures() -> None:
    """Only the holder of the key signs, only these data, and only for `verify`."""
    signature = ALICE.sign(b"data")
    assert verify(ALICE.public_key, b"data", signature)
    assert not verify(BOB.public_key, b"data", signature)
    assert not verify(ALICE.public_key, b"date", signature)
    assert not verify(ALICE.public_key, b"data", signature[:-1] + bytes([signature[-1] ^ 1]))
    assert signature != Ed25519PrivateKey.from_private_bytes(b"a" * 32).sign(b"data")  # of use in no other protocol


@given(st.binary(max_size=80), st.binary(max_size=80), st.binary(max_size=80))
def test_verify_takes_anything(public_key: bytes, data: bytes, signature: bytes) -> None:
    """Keys and signatures of a wrong length are False, and nothing is an exception."""
    assert not verify(public_key[:31], data, signature)
    assert not verify(public_key, data, signature[:63])
    verify(public_key.ljust(32, b"\0")[:32], data, signature.ljust(64, b"\xff")[:64])


def test_a_file_of_an_identity(tmp_path: Path) -> None:
    """It is made once, private from the start, never overwritten, and gives the same peer again."""
    path = tmp_path / "key.pem"
    old_umask = os.umask(0)
    try:
        made = create_identity(path)
    finally:
        os.umask(old_umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["key.pem"]
    content = path.read_bytes()
    with pytest.raises(IdentityError, match=r"key\.pem exists already"):
        create_identity(path)
    assert path.read_bytes() == content
    assert load_identity(path).peer_id == made.peer_id == load_or_create_identity(path).peer_id
    assert load_or_create_identity(tmp_path / "other.pem").peer_id != made.peer_id
    path.chmod(0o400)
    assert load_identity(path).peer_id == made.peer_id


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match=r"cannot write the identity .*key\.pem: No such file or directory"):
        create_identity(tmp_path / "missing" / "key.pem")
    (tmp_path / "link.pem").symlink_to(tmp_path / "nowhere")
    with pytest.raises(IdentityError, match="exists already"):
        create_identity(tmp_path / "link.pem")
    with pytest.raises(IdentityError, match="cannot read"):
        load_or_create_identity(tmp_path / "link.pem")
    assert os.listdir(tmp_path) == ["link.pem"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o644, 0o777])
def test_a_file_that_others_can_open_is_refused(tmp_path: Path, mode: int) -> None:
    key = private(tmp_path / "key.pem", ALICE.private_key_pem(), mode)
    secret = private(tmp_path / "secret", SECRET, mode)
    with pytest.raises(IdentityError, match=f"mode {mode:o}.*chmod 600 {key}$"):
        load_identity(key)
    with pytest.raises(IdentityError, match=f"chmod 600 {secret}$"):
        load_swarm_secret(secret)


@pytest.mark.parametrize(
    ("owner", "mode", "is_taken"),
    [
        *((0, mode, True) for mode in (0o400, 0o440, 0o640)),
        *((0, mode, False) for mode in (0o444, 0o460, 0o450, 0o660)),
        *((1000, mode, mode == 0o400) for mode in (0o400, 0o440, 0o640)),
    ],
)
def test_a_secret_as_kubernetes_mounts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: int, mode: int, is_taken: bool
) -> None:
    """A file of root's may be open to its group for reading, behind the two links of a Secret volume; ours may not."""
    (tmp_path / "..2026_11_30").mkdir()
    file = private(tmp_path / "..2026_11_30" / "secret", SECRET, mode)
    (tmp_path / "..data").symlink_to("..2026_11_30")
    (tmp_path / "secret").symlink_to(Path("..data") / "secret")
    status = list(file.stat())
    status[stat.ST_UID] = owner
    monkeypatch.setattr(os, "fstat", lambda descriptor: os.stat_result(status))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    if is_taken:
        assert load_swarm_secret(tmp_path / "secret") == SECRET
    else:
        with pytest.raises(IdentityError, match=f"mode {mode:o}.*chmod 600"):
            load_swarm_secret(tmp_path / "secret")


PKCS8 = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
PLAIN, ENCRYPTED = serialization.NoEncryption(), serialization.BestAvailableEncryption(b"password")
PUBLIC = (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
EC_KEY = ec.generate_private_key(ec.SECP256R1())
OTHER_KEYS = {
    "empty": b" \n",
    "text": b"hello",
    "cut": ALICE.private_key_pem()[:60],
    "public": Ed25519PrivateKey.generate().public_key().public_bytes(*PUBLIC),
    "encrypted": Ed25519PrivateKey.generate().private_bytes(*PKCS8, ENCRYPTED),
    "ec": EC_KEY.private_bytes(*PKCS8, PLAIN),
    "long": ALICE.private_key_pem() + b"\n" * 5000,
}
"""Content of files that are no Ed25519 private key."""


@pytest.mark.parametrize("kind", OTHER_KEYS)
def test_other_content_is_refused(tmp_path: Path, kind: str) -> None:
    path = private(tmp_path / "key.pem", OTHER_KEYS[kind])
    with pytest.raises(IdentityError, match=r"key\.pem.*expected an?\b.*key") as caught:
        load_identity(path)
    assert "\n" not in str(caught.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="is a folder"):
        load_identity(tmp_path)
    with pytest.raises(IdentityError, match=r"cannot read .*nothing: No such file"):
        load_identity(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(IdentityError, match="no ordinary file"):
        load_identity(tmp_path / "pipe")


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read everything")
def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    path = private(tmp_path / "key.pem", ALICE.private_key_pem(), 0o200)
    with pytest.raises(IdentityError, match="Permission denied"):
        load_identity(path)


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    """A second holder is refused while the first one lives; looking at the file is free."""
    path = tmp_path / "key.pem"
    with hold_identity(path) as first:
        with pytest.raises(IdentityError, match=r"key\.pem is in use by another process"), hold_identity(path):
            pass
        assert load_identity(path).peer_id == first.peer_id
    with hold_identity(path) as second:
        assert second.peer_id == first.peer_id


def _hold_and_die(path: Path) -> None:
    with hold_identity(path):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_dead_holder_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    process = multiprocessing.get_context("spawn").Process(target=_hold_and_die, args=(path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    with hold_identity(path):
        pass


def test_a_swarm_secret(tmp_path: Path) -> None:
    """White space around it and a byte order mark do not count; it has at least 16 bytes, and the file at most 4096."""
    path = tmp_path / "secret"
    for before, after in ((b"\n ", b" \r\n"), (b"\xef\xbb\xbf", b"\r\n"), (b"", b"x" * (4096 - len(SECRET)))):
        assert load_swarm_secret(private(path, before + SECRET + after)) == SECRET + after.strip()
    for content in (b"", b"x" * 15, b"x" * 15 + b"\n\n"):
        with pytest.raises(IdentityError, match="at least 16 bytes"):
            load_swarm_secret(private(path, content))
    with pytest.raises(IdentityError, match="longer than 4096"):
        load_swarm_secret(private(path, b"x" * 4097))


def test_an_allow_list(tmp_path: Path) -> None:
    """It has a peer id a line, comments and blank lines between them, and what a Windows editor begins a file with."""
    path = tmp_path / "allowed"
    bob = str(BOB.peer_id).upper()
    path.write_text(f"\ufeff# friends\n\n{ALICE.peer_id}  # Alice\r\n\t{bob}\n{ALICE.peer_id}", "utf-8")
    assert load_allow_list(path) == {ALICE.peer_id, BOB.peer_id}


@pytest.mark.parametrize("line", ["alice", "ab" * 31, "ab" * 33, "ab " * 32, "zz" * 32, "\N{FULLWIDTH DIGIT ONE}" * 64])
def test_a_wrong_line_of_an_allow_list_is_named(tmp_path: Path, line: str) -> None:
    path = private(tmp_path / "allowed", f"{ALICE.peer_id}\n{line}\n".encode())
    with pytest.raises(IdentityError, match="allowed line 2: expected a peer id of 64"):
        load_allow_list(path)


def test_an_allow_list_of_nobody_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="allowed"):
        load_allow_list(tmp_path / "allowed")
    for content in (b"", b"# nobody\n", b"\xff\xfe"):
        with pytest.raises(IdentityError, match="allowed"):
            load_allow_list(private(tmp_path / "allowed", content))


def test_membership() -> None:
    """None allows everybody, a set those in it; a short secret is refused without being repeated."""
    assert Membership().admits(ALICE.peer_id)
    only_alice = Membership(allowed=frozenset({ALICE.peer_id}))
    assert only_alice.admits(ALICE.peer_id)
    assert not only_alice.admits(BOB.peer_id)
    assert not Membership(allowed=frozenset()).admits(ALICE.peer_id)
    with pytest.raises(ValueError, match="at least 16 bytes") as caught:
        Membership(secret=b"hunter2")
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ValueError, match="frozenset of PeerId"):
        Membership(allowed=frozenset({"alice"}))  # type: ignore[arg-type]


def test_a_certificate_chain() -> None:
    """The swarm's key, which the secret alone determines, signs it, the same each time; the leaf is no authority."""
    chain = certificate_chain(ALICE, Membership(secret=SECRET))
    assert certificate_chain(ALICE, Membership(secret=SECRET, allowed=frozenset())) == chain
    leaf = x509.load_der_x509_certificate(chain.leaf_certificate)
    swarm = x509.load_der_x509_certificate(chain.swarm_certificate)
    leaf.verify_directly_issued_by(swarm)
    swarm.verify_directly_issued_by(swarm)
    assert certificate_chain(BOB, Membership(secret=SECRET)).swarm_certificate == chain.swarm_certificate
    assert certificate_chain(ALICE, Membership()).swarm_certificate != chain.swarm_certificate
    assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert swarm.extensions.get_extension_for_class(x509.BasicConstraints).value.path_length == 0
    assert leaf.not_valid_before_utc == datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def test_the_peer_of_a_certificate() -> None:
    """It is the same whatever swarm has signed; no serial number of many keys is of another length."""
    for index in range(64):
        identity = Identity.from_seed(bytes([index]) * 32)
        for membership in (Membership(), Membership(secret=SECRET)):
            der = certificate_chain(identity, membership).leaf_certificate
            assert peer_id_of_certificate_untrusted(der) == identity.peer_id


def test_every_other_certificate_is_refused() -> None:
    chain = certificate_chain(ALICE, Membership())
    der = chain.leaf_certificate
    changed = [der[:index] + bytes([der[index] ^ 1]) + der[index + 1 :] for index in range(len(der) - 64)]
    cut = [der[:index] for index in range(len(der))]
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "swarm")]))
        .serial_number(1)
        .not_valid_before(datetime.datetime(1970, 1, 1))
        .not_valid_after(datetime.datetime(2100, 1, 1))
    )
    key = Ed25519PrivateKey.from_private_bytes(b"a" * 32)
    certificates = [builder.public_key(each.public_key()).sign(key, None) for each in (key, EC_KEY)]
    others = [certificate.public_bytes(serialization.Encoding.DER) for certificate in certificates]
    for wrong in [chain.swarm_certificate, *others, *changed, *cut, der + b"\0", b"", b"\x30\x82\xff\xff"]:
        with pytest.raises(RemoteProtocolError, match="not an Ed25519 leaf"):
            peer_id_of_certificate_untrusted(wrong)


ID = "0123456789abcdef" * 4

hosts = st.sampled_from(["127.0.0.1", "::1", "fe80::1%eth0", "seed.example.org", "localhost"])
addresses = st.builds(Address, host=hosts, port=st.integers(0, 65535))
contacts = st.builds(Contact, peer_id=st.binary(min_size=32, max_size=32).map(PeerId), address=addresses)


@given(contacts)
def test_full_text_names_the_same_contact(contact: Contact) -> None:
    assert Contact.parse(contact.full) == contact
    assert Contact.parse(f" {contact.full}\n") == contact


def test_text_for_logs_is_short() -> None:
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
    """It is neither shorter nor longer, nor has what `bytes.fromhex` or `int` would let pass."""
    assert PeerId.parse(ID).raw.hex() == ID
    with pytest.raises(ValueError, match="expected a peer id of 64 hexadecimal digits"):
        PeerId.parse(text)
