"""Processes of `dmoe`: lines to paste, swarms that keep strangers out, nodes that serve and leave, auxiliaries."""

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from dmoe_jax.cli import main
from dmoe_jax.cli.assist import AssistCommand
from dmoe_jax.cli.network import ListenOptions, NetworkOptions, join_line, join_swarm
from dmoe_jax.cli.status import read_members
from dmoe_jax.machine.environment import SECRET_VARIABLE
from dmoe_jax.runs.endings import EXIT_AGAIN, UsageError
from dmoe_net.averaging.config import AveragerConfig
from dmoe_net.averaging.grouping.group_key import MoshpitGrid
from dmoe_net.averaging.opening import open_averager
from dmoe_net.averaging.plan import AveragingPlan
from dmoe_net.averaging.reduction.partition import AllReduceConfig
from dmoe_net.averaging.speeds import Speeds
from dmoe_net.errors import CallRefused
from dmoe_net.identity import Address, Contact
from dmoe_net.wire.compression import Compression
from tests.dmoe_jax.test_cli import OWN_FILE, STRANGER, check_one_line
from tests.dmoe_jax.training_rig import parsed


def private(path: Path, text: str) -> str:
    """A file that only its owner can read."""
    path.touch(0o600)
    path.write_text(text)
    return str(path)


@contextmanager
def running(*args: str, lines: list[str] | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A `dmoe` process, in the end terminated, and the contact to join that it prints, after what `lines` gets."""
    command = [sys.executable, "-m", "dmoe_jax.cli", *args]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}, **pipes) as process:
        try:
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
        check_one_line(["dht", "--listen", address], EXIT_AGAIN, f"cannot listen at {address}", capsys)
        assert nodes_of(capsys, contact, "--insecure-loopback") == []
        line = f"cannot join the swarm over TLS without a secret: {address} does not speak our TLS"
        check_one_line(["status", "--join", contact], 1, line, capsys)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130


def nodes_of(capsys: pytest.CaptureFixture[str], *join: str) -> list[dict[str, Any]]:
    """Nodes that `dmoe status --json` lists."""
    with pytest.raises(SystemExit) as exit_:
        main(["status", "--json", "--join", *join])
    assert exit_.value.code == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)["nodes"]


def test_a_secret_keeps_strangers_out(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """With the secret the peer can be joined, by flag or environment; everybody else gets one line that says why."""
    secret, other = private(tmp_path / "secret", "0123456789abcdef"), private(tmp_path / "other", "fedcba9876543210")
    key = str(tmp_path / "key")
    with running("dht", "--swarm-secret-file", secret, "--identity", key) as (_, contact):
        address = contact.partition("@")[2]
        member = [contact, "--swarm-secret-file", secret]
        assert nodes_of(capsys, *member) == []
        # A peer that is down, or was asked for under another address, does not matter beside one that answers.
        assert nodes_of(capsys, f"{STRANGER}@127.0.0.1:1", *member) == []
        for join, status, line in [
            ([contact], 1, f"over TLS without a secret: {address} is not of our swarm"),
            ([address, "--swarm-secret-file", other], 1, f"over TLS with the secret in {other}: {address} is not of"),
            ([contact, "--insecure-loopback"], EXIT_AGAIN, f"over plain TCP: cannot connect to .*{address}: "),
            ([f"{STRANGER}@{address}", *member], 1, f"{address} is peer .*, expected {STRANGER} "),
            ([*member, "--identity", key], EXIT_AGAIN, f"the identity {key} is in use by another process"),
        ]:
            check_one_line(["status", "--join", *join], status, f".*{line}", capsys)
        monkeypatch.setenv(SECRET_VARIABLE, secret)
        assert nodes_of(capsys, contact) == []
        line = f".*--insecure-loopback proves nothing: {SECRET_VARIABLE}={secret} would have no effect"
        check_one_line(["status", "--join", contact, "--insecure-loopback"], 2, line, capsys)


async def test_who_announces_a_name_is_joined_by_it(caplog: pytest.LogCaptureFixture) -> None:
    """A peer on every address of its machine hands out the announced one, and warns if its swarm is open."""
    everywhere = ListenOptions(listen="0.0.0.0:0", announce="localhost")
    async with join_swarm(NetworkOptions(), join=[], listen=everywhere) as peer:
        assert f"everybody who reaches {peer.rpc.address} may join" in caplog.text
        line = join_line("node", NetworkOptions(swarm_secret_file=Path("a b")), peer)
        # The whole path: the line is for terminals in other folders too.
        found = re.fullmatch(r"Join it with:  dmoe node --join (\S+@localhost:\d+) --swarm-secret-file '/.*/a b'", line)
        async with join_swarm(NetworkOptions(), join=[found[1]]) as client:
            assert client.dht.statistics().contacts == 1


async def test_all_peers_may_be_started_with_one_list(tmp_path: Path) -> None:
    """A peer that finds itself among those to join through leaves itself out; the first one starts the swarm."""
    seed = NetworkOptions(identity=tmp_path / "key")
    async with join_swarm(seed, join=[], listen=ListenOptions()) as peer:
        own = Contact(peer.rpc.peer_id, peer.rpc.address or Address("", 0))
    async with join_swarm(seed, join=[own.full], listen=ListenOptions(listen=str(own.address))) as peer:
        assert peer.dht.statistics().contacts == 0


NODE = ["node", "--expert", "feedforward", "--d-model", "8", "--warm-up-rows", "1"]
"""A node of small experts, but for its experts."""


async def teach(peer: Any, contact: str, uids: Iterable[str]) -> None:
    """One update for each of these experts of a node."""
    x, index = np.ones((1, 8), np.float32), np.zeros(1, np.int32)
    for uid in uids:
        body = {"parts": [{"uid": uid, "id": b"id", "rows": 1}]}
        await peer.rpc.call(Contact.parse(contact), "expert.backward", body, (index, x, x), timeout_s=30)


@pytest.mark.slow
async def test_a_node_fails_on_purpose_and_is_gone_at_once() -> None:
    """It says what it does wrong, its status stays honest, and after SIGTERM it is listed no moment longer."""
    flags = ["--experts", "ffn.[0:2]", "--faults", "refuse=1"]
    with running("dht") as (_, entrance):
        with running(*NODE, "--join", entrance, *flags) as (node, contact):
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


@pytest.mark.slow
async def test_a_node_that_keeps_nothing_says_so_at_its_end() -> None:
    """If there is anything to keep."""
    with running(*NODE, "--experts", "ffn.[0:2]") as (node, contact):
        async with join_swarm(NetworkOptions(), join=[contact]) as peer:
            await teach(peer, contact, ["ffn.1"])
        node.terminate()
        assert node.wait(timeout=20) == 130
        line = "What 1 of 2 experts have learnt is not kept: there was no --checkpoint-dir"
        assert node.stdout.read().splitlines()[-1] == line


def test_a_peer_ends_with_the_process_that_started_it() -> None:
    """With --exit-on-stdin-eof a closed standard input ends the peer."""
    with running("dht", "--exit-on-stdin-eof") as (process, _):
        process.stdin.close()
        assert process.wait(timeout=20) == 130


@pytest.mark.slow
async def test_experts_outlive_a_killed_node(tmp_path: Path) -> None:
    """The one of three that has room goes on from the checkpoints of the one that is killed."""
    claims = ["--claim", "4", "--of", "ffn.[0:2].[0:4]"]
    saves = ["--checkpoint-dir", str(tmp_path), "--checkpoint-period-s", "1"]
    uids, lines = {f"ffn.{row}.{column}" for row in range(2) for column in range(4)}, list[str]()
    with running("dht") as (_, entrance), ExitStack() as stack:
        command = [*NODE, "--join", entrance, *claims, *saves]
        # One after the other: the third finds nothing left to claim.
        first, contact = stack.enter_context(running(*command))
        stack.enter_context(running(*command))
        stack.enter_context(running(*command, lines=lines))
        assert any("serves 0 experts and may claim 4 more" in line for line in lines)
        async with join_swarm(NetworkOptions(), join=[entrance]) as peer:
            killed = Contact.parse(contact)
            updates = (await read_members(peer, "dmoe"))[1][killed.peer_id]["updates"]
            assert len(updates) == 4
            await teach(peer, contact, updates)
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
    flags = [*NODE, "--experts", "ffn.[0:2]"]
    flags += ["--checkpoint-dir", str(tmp_path / "experts"), "--checkpoint-period-s", "0.2"]

    async def learn(contact: str) -> None:
        async with join_swarm(NetworkOptions(), join=[contact]) as peer:
            await teach(peer, contact, ["ffn.0", "ffn.1"])
            await trio.sleep(2.0)

    limited = 'ulimit -f 1; exec "$@"'  # no file above 512 or 1,024 bytes
    command = ["sh", "-c", limited, "sh", sys.executable, "-m", "dmoe_jax.cli", *flags]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "DMOE_XLA_CACHE": ""}
    # Pipes: a file of what it says would be cut off, too.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        contact = next(found[1] for line in process.stdout if (found := re.search(r"--join (\S+)", line)))
        second = subprocess.run([sys.executable, "-m", "dmoe_jax.cli", *flags], capture_output=True, text=True)
        assert second.returncode == EXIT_AGAIN
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
    (file := tmp_path / "own.py").write_text(OWN_FILE)
    flags = ["--expert", f"{file}:expert", "--optimizer", f"{file}:optimizer", "--warm-up-rows", "2"]
    lines: list[str] = []
    with running("node", "--experts", "ffn.[0:2]", *flags, lines=lines) as (_, contact):
        assert lines[0].split()[2:5] == ["has", "joined", "the"]
        assert lines[1].startswith("2 experts ")  # how they are run, as it has measured
        assert lines[2] == "compiling 1 of 1"  # of two sizes one was compiled to measure, or a stack has one for both
        async with join_swarm(NetworkOptions(), join=[contact]) as peer:
            reply = await peer.rpc.call(Contact.parse(contact), "expert.info", {"uid": "ffn.1"}, timeout_s=5)
            assert reply.body["output"]["shape"] == [8]


def test_flags_that_cannot_be_meant_are_refused() -> None:
    """The message names the flag; those that pass can be used."""
    join = (f"{STRANGER}@127.0.0.1:1",)
    for wishes, message in (
        ({"join": ()}, "--join needs"),
        ({"name": "a.b"}, "--name: a prefix is"),
        ({"up": -1.0}, "--up, --down: bandwidth up is from 1000 .*, got -125000"),
        ({"down": 1e9}, "--up, --down: bandwidth down"),
        ({"window_s": 0.0}, "--window-s, --timeout-s: "),
        ({"timeout_s": 1e9}, "--timeout-s: "),
    ):
        with pytest.raises(UsageError, match=message):
            parsed(AssistCommand, **({"join": join} | wishes)).check()
    command = parsed(AssistCommand, join=join, up=8.0, down=80.0, timeout_s=12.0, compression="bfloat16")
    command.check()
    speeds, form = Speeds(up=1e6, down=1e7), {"timeout_s": 12.0, "compression": Compression.BFLOAT16}
    assert command.meeting.speeds() == speeds
    assert command.averager() == AveragerConfig.of(window_s=5.0, speeds=speeds, **form)
    assert command.rounds().all_reduce == AllReduceConfig(**form)


async def average_as_client(contact: str, value: float, done: list[Any]) -> None:
    """A peer that listens nowhere, in a group of two; it goes on until somebody has reduced for it."""
    plan, rng = AveragingPlan.of(size=100_000, grid=MoshpitGrid(side=2, dims=1)), random.Random(int(value))
    config = AveragerConfig.of(window_s=5.0, timeout_s=20.0, compression=Compression.NONE)
    async with (
        join_swarm(NetworkOptions(insecure_loopback=True), join=[contact]) as peer,
        open_averager(peer.rpc, peer.dht, plan, prefix="run", rng=rng, config=config) as averager,
    ):
        done.append(await averager.step(np.full(100_000, value, np.float32)))


@pytest.mark.slow
def test_two_clients_average_with_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    """It learns the size of their vectors, reduces all of both, tells of it, and is listed until it is stopped."""
    lines: list[str] = []
    done: list[Any] = []

    async def average(contact: str) -> None:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for value in (1.0, 4.0):
                    nursery.start_soon(average_as_client, contact, value, done)

    async def listed(contact: str) -> list[Any]:
        async with join_swarm(NetworkOptions(insecure_loopback=True), join=[contact]) as peer:
            members, _ = await read_members(peer, "dmoe")
        return [(member.role, member.info["group"]) for member in members]

    with running("dht", "--insecure-loopback") as (_, dht):
        flags = ["--join", dht, "--name", "run", "--window-s", "5", "--timeout-s", "20"]
        with running("assist", "--insecure-loopback", *flags, lines=lines) as (process, contact):
            trio.run(average, dht)
            assert process.stdout.readline() == "run: averages of 100,000 numbers in groups of 2\n"
            # Two vectors of 400 kB each way.
            assert process.stdout.readline() == "round 1: 3 peers, 0.8 MB each way, 0.8 MB in all\n"
            with pytest.raises(SystemExit):
                main(["status", "--insecure-loopback", "--json", "--join", contact])
            shown = json.loads(capsys.readouterr().out)
            assert [each["info"]["group"] for each in shown["auxiliaries"]] == ["run"]
            assert shown["auxiliaries"][0]["address"] == contact.partition("@")[2]
            assert trio.run(listed, dht) == [("auxiliary", "run")]
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=20) == 130
            assert process.stdout.read().splitlines()[-1] == "assisted in 1 rounds, 0.8 MB each way"
        assert trio.run(listed, dht) == []
    assert lines[0].startswith("auxiliary peer ")
    for step in done:
        assert (len(step.peers), step.received) == (3, 1.0)
        np.testing.assert_array_equal(step.average, np.full(100_000, 2.5, np.float32))
