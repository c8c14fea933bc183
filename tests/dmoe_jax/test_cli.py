"""The `dmoe` command: one clear line and a status for every mistake, lines to paste, swarms that keep strangers out,
tables that are right."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dmoe_jax.cli import main
from dmoe_jax.cli.network import ListenOptions, NetworkOptions
from dmoe_jax.cli.status import Reading, status_tables
from dmoe_jax.cli.swarm import join_line, join_swarm
from dmoe_jax.environment import JOIN_VARIABLE, SECRET_VARIABLE
from dmoe_jax.members import Member
from dmoe_jax.routing.registry import ROUTERS
from net.errors import CallRefused
from net.identity import Address, Contact, PeerId

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


def outcome(args: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit status and standard error of `dmoe ARGS`."""
    with pytest.raises(SystemExit) as exit_:
        main(args)
    return int(exit_.value.code or 0), capsys.readouterr().err


TINY_NODE = [
    *("--experts", "layer0.[0:2]", "--warm-up-rows", "1"),
    *("--d-model", "8", "--num-heads", "2", "--d-ff", "8", "--seq-len", "2", "--mem-len", "2"),
]


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


@pytest.mark.parametrize(
    ("args", "status", "line"),
    [
        ([], 2, "Expected one of {demo, up, dht, node, train, status, identity}"),
        (["dht", "--bogus", "3"], 2, "Unrecognized options: --bogus, 3"),
        (["node", "--d-model", "x"], 2, "Error parsing --d-model: .*'x'"),
        (["train"], 2, "Missing from dmoe train: --join"),
        (["train", "--join", "127.0.0.1:1", "--compression", "zip"], 2, "invalid choice 'zip'"),
        (["train", "--join", "127.0.0.1:1", "--k-min", "9"], 1, "--k-min must not exceed --k-best, got 9 and 4"),
        (["train", "--join", "127.0.0.1:1", "--steps", "0"], 1, "--steps must be at least 1, got 0"),
        (["train", "--join", "127.0.0.1:1", "--resume"], 1, "--resume needs --out"),
        (
            ["train", "--join", "127.0.0.1:1", "--weight-decay", "-1"],
            1,
            "weight_decay must not be negative, got -1.0",
        ),
        (["train", "--join", "127.0.0.1:1", "--learning-rate-floor", "2"], 1, "floor must be .*, got 2.0"),
        (["train", "--join", "127.0.0.1:1", "--eval-tokens", "0", "--d-ff", "0"], 2, "d_ff must be .*, got 0"),
        (["train", "--join", "127.0.0.1:1", "--dropout", "1"], 2, "dropout must be .* below 1, got 1.0"),
        (["train", "--join", "127.0.0.1:1", "--compute-dtype", "int8"], 2, "compute_dtype must be .*, got 'int8'"),
        (["train", "--join", "127.0.0.1:1", "--router", "best"], 1, "unknown router 'best'; expected .*product_key"),
        (["train", "--join", "127.0.0.1:1", "--router", "/nowhere/r.py:mine"], 1, "router '/nowhere/r.py:mine': .* no"),
        (["train", "--join", "127.0.0.1:1"], 1, "cannot join the swarm: cannot connect to 127.0.0.1:1: .*refused"),
        (["node", "--experts", "layer0.[4:2]"], 1, r"expected \[START:STOP\] with START < STOP"),
        (["node", "--experts", "a.1", "a.[0:2]"], 1, "--experts must name .* none twice"),
        (["node", "--weight-decay", "-0.1"], 1, "--weight-decay must not be negative, got -0.1"),
        (["node", "--warmup-steps", "-1"], 1, "--warmup-steps must not be negative, got -1"),
        (["node", "--announce-period-s", "-1"], 1, "--announce-period-s must be positive, got -1.0"),
        (["status", "--join", "nowhere"], 1, "expected an address as HOST:PORT, got 'nowhere'"),
        (["node", "--faults", "late"], 1, "--faults: expected FAULT=RATE or late=RATE:MEAN_S, .* got 'late'"),
        (["node", "--faults", "late=0.6", "die=0.6"], 1, "--faults: .*together at most 1"),
        (["status", "--join", "127.0.0.1:1"], 1, "cannot join the swarm: cannot connect to 127.0.0.1:1: .*refused"),
        (["status", "--join", f"{STRANGER}@127.0.0.1:1"], 1, "cannot join the swarm: cannot connect to .*refused"),
        (["status", "--join", "ab@127.0.0.1:1"], 1, "expected a peer as PEERID@HOST:PORT, got 'ab@127.0.0.1:1'"),
        (["status", "--join", "127.0.0.1:1", "--insecure-loopback"], 1, "cannot join the swarm over plain TCP: "),
        (
            ["status", "--join", "127.0.0.1:1", "--insecure-loopback", "--identity", "f", "--allow-list", "f"],
            2,
            "--insecure-loopback proves nothing: --identity and --allow-list would have no effect",
        ),
        (["dht", "--listen", "203.0.113.1:0"], 1, "cannot listen at 203.0.113.1:0: "),
        (["dht", "--listen", "203.0.113.1:0", "--insecure-loopback"], 1, ".*loopback only"),
        (["dht", "--listen", "203.0.113.1"], 2, "expected an address as HOST:PORT, got '203.0.113.1'"),
        (["dht", "--listen", "0.0.0.0:0"], 2, "--listen 0.0.0.0:0 .*--announce must say"),
        (["node", "--listen", "[::]:0"], 2, r"--listen \[::\]:0 .*--announce must say"),
        (["dht", "--announce", "host:4000"], 2, "--announce must be .* without a port, got 'host:4000'"),
        (["identity"], 2, "Missing from dmoe identity: FILE"),
        (["identity", "/nowhere/key"], 1, "cannot write the identity /nowhere/key: No such file or directory"),
    ],
)
def test_a_mistake_gets_one_line(args: list[str], status: int, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No traceback, no box: one line that names the value, and a status that is not zero."""
    got, error = outcome(args, capsys)
    assert got == status
    assert re.match(rf"dmoe: error: .*{line}", error)
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("flag", "content", "mode", "line"),
    [
        ("--identity", "", 0o644, "open to others .mode 644.*chmod 600"),
        ("--identity", "not a key", 0o600, "expected an unencrypted Ed25519 private key"),
        ("--swarm-secret-file", "0123456789abcdef", 0o640, "open to others .mode 640"),
        ("--swarm-secret-file", "short", 0o600, "holds 5 bytes, expected .* at least 16 .*openssl rand"),
        ("--swarm-secret-file", None, 0o600, "No such file or directory"),
        ("--allow-list", "bob", 0o600, "line 1: expected a peer id of 64 hexadecimal digits, got 'bob'"),
    ],
)
def test_a_file_that_will_not_do_gets_one_line(
    flag: str, content: str | None, mode: int, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is sent: the line names the file and what was expected."""
    file = tmp_path / "file"
    if content is not None:
        file.write_text(content)
        file.chmod(mode)
    status, error = outcome(["status", "--join", "127.0.0.1:1", flag, str(file)], capsys)
    assert status == 1
    assert re.match(rf"dmoe: error: .*{re.escape(str(file))}.*{line}", error)
    assert len(error.splitlines()) == 1


ROUTER_FILE = """
import jax.numpy as jnp
from dmoe_jax.routing.base import top_k_router

def init(key, d_model):
    return {"w": jnp.ones((d_model, 8))}

def scores(params, x, *, key=None, ids=None):
    return tuple(jnp.split(x @ params["w"], 2, axis=-1))

def router(name, scores):
    return lambda grid_size: top_k_router(name, grid_size, init, scores)

narrow = router("narrow", lambda params, x, **_: (x @ params["w"])[:, :3])
not_finite = router("not_finite", lambda params, x, **_: scores(params, x * jnp.nan))
for_another_grid = router("elsewhere", scores)((2, 2))

def broken(grid_size):
    raise KeyError("gone")
"""


@pytest.mark.parametrize(
    ("attribute", "line"),
    [
        ("absent", "defines no 'absent'"),
        ("broken", "broken.*raised KeyError: 'gone'"),
        ("for_another_grid", r"'elsewhere' is for grid \(2, 2\), the model's grid is \(4, 4\)"),
        ("narrow", r"'narrow': .*\(\(3, 4\), \(3, 4\)\).* got \(\(3, 3\),\)"),
        ("not_finite", "'not_finite': .*NaN"),
    ],
)
def test_a_router_that_will_not_do_gets_one_line(
    attribute: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the swarm is joined, which would fail too: nobody listens there."""
    file = tmp_path / "routers.py"
    file.write_text(ROUTER_FILE)
    router = ["--router", f"{file}:{attribute}"]
    status, error = outcome(["train", "--join", "127.0.0.1:1", "--d-model", "16", *router], capsys)
    assert status == 1
    assert re.match(rf"dmoe: error: .*{line}", error)
    assert len(error.splitlines()) == 1


def test_help_names_every_router(capsys: pytest.CaptureFixture[str]) -> None:
    """The names are written down where JAX is not imported; they are those of the registry."""
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    words = re.sub(r"[│\s]+", " ", capsys.readouterr().out)
    listed = re.search(r"Chooses the experts of each sequence: ([^.]+)\.", words)
    assert listed is not None
    assert re.split(r", | or ", listed[1]) == list(ROUTERS)


def test_an_identity_is_made_once_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first call makes a private file; each prints the same 64 digits and nothing else."""
    file, printed = tmp_path / "key", []
    for _ in range(2):
        with pytest.raises(SystemExit) as exit_:
            main(["identity", str(file)])
        assert exit_.value.code == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert re.fullmatch(r"[0-9a-f]{64}\n", printed[0])
    assert file.stat().st_mode & 0o777 == 0o600


def test_help_needs_no_jax() -> None:
    """Neither `--help` nor a DHT peer waits for JAX, or pays for it in memory."""
    code = "import dmoe_jax.cli, sys; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("command", ["demo", "up", "dht", "node", "train", "status"])
def test_help_describes_every_flag(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` succeeds and no flag is without a sentence."""
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    flags = re.split(r"\n[│ ]{2}(?=--)", text)[1:]
    assert len(flags) >= 3
    for flag in flags:
        assert len(re.sub(r"[│╭╮╰╯─\s]+", " ", flag).split("(default")[0].split()) > 4, flag


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
    """What `dmoe status --json` lists."""
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
        assert (status, len(error.splitlines())) == (1, 1)
        assert f"--insecure-loopback does not go with {SECRET_VARIABLE}={secret}" in error


async def test_who_announces_a_name_is_joined_by_it(caplog: pytest.LogCaptureFixture) -> None:
    """A peer on every address of its machine hands out the announced one, and warns if its swarm is open."""
    everywhere = ListenOptions(listen="0.0.0.0:0", announce="localhost")
    async with join_swarm(NetworkOptions(), join=[], listen=everywhere) as peer:
        assert f"everybody who reaches {peer.rpc.address} may join" in caplog.text
        line = join_line("node", NetworkOptions(swarm_secret_file=Path("a b")), peer)
        found = re.fullmatch(r"Join it with:  dmoe node --join (\S+@localhost:\d+) --swarm-secret-file 'a b'", line)
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


def test_a_stopped_node_is_gone_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """SIGTERM lets a node withdraw: it is listed while it serves and not a moment longer."""
    with running("dht") as (_, contact):
        with running("node", "--join", contact, *TINY_NODE) as (node, _):
            (listed,) = nodes_of(capsys, contact)
            assert listed["status"]["updates"] == {"layer0.0": 0, "layer0.1": 0}
            node.terminate()
            assert node.wait(timeout=20) == 130
        assert nodes_of(capsys, contact) == []


async def test_a_node_fails_on_purpose_where_it_is_told_to() -> None:
    """Every expert call meets the fault; the status stays honest; and the node says so."""
    with running("node", *TINY_NODE, "--faults", "refuse=1") as (node, contact):
        assert node.stdout is not None
        assert node.stdout.readline() == "This node misbehaves on purpose: --faults refuse=1\n"
        async with join_swarm(NetworkOptions(), join=[contact]) as peer:
            target = Contact.parse(contact)
            assert (await peer.rpc.call(target, "node.status", {}, timeout_s=5)).body["updates"]
            with pytest.raises(CallRefused, match="on purpose"):
                await peer.rpc.call(target, "expert.info", {"uid": "layer0.0"}, timeout_s=5)
        node.terminate()
        assert node.wait(timeout=20) == 130


def test_a_peer_ends_with_the_process_that_started_it() -> None:
    """With --exit-on-stdin-eof a closed standard input ends the peer."""
    with running("dht", "--exit-on-stdin-eof") as (process, _):
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=20) == 130


def member(index: int, role: str, *, listens: bool = True, **facts: Any) -> Member:
    peer_id = PeerId(bytes([index]) * 32)
    contact = Contact(peer_id, Address("127.0.0.1", 1000 + index)) if listens else None
    return Member(peer_id=peer_id, contact=contact, info={"role": role, **facts}, expiration=0.0)


def tables(before: list[Reading], now: list[Reading]) -> str:
    """What the terminal shows, in 80 columns."""
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115 (rich owns it)
    with console.file:
        console.print(status_tables("test", before, now))
    return console.export_text()


def test_status_shows_rates_silence_and_who_compiles() -> None:
    """Rates are differences over the node's own time, busy never above all of it; silence is said, not left out."""

    def reading(index: int, calls: int, uptime_s: float, busy_s: float) -> Reading:
        counters = {"forward": calls, "backward": calls, "busy_s": busy_s, "waiting_rows": 7, "uptime_s": uptime_s}
        served = {"updates": {"a.0": 3, "a.1": 4}}
        return Reading(member=member(index, "node", state="serving", experts=2), status=counters | served)

    silent = Reading(member=member(2, "node", state="serving", experts=2))
    compiling = Reading(member=member(3, "node", state="compiling 3 of 8", experts=4))
    before = [reading(0, 10, 60.0, 1.0), reading(1, 10, 60.0, 0.0)]
    text = tables(before, [reading(0, 15, 62.0, 2.0), reading(1, 10, 62.0, 2.5), silent, compiling])
    assert "swarm 'test': 4 nodes, 10 experts" in text
    # (15 - 10) forward and as many backward calls in two seconds; one second of work in two.
    assert re.search(r"00000000 +127\.0\.0\.1:1000 +2 +5\.0 +7 +50 % +7 +up 62 s", text)
    # A batch of 2.5 s that ended within these two seconds.
    assert re.search(r"01010101 +127\.0\.0\.1:1001 +2 +0\.0 +7 +100 % +7 +up 62 s", text)
    assert re.search(r"02020202 +127\.0\.0\.1:1002 +2 +no answer", text)
    assert re.search(r"03030303 +127\.0\.0\.1:1003 +4 +compiling 3 of 8", text)


def test_status_shows_trainers_and_averagers() -> None:
    """Those that listen nowhere, too, and those that leave a figure out."""
    trainer = member(
        1, "trainer", listens=False, state="training", step=40, loss=6.0625, items_per_s=1234.5, failed_calls=3
    )
    waiting = member(2, "trainer", state="waiting for experts")
    averager = member(1, "averager", name="trunk", state="averaging", rounds=4, peers=2)
    text = tables([], [Reading(member=each) for each in (trainer, waiting, averager)])
    assert re.search(r"01010101 +- +training +40 +6\.062 +1,23[45] +3", text)
    assert re.search(r"02020202 +127\.0\.0\.1:1002 +waiting for experts", text)
    assert re.search(r"01010101 +127\.0\.0\.1:1001 +trunk +averaging +4 +2", text)


def test_status_says_that_nobody_is_listed() -> None:
    """A name with a slip of the pen is no empty table."""
    assert "Nobody is listed under the name 'test'" in tables([], [])


def test_the_environment_names_whom_to_join(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """DMOE_JOIN stands for --join in every command that has it, and only where it is not given."""
    monkeypatch.setenv(JOIN_VARIABLE, "127.0.0.1:1 nowhere")
    for command in ("dht", "node", "train", "status"):
        assert outcome([command], capsys)[1] == "dmoe: error: --join: expected an address as HOST:PORT, got 'nowhere'\n"
    assert "127.0.0.1:2: Connection refused" in outcome(["status", "--join", "127.0.0.1:2"], capsys)[1]
    assert outcome(["identity"], capsys)[0] == 2


def test_a_wrong_address_is_told_before_jax_is_imported() -> None:
    """A slip of the pen need not wait for seconds of imports."""
    code = """if True:
        import sys
        from dmoe_jax.cli import main
        try:
            main(["train", "--join", "foo"])
        except SystemExit as exit_:
            sys.exit(exit_.code + 10 * ("jax" in sys.modules))
    """
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "dmoe: error: --join: expected an address as HOST:PORT, got 'foo'\n")


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_slips_of_the_pen_are_guessed_on_every_terminal(encoding: str) -> None:
    """Tyro draws its boxes with other characters where the terminal lacks them; the line is the same."""
    for args, line in [
        (
            ["train", "--learing-rate", "1", "--join", "a:1"],
            "--learing-rate, 1; did you mean --learning-rate? See dmoe train",
        ),
        (["stauts"], "stauts; did you mean status? See dmoe"),
        (["train"], "Missing from dmoe train: --join PEER .*; see dmoe train"),
    ]:
        done = subprocess.run(
            [sys.executable, "-m", "dmoe_jax.cli", *args],
            check=False,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONIOENCODING": encoding, JOIN_VARIABLE: ""},
        )
        assert done.returncode == 2
        assert re.fullmatch(rf"dmoe: error: .*{line} --help\n".replace("?", r"\?"), done.stderr), done.stderr


OWN_FILE = """
import flax.linen as nn, numpy as np, optax
from dmoe_jax.experts import as_expert

class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(8)(x)

def expert():
    return as_expert(Block(), np.zeros((2, 8), np.float32))

optimizer = optax.adamw(1e-3)
number = 3
"""


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--expert", "FILE:number"], "expert .*: expected an Expert .*got int: 3"),
        (["--expert", "FILE:nothing"], "expert .* defines no 'nothing'; it defines Block"),
        (["--expert", "/nowhere/e.py:expert"], "expert .*: there is no file /nowhere/e.py"),
        (["--expert", "convolution"], "expert 'convolution': expected one of feedforward, transformer_xl, or"),
        (["--expert", "feedforward", "--seq-len", "8"], "--seq-len would have no effect beside --expert feedforward"),
        (["--expert", "FILE:expert", "--d-model", "8"], "--d-model would have no effect beside --expert"),
        (["--optimizer", "FILE:number"], "optimizer .*: expected an optax.GradientTransformation, got int: 3"),
        (["--optimizer", "FILE:optimizer", "--learning-rate", "3"], "--learning-rate would have no effect beside"),
        (["--learning-rate", "0"], "--learning-rate must be positive, got 0.0"),
        (["--swarm", "a b"], "--swarm must be 1 to 64 letters, .* got 'a b'"),
    ],
)
def test_an_expert_that_will_not_do_gets_one_line(
    flags: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the swarm is joined, which would fail too: nobody listens there."""
    file = tmp_path / "own.py"
    file.write_text(OWN_FILE)
    words = [word.replace("FILE", str(file)) for word in flags]
    status, error = outcome(["node", "--join", "127.0.0.1:1", *words], capsys)
    assert status == 1
    assert re.match(rf"dmoe: error: .*{line}", error)
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("kind", ["own.py", "feedforward"])
async def test_a_node_serves_any_kind_of_expert(kind: str, tmp_path: Path) -> None:
    """An own network with an own optimiser, and a built-in kind by name; it says what it does, and then serves."""
    file = tmp_path / "own.py"
    file.write_text(OWN_FILE)
    own = ["--expert", f"{file}:expert", "--optimizer", f"{file}:optimizer"]
    flags = own if kind == "own.py" else ["--expert", "feedforward", "--d-model", "8"]
    lines: list[str] = []
    with running("node", "--experts", "ffn.[0:2]", "--warm-up-rows", "2", *flags, lines=lines) as (_, contact):
        assert [line.split()[2:5] for line in lines[:1]] == [["has", "joined", "the"]]
        assert lines[1:3] == ["compiling 1 of 2", "compiling 2 of 2"]
        async with join_swarm(NetworkOptions(), join=[contact]) as peer:
            reply = await peer.rpc.call(Contact.parse(contact), "expert.info", {"uid": "ffn.1"}, timeout_s=5)
            assert reply.body["output"]["shape"] == [8]
