"""The `dmoe` command: one clear line and a status for every mistake, lines to paste, tables that are right."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from rich.console import Console

from dmoe_jax.cli import main
from dmoe_jax.cli.status import NodeReading, status_table
from net.identity import Address, Contact, PeerId


def outcome(args: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit status and standard error of `dmoe ARGS`."""
    with pytest.raises(SystemExit) as exit_:
        main(args)
    return int(exit_.value.code or 0), capsys.readouterr().err


@contextmanager
def running(*args: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A `dmoe` process and the address that it asks others to join; ended with SIGTERM if it still runs."""
    command = [sys.executable, "-m", "dmoe_jax.cli", *args]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            address = ""
            while not address:
                line = process.stdout.readline()
                assert line, "the process ended before it printed an address"
                found = re.search(r"--join (\S+)", line)
                address = found[1] if found else ""
            yield process, address
        finally:
            process.terminate()
            process.wait(timeout=20)


@pytest.mark.parametrize(
    ("args", "status", "line"),
    [
        ([], 2, "Expected one of {dht, node, train, status}"),
        (["dht", "--bogus", "3"], 2, "Unrecognized options: --bogus, 3"),
        (["node", "--d-model", "x"], 2, "Error parsing --d-model: .*'x'"),
        (["train"], 2, "Missing from dmoe train: --join"),
        (["train", "--join", "127.0.0.1:1", "--data", "novels"], 2, "invalid choice 'novels'"),
        (["train", "--join", "127.0.0.1:1", "--k-min", "9"], 1, "--k-min must not exceed --k-best, got 9 and 4"),
        (["train", "--join", "127.0.0.1:1", "--steps", "0"], 1, "--steps must be at least 1, got 0"),
        (["train", "--join", "127.0.0.1:1", "--resume"], 1, "--resume needs --out"),
        (["train", "--join", "127.0.0.1:1"], 1, "none of the initial peers answered: 127.0.0.1:1"),
        (["node", "--experts", "layer0.[4:2]"], 1, r"expected \[START:STOP\] with START < STOP"),
        (["node", "--experts", "a.1", "a.[0:2]"], 1, "--experts must name .* none twice"),
        (["node", "--announce-period-s", "-1"], 1, "--announce-period-s must be positive, got -1.0"),
        (["status", "--join", "nowhere"], 1, "expected an address as HOST:PORT, got 'nowhere'"),
        (["status", "--join", "127.0.0.1:1"], 1, "none of the initial peers answered: 127.0.0.1:1"),
        (["dht", "--listen", "203.0.113.1:0"], 1, "plain TCP listens on loopback only"),
    ],
)
def test_a_mistake_gets_one_line(args: list[str], status: int, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No traceback, no box: one line that names the value, and a status that is not zero."""
    got, error = outcome(args, capsys)
    assert got == status
    assert re.match(rf"dmoe: error: .*{line}", error)
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("command", ["dht", "node", "train", "status"])
def test_help_describes_every_flag(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` succeeds and no flag is without a sentence."""
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    flags = re.split(r"\n[│ ]+(?=--)", text)[1:]
    assert len(flags) >= 3
    for flag in flags:
        assert len(re.sub(r"[│╭╮╰╯─\s]+", " ", flag).split("(default")[0].split()) > 4, flag


def test_a_peer_can_be_joined_and_its_port_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    """The printed line joins; listening on the same port fails in one line; SIGTERM ends the peer."""
    with running("dht") as (process, address):
        status, error = outcome(["dht", "--listen", address], capsys)
        assert (status, len(error.splitlines())) == (1, 1)
        assert f"cannot listen at {address}" in error
        with pytest.raises(SystemExit) as exit_:
            main(["status", "--join", address, "--json"])
        assert exit_.value.code == 0
        assert json.loads(capsys.readouterr().out) == {"swarm": "dmoe", "nodes": []}
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130


def nodes_of(address: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """What `dmoe status --json` lists."""
    with pytest.raises(SystemExit):
        main(["status", "--join", address, "--json"])
    nodes: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["nodes"]
    return nodes


def test_a_stopped_node_is_gone_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """SIGTERM lets a node withdraw: it is listed while it serves and not a moment longer."""
    tiny = ["--d-model", "8", "--num-heads", "2", "--d-ff", "8", "--seq-len", "2", "--mem-len", "2"]
    with running("dht") as (_, address):
        with running("node", "--join", address, "--experts", "layer0.[0:2]", "--warm-up-rows", "1", *tiny) as (node, _):
            (listed,) = nodes_of(address, capsys)
            assert listed["status"]["updates"] == {"layer0.0": 0, "layer0.1": 0}
            node.terminate()
            assert node.wait(timeout=20) == 130
        assert nodes_of(address, capsys) == []


def test_a_peer_ends_with_the_process_that_started_it() -> None:
    """With --exit-on-stdin-eof a closed standard input ends the peer."""
    with running("dht", "--exit-on-stdin-eof") as (process, _):
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=20) == 130


def test_status_table_shows_rates_and_silence() -> None:
    """Rates are differences over time; a node that does not answer is said so, not left out."""
    contacts = [Contact(PeerId(bytes([index]) * 32), Address("127.0.0.1", 1000 + index)) for index in range(2)]

    def reading(contact: Contact, calls: int, time_s: float) -> NodeReading:
        status = {
            "forward": calls,
            "backward": calls,
            "busy_s": 0.5 * time_s,
            "waiting_rows": 7,
            "uptime_s": 60.0 + time_s,
            "updates": {"a.0": 3, "a.1": 4},
        }
        return NodeReading(contact=contact, status=status, time_s=time_s)

    silent = NodeReading(contact=contacts[1], status=None, time_s=2.0)
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115 (rich owns it)
    with console.file:
        console.print(status_table("test", [reading(contacts[0], 10, 0.0)], [reading(contacts[0], 15, 2.0), silent]))
    text = console.export_text()
    assert "swarm 'test': 2 nodes, 2 experts" in text
    # (15 - 10) forward and as many backward calls in two seconds; one second of work in two.
    assert re.search(r"00000000 +127\.0\.0\.1:1000 +2 +5\.0 +7 +50 % +7 +62 s", text)
    assert re.search(r"01010101 +127\.0\.0\.1:1001 +no answer", text)
