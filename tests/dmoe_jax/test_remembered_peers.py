"""Peers remembered on disk: a process that is started again is the same peer, and finds its swarm."""

from pathlib import Path

import pytest

from dmoe_jax.cli.network import NetworkOptions, join_swarm
from dmoe_jax.peers.joining import WrongPeer
from dmoe_jax.peers.peer import PeerConfig, open_peer
from dmoe_jax.peers.remembered import MAX_REMEMBERED, load_peers, save_peers
from dmoe_jax.peers.security import Plain
from dmoe_jax.runs.endings import UsageError
from dmoe_net.errors import DialFailed
from dmoe_net.identity import Address, Contact, PeerId

PEERS = tuple(
    Contact(PeerId(number.to_bytes(32, "big")), Address("10.0.0.1", 1 + number)) for number in range(MAX_REMEMBERED + 1)
)
NOBODY = "127.0.0.1:1"


def test_peers_are_read_as_they_were_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At most 64; a line that names none is passed over, and whoever knows nobody keeps what it knew."""
    assert load_peers(tmp_path) == ()
    save_peers(tmp_path, PEERS)
    assert len(set(load_peers(tmp_path)) & set(PEERS)) == MAX_REMEMBERED
    save_peers(tmp_path, PEERS[:2])
    save_peers(tmp_path, ())
    assert set(load_peers(tmp_path)) == set(PEERS[:2])
    (file,) = tmp_path.iterdir()
    file.write_text(f"{PEERS[3].full}\nnobody\n{PEERS[4].full}\n")
    assert load_peers(tmp_path) == PEERS[3:5]
    assert "expected a peer as PEERID@HOST:PORT, got 'nobody'" in caplog.text
    file.write_bytes(b"\xff")
    assert load_peers(tmp_path) == ()


async def test_a_peer_finds_its_swarm_though_nobody_it_was_told_of_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Through those that it has met; one that is named and is somebody else is still an error."""
    own = PeerConfig(security=Plain(), seed=2, state_dir=tmp_path)
    async with open_peer((), PeerConfig(security=Plain(), seed=1)) as first:
        assert first.own_contact is not None
        async with open_peer(first.contact, own):
            pass
        assert load_peers(tmp_path) == (first.own_contact,)
        for join in (NOBODY, ()):
            async with open_peer(join, own) as again:
                assert again.dht.contacts() == (first.own_contact,)
        assert f"trying the peers that are remembered in {tmp_path}" in caplog.text
        with pytest.raises(WrongPeer):
            async with open_peer(Contact(PEERS[1].peer_id, first.own_contact.address), own):
                pass
    elsewhere = PeerConfig(security=Plain(), seed=2, state_dir=tmp_path / "elsewhere")
    with pytest.raises(DialFailed, match="cannot join the swarm over plain TCP"):
        async with open_peer(NOBODY, elsewhere):
            pass


async def test_a_state_dir_keeps_the_key_too(tmp_path: Path) -> None:
    """Unless another file is named; a folder that cannot be made is a mistake on the command line."""
    ids = []
    for _ in range(2):
        async with join_swarm(NetworkOptions(state_dir=tmp_path / "new" / "state"), join=[]) as peer:
            ids.append(peer.rpc.peer_id)
    async with join_swarm(NetworkOptions(state_dir=tmp_path / "new", identity=tmp_path / "key"), join=[]) as peer:
        ids.append(peer.rpc.peer_id)
    assert ids[0] == ids[1] != ids[2]
    with pytest.raises(UsageError, match=r"--state-dir .*key: File exists"):
        NetworkOptions(state_dir=tmp_path / "key").made_state_dir()
