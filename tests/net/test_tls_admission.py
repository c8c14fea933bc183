"""Admission over an encrypted link: who is let in, and what refused peers learn."""

import contextlib

import pytest
import trio

from dmoe_net.errors import ConnectionLost, DialFailed, HandshakeFailed
from dmoe_net.identity import Address
from dmoe_net.keys import Membership, certificate_chain
from dmoe_net.transport.tls import TlsLink, TlsTransport
from dmoe_net.transport.tls_engine import client_context, server_context
from tests.net.link_frames import numbered, parts_of
from tests.net.tls_peers import (
    ALICE,
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
    raw_dialler,
    trusting,
)


@pytest.mark.parametrize(("theirs", "ours"), [(OPEN, SECRET), (OTHER_SECRET, SECRET), (SECRET, OPEN)])
async def test_an_outsider_dials_a_member(theirs: Membership, ours: Membership) -> None:
    """The member's handshake fails; the outsider hears why instead of a first frame."""
    dialled, accepted, error = await dial_and_accept(
        TlsTransport(EVE, membership=theirs), TlsTransport(BOB, membership=ours)
    )
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
    listener = await trio.open_tcp_listeners(0, host="127.0.0.1")
    address = Address("127.0.0.1", listener[0].socket.getsockname()[1])
    chain = trusting(certificate_chain(BOB, OPEN), certificate_chain(BOB, SECRET))
    async with trio.open_nursery() as nursery:

        async def refuse() -> None:
            async with await listener[0].accept() as stream:
                raw = RawPeer(stream, server_context(chain))
                with pytest.raises(HandshakeFailed, match="is not of our swarm"):
                    await raw.handshake()
                await raw.flush()

        nursery.start_soon(refuse)
        link = await TlsTransport(ALICE).dial(address)
        with pytest.raises(HandshakeFailed, match="refused us: another swarm secret, or we are not on its allow-list"):
            await link.receive()
        link.abort()
    await listener[0].aclose()


async def test_who_is_not_on_the_allow_list() -> None:
    """Refused by the listener before it sends anything; refused by the dialler before it shows who it is."""
    dialled, accepted, error = await dial_and_accept(
        TlsTransport(EVE), TlsTransport(BOB, membership=allowing(ALICE, BOB))
    )
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
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    address = Address("127.0.0.1", listener.socket.getsockname()[1])
    received = b""
    async with trio.open_nursery() as nursery:

        async def wrong_peer() -> None:
            nonlocal received
            async with await listener.accept() as stream:
                raw = RawPeer(stream, server_context(certificate_chain(EVE, OPEN)))
                raw.engine.feed(memoryview(await stream.receive_some()))
                assert not raw.engine.handshake()
                await raw.flush()
                with contextlib.suppress(trio.BrokenResourceError):
                    received = await stream.receive_some()

        nursery.start_soon(wrong_peer)
        with pytest.raises(DialFailed, match="expected"):
            await TlsTransport(ALICE).dial(address, peer_id=BOB.peer_id)
    assert received == b""
    await listener.aclose()


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
