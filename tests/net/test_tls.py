"""Encrypted links over the loopback interface: what they carry, what they leave behind, who is let in, and what refused
peers learn."""

import contextlib
import os
import ssl
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import trio
import trio.testing

from dmoe_net.errors import ConnectionLost, DialFailed, HandshakeFailed, RemoteProtocolError
from dmoe_net.identity import Address
from dmoe_net.keys import Membership, certificate_chain
from dmoe_net.transport.tcp import TcpTransport
from dmoe_net.transport.tls import TlsLink, TlsTransport
from dmoe_net.transport.tls_engine import client_context, server_context
from tests.net.link_frames import assert_same, begin_and_cancel, bytes_of, exchange, numbered, parts_of
from tests.net.tls_peers import (
    ALICE,
    ANY_PORT,
    BOB,
    EVE,
    OPEN,
    OTHER_SECRET,
    SECRET,
    RawPeer,
    allowing,
    assert_refused,
    caught,
    dial_and_accept,
    link_pair,
    raw_dialler,
    raw_listener,
    raw_pair,
    trusting,
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
        await begin_and_cancel(link.receive)
        await raw.stream.send_all(ciphertext[700:])
        assert_same(await link.receive(), frame)


async def test_a_cancelled_send_ends_the_link() -> None:
    """Part of a record may have left, so nothing else may follow, not even a farewell."""
    async with link_pair() as (dialled, accepted):
        await begin_and_cancel(dialled.send, *parts_of(numbered(1, 32 * 2**20)))
        with pytest.raises(trio.BusyResourceError):
            await dialled.send(*parts_of(numbered(2)))
        await dialled.aclose()
        with pytest.raises(ConnectionLost, match="without a farewell"):
            await accepted.receive()


async def test_the_transports_bound_on_bodies_is_kept() -> None:
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
    async with trio.open_nursery() as nursery:
        nursery.start_soon(alice.dial, silent.address)
        accepted = await silent.accept()
        await trio.testing.wait_all_tasks_blocked(0.01)
        nursery.cancel_scope.cancel()
    accepted.abort()
    assert num_descriptors() == before
    async with raw_dialler() as (_, link):
        await begin_and_cancel(link.handshake)
        link.abort()
    assert num_descriptors() == before
    await silent.aclose()


@pytest.fixture
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder where temporary files go."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_key_is_never_on_disk_where_memory_will_do(temporary_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(ssl.SSLError):
        server_context(replace(chain, private_key_pem=EVE.private_key_pem()))
    assert modes == [(temporary_folder, 0o600)] * 2
    assert os.listdir(temporary_folder) == []


async def test_no_log_of_secrets_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment variable by which programs are made to write down their connections' keys has no effect."""
    monkeypatch.setenv("SSLKEYLOGFILE", str(tmp_path / "keys"))
    async with link_pair() as (dialled, accepted):
        await exchange(dialled, accepted, numbered(1))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("theirs", "ours"), [(OPEN, SECRET), (OTHER_SECRET, SECRET), (SECRET, OPEN)])
async def test_an_outsider_dials_a_member(theirs: Membership, ours: Membership) -> None:
    """The member's handshake fails; the outsider hears why instead of a first frame."""
    eve, bob = TlsTransport(EVE, membership=theirs), TlsTransport(BOB, membership=ours)
    dialled, accepted, error = await dial_and_accept(eve, bob)
    # With another secret a dialler refuses the listener's certificate before it shows its own.
    assert isinstance(dialled, DialFailed)
    assert "is not of our swarm" in str(dialled)
    assert_refused(accepted, error, "refused us")
    with pytest.raises(ConnectionLost):
        await accepted.send(*parts_of(numbered(1)))


async def test_an_outsider_who_trusts_the_members_is_not_trusted() -> None:
    """Eve knows the members' swarm certificate, not their secret. She hears an alert and not a byte of data."""
    chain = trusting(certificate_chain(EVE, OTHER_SECRET), certificate_chain(BOB, SECRET))
    async with raw_dialler(client_context(chain), SECRET) as (raw, link), trio.open_nursery() as nursery:

        async def member() -> None:
            error = await caught(link.handshake)
            assert_refused(link, error, "is not of our swarm")
            assert isinstance(await caught(lambda: link.send(*parts_of(numbered(1)))), ConnectionLost)

        nursery.start_soon(member)
        await raw.handshake()  # in TLS 1.3 the dialler is through before it is judged
        raw.engine.feed(memoryview(await raw.stream.receive_some()))
        with pytest.raises(HandshakeFailed, match="refused us: another swarm secret"):
            raw.engine.decrypt_into(memoryview(bytearray(100)))


async def test_a_refused_dialler_learns_it_at_its_first_receive() -> None:
    """The library's own dialler, when the listener judges it only afterwards."""

    async def refuse(raw: RawPeer) -> None:
        with pytest.raises(HandshakeFailed, match="is not of our swarm"):
            await raw.handshake()
        await raw.flush()

    context = server_context(trusting(certificate_chain(BOB, OPEN), certificate_chain(BOB, SECRET)))
    async with raw_listener(context, refuse) as address:
        link = await TlsTransport(ALICE).dial(address)
        with pytest.raises(HandshakeFailed, match="refused us: another swarm secret, or we are not on its allow-list"):
            await link.receive()
        link.abort()


async def test_who_is_not_on_the_allow_list() -> None:
    """Refused by the listener before it sends anything; refused by the dialler before it shows who it is."""
    bob = TlsTransport(BOB, membership=allowing(ALICE, BOB))
    dialled, accepted, error = await dial_and_accept(TlsTransport(EVE), bob)
    assert_refused(accepted, error, f"{EVE.peer_id} is not on our allow-list")
    if isinstance(dialled, TlsLink):  # else the reset was there first
        with pytest.raises(HandshakeFailed, match="not on its allow-list"):
            await dialled.receive()
        dialled.abort()
    dialled, accepted, error = await dial_and_accept(TlsTransport(ALICE, membership=allowing(BOB)), TlsTransport(EVE))
    assert isinstance(dialled, DialFailed)
    assert f"{EVE.peer_id} is not on our allow-list" in str(dialled)
    assert isinstance(error, ConnectionLost)
    accepted.abort()


async def test_another_peer_answers() -> None:
    """The error names both; the wrong peer does not even learn who asked."""
    dialled, accepted, error = await dial_and_accept(TlsTransport(ALICE), TlsTransport(EVE), peer_id=BOB.peer_id)
    assert isinstance(dialled, DialFailed)
    assert f"is peer {EVE.peer_id}, expected {BOB.peer_id}" in str(dialled)
    assert isinstance(error, ConnectionLost)
    assert accepted.remote_peer_id is None


async def test_a_dialler_shows_nothing_to_whom_it_refuses() -> None:
    """After the first message of the handshake, in the clear anyway, the wrong peer gets no other byte."""
    received = b""

    async def listen(raw: RawPeer) -> None:
        nonlocal received
        raw.engine.feed(memoryview(await raw.stream.receive_some()))
        assert not raw.engine.handshake()
        await raw.flush()
        with contextlib.suppress(trio.BrokenResourceError):
            received = await raw.stream.receive_some()

    async with raw_listener(server_context(certificate_chain(EVE, OPEN)), listen) as address:
        with pytest.raises(DialFailed, match="expected"):
            await TlsTransport(ALICE).dial(address, peer_id=BOB.peer_id)
    assert received == b""


async def test_a_peer_does_not_talk_to_itself() -> None:
    """Whoever dials its own address is told so, and whoever has our key is not let in."""
    alice = TlsTransport(ALICE)
    for expected in (None, ALICE.peer_id, BOB.peer_id):
        dialled, accepted, error = await dial_and_accept(alice, alice, peer_id=expected)
        assert isinstance(dialled, DialFailed)
        assert "that is this peer itself" in str(dialled)
        assert isinstance(error, ConnectionLost)
        accepted.abort()
    context = client_context(certificate_chain(BOB, OPEN))
    async with raw_dialler(context) as (raw, link), trio.open_nursery() as nursery:
        nursery.start_soon(raw.handshake)
        assert_refused(link, await caught(link.handshake), "has our own identity")
