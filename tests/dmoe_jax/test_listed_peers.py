"""Peers to join through that a file lists, which may come late, be old, or be no such file."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from dmoe_jax import open_swarm
from dmoe_jax.cli.network import ListenOptions, NetworkOptions, check_join, join_swarm
from dmoe_jax.peers import joining, listed
from dmoe_jax.peers.joining import WrongPeer, parse_targets
from dmoe_jax.peers.listed import MAX_LISTED, NobodyListed, PeersFile, keep_following, peers_now, read_peers
from dmoe_jax.peers.peer import PeerConfig, open_peer
from dmoe_jax.peers.security import Plain
from dmoe_jax.runs.endings import CommandFailed, UsageError
from dmoe_net import simulate
from dmoe_net.errors import DialFailed
from dmoe_net.identity import Address, Contact, PeerId
from dmoe_net.nursery import background_nursery

KNOWN = Contact(PeerId(bytes(31) + b"k"), Address("host", 4000))
NOBODY = "127.0.0.1:1"
FIRST = PeerConfig(security=Plain(), seed=1)
SECOND = PeerConfig(security=Plain(), seed=2)


async def said(caplog: pytest.LogCaptureFixture, text: str) -> None:
    """Return when the log has it."""
    with trio.fail_after(10):
        while text not in caplog.text:  # noqa: ASYNC110
            await trio.sleep(0.01)


def file_of(folder: Path, text: str | bytes) -> PeersFile:
    path = folder / "peers"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return PeersFile(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"# seeds\n\n{KNOWN.full}  # first\n host:4001\r\n", [KNOWN, Address("host", 4001)]),
        ("host:4001\nhost:4001\n", [Address("host", 4001)]),
        ("host:4001", [Address("host", 4001)]),  # by an editor that ends no line
        (f"host:4001\n{KNOWN.full[:50]}", [Address("host", 4001)]),  # somebody writes the second one just now
    ],
)
def test_peers_are_listed_a_line_each(tmp_path: Path, text: str, expected: list[Contact | Address]) -> None:
    """Comments, blank lines and a line that is not whole yet are passed over."""
    assert read_peers(file_of(tmp_path, text)) == tuple(expected)


def test_a_file_is_told_from_an_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By its beginning; the home folder is meant as in a shell, which leaves it alone behind a colon."""
    monkeypatch.setenv("HOME", str(tmp_path))
    parsed = parse_targets(["file:~/a b", " file:c ", "file.org:4000", KNOWN.full])
    assert parsed == (PeersFile(tmp_path / "a b"), PeersFile(Path("c")), Address("file.org", 4000), KNOWN)


@pytest.mark.parametrize("text", [None, "", "# nobody yet\n\n", "host"])
def test_a_file_may_list_nobody_yet(tmp_path: Path, text: str | None) -> None:
    """It is told apart from a file that never will."""
    file = PeersFile(tmp_path / "later" / "peers") if text is None else file_of(tmp_path, text)
    with pytest.raises(NobodyListed, match=str(file.path)):
        read_peers(file)
    check_join([str(file)])  # so a command waits for it
    # Who is named beside it is not waited for.
    assert peers_now(parse_targets([str(file), "host:1"])) == (Address("host", 1),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("host:1\nnobody\n", "peers, line 2: expected an address as HOST:PORT, got 'nobody'"),
        ("a@host:1\n", "peers, line 1: expected a peer as PEERID@HOST:PORT"),
        (b"host:1\n\xff\xfe\n", "peers: expected text"),
        ("#" * 70_000, "peers: expected at most 65,536 bytes"),
        ("".join(f"host:{port}\n" for port in range(MAX_LISTED + 1)), "peers: expected at most 64 peers, got 65"),
    ],
)
def test_a_file_of_something_else_is_refused_at_once(tmp_path: Path, text: str | bytes, message: str) -> None:
    """In a line that names the file, and the line where one is wrong."""
    file = file_of(tmp_path, text)
    with pytest.raises(UsageError, match=f"--join: file:.*{message}"):
        check_join([str(file)])


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    """A folder; a device without an end; a path below a file; no path."""
    for path in (str(tmp_path), "/dev/zero"):
        with pytest.raises(ValueError, match=f"file:{path}: .*no regular file"):
            read_peers(PeersFile(Path(path)))
    with pytest.raises(ValueError, match="cannot be read: Not a directory"):
        read_peers(PeersFile(file_of(tmp_path, "").path / "peers"))
    with pytest.raises(UsageError, match="--join: expected a file of peers as file:PATH, got 'file:'"):
        check_join(["file:"])


@pytest.fixture
def _quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "_LOOK_PERIOD_S", 0.01)
    monkeypatch.setattr(listed, "_FOLLOW_PERIOD_S", 0.01)


@pytest.mark.usefixtures("_quick_looks")
async def test_who_comes_first_waits_for_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It joins through whoever writes its contact there, and says meanwhile what it waits for."""
    path, found = tmp_path / "new" / "contact", []

    async def join() -> None:
        async with open_swarm(f"file:{path}", security=Plain()) as swarm:
            found.extend(swarm.peer.dht.contacts())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(join)
        await said(caplog, f"nobody to join through yet: there is no {path}; waiting, for at most 300 s")
        options = NetworkOptions(insecure_loopback=True)
        async with join_swarm(options, join=[], listen=ListenOptions(write_contact=path)) as first:
            while not found:  # noqa: ASYNC110
                await trio.sleep(0.01)
    assert found == [first.own_contact]
    assert [each.name for each in path.parent.iterdir()] == ["contact"]


@pytest.mark.usefixtures("_quick_looks")
async def test_a_file_that_is_old_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody answers there, until another one has been written."""
    file, found = file_of(tmp_path, f"{NOBODY}\n"), []

    async def join() -> None:
        async with open_peer(str(file), SECOND) as peer:
            found.extend(peer.dht.contacts())

    async with open_peer((), FIRST) as first, trio.open_nursery() as nursery:
        nursery.start_soon(join)
        await said(caplog, f"reading {file} again, for at most")
        file_of(tmp_path, f"{first.contact}\n")
    assert found == [first.own_contact]


@pytest.mark.usefixtures("_quick_looks")
async def test_waiting_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reason: there is no file, or nobody whom it lists answers."""
    monkeypatch.setattr("dmoe_jax.peers.peer.LISTED_WAIT_S", 0.02)
    with pytest.raises(DialFailed, match="nobody to join through: there is no "):
        await open_peer(f"file:{tmp_path / 'peers'}", SECOND).__aenter__()
    with pytest.raises(DialFailed, match=f"cannot join the swarm .*{NOBODY}"):
        await open_peer(str(file_of(tmp_path, NOBODY)), SECOND).__aenter__()


async def test_another_peer_at_a_listed_place_counts_as_gone(tmp_path: Path) -> None:
    """A file may be old; where the same peer is named outright, that is an error."""
    async with open_peer((), FIRST) as first:
        assert first.own_contact is not None
        old = Contact(KNOWN.peer_id, first.own_contact.address)
        file = file_of(tmp_path, f"{old.full}\n{first.contact}\n")
        async with open_peer(str(file), SECOND) as peer:
            assert first.own_contact in peer.dht.contacts()
        with pytest.raises(WrongPeer):
            await open_peer([str(file), old], SECOND).__aenter__()


async def test_who_remembers_others_does_not_wait(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A seed that is started again finds its swarm while its own file is old, or not there."""
    own = PeerConfig(security=Plain(), seed=2, state_dir=tmp_path)
    async with open_peer((), FIRST) as first:
        async with open_peer(first.contact, own):
            pass
        for text in (None, NOBODY):
            join = f"file:{tmp_path / 'none'}" if text is None else str(file_of(tmp_path, text))
            async with open_peer(join, own) as again:
                assert again.dht.contacts() == (first.own_contact,)
    assert caplog.text.count("trying the peers that are remembered in") == 2


@pytest.mark.usefixtures("_quick_looks")
async def test_whoever_has_joined_follows_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The DHT rejoins through those that it lists by then; a file that was broken changes nothing, and is told of
    once."""
    file, tried = file_of(tmp_path, "host:1\n"), []
    changed = trio.Event()

    def rejoin_through(peers: Sequence[Contact | Address]) -> None:
        if not tried or tried[-1] != peers:
            tried.append(peers)
            changed.set()

    dht: Any = SimpleNamespace(rejoin_through=rejoin_through)
    with trio.fail_after(10):
        async with background_nursery() as nursery:
            nursery.start_soon(keep_following, cast(Any, (KNOWN, file)), dht)
            await changed.wait()
            file_of(tmp_path, "nobody\n")
            await said(caplog, "line 1: expected an address as HOST:PORT, got 'nobody'; going on with those")
            changed = trio.Event()
            file_of(tmp_path, "host:2\n")
            await changed.wait()
    assert tried == [(KNOWN, Address("host", 1)), (KNOWN, Address("host", 2))]
    assert caplog.text.count("going on with those") == 1


async def test_a_contact_that_cannot_be_written_ends_the_command(tmp_path: Path) -> None:
    """Nobody could join."""
    for path, why in ((tmp_path, "Is a directory"), (file_of(tmp_path, "").path / "contact", "File exists")):
        with pytest.raises(CommandFailed, match=f"--write-contact {path}: {why}"):
            await join_swarm(NetworkOptions(), join=[], listen=ListenOptions(write_contact=path)).__aenter__()


async def test_a_simulation_has_no_files() -> None:
    """Its peers have addresses from the beginning."""
    async with simulate(seed=1) as network:
        with pytest.raises(ValueError, match="a simulation has no files of peers, got file:peers"):
            await open_peer("file:peers", PeerConfig(network=network, host="a", seed=1)).__aenter__()
