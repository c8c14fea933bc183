"""Encrypted links over the loopback interface: what they carry, and what they leave behind."""

import os
import ssl
import tempfile
from pathlib import Path

import pytest
import trio
import trio.testing

from dmoe_net.errors import ConnectionLost, RemoteProtocolError
from dmoe_net.identity import Address
from dmoe_net.keys import CertificateChain, Membership, certificate_chain
from dmoe_net.transport.tcp import TcpTransport
from dmoe_net.transport.tls import TlsTransport
from dmoe_net.transport.tls_engine import client_context, server_context
from tests.net.link_frames import assert_same, bytes_of, exchange, numbered, parts_of
from tests.net.tls_peers import (
    ALICE,
    ANY_PORT,
    BOB,
    EVE,
    OPEN,
    SECRET,
    allowing,
    link_pair,
    raw_dialler,
    raw_pair,
)


@pytest.mark.parametrize("membership", [OPEN, SECRET, allowing(ALICE, BOB)], ids=["open", "secret", "allowed"])
async def test_two_peers_exchange_frames(membership: Membership) -> None:
    """Small, many and large frames both ways, byte for byte, aligned; each end knows the other; a clean end is None."""
    frames = [numbered(1), numbered(2, 100, 0, 3), numbered(3, 8 * 2**20), numbered(4, 65_536), numbered(5, *[64] * 60)]
    async with link_pair(membership) as (dialled, accepted):
        assert (dialled.remote_peer_id, accepted.remote_peer_id) == (BOB.peer_id, ALICE.peer_id)
        await exchange(dialled, accepted, *frames)
        await exchange(accepted, dialled, *frames)
        await accepted.handshake()
        await dialled.handshake()
        await dialled.aclose()
        await dialled.aclose()
        assert await accepted.receive() is None
        await accepted.aclose()


async def test_a_first_frame_may_come_with_the_end_of_the_handshake() -> None:
    """Data that follow the dialler's last handshake message in the same packet are not lost."""
    frame = numbered(1, 10)
    async with raw_dialler() as (raw, link), trio.open_nursery() as nursery:

        async def dialler() -> None:
            while not raw.engine.handshake():
                await raw.flush()
                raw.engine.feed(memoryview(await raw.stream.receive_some()))
            await raw.send(bytes_of(frame))

        nursery.start_soon(dialler)
        await link.handshake()
        assert_same(await link.receive(), frame)


async def test_a_cancelled_receive_loses_nothing() -> None:
    """Half a record and half a frame stay with the link; the next receive goes on."""
    frame = numbered(1, 1000)
    async with raw_pair() as (raw, link):
        raw.engine.encrypt(bytes_of(frame)[:500])
        raw.engine.encrypt(bytes_of(frame)[500:])
        ciphertext = raw.engine.take_ciphertext()
        await raw.stream.send_all(ciphertext[:700])
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(link.receive)
                await trio.testing.wait_all_tasks_blocked(0.01)
                scope.cancel()
        await raw.stream.send_all(ciphertext[700:])
        assert_same(await link.receive(), frame)


async def test_a_cancelled_send_ends_the_link() -> None:
    """Part of a record may have left, so nothing else may follow, not even a farewell."""
    async with link_pair() as (dialled, accepted):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(dialled.send, *parts_of(numbered(1, 32 * 2**20)))
                await trio.testing.wait_all_tasks_blocked(0.01)
                scope.cancel()
        with pytest.raises(trio.BusyResourceError):
            await dialled.send(*parts_of(numbered(2)))
        await dialled.aclose()
        with pytest.raises(ConnectionLost, match="without a farewell"):
            await accepted.receive()


async def test_the_transports_bound_on_bodies_is_kept() -> None:
    """A link of a transport with a bound of 1000 bytes refuses 1001."""
    async with link_pair(max_body_bytes=1000) as (dialled, accepted):
        await dialled.send(*parts_of(numbered(1, 1000), numbered(2, 1001)))
        assert_same(await accepted.receive(), numbered(1, 1000))
        with pytest.raises(RemoteProtocolError, match="1001"):
            await accepted.receive()


async def test_any_address_can_be_listened_on() -> None:
    """Encrypted links are for all interfaces, and a host name is looked up."""
    for host in ("0.0.0.0", "localhost"):
        listener = await TlsTransport(BOB).listen(Address(host, 0))
        assert listener.address.host == host
        assert listener.address.port > 0
        await listener.aclose()


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors in /proc")
async def test_a_cancelled_handshake_leaves_nothing_open() -> None:
    """Dialling somebody who says nothing, and accepting somebody who says nothing, until the caller has enough."""
    alice, silent = TlsTransport(ALICE), await TcpTransport().listen(ANY_PORT)
    before = num_descriptors()
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(alice.dial, silent.address)
            accepted = await silent.accept()
            await trio.testing.wait_all_tasks_blocked(0.01)
            scope.cancel()
    accepted.abort()
    assert num_descriptors() == before
    async with raw_dialler() as (_, link):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(link.handshake)
                await trio.testing.wait_all_tasks_blocked(0.01)
                scope.cancel()
        link.abort()
    assert num_descriptors() == before
    await silent.aclose()


@pytest.fixture
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder where temporary files go."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_key_is_never_on_disk_where_memory_will_do(temporary_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Linux no temporary file is made at all."""
    if not hasattr(os, "memfd_create"):
        pytest.skip("no files in memory here")
    monkeypatch.setattr(tempfile, "mkstemp", None)
    before = num_descriptors()
    TlsTransport(ALICE)
    assert num_descriptors() == before


def test_a_key_does_not_stay_on_disk(temporary_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere the file is ours alone while `ssl` reads it, and gone afterwards, even if that fails."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    modes = []
    load = ssl.SSLContext.load_cert_chain

    def watched(context: ssl.SSLContext, path: str) -> None:
        modes.append((Path(path).parent, os.stat(path).st_mode & 0o777))
        load(context, path)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", watched)
    chain = certificate_chain(ALICE, OPEN)
    client_context(chain)
    wrong = CertificateChain(
        swarm_certificate=chain.swarm_certificate,
        leaf_certificate=chain.leaf_certificate,
        private_key_pem=EVE.private_key_pem(),
    )
    with pytest.raises(ssl.SSLError):
        server_context(wrong)
    assert modes == [(temporary_folder, 0o600)] * 2
    assert os.listdir(temporary_folder) == []


async def test_no_log_of_secrets_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment variable by which programs are made to write down their connections' keys has no effect."""
    monkeypatch.setenv("SSLKEYLOGFILE", str(tmp_path / "keys"))
    async with link_pair() as (dialled, accepted):
        await exchange(dialled, accepted, numbered(1))
    assert os.listdir(tmp_path) == []
