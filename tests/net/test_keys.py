"""Identities, their files, and certificates."""

import datetime
import hashlib
import multiprocessing
import os
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
from dmoe_net.identity import PeerId
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
    """A file with this content and mode."""
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_an_identity_follows_from_its_seed() -> None:
    """RFC 8032, section 7.1, test 1: this seed has this public key; the peer id is its SHA-256."""
    seed = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    public_key = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
    identity = Identity.from_seed(seed)
    assert identity.public_key == public_key
    assert identity.peer_id == peer_id_of(public_key) == PeerId(hashlib.sha256(public_key).digest())
    assert Identity.generate().peer_id != Identity.generate().peer_id


@pytest.mark.parametrize("seed", [b"", b"x" * 31, b"x" * 33, "x" * 32])
def test_a_seed_of_another_length_is_refused(seed: bytes) -> None:
    """Without repeating it: it may be somebody's key."""
    with pytest.raises(ValueError, match=r"is 32 bytes$"):
        Identity.from_seed(seed)


def test_nothing_secret_is_printed() -> None:
    """Neither a key nor a secret shows up in a log by accident."""
    chain = certificate_chain(ALICE, Membership(secret=SECRET))
    text = repr((ALICE, Membership(secret=SECRET), chain))
    assert "PRIVATE" not in text
    assert "horse" not in text
    assert str(ALICE.peer_id) in text


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
    """The error names it, and nothing is left behind."""
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
    """The error says what to do."""
    key = private(tmp_path / "key.pem", ALICE.private_key_pem(), mode)
    secret = private(tmp_path / "secret", SECRET, mode)
    with pytest.raises(IdentityError, match=f"mode {mode:o}.*chmod 600 {key}$"):
        load_identity(key)
    with pytest.raises(IdentityError, match=f"chmod 600 {secret}$"):
        load_swarm_secret(secret)


def other_keys() -> dict[str, bytes]:
    """Content of files that are no Ed25519 private key."""
    pkcs8 = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    key = Ed25519PrivateKey.generate()
    ec_key = ec.generate_private_key(ec.SECP256R1())
    return {
        "empty": b" \n",
        "text": b"hello",
        "cut": ALICE.private_key_pem()[:60],
        "public": key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        ),
        "encrypted": key.private_bytes(*pkcs8, serialization.BestAvailableEncryption(b"password")),
        "ec": ec_key.private_bytes(*pkcs8, serialization.NoEncryption()),
        "long": ALICE.private_key_pem() + b"\n" * 5000,
    }


@pytest.mark.parametrize("kind", sorted(other_keys()))
def test_other_content_is_refused(tmp_path: Path, kind: str) -> None:
    """One line that names the file and what was expected."""
    path = private(tmp_path / "key.pem", other_keys()[kind])
    with pytest.raises(IdentityError, match=r"key\.pem.*expected an?\b.*key") as caught:
        load_identity(path)
    assert "\n" not in str(caught.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """A folder, nothing, and a pipe, which does not keep us waiting."""
    with pytest.raises(IdentityError, match="is a folder"):
        load_identity(tmp_path)
    with pytest.raises(IdentityError, match=r"cannot read .*nothing: No such file"):
        load_identity(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(IdentityError, match="no ordinary file"):
        load_identity(tmp_path / "pipe")


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read everything")
def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    """The system's reason is passed on."""
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
        os._exit(7)


def test_a_dead_holder_holds_nothing(tmp_path: Path) -> None:
    """The lock of a process that crashed is gone with it."""
    path = tmp_path / "key.pem"
    process = multiprocessing.get_context("spawn").Process(target=_hold_and_die, args=(path,))
    process.start()
    process.join()
    assert process.exitcode == 7
    with hold_identity(path):
        pass


def test_a_swarm_secret(tmp_path: Path) -> None:
    """White space at both ends and a byte order mark do not count; what is left has at least 16 bytes, and the file at
    most 4096."""
    path = tmp_path / "secret"
    assert load_swarm_secret(private(path, b"\n " + SECRET + b" \r\n")) == SECRET
    assert load_swarm_secret(private(path, b"\xef\xbb\xbf" + SECRET + b"\r\n")) == SECRET
    assert load_swarm_secret(private(path, b"x" * 4096)) == b"x" * 4096
    for content in (b"", b"x" * 15, b"x" * 15 + b"\n\n"):
        with pytest.raises(IdentityError, match="at least 16 bytes"):
            load_swarm_secret(private(path, content))
    with pytest.raises(IdentityError, match="longer than 4096"):
        load_swarm_secret(private(path, b"x" * 4097))


def test_an_allow_list(tmp_path: Path) -> None:
    """A peer id a line, comments and blank lines between them, and what a Windows editor begins a file with."""
    path = tmp_path / "allowed"
    path.write_text(
        f"\ufeff# friends\n\n{ALICE.peer_id}  # Alice\r\n\t{str(BOB.peer_id).upper()}\n{ALICE.peer_id}", "utf-8"
    )
    assert load_allow_list(path) == {ALICE.peer_id, BOB.peer_id}


@pytest.mark.parametrize("line", ["alice", "ab" * 31, "ab" * 33, "ab " * 32, "zz" * 32, "\N{FULLWIDTH DIGIT ONE}" * 64])
def test_a_wrong_line_of_an_allow_list_is_named(tmp_path: Path, line: str) -> None:
    """The error says which line it is."""
    path = tmp_path / "allowed"
    path.write_text(f"{ALICE.peer_id}\n{line}\n", "utf-8")
    with pytest.raises(IdentityError, match="allowed line 2: expected a peer id of 64"):
        load_allow_list(path)


@pytest.mark.parametrize("content", [b"", b"# nobody\n", b"\xff\xfe", None])
def test_an_allow_list_of_nobody_is_refused(tmp_path: Path, content: bytes | None) -> None:
    """It would keep everybody out, and hardly on purpose."""
    path = tmp_path / "allowed"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(IdentityError, match="allowed"):
        load_allow_list(path)


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
    """Signed by the swarm's key, which only the secret determines; the same each time; no authority for the leaf."""
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
    """The same peer whatever swarm has signed; many keys, so that no serial number is of another length."""
    for index in range(64):
        identity = Identity.from_seed(bytes([index]) * 32)
        for membership in (Membership(), Membership(secret=SECRET)):
            der = certificate_chain(identity, membership).leaf_certificate
            assert peer_id_of_certificate_untrusted(der) == identity.peer_id


def test_every_other_certificate_is_refused() -> None:
    """An authority, another format, another kind of key, a cut or changed one, bytes that are none."""
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
    others = [
        builder.public_key(public_key).sign(key, None).public_bytes(serialization.Encoding.DER)
        for public_key in (key.public_key(), ec.generate_private_key(ec.SECP256R1()).public_key())
    ]
    for wrong in [chain.swarm_certificate, *others, *changed, *cut, der + b"\0", b"", b"\x30\x82\xff\xff"]:
        with pytest.raises(RemoteProtocolError, match="not an Ed25519 leaf"):
            peer_id_of_certificate_untrusted(wrong)
