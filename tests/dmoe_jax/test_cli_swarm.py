"""Processes of `dmoe`: lines to paste, swarms that keep strangers out, nodes that serve and leave."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from dmoe_jax.cli import main
from dmoe_jax.cli.network import ListenOptions, NetworkOptions, join_line, join_swarm
from dmoe_jax.cli.status import read_members
from dmoe_jax.machine.environment import JOIN_VARIABLE, SECRET_VARIABLE
from dmoe_net.errors import CallRefused
from dmoe_net.identity import Address, Contact
from tests.dmoe_jax.own_file import OWN_FILE
from tests.dmoe_jax.training_rig import outcome

STRANGER = "ab" * 32


@pytest.fixture(autouse=True)
def _no_secret_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    monkeypatch.delenv(JOIN_VARIABLE, raising=False)


def private(path: Path, text: str) -> str:
    """A file that only its owner can read."""
    path.touch(0o600)
    path.write_text(text)
    return str(path)


@contextmanager
def running(*args: str, lines: list[str] | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A `dmoe` process and the contact that it asks others to join; ended with SIGTERM if it still runs.

    The lines that it printed before are appended to `lines`.
    """
    command = [sys.executable, "-m", "dmoe_jax.cli", *args]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            contact = ""
            while not contact:
                line = process.stdout.readline()
                assert line, "the process ended before it printed how to join it"
                if lines is not None:
                    lines.append(line.rstrip("\n"))
                found = re.search(r"--join (\S+)", line)
                contact = found[1] if found else ""
            yield process, contact
        finally:
            process.terminate()
            process.wait(timeout=20)


def test_a_peer_can_be_joined_and_its_port_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    """The printed line joins; listening on the same port fails in one line; SIGTERM ends the peer."""
    with running("dht", "--insecure-loopback") as (process, contact):
        address = str(Contact.parse(contact).address)
        status, error = outcome(["dht", "--listen", address], capsys)
        assert (status, len(error.splitlines())) == (1, 1)
        assert f"cannot listen at {address}" in error
        assert nodes_of(capsys, contact, "--insecure-loopback") == []
        status, error = outcome(["status", "--join", contact], capsys)
        assert (status, len(error.splitlines())) == (1, 1)
        assert f"cannot join the swarm over TLS without a secret: {address} does not speak our TLS" in error
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130


def nodes_of(capsys: pytest.CaptureFixture[str], *join: str) -> list[dict[str, Any]]:
    """Nodes that `dmoe status --json` lists."""
    with pytest.raises(SystemExit) as exit_:
        main(["status", "--json", "--join", *join])
    assert exit_.value.code == 0, capsys.readouterr().err
    nodes: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["nodes"]
    return nodes


def test_a_secret_keeps_strangers_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the secret the peer can be joined, by flag or environment; everybody else gets one line that says why."""
    secret, other = private(tmp_path / "secret", "0123456789abcdef"), private(tmp_path / "other", "fedcba9876543210")
    key = str(tmp_path / "key")
    with running("dht", "--swarm-secret-file", secret, "--identity", key) as (_, contact):
        address = contact.partition("@")[2]
        member = [contact, "--swarm-secret-file", secret]
        assert nodes_of(capsys, *member) == []
        # A peer that is down, or was asked for under another address, does not matter beside one that answers.
        assert nodes_of(capsys, f"{STRANGER}@127.0.0.1:1", *member) == []
        for join, line in [
            ([contact], f"over TLS without a secret: {address} is not of our swarm"),
            ([address, "--swarm-secret-file", other], f"over TLS with the secret in {other}: {address} is not of our"),
            ([contact, "--insecure-loopback"], f"over plain TCP: cannot connect to .*{address}: "),
            ([f"{STRANGER}@{address}", *member], f"{address} is peer .*, expected {STRANGER} "),
            ([*member, "--identity", key], f"the identity {key} is in use by another process"),
        ]:
            status, error = outcome(["status", "--join", *join], capsys)
            assert status == 1
            assert re.match(rf"dmoe: error: .*{line}", error)
            assert len(error.splitlines()) == 1
        monkeypatch.setenv(SECRET_VARIABLE, secret)
        assert nodes_of(capsys, contact) == []
        status, error = outcome(["status", "--join", contact, "--insecure-loopback"], capsys)
        assert (status, len(error.splitlines())) == (2, 1)
        assert f"--insecure-loopback proves nothing: {SECRET_VARIABLE}={secret} would have no effect" in error


async def test_who_announces_a_name_is_joined_by_it(caplog: pytest.LogCaptureFixture) -> None:
    """A peer on every address of its machine hands out the announced one, and warns if its swarm is open."""
    everywhere = ListenOptions(listen="0.0.0.0:0", announce="localhost")
    async with join_swarm(NetworkOptions(), join=[], listen=everywhere) as peer:
        assert f"everybody who reaches {peer.rpc.address} may join" in caplog.text
        line = join_line("node", NetworkOptions(swarm_secret_file=Path("a b")), peer)
        # The whole path: the line is for terminals in other folders too.
        found = re.fullmatch(r"Join it with:  dmoe node --join (\S+@localhost:\d+) --swarm-secret-file '/.*/a b'", line)
        assert found is not None
        async with join_swarm(NetworkOptions(), join=[found[1]]) as client:
            assert client.dht.statistics().contacts == 1


async def test_all_peers_may_be_started_with_one_list(tmp_path: Path) -> None:
    """A peer that finds itself among those to join through leaves itself out; the first one starts the swarm."""
    seed = NetworkOptions(identity=tmp_path / "key")
    async with join_swarm(seed, join=[], listen=ListenOptions()) as peer:
        own = Contact(peer.rpc.peer_id, peer.rpc.address or Address("", 0))
    async with join_swarm(seed, join=[own.full], listen=ListenOptions(listen=str(own.address))) as peer:
        assert peer.dht.statistics().contacts == 0


@pytest.mark.slow
async def test_a_node_fails_on_purpose_and_is_gone_at_once() -> None:
    """It is listed while it serves, and says what it does wrong: every expert call meets the fault, its status stays
    honest. SIGTERM lets it withdraw: it is not listed a moment longer."""
    node_flags = ["--expert", "feedforward", "--d-model", "8", "--experts", "ffn.[0:2]", "--warm-up-rows", "1"]
    with running("dht") as (_, entrance):
        with running("node", "--join", entrance, *node_flags, "--faults", "refuse=1") as (node, contact):
            assert node.stdout is not None
            assert node.stdout.readline() == "This node misbehaves on purpose: --faults refuse=1\n"
            async with join_swarm(NetworkOptions(), join=[contact]) as peer:
                (listed,) = (await read_members(peer, "dmoe"))[1].values()
                assert listed["updates"] == {"ffn.0": 0, "ffn.1": 0}
                with pytest.raises(CallRefused, match="on purpose"):
                    await peer.rpc.call(Contact.parse(contact), "expert.info", {"uid": "ffn.0"}, timeout_s=5)
            node.terminate()
            assert node.wait(timeout=20) == 130
        async with join_swarm(NetworkOptions(), join=[entrance]) as peer:
            assert await read_members(peer, "dmoe") == ((), {})


def test_a_peer_ends_with_the_process_that_started_it() -> None:
    """With --exit-on-stdin-eof a closed standard input ends the peer."""
    with running("dht", "--exit-on-stdin-eof") as (process, _):
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=20) == 130


@pytest.mark.slow
async def test_experts_outlive_a_killed_node(tmp_path: Path) -> None:
    """When one of three processes that claim, over TLS, is killed, the one that has room takes its experts over and
    goes on from the checkpoints that the dead one has saved."""
    claims = ["--claim", "4", "--of", "ffn.[0:2].[0:4]", "--checkpoint-dir", str(tmp_path)]
    kind = ["--expert", "feedforward", "--d-model", "8", "--warm-up-rows", "1", "--checkpoint-period-s", "1"]
    uids = {f"ffn.{row}.{column}" for row in range(2) for column in range(4)}
    x, lines = np.ones((1, 8), np.float32), list[str]()
    with running("dht") as (_, entrance), ExitStack() as stack:
        command = ["node", "--join", entrance, *claims, *kind]
        # One after the other: the third finds nothing left to claim.
        first, contact = stack.enter_context(running(*command))
        stack.enter_context(running(*command))
        stack.enter_context(running(*command, lines=lines))
        assert any("serves 0 experts and may claim 4 more" in line for line in lines)
        async with join_swarm(NetworkOptions(), join=[entrance]) as peer:
            killed = Contact.parse(contact)
            updates = (await read_members(peer, "dmoe"))[1][killed.peer_id]["updates"]
            assert len(updates) == 4
            for uid in updates:
                body = {"parts": [{"uid": uid, "id": b"id", "rows": 1}]}
                index = np.zeros(1, np.int32)
                await peer.rpc.call(killed, "expert.backward", body, (index, x, x), timeout_s=30)
            while not all((tmp_path / uid / "1").is_dir() for uid in updates):  # noqa: ASYNC110 (a folder)
                await trio.sleep(0.2)
            first.kill()
            with trio.fail_after(60):
                found: dict[str, int] = {}
                adopted: list[str] = []
                while found.keys() != uids or "{}" in adopted:  # an expert is served before it is counted
                    await trio.sleep(0.5)
                    statuses = (await read_members(peer, "dmoe"))[1]
                    living = [status for peer_id, status in statuses.items() if peer_id != killed.peer_id]
                    found = {uid: count for status in living for uid, count in status["updates"].items()}
                    adopted = sorted(str(status["claims"]["adopted"]) for status in living)
            assert {uid: found[uid] for uid in updates} == dict.fromkeys(updates, 1)
            assert adopted == ["{'checkpoint': 4}", "{'seed': 4}"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit stands for a full disk")
def test_a_node_without_room_goes_on_and_ends_with_a_sentence(tmp_path: Path) -> None:
    """It says once that it cannot save, and nothing of a checkpoint is left; a second node with its experts is told who
    saves them; at its end one line has the reason, and the status is 1."""
    flags = ["node", "--experts", "ffn.[0:2]", "--expert", "feedforward", "--d-model", "8", "--warm-up-rows", "1"]
    flags += ["--checkpoint-dir", str(tmp_path / "experts"), "--checkpoint-period-s", "0.2"]

    async def learn(contact: str) -> None:
        x, index = np.ones((1, 8), np.float32), np.zeros(1, np.int32)
        async with join_swarm(NetworkOptions(), join=[contact]) as peer:
            for uid in ("ffn.0", "ffn.1"):
                body = {"parts": [{"uid": uid, "id": b"id", "rows": 1}]}
                await peer.rpc.call(Contact.parse(contact), "expert.backward", body, (index, x, x), timeout_s=30)
            await trio.sleep(2.0)

    limited = 'ulimit -f 1; exec "$@"'  # no file above 512 or 1,024 bytes
    command = ["sh", "-c", limited, "sh", sys.executable, "-m", "dmoe_jax.cli", *flags]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "DMOE_XLA_CACHE": ""}
    # Pipes: a file of what it says would be cut off, too.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        contact = next(found[1] for line in process.stdout if (found := re.search(r"--join (\S+)", line)))
        second = subprocess.run([sys.executable, "-m", "dmoe_jax.cli", *flags], capture_output=True, text=True)
        assert second.returncode == 1
        assert f"is under way: process {process.pid} on " in second.stderr
        assert "Traceback" not in second.stderr
        trio.run(learn, contact)
        process.terminate()
        assert process.wait(timeout=20) == 1
    finally:
        process.kill()
        _, said = process.communicate()
    lines = said.splitlines()
    assert sum("could not be saved, among them ffn." in line for line in lines) == 2
    assert "; the node goes on, and tries again every 0.2 s" in said
    assert lines[-1].startswith("dmoe: error: 2 of 2 experts could not be saved, among them ffn.0: checkpoint ")
    assert "Traceback" not in said
    assert not [path for path in (tmp_path / "experts").rglob("*") if path.is_file()]


@pytest.mark.slow
async def test_a_node_serves_an_expert_of_the_users_own(tmp_path: Path) -> None:
    """An own network with an own optimiser; the node says what it does, and then serves."""
    file = tmp_path / "own.py"
    file.write_text(OWN_FILE)
    flags = ["--expert", f"{file}:expert", "--optimizer", f"{file}:optimizer", "--warm-up-rows", "2"]
    lines: list[str] = []
    with running("node", "--experts", "ffn.[0:2]", *flags, lines=lines) as (_, contact):
        assert [line.split()[2:5] for line in lines[:1]] == [["has", "joined", "the"]]
        assert lines[1].startswith("2 experts ")  # how they are run, as it has measured
        assert lines[2] == "compiling 1 of 1"  # of two sizes one was compiled to measure, or a stack has one for both
        async with join_swarm(NetworkOptions(), join=[contact]) as peer:
            reply = await peer.rpc.call(Contact.parse(contact), "expert.info", {"uid": "ffn.1"}, timeout_s=5)
            assert reply.body["output"]["shape"] == [8]
