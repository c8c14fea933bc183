"""Identities, swarm secrets and allow-lists as files.

What is secret is accepted only from a file that nobody else can read or write, and is written only so. A file of
root's may also be open to its group for reading: so Kubernetes mounts a Secret for a process that is not root.
All trouble with a file is an `IdentityError` of one line that names it.
"""

import codecs
import errno
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dmoe_net.identity import PeerId
from dmoe_net.keys import MIN_SECRET_BYTES, Identity, IdentityError, IdentityInUse

if sys.platform != "win32":
    import fcntl

_MAX_FILE_BYTES = 4096  # of a key or a secret


def load_identity(path: str | Path) -> Identity:
    """Read a private key.

    Raises:
      IdentityError: the file is missing or unreadable, others can read or write it, or it is no Ed25519 key.
    """
    with _opened(path) as (_, content):
        return _identity(path, content)


def create_identity(path: str | Path) -> Identity:
    """Make a new identity and, atomically, a file for it that only we can read.

    Raises:
      IdentityError: something is there already, or the file cannot be written.
    """
    path = Path(path)
    identity = Identity.generate()
    # Linking, unlike renaming, overwrites nothing.
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(identity.private_key_pem())
                file.flush()
                os.fsync(file.fileno())
            os.link(draft, path)
        finally:
            os.unlink(draft)
    except FileExistsError as exc:
        raise IdentityError(f"{path} exists already, an identity is never overwritten") from exc
    except OSError as exc:
        raise IdentityError(f"cannot write the identity {path}: {exc.strerror}") from exc
    return identity


def load_or_create_identity(path: str | Path) -> Identity:
    """Read the identity there, or make one if nothing is there.

    Raises:
      IdentityError: as `load_identity` and `create_identity`.
    """
    _create_if_missing(path)
    return load_identity(path)


@contextmanager
def hold_identity(path: str | Path) -> Iterator[Identity]:
    """`load_or_create_identity`, and keep other processes from holding the same file while the block lasts: two that
    are one peer would take each other's connections. (Windows: nobody is kept out.)

    Raises:
      IdentityError: as `load_or_create_identity`. IdentityInUse: another process holds it.
    """
    _create_if_missing(path)
    with _opened(path) as (descriptor, content):
        if sys.platform != "win32":
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as exc:
                raise IdentityInUse(f"the identity {path} is in use by another process") from exc
            except OSError as exc:
                raise IdentityError(f"cannot lock the identity {path}: {exc.strerror}") from exc
        yield _identity(path, content)


def load_swarm_secret(path: str | Path) -> bytes:
    """Read a swarm's secret, without the byte order mark and the white space at both ends that editors add.

    Raises:
      IdentityError: the file is missing or unreadable, others can read or write it, or it is too short or too long.
    """
    with _opened(path) as (_, content):
        secret = content.removeprefix(codecs.BOM_UTF8).strip()
    if len(secret) < MIN_SECRET_BYTES:
        raise IdentityError(
            f"{path} holds {len(secret)} bytes, expected a random swarm secret of at least {MIN_SECRET_BYTES} bytes "
            "(make one with: openssl rand -hex 32)"
        )
    return secret


def load_allow_list(path: str | Path) -> frozenset[PeerId]:
    """Read an allow-list: a peer id of 64 hexadecimal digits a line; `#` begins a comment.

    Raises:
      IdentityError: the file cannot be read, names nobody, or has a line that is something else.
    """
    try:
        lines = Path(path).read_text("utf-8-sig").splitlines()
    except OSError as exc:
        raise IdentityError(f"cannot read {path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise IdentityError(f"{path} is not text, expected a peer id a line") from exc
    allowed = set()
    for number, line in enumerate(lines, start=1):
        digits = line.partition("#")[0].strip()
        if not digits:
            continue
        try:
            allowed.add(PeerId.parse(digits))
        except ValueError as exc:
            raise IdentityError(f"{path} line {number}: {exc}") from exc
    if not allowed:
        raise IdentityError(f"{path} names nobody, expected a peer id of 64 hexadecimal digits a line")
    return frozenset(allowed)


def _create_if_missing(path: str | Path) -> None:
    if os.path.lexists(path):
        return
    try:
        create_identity(path)
    except IdentityError as exc:
        if not isinstance(exc.__cause__, FileExistsError):  # then another process was quicker
            raise


@contextmanager
def _opened(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """The descriptor and the content of a file that is ours alone. The descriptor is checked and not the path, so that
    nothing can change between check and use."""
    flags = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)  # the first: a pipe must not keep us waiting
    try:
        try:
            descriptor = os.open(path, flags | os.O_RDWR)  # for the lock: NFS locks only what can be written
        except OSError as exc:
            if exc.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            descriptor = os.open(path, flags | os.O_RDONLY)
    except IsADirectoryError as exc:
        raise IdentityError(f"{path} is a folder, expected a file") from exc
    except OSError as exc:
        raise IdentityError(f"cannot read {path}: {exc.strerror}") from exc
    try:
        status = os.fstat(descriptor)
        mode = status.st_mode
        if not stat.S_ISREG(mode):
            raise IdentityError(f"{path} is no ordinary file")
        if os.name == "posix" and not _is_private(mode, owner=status.st_uid, user=os.geteuid()):
            raise IdentityError(
                f"{path} is open to others (mode {stat.S_IMODE(mode):03o}), expected it to be private: chmod 600 {path}"
            )
        try:
            content = os.read(descriptor, _MAX_FILE_BYTES + 1)
        except OSError as exc:
            raise IdentityError(f"cannot read {path}: {exc.strerror}") from exc
        if len(content) > _MAX_FILE_BYTES:
            raise IdentityError(f"{path} is longer than {_MAX_FILE_BYTES} bytes, expected a key or a secret")
        yield descriptor, content
    finally:
        os.close(descriptor)


def _is_private(mode: int, *, owner: int, user: int) -> bool:
    """True if nobody but the owner can open a file; or if it is root's, and others of its group can only read it.

    Whatever `defaultMode` a Secret volume names, the kubelet lets the pod's fsGroup read it (kubernetes issue 57923):
    it is of root and has mode 440. Which group may read, root has decided; PostgreSQL takes such keys, too.
    """
    return not mode & (0o037 if owner == 0 != user else 0o077)


def _identity(path: str | Path, content: bytes) -> Identity:
    if not content.strip():
        raise IdentityError(f"{path} is empty, expected an Ed25519 private key (PEM, PKCS 8)")
    try:
        return Identity.from_pem(content)
    except IdentityError as exc:
        raise IdentityError(f"cannot use {path}: {exc}") from exc
