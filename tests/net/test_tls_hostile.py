"""Bytes and certificates that are not what they should be, on encrypted links and their listeners."""

import contextlib
import datetime
import ssl
import struct
from pathlib import Path

import pytest
import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from dmoe_net.errors import (
    ConnectionLost,
    DialFailed,
    HandshakeFailed,
    LocalProtocolError,
    NetError,
    RemoteProtocolError,
)
from dmoe_net.keys import certificate_chain
from dmoe_net.transport.tcp import TcpTransport
from dmoe_net.transport.tls import TlsTransport
from dmoe_net.transport.tls_engine import client_context
from tests.net.link_frames import assert_same, bytes_of, numbered, parts_of
from tests.net.tls_peers import (
    ALICE,
    ANY_PORT,
    BOB,
    EVE,
    OPEN,
    RawPeer,
    assert_refused,
    caught,
    hostile_context,
    raw_dialler,
    raw_listener,
    raw_pair,
    rejection,
    trusting,
)


@pytest.mark.parametrize(
    "data",
    [
        bytes_of(numbered(1, 100)),
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(1000),
        struct.pack("!BHH", 22, 0x0301, 0xFFFF) + bytes(100),
    ],
    ids=["frame", "http", "zeros", "record"],
)
async def test_garbage_at_a_listener(data: bytes) -> None:
    """Whatever does not begin with TLS fails the handshake; the listener lives on."""
    bob = TlsTransport(BOB)
    listener = await bob.listen(ANY_PORT)
    async with await trio.open_tcp_stream("127.0.0.1", listener.address.port) as stream:
        await stream.send_all(data)
        link = await listener.accept()
        assert_refused(link, await caught(link.handshake), "does not speak our TLS")
    async with trio.open_nursery() as nursery:

        async def dial() -> None:
            (await TlsTransport(ALICE).dial(listener.address)).abort()

        nursery.start_soon(dial)
        link = await listener.accept()
        assert await caught(link.handshake) is None
    link.abort()
    await listener.aclose()


async def test_an_endless_handshake_is_cut_off() -> None:
    """A first message that announces 128 KiB, OpenSSL's own limit, is not waited for."""
    async with raw_dialler() as (raw, link), trio.open_nursery() as nursery:
        message = b"\x01" + (131_000).to_bytes(3, "big") + bytes(131_000)

        async def flood() -> None:
            with contextlib.suppress(trio.BrokenResourceError):
                for start in range(0, 120_000, 16_000):
                    piece = message[start : start + 16_000]
                    await raw.stream.send_all(struct.pack("!BHH", 22, 0x0301, len(piece)) + piece)

        nursery.start_soon(flood)
        assert_refused(link, await caught(link.handshake), "no end of a handshake")


async def test_an_older_tls_is_refused(tmp_path: Path) -> None:
    """TLS 1.2 would show certificates in the clear."""
    context = hostile_context(certificate_chain(ALICE, OPEN).pem, tmp_path / "pem")
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    error = await rejection(context)
    assert isinstance(error, HandshakeFailed)
    assert "unsupported protocol" in str(error)


async def test_plain_and_encrypted_do_not_mix() -> None:
    plain = await TcpTransport().listen(ANY_PORT)
    async with trio.open_nursery() as nursery:

        async def dial() -> None:
            with pytest.raises(DialFailed, match="does not speak our TLS, or went down"):
                await TlsTransport(ALICE).dial(plain.address)

        nursery.start_soon(dial)
        link = await plain.accept()
        with pytest.raises(RemoteProtocolError, match="not a part of a frame"):
            await link.receive()
        link.abort()
    await plain.aclose()
    encrypted = await TlsTransport(BOB).listen(ANY_PORT)
    dialled = await TcpTransport().dial(encrypted.address)
    await dialled.send(*parts_of(numbered(1, 100)))
    accepted = await encrypted.accept()
    assert_refused(accepted, await caught(accepted.handshake), "does not speak our TLS")
    with contextlib.suppress(RemoteProtocolError, ConnectionLost):
        assert await dialled.receive() is None
    dialled.abort()
    await encrypted.aclose()


@pytest.mark.parametrize("nbytes", [0, 500])
async def test_truncation_is_no_end(nbytes: int) -> None:
    """Without a farewell, which nobody else can forge, the end is ConnectionLost, between frames too."""
    async with raw_pair() as (raw, link):
        await raw.send(bytes_of(numbered(1, 10)) + bytes_of(numbered(2, 1000))[:nbytes])
        await raw.stream.aclose()
        assert_same(await link.receive(), numbered(1, 10))
        with pytest.raises(ConnectionLost, match="without a farewell"):
            await link.receive()


async def test_a_farewell_inside_a_frame_is_no_end() -> None:
    async with raw_pair() as (raw, link):
        await raw.send(bytes_of(numbered(1, 1000))[:500])
        raw.engine.close()
        await raw.flush()
        with pytest.raises(ConnectionLost, match="ended inside a frame"):
            await link.receive()


async def test_a_changed_byte_is_noticed() -> None:
    """One bit flipped on the way: nothing of that record comes out, and the link is of no further use."""
    async with raw_pair() as (raw, link):
        raw.engine.encrypt(bytes_of(numbered(1, 1000)))
        ciphertext = bytearray(raw.engine.take_ciphertext())
        ciphertext[100] ^= 1
        await raw.stream.send_all(ciphertext)
        with pytest.raises(RemoteProtocolError, match="bad record mac"):
            await link.receive()
        with pytest.raises(ConnectionLost):
            await link.receive()
        with pytest.raises(ConnectionLost):
            await link.send(*parts_of(numbered(2)))


async def test_a_peer_that_is_proven_can_still_talk_nonsense() -> None:
    async with raw_pair() as (raw, link):
        await raw.send(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(RemoteProtocolError, match="not a part of a frame"):
            await link.receive()


class HandMadeRecords:
    """Writes TLS records as RFC 8446 has them, from a dialler's log of secrets; cipher TLS_AES_256_GCM_SHA384."""

    def __init__(self, key_log: str) -> None:
        (line,) = (line for line in key_log.splitlines() if line.startswith("CLIENT_TRAFFIC_SECRET_0 "))
        self._secret = bytes.fromhex(line.split()[2])
        self._sequence = 0

    def _expand(self, label: bytes, nbytes: int) -> bytes:
        """HKDF-Expand-Label, section 7.1."""
        info = struct.pack("!HB", nbytes, 6 + len(label)) + b"tls13 " + label + b"\0"
        return HKDFExpand(algorithm=hashes.SHA384(), length=nbytes, info=info).derive(self._secret)

    def record(self, content: bytes, kind: int) -> bytes:
        """One record, sections 5.2 and 5.3."""
        nonce = int.from_bytes(self._expand(b"iv", 12), "big") ^ self._sequence
        self._sequence += 1
        head = struct.pack("!BHH", 23, 0x0303, len(content) + 17)
        inner = content + bytes([kind])
        return head + AESGCM(self._expand(b"key", 32)).encrypt(nonce.to_bytes(12, "big"), inner, head)

    def key_update(self) -> bytes:
        """Section 4.6.3: new keys on this side from here on, and the request that the other side does the same."""
        record = self.record(b"\x18\0\0\x01\x01", 22)
        self._secret, self._sequence = self._expand(b"traffic upd", 48), 0
        return record


async def test_requests_for_new_keys_are_bounded(tmp_path: Path) -> None:
    """A few are carried out; each is answered only when there is data to send, so a flood of them must end."""
    context = client_context(certificate_chain(ALICE, OPEN))
    context.keylog_filename = str(tmp_path / "keys")
    async with raw_dialler(context) as (raw, link):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(raw.handshake)
            await link.handshake()
        by_hand = HandMadeRecords((tmp_path / "keys").read_text())
        few = b"".join(by_hand.key_update() for _ in range(3))
        await raw.stream.send_all(few + by_hand.record(bytes_of(numbered(1, 10)), 23))
        assert_same(await link.receive(), numbered(1, 10))
        await raw.stream.send_all(b"".join(by_hand.key_update() for _ in range(1000)))
        with pytest.raises(RemoteProtocolError, match="new keys on and on"):
            await link.receive()


async def test_nothing_passes_before_the_handshake() -> None:
    """OpenSSL would shake hands by itself on the first use, and nobody would check with whom."""
    async with raw_dialler() as (_, link):
        with pytest.raises(LocalProtocolError, match="needs its handshake first"):
            await link.send(*parts_of(numbered(1)))
        with pytest.raises(LocalProtocolError, match="needs its handshake first"):
            await link.receive()
        await link.aclose()
        with pytest.raises(ConnectionLost):
            await link.handshake()


PLAIN = serialization.NoEncryption()


def swarm_key(secret: bytes) -> Ed25519PrivateKey:
    """As documented: HKDF-SHA256 without salt."""
    kdf = HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=b"dmoe_jax swarm key v1")
    return Ed25519PrivateKey.from_private_bytes(kdf.derive(secret))


def name(text: str) -> x509.Name:
    """A name with this one attribute."""
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def forged(
    public_key: object,
    issuer_key: Ed25519PrivateKey,
    *,
    subject: str = "peer",
    issuer: str = "swarm",
    is_ca: bool = False,
) -> bytes:
    """A certificate made by somebody who knows how, PEM."""
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name(subject))
        .issuer_name(name(issuer))
        .public_key(public_key)  # type: ignore[arg-type]
        .serial_number(7)
        .not_valid_before(datetime.datetime(1970, 1, 1))
        .not_valid_after(datetime.datetime(2100, 1, 1))
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        .sign(issuer_key, None)
    )
    return certificate.public_bytes(serialization.Encoding.PEM)


def pem_of(key: Ed25519PrivateKey | ec.EllipticCurvePrivateKey) -> bytes:
    """A private key as a file's content."""
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, PLAIN)


async def test_certificates_that_are_none_of_a_peer_are_refused(tmp_path: Path) -> None:
    """The key of an open swarm, which everybody has, signed them, but they are no Ed25519 leaves of our format; or it
    did not, and OpenSSL itself refuses them."""
    open_key, key, between = swarm_key(b""), Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    ec_key, swarm = ec.generate_private_key(ec.SECP256R1()), certificate_chain(ALICE, OPEN).swarm_certificate
    signed = {
        "another kind of key": forged(ec_key.public_key(), open_key) + pem_of(ec_key),
        "another format": forged(key.public_key(), open_key) + pem_of(key),
        "an authority": forged(key.public_key(), open_key, is_ca=True) + pem_of(key),
        "the swarm itself": ssl.DER_cert_to_PEM_cert(swarm).encode() + pem_of(open_key),
    }
    not_signed = {
        "none": b"",
        "self-signed": forged(key.public_key(), key, subject="swarm") + pem_of(key),
        "through an authority": forged(key.public_key(), between, issuer="between")
        + forged(between.public_key(), open_key, subject="between", is_ca=True)
        + pem_of(key),
        "another swarm's": forged(key.public_key(), swarm_key(b"x" * 16)) + pem_of(key),
    }
    for kind, pem in (signed | not_signed).items():
        error = await rejection(hostile_context(pem, tmp_path / "pem"))
        assert isinstance(error, HandshakeFailed), kind
        assert ("no certificate of a peer" in str(error)) == (kind in signed), kind


async def test_another_peers_certificate_without_its_key(tmp_path: Path) -> None:
    """The handshake demands the key. (A mismatched Ed25519 key cannot even be loaded; an elliptic-curve key file
    carries its public half, and can lie about it.)"""
    alice = certificate_chain(ALICE, OPEN)
    stolen = trusting(alice, alice).pem.replace(alice.private_key_pem, EVE.private_key_pem())
    with pytest.raises(ssl.SSLError, match="KEY_VALUES_MISMATCH"):
        hostile_context(stolen, tmp_path / "pem")
    victim, eve = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    pkcs1, point = serialization.PrivateFormat.TraditionalOpenSSL, serialization.PublicFormat.UncompressedPoint
    own, others = (each.public_key().public_bytes(serialization.Encoding.X962, point) for each in (eve, victim))
    file = eve.private_bytes(serialization.Encoding.DER, pkcs1, PLAIN).replace(own, others)
    lie = ssl.DER_cert_to_PEM_cert(file).replace("CERTIFICATE", "EC PRIVATE KEY")
    certificate = forged(victim.public_key(), swarm_key(b""))
    error = await rejection(hostile_context(certificate + lie.encode(), tmp_path / "pem"))
    assert isinstance(error, HandshakeFailed)
    assert "bad signature" in str(error)


async def test_a_listener_with_a_wrong_certificate_is_not_dialled(tmp_path: Path) -> None:
    """The same checks hold for whoever listens."""
    key = Ed25519PrivateKey.generate()

    async def shake_hands(raw: RawPeer) -> None:
        with contextlib.suppress(NetError, trio.BrokenResourceError):
            await raw.handshake()

    for signer, why in ((swarm_key(b""), "no certificate of a peer"), (swarm_key(b"x" * 16), "not of our swarm")):
        context = hostile_context(forged(key.public_key(), signer) + pem_of(key), tmp_path / "pem", is_server=True)
        async with raw_listener(context, shake_hands) as address:
            with pytest.raises(DialFailed, match=why):
                await TlsTransport(ALICE).dial(address)
