"""A swarm of `dmoe` processes on this machine, for `dmoe up`, the demonstration and measurements.

Every process is started with a pipe as its standard input and told to end when that closes, so that none outlives its
supervisor, even if that is killed. Each runs in a session of its own: Ctrl-C in a terminal reaches only the supervisor,
which ends the others in order. Each writes to a log file of its own, which the supervisor reads. Links are encrypted;
the swarm has no secret unless it is given one, and listens on loopback only.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import trio

from dmoe_jax.directory.grid import ExpertUid
from dmoe_jax.machine.environment import NO_FLAGS, PREFIX, SECRET_VARIABLE
from dmoe_jax.runs.endings import EXIT_AGAIN, CommandFailed, UsageError

_GRACE_S = {"train": 60.0, "node": 20.0, "dht": 4.0}
"""Seconds between SIGTERM and SIGKILL, by command, in the order in which processes end: a trainer writes its report
while the nodes are still there, and a node its checkpoints."""

_HURRIED_GRACE_S = 4.0
"""Grace when everything ends at once. A node withdraws its experts within two seconds."""

_READY_TIMEOUT_S, _LOOK_PERIOD_S = 300.0, 0.1
"""Seconds for a process to serve, and between two looks at its log."""

_JOIN_LINE = re.compile(r"^Join it with: .*--join (\S+).*\n", re.MULTILINE)
"""The whole line, since a contact cut in two would still match."""

_METRICS_LINE = re.compile(r"^metrics at http://(\S+)/metrics\n", re.MULTILINE)


class ProcessFailed(Exception):
    """A process of the swarm ended before it was ready, or with an error. The message has the end of its log; `ended`
    is its exit status, None if that is unknown, or it still runs."""

    def __init__(self, message: str, *, ended: int | None = None) -> None:
        super().__init__(message)
        self.status = ended if ended in (CommandFailed.status, UsageError.status) else EXIT_AGAIN
        """Exit status for the command that needs the process: as that one ended, if starting again helps neither."""


@dataclass(slots=True, eq=False)
class SwarmProcess:
    """One `dmoe` process."""

    name: str
    kind: str
    """Its command: dht, node or train."""
    process: trio.Process
    log: Path
    """File with everything that it printed."""
    contact: str = ""
    """PEERID@HOST:PORT to join it at; "" until it printed one, which it does when it serves."""
    metrics: str = ""
    """HOST:PORT of its metrics; "" until it has printed it, and if it shows none."""
    last_line: str = ""
    """The last whole line of its log."""
    settled: trio.Event = field(default_factory=trio.Event)
    """Event that it has printed its contact, or has ended."""

    @property
    def address(self) -> str:
        """HOST:PORT of its contact."""
        return self.contact.rpartition("@")[2]

    @property
    def is_running(self) -> bool:
        """True while the process runs."""
        return self.process.poll() is None

    async def ready(self) -> None:
        """Wait until it has printed the line to join it with; raise ProcessFailed if it ends, or after five minutes."""
        with trio.move_on_after(_READY_TIMEOUT_S):
            await self.settled.wait()
        if not self.contact:
            what = f"was not ready within {_READY_TIMEOUT_S:g} s" if self.is_running else "did not start"
            raise ProcessFailed(f"{self.name} {what}: {_last_lines(self.log)}", ended=self.process.poll())


class LocalSwarm:
    """Starts `dmoe` processes and ends them all. Made by `open_local_swarm`."""

    def __init__(self, nursery: trio.Nursery, log_folder: Path, network_flags: Sequence[str]) -> None:
        self._nursery = nursery
        self._log_folder = log_folder
        # Neither the secret of somebody's real swarm is for this one, nor what stands for flags. Several processes may
        # share one GPU: none may take its whole memory. Lines in a log are not cut at the width of a terminal.
        inherited = {key: value for key, value in os.environ.items() if key in NO_FLAGS or not key.startswith(PREFIX)}
        own = {"PYTHONUNBUFFERED": "1", "COLUMNS": "200", SECRET_VARIABLE: ""}
        self._environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **inherited, **own}
        self._network_flags = tuple(network_flags)
        self.processes: list[SwarmProcess] = []
        """Every process started, in order."""

    def of_kind(self, kind: str) -> list[SwarmProcess]:
        """Return the processes that run this command, in the order in which they were started."""
        return [process for process in self.processes if process.kind == kind]

    async def launch(self, name: str, command: Sequence[str]) -> SwarmProcess:
        """Start `dmoe COMMAND`, which prints to its log."""
        log = self._log_folder / f"{name}.log"
        with log.open("wb") as output:
            process = await trio.lowlevel.open_process(
                [sys.executable, "-m", "dmoe_jax.cli", *command, *self._network_flags, "--exit-on-stdin-eof"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=self._environment,
            )
        launched = SwarmProcess(name, command[0], process, log)
        self.processes.append(launched)
        self._nursery.start_soon(_watch, launched)
        return launched

    async def start(self, name: str, command: Sequence[str]) -> SwarmProcess:
        """Start `dmoe COMMAND` and wait until it is ready; see `SwarmProcess.ready`."""
        started = await self.launch(name, command)
        await started.ready()
        return started

    async def end(self, process: SwarmProcess, *, grace_s: float | None = None) -> None:
        """SIGTERM, then SIGKILL after `grace_s` (None: what its kind needs). Returns when the process is gone."""
        if process.is_running:
            process.process.terminate()
            with trio.move_on_after(_GRACE_S[process.kind] if grace_s is None else grace_s):
                await process.process.wait()
        if process.is_running:
            process.process.kill()
            await process.process.wait()

    async def end_in_order(self) -> None:
        """End the trainers, then the nodes, then the DHT peer."""
        for kind in _GRACE_S:
            await self._end_together(self.of_kind(kind))

    async def _end_together(self, processes: Iterable[SwarmProcess], grace_s: float | None = None) -> None:
        async with trio.open_nursery() as ending:
            for process in processes:
                ending.start_soon(partial(self.end, process, grace_s=grace_s))


@asynccontextmanager
async def open_local_swarm(log_folder: Path, *, network_flags: Sequence[str] = ()) -> AsyncIterator[LocalSwarm]:
    """Open a swarm whose processes are all gone when the block ends: in order, or if it is cancelled at once. Each has
    these flags, such as `--insecure-loopback`, and its log in the folder, which exists."""
    async with trio.open_nursery() as nursery:
        swarm = LocalSwarm(nursery, log_folder, network_flags)
        try:
            yield swarm
            await swarm.end_in_order()
        finally:
            with trio.CancelScope(shield=True):
                await swarm._end_together(swarm.processes, _HURRIED_GRACE_S)
            nursery.cancel_scope.cancel()


def deal(uids: Iterable[ExpertUid], num_nodes: int) -> list[list[str]]:
    """Deal experts out to nodes in turn, so that every layer and grid row loses a few when one dies. No node has two
    experts more than another."""
    hands: list[list[str]] = [[] for _ in range(num_nodes)]
    rows: dict[tuple[object, ...], int] = {}
    for index, uid in enumerate(uids):
        # A step of one more per row keeps a node's experts from forming a column of the grid.
        row = rows.setdefault((uid.prefix, uid.coordinates[:-1]), len(rows))
        wanted = (index + row) % num_nodes
        least = min(map(len, hands))
        turns = (hands[(wanted + step) % num_nodes] for step in range(num_nodes))
        next(hand for hand in turns if len(hand) == least).append(str(uid))
    return hands


def check_status(process: SwarmProcess, status: int) -> None:
    """Raise ProcessFailed if a process ended with an error of its own; a kill from outside is none."""
    if status not in (0, -getattr(signal, "SIGKILL", 9)):
        raise ProcessFailed(f"{process.name} ended with status {status}: {_last_lines(process.log)}", ended=status)


def _last_lines(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return " / ".join(lines[-3:]) if lines else "it printed nothing"


async def _watch(process: SwarmProcess) -> None:
    unread = ""
    with process.log.open(encoding="utf-8", errors="replace") as log:
        while True:
            was_running = process.is_running
            unread += log.read()
            *lines, rest = unread.split("\n")
            process.last_line = next((line for line in reversed(lines) if line.strip()), process.last_line)
            if not process.metrics and (shown := _METRICS_LINE.search(unread)) is not None:
                process.metrics = shown[1]
            if not process.contact and (found := _JOIN_LINE.search(unread)) is not None:
                process.contact = found[1]
                process.settled.set()
            unread = rest
            if not was_running:
                process.settled.set()
                return
            await trio.sleep(_LOOK_PERIOD_S)
