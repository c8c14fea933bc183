"""Certificates that are not what they should be, on encrypted links."""

import contextlib
import datetime
import ssl
from pathlib import Path

import pytest
import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from dmoe_net.errors import DialFailed, HandshakeFailed, NetError
from dmoe_net.identity import Address
from dmoe_net.keys import certificate_chain
from dmoe_net.transport.tls import TlsTransport
from tests.net.tls_peers import ALICE, EVE, OPEN, RawPeer, hostile_context, rejection, trusting


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
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


async def test_certificates_of_other_kinds_are_refused(tmp_path: Path) -> None:
    """Signed by the swarm's key, which in an open swarm everybody has, but no Ed25519 leaf of our format."""
    open_key, key, ec_key = swarm_key(b""), Ed25519PrivateKey.generate(), ec.generate_private_key(ec.SECP256R1())
    swarm = certificate_chain(ALICE, OPEN).swarm_certificate
    kinds = {
        "another kind of key": forged(ec_key.public_key(), open_key) + pem_of(ec_key),
        "another format": forged(key.public_key(), open_key) + pem_of(key),
        "an authority": forged(key.public_key(), open_key, is_ca=True) + pem_of(key),
        "the swarm itself": ssl.DER_cert_to_PEM_cert(swarm).encode() + pem_of(open_key),
    }
    for kind, pem in kinds.items():
        error = await rejection(hostile_context(pem, tmp_path / "pem"))
        assert isinstance(error, HandshakeFailed), kind
        assert "no certificate of a peer" in str(error), kind


async def test_certificates_that_the_swarm_has_not_signed_are_refused(tmp_path: Path) -> None:
    """By OpenSSL itself: none at all, a self-signed one, one under an authority in between."""
    key, between = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    kinds = {
        "none": b"",
        "self-signed": forged(key.public_key(), key, subject="swarm") + pem_of(key),
        "through an authority": forged(key.public_key(), between, issuer="between")
        + forged(between.public_key(), swarm_key(b""), subject="between", is_ca=True)
        + pem_of(key),
        "another swarm's": forged(key.public_key(), swarm_key(b"x" * 16)) + pem_of(key),
    }
    for kind, pem in kinds.items():
        error = await rejection(hostile_context(pem, tmp_path / "pem"))
        assert isinstance(error, HandshakeFailed), kind
        assert "no certificate of a peer" not in str(error), kind


async def test_another_peers_certificate_without_its_key(tmp_path: Path) -> None:
    """The handshake demands the key. (A mismatched Ed25519 key cannot even be loaded; an elliptic-curve key file
    carries its public half, and can lie about it.)"""
    alice = certificate_chain(ALICE, OPEN)
    stolen = trusting(alice, alice).pem.replace(alice.private_key_pem, EVE.private_key_pem())
    with pytest.raises(ssl.SSLError, match="KEY_VALUES_MISMATCH"):
        hostile_context(stolen, tmp_path / "pem")
    victim, eve = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    pkcs1 = serialization.PrivateFormat.TraditionalOpenSSL
    encoded = [
        key.private_bytes(serialization.Encoding.DER, pkcs1, serialization.NoEncryption()) for key in (victim, eve)
    ]
    public = [
        key.public_key().public_bytes(serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint)
        for key in (victim, eve)
    ]
    lie = ssl.DER_cert_to_PEM_cert(encoded[1].replace(public[1], public[0])).replace("CERTIFICATE", "EC PRIVATE KEY")
    certificate = forged(victim.public_key(), swarm_key(b""))
    error = await rejection(hostile_context(certificate + lie.encode(), tmp_path / "pem"))
    assert isinstance(error, HandshakeFailed)
    assert "bad signature" in str(error)


async def test_a_listener_with_a_wrong_certificate_is_not_dialled(tmp_path: Path) -> None:
    """The same checks hold for whoever listens."""
    key = Ed25519PrivateKey.generate()
    for signer, why in ((swarm_key(b""), "no certificate of a peer"), (swarm_key(b"x" * 16), "not of our swarm")):
        context = hostile_context(forged(key.public_key(), signer) + pem_of(key), tmp_path / "pem", is_server=True)
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        async with trio.open_nursery() as nursery:

            async def serve(listener: trio.SocketListener = listener, context: ssl.SSLContext = context) -> None:
                async with await listener.accept() as stream:
                    with contextlib.suppress(NetError, trio.BrokenResourceError):
                        await RawPeer(stream, context).handshake()

            nursery.start_soon(serve)
            with pytest.raises(DialFailed, match=why):
                await TlsTransport(ALICE).dial(Address("127.0.0.1", listener.socket.getsockname()[1]))
        await listener.aclose()
