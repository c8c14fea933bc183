"""Processes of a local swarm: experts dealt out so that a death is survivable, ends in order, failures in a line."""

import signal
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import trio

from dmoe_jax.cli.lifecycle import Stop, _threads_at_work, run_until_done
from dmoe_jax.cli.network import ListenOptions, MetricsOptions, NetworkOptions, join_swarm
from dmoe_jax.directory.grid import all_uids, expand_grid_pattern
from dmoe_jax.machine.disk import CheckpointError, FolderInUse
from dmoe_jax.machine.environment import JOIN_VARIABLE, SECRET_VARIABLE
from dmoe_jax.peers.joining import NotAdmitted
from dmoe_jax.runs.endings import CommandFailed, TryAgain, UsageError, mistakes_in_one_line
from dmoe_jax.runs.processes import LocalSwarm, ProcessFailed, SwarmProcess, check_status, deal, open_local_swarm
from dmoe_net.errors import (
    CallRefused,
    ConnectionLost,
    DialFailed,
    ListenFailed,
    NoQuorum,
    PeerTimeout,
    VersionMismatch,
)
from dmoe_net.identity import Contact
from dmoe_net.keys import IdentityInUse

NUM_LAYERS, GRID = 2, (4, 4)


@pytest.mark.parametrize("num_nodes", range(3, 33))
def test_every_expert_has_one_home_and_no_node_owns_a_row(num_nodes: int) -> None:
    """All experts are served once; losing any node leaves every layer and every grid row with living experts."""
    uids = [uid for layer in range(NUM_LAYERS) for uid in all_uids(f"layer{layer}", GRID)]
    hands, everything = deal(uids, num_nodes), list(map(str, uids))
    assert sorted(uid for hand in hands for uid in hand) == sorted(everything)
    assert max(map(len, hands)) - min(map(len, hands)) <= 1
    for hand in hands:
        rows = Counter(uid.rpartition(".")[0] for uid in everything if uid not in hand)
        assert len(rows) == NUM_LAYERS * GRID[0]


def test_columns_are_shared_out_too() -> None:
    """As many nodes as columns: dealt row after row without a shift, each would own a column."""
    hands = deal(expand_grid_pattern("ffn.[0:4].[0:4]"), 4)
    assert [len({uid.rpartition(".")[2] for uid in hand}) for hand in hands] == [len(hand) for hand in hands] == [4] * 4


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ExceptionGroup("", [ProcessFailed("why"), KeyError("its pipe")]), 75),
        (ProcessFailed("why", ended=-9), 75),
        (ProcessFailed("why", ended=1), 1),
        (ProcessFailed("why", ended=2), 2),
        (ExceptionGroup("", [ExceptionGroup("", [UsageError("why\nadvice")])]), 2),
        (CommandFailed("why"), 1),
        (TryAgain("why"), 75),
        (DialFailed("why"), 75),
        (PeerTimeout("why"), 75),
        (NoQuorum("why"), 75),
        (FolderInUse("why"), 75),
        (IdentityInUse("why"), 75),
        (ListenFailed("why"), 1),
        (NotAdmitted("why"), 1),
        (VersionMismatch("why"), 1),
        (CallRefused("why"), 1),
        (CheckpointError("why"), 1),
    ],
)
def test_what_failed_ends_in_one_line(error: Exception, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever else the nursery put into the group beside the reason; 75 stands for what time may heal."""

    async def fail(stop: Stop) -> int:
        raise error

    with pytest.raises(SystemExit) as exit_:
        run_until_done(fail)
    assert exit_.value.code == status
    assert capsys.readouterr().err == "dmoe: error: why\n"


LEAVES_WORK = """
import itertools, sys, threading, trio
from dmoe_jax.cli.lifecycle import run_until_done

def work():
    import jax
    started.set()
    for number in itertools.count():
        jax.jit(lambda x, number=number: x + number)(1.0)

async def main(stop):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: trio.to_thread.run_sync(work, abandon_on_cancel=True))
        await trio.to_thread.run_sync(started.wait)
        print("working")
        stop.request()
        await trio.sleep_forever()

started = threading.Event()
sys.exit(run_until_done(main))
"""


@pytest.mark.slow
def test_a_command_that_is_stopped_amid_work_of_jax_ends_in_order() -> None:
    """As one that loads a model in a thread; Python would abort the process, and standard output would be lost."""
    done = subprocess.run([sys.executable, "-c", LEAVES_WORK], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "working\n", "")


async def test_work_in_a_thread_is_seen_until_it_is_over() -> None:
    """By the names that trio gives: if these change, commands would abort again. The reader of standard input is
    none."""
    found = await trio.to_thread.run_sync(_threads_at_work)
    assert (found, _threads_at_work()) == (True, False)
    assert not await trio.to_thread.run_sync(_threads_at_work, thread_name="standard input")


async def test_a_port_that_is_taken_may_be_free_later() -> None:
    """An address that is not this machine's will not be."""
    async with join_swarm(NetworkOptions(), join=[], listen=ListenOptions()) as peer:
        taken = ListenOptions(listen=str(peer.rpc.address))
        for listen, is_taken in ((taken, True), (ListenOptions(listen="192.0.2.1:0"), False)):
            with pytest.raises(ListenFailed) as raised:
                await join_swarm(NetworkOptions(), join=[], listen=listen).__aenter__()
            assert raised.value.is_taken is is_taken
        metrics = MetricsOptions(metrics_port=peer.rpc.address.port)
        with pytest.raises(TryAgain, match="--metrics-port: cannot listen"):
            await metrics.opened("dht").__aenter__()


def test_a_folder_in_use_may_be_free_later() -> None:
    """Another error of the disk stays until somebody does something about it."""
    for error, kind in ((FolderInUse("why"), TryAgain), (OSError("why"), CommandFailed)):
        with pytest.raises(CommandFailed, match="why") as raised, mistakes_in_one_line():
            raise error
        assert type(raised.value) is kind


def test_a_bug_keeps_its_traceback_and_an_early_interrupt_its_status() -> None:
    """A mistake beside something else does not hide it; Ctrl-C before the handlers stand is an interruption."""

    async def end(error: BaseException, stop: Stop) -> int:
        raise error

    with pytest.raises(ExceptionGroup):
        run_until_done(partial(end, ExceptionGroup("", [UsageError("wrong"), KeyError("bug")])))
    assert run_until_done(partial(end, BaseExceptionGroup("", [KeyboardInterrupt()]))) == 130


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConnectionLost("its node"), 130),
        (ExceptionGroup("", [NoQuorum("layer0"), ExceptionGroup("", [trio.ClosedResourceError()])]), 130),
        (CheckpointError("why"), 1),
        (ExceptionGroup("", [NoQuorum("layer0"), KeyError("bug")]), None),
    ],
    ids=repr,
)
def test_connections_that_are_cut_as_a_command_leaves_fail_nothing(error: Exception, status: int | None) -> None:
    """Ctrl-C while a swarm is busy is an interruption, whatever waits for an answer then; other errors are told."""

    async def leaving(stop: Stop) -> int:
        with stop.body():
            stop.request()
            await trio.sleep_forever()
        raise error

    if status == 130:
        assert run_until_done(leaving) == status
    else:
        with pytest.raises(ExceptionGroup if status is None else SystemExit) as ended:
            run_until_done(leaving)
        assert getattr(ended.value, "code", None) == status


def test_signals_end_the_body_first_and_handlers_are_put_back() -> None:
    """The first signal ends the body and leaves time to end in order, the second everything; no handler stays."""

    def handlers() -> list[object]:
        return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    async def command(stop: Stop) -> int:
        with stop.body() as body:
            signal.raise_signal(signal.SIGTERM)
            await trio.sleep_forever()
        assert body.cancelled_caught
        events.append("body")
        signal.raise_signal(signal.SIGINT)
        await trio.sleep_forever()
        return 0

    async def fail(stop: Stop) -> int:
        await trio.lowlevel.checkpoint()
        raise UsageError("wrong")

    before, events = handlers(), list[str]()
    assert run_until_done(command, leave_timeout_s=1000.0) == 130
    assert events == ["body"]
    with pytest.raises(SystemExit):
        run_until_done(fail)
    assert handlers() == before


QUIET = "import time; print('up', flush=True); time.sleep(99)"
OBSTINATE = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {QUIET}"


async def run_script(swarm: LocalSwarm, kind: str, script: str, log: Path) -> SwarmProcess:
    """A process that is no `dmoe`, put among those of the swarm, once it has begun."""
    process = await trio.lowlevel.open_process([sys.executable, "-c", script], stdout=subprocess.PIPE)
    swarm.processes.append(SwarmProcess(log.stem, kind, process, log))
    assert process.stdout is not None
    assert await process.stdout.receive_some() != b""
    return swarm.processes[-1]


async def test_local_swarms_peers_prove_who_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process gives its id with its address, and needs nothing of what the user's real swarm needs."""
    monkeypatch.setenv(SECRET_VARIABLE, str(tmp_path / "nothing here"))
    monkeypatch.setenv(JOIN_VARIABLE, "127.0.0.1:1")
    async with open_local_swarm(tmp_path) as swarm:
        first = await swarm.start("first", ["dht"])
        second = await swarm.start("second", ["dht", "--join", first.contact])
        assert str(Contact.parse(second.contact).address) == second.address
    assert [process.process.returncode for process in (first, second)] == [130, 130]


async def test_a_process_that_does_not_start_is_told_with_its_reason(tmp_path: Path) -> None:
    """The end of its log is in the message; the swarm around it is ended."""
    with pytest.RaisesGroup(pytest.RaisesExc(ProcessFailed, match="second did not start: .*expected an address")):
        async with open_local_swarm(tmp_path) as swarm:
            first = await run_script(swarm, "dht", QUIET, tmp_path / "first")
            await swarm.start("second", ["dht", "--join", "nowhere"])
    assert not first.is_running


async def test_trainers_end_before_nodes_and_nodes_before_the_dht(tmp_path: Path) -> None:
    """However they were started; who ignores SIGTERM is killed after its grace."""
    ended: list[str] = []

    async def note(process: SwarmProcess) -> None:
        await process.process.wait()
        ended.append(process.kind)

    async with trio.open_nursery() as nursery, open_local_swarm(tmp_path) as swarm:
        for kind in ("node", "dht", "train"):
            process = await run_script(swarm, kind, QUIET, tmp_path / f"{kind}.log")
            nursery.start_soon(note, process)
        obstinate = await run_script(swarm, "node", OBSTINATE, tmp_path / "obstinate.log")
        await swarm.end(obstinate, grace_s=0.2)
        assert obstinate.process.returncode == -signal.SIGKILL
    assert ended == ["train", "node", "dht"]


async def test_how_a_process_ended_decides_whether_it_failed(tmp_path: Path) -> None:
    """Done or killed from outside is no failure of its own; any other status is, with what it said last."""
    async with open_local_swarm(tmp_path) as swarm:
        process = await run_script(swarm, "train", QUIET, tmp_path / "trainer0")
    for status in (0, -signal.SIGKILL):
        check_status(process, status)
    with pytest.raises(ProcessFailed, match="trainer0 ended with status 1: it printed nothing"):
        check_status(process, 1)
    (tmp_path / "trainer0").write_text("first\nsecond\nthird\nfourth\n")
    with pytest.raises(ProcessFailed, match="trainer0 ended with status 3: second / third / fourth"):
        check_status(process, 3)
