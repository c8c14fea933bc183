"""Keys and certificates: who we are, who may take part, and how both are proven inside a TLS handshake.

A peer is an Ed25519 key; its `PeerId` is the hash of the public key. Python's `ssl` can demand a certificate of the
other side only together with verifying its chain, so the self-signed certificate of a peer nobody knows yet could not
pass. Therefore each process issues itself a *leaf* certificate for its own key, signed by a *swarm key* that is
derived from the swarm's secret. The handshake then proves two things in both directions, before a byte of ours is
read or sent: the chain, that the peer knows the secret; TLS's CertificateVerify, that it holds the key that it names.
In a swarm without a secret the swarm key is public knowledge, and the chain proves nothing but the format.

The first certificate of a handshake is the listener's, so whoever can reach a listener can test guesses of the secret
against it, offline. No derivation, however slow, makes a guessable secret safe: use a random one
(`openssl rand -hex 32`).

Certificates are canonical: everything in a leaf but key and signature is fixed or follows from the key. A peer's
certificate is compared byte by byte with the one that we would have written, and never parsed here.
"""

import datetime
import hashlib
from dataclasses import dataclass, field
from typing import Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from dmoe_net.errors import RemoteProtocolError
from dmoe_net.identity import PeerId

SEED_BYTES = 32
PUBLIC_KEY_BYTES = 32
SIGNATURE_BYTES = 64
MIN_SECRET_BYTES = 16

_SIGN_DOMAIN = b"dmoe_jax signed data v1\0"
"""Before all that `Identity.sign` signs. A TLS handshake signs with the same key; nobody can have us sign, as data,
what would pass for our part of a handshake."""

_SWARM_KEY_INFO = b"dmoe_jax swarm key v1"

# No clock: a machine whose clock is wrong can take part, and a certificate is the same each time it is issued.
_NOT_BEFORE = datetime.datetime(1970, 1, 1)
_NOT_AFTER = datetime.datetime(9999, 12, 31, 23, 59, 59)  # RFC 5280 section 4.1.2.5: no expiration

_SWARM_NAME = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "swarm")])
_PEER_NAME = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "peer")])
_SPKI_PREFIX = bytes.fromhex("302a300506032b6570032100")  # RFC 8410: what stands before an Ed25519 public key


class IdentityError(ValueError):
    """A key, or a file of keys, secrets or names, cannot be used; one line says why and what was expected."""


class IdentityInUse(IdentityError):
    """Another process is this peer just now."""


class Identity:
    """A peer's private key. Neither printed nor compared by content."""

    __slots__ = ("_key", "_peer_id", "_public_key")

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self._public_key = key.public_key().public_bytes_raw()
        self._peer_id = peer_id_of(self._public_key)

    @classmethod
    def generate(cls) -> Self:
        """A new one, from the system's randomness."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> Self:
        """The same one for the same 32 bytes: for simulations and tests. Who knows the seed is this peer."""
        if not isinstance(seed, bytes) or len(seed) != SEED_BYTES:
            raise ValueError(f"the seed of an identity is {SEED_BYTES} bytes")  # its value is not for a log
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def from_pem(cls, pem: bytes) -> Self:
        """Read back what `private_key_pem` has written.

        Raises:
          IdentityError: it is something else. The message has no subject: the caller knows where it comes from.
        """
        try:
            key = serialization.load_pem_private_key(pem, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as exc:  # TypeError: it is encrypted
            raise IdentityError("expected an unencrypted Ed25519 private key (PEM, PKCS 8)") from exc
        if not isinstance(key, Ed25519PrivateKey):
            raise IdentityError("expected an Ed25519 private key (PEM, PKCS 8), it is a key of another kind")
        return cls(key)

    @property
    def peer_id(self) -> PeerId:
        """SHA-256 of the public key."""
        return self._peer_id

    @property
    def public_key(self) -> bytes:
        """The 32 raw bytes."""
        return self._public_key

    def sign(self, data: bytes) -> bytes:
        """A signature of 64 bytes that `verify` checks. Callers put the purpose into `data`."""
        return self._key.sign(_SIGN_DOMAIN + data)

    def private_key_pem(self) -> bytes:
        """The key as unencrypted PKCS 8: a file's content, for its owner's eyes only."""
        return self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    def __repr__(self) -> str:
        return f"Identity({self._peer_id})"


def peer_id_of(public_key: bytes) -> PeerId:
    """The name of the peer with this raw public key."""
    if len(public_key) != PUBLIC_KEY_BYTES:
        raise ValueError(f"a public key is {PUBLIC_KEY_BYTES} bytes, got {len(public_key)}")
    return PeerId(hashlib.sha256(public_key).digest())


def verify(public_key: bytes, data: bytes, signature: bytes) -> bool:
    """Return True if the holder of `public_key` has signed `data` by `Identity.sign`. Return False for keys or
    signatures of any wrong length too: all three may come from the network."""
    if len(public_key) != PUBLIC_KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, _SIGN_DOMAIN + data)
    except (InvalidSignature, ValueError):
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Conditions on which a peer may take part in a swarm. Both hold for both ends of every connection.

    Attributes:
      secret: what all members know, random, at least 16 bytes; empty for a swarm open to everybody.
      allowed: the only peers to talk to; None for everybody who knows the secret.
    """

    secret: bytes = field(default=b"", repr=False)
    allowed: frozenset[PeerId] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.secret, bytes) or 0 < len(self.secret) < MIN_SECRET_BYTES:
            raise ValueError(f"a swarm secret is at least {MIN_SECRET_BYTES} bytes, or none for an open swarm")
        if self.allowed is not None and not (
            isinstance(self.allowed, frozenset) and all(isinstance(peer, PeerId) for peer in self.allowed)
        ):
            raise ValueError(f"allowed must be a frozenset of PeerId or None, got {self.allowed!r}")

    @property
    def tag(self) -> bytes:
        """Tag of the swarm, 32 bytes: the public key that follows from the secret. What is signed for one swarm is
        nothing in another."""
        return _swarm_key(self.secret).public_key().public_bytes_raw()

    def admits(self, peer_id: PeerId) -> bool:
        """Return True if the allow-list admits a peer; that it knows the secret is the handshake's part to check."""
        return self.allowed is None or peer_id in self.allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateChain:
    """Certificates and private key of a TLS endpoint.

    Attributes:
      swarm_certificate: DER; the only certificate to trust.
      leaf_certificate: DER; the one to show.
      private_key_pem: the leaf's key, unencrypted.
    """

    swarm_certificate: bytes
    leaf_certificate: bytes
    private_key_pem: bytes = field(repr=False)

    @property
    def pem(self) -> bytes:
        """Leaf and key, as `ssl` wants to load them."""
        leaf = x509.load_der_x509_certificate(self.leaf_certificate)
        return leaf.public_bytes(serialization.Encoding.PEM) + self.private_key_pem


def certificate_chain(identity: Identity, membership: Membership) -> CertificateChain:
    """Issue our own leaf, in the name of the swarm. The same each time."""
    swarm_key = _swarm_key(membership.secret)
    return CertificateChain(
        swarm_certificate=_issue(
            swarm_key.public_key().public_bytes_raw(), _SWARM_NAME, swarm_key, constraints=_SWARM_CONSTRAINTS
        ),
        leaf_certificate=_issue(identity.public_key, _PEER_NAME, swarm_key, constraints=_LEAF_CONSTRAINTS),
        private_key_pem=identity.private_key_pem(),
    )


def peer_id_of_certificate_untrusted(der: bytes) -> PeerId:
    """Whom a leaf certificate names. That the swarm signed it and that the peer holds its key is for TLS to check.

    Raises:
      RemoteProtocolError: it differs from the leaf that `certificate_chain` makes for that key in anything but the
        signature.
    """
    public_key = der.partition(_SPKI_PREFIX)[2][:PUBLIC_KEY_BYTES]
    if len(public_key) == PUBLIC_KEY_BYTES:
        ours = _issue(public_key, _PEER_NAME, _swarm_key(b""), constraints=_LEAF_CONSTRAINTS)
        if len(der) == len(ours) and der[:-SIGNATURE_BYTES] == ours[:-SIGNATURE_BYTES]:
            return peer_id_of(public_key)
    raise RemoteProtocolError("the certificate is not an Ed25519 leaf of our format")


# A leaf cannot vouch for others, and neither can anything between it and the swarm's certificate.
_SWARM_CONSTRAINTS = x509.BasicConstraints(ca=True, path_length=0)
_LEAF_CONSTRAINTS = x509.BasicConstraints(ca=False, path_length=None)


def _swarm_key(secret: bytes) -> Ed25519PrivateKey:
    seed = HKDF(algorithm=hashes.SHA256(), length=SEED_BYTES, salt=None, info=_SWARM_KEY_INFO).derive(secret)
    return Ed25519PrivateKey.from_private_bytes(seed)


def _issue(
    public_key: bytes, name: x509.Name, swarm_key: Ed25519PrivateKey, *, constraints: x509.BasicConstraints
) -> bytes:
    digest = hashlib.sha256(public_key).digest()
    serial = bytes([digest[0] & 0x3F | 0x40]) + digest[1:16]  # positive, and always 16 bytes long
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(_SWARM_NAME)
        .public_key(Ed25519PublicKey.from_public_bytes(public_key))
        .serial_number(int.from_bytes(serial, "big"))
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .add_extension(constraints, critical=True)
        .sign(swarm_key, algorithm=None)
    )
    return certificate.public_bytes(serialization.Encoding.DER)


OPEN_SWARM = Membership().tag
"""Tag of every swarm without a secret."""
