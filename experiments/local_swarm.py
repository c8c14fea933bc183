"""A swarm of real processes on this machine, for demonstrations and measurements.

Every process is started with a pipe as its standard input and told to end when that closes, so that none outlives the
one that started it, even if that is killed. Each runs in a session of its own: Ctrl-C in a terminal reaches only the
supervisor, which ends the others in order.

Links are encrypted, and every process joins through a peer that proves to be the one that was started. The swarm has
no secret: it listens on loopback only, and lives as long as its supervisor.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import trio

from dmoe_jax.cli.network import SECRET_VARIABLE
from dmoe_jax.grid import all_uids, layer_prefix

_TERMINATE_GRACE_S = 4.0
"""A node withdraws its experts within two seconds of SIGTERM; twice that, then SIGKILL."""

_OTHERS_GRACE_S = 60.0
"""For the other trainer processes once the first is done."""

_JOIN_LINE = re.compile(r"--join (\S+)")


class ProcessFailed(Exception):
    """A process of the swarm ended before it was ready. The message has the end of its log."""


@dataclass(slots=True, eq=False)
class SwarmProcess:
    """One `dmoe` process.

    Attributes:
      name: what logs and tables call it.
      process: the trio process.
      log: file with everything that it printed.
      contact: PEERID@HOST:PORT to join it at; "" until it printed one.
    """

    name: str
    process: trio.Process
    log: Path
    contact: str = ""

    @property
    def address(self) -> str:
        """HOST:PORT of its contact."""
        return self.contact.rpartition("@")[2]

    @property
    def is_running(self) -> bool:
        """Whether the process still runs."""
        return self.process.poll() is None


class LocalSwarm:
    """Starts `dmoe` processes and ends them all. Made by `open_local_swarm`."""

    def __init__(
        self, nursery: trio.Nursery, log_folder: Path, environment: Mapping[str, str], network_flags: Sequence[str]
    ) -> None:
        self._nursery = nursery
        self._log_folder = log_folder
        # Empty: the secret of somebody's real swarm is not for this one.
        self._environment = {**os.environ, "PYTHONUNBUFFERED": "1", SECRET_VARIABLE: "", **environment}
        self._network_flags = tuple(network_flags)
        self.processes: list[SwarmProcess] = []
        """Every process started, in order."""

    async def start(self, name: str, command: Sequence[str], *, ready_timeout_s: float = 120.0) -> SwarmProcess:
        """Run `dmoe COMMAND` and wait until it printed the line to join it with.

        Raises:
          ProcessFailed: when it ended, or was not ready in time.
        """
        started = await self._open(name, command, stdout=subprocess.PIPE)
        ready = trio.Event()
        self._nursery.start_soon(_copy_output, started, ready)
        with trio.move_on_after(ready_timeout_s):
            await ready.wait()
        if not started.contact:
            what = f"was not ready within {ready_timeout_s:g} s" if started.is_running else "did not start"
            raise ProcessFailed(f"{name} {what}: {last_lines(started.log)}")
        return started

    async def start_in_foreground(self, name: str, command: Sequence[str]) -> SwarmProcess:
        """Run `dmoe COMMAND` with this process's standard output; do not wait for it."""
        return await self._open(name, command, stdout=None)

    async def start_in_background(self, name: str, command: Sequence[str]) -> SwarmProcess:
        """Run `dmoe COMMAND` with its output in its log; do not wait for it."""
        started = await self._open(name, command, stdout=subprocess.PIPE)
        self._nursery.start_soon(_copy_output, started, trio.Event())
        return started

    async def _open(self, name: str, command: Sequence[str], *, stdout: int | None) -> SwarmProcess:
        log = self._log_folder / f"{name}.log"
        with log.open("w") as errors:
            process = await trio.lowlevel.open_process(
                [sys.executable, "-m", "dmoe_jax.cli", *command, *self._network_flags, "--exit-on-stdin-eof"],
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=errors if stdout is not None else None,
                start_new_session=True,
                env=self._environment,
            )
        started = SwarmProcess(name, process, log)
        self.processes.append(started)
        return started

    async def end(self, process: SwarmProcess, *, grace_s: float = _TERMINATE_GRACE_S) -> None:
        """SIGTERM, then SIGKILL after `grace_s`. Returns when the process is gone."""
        if process.is_running:
            process.process.terminate()
            with trio.move_on_after(grace_s):
                await process.process.wait()
        if process.is_running:
            process.process.kill()
            await process.process.wait()


@asynccontextmanager
async def open_local_swarm(
    log_folder: Path, environment: Mapping[str, str] | None = None, *, network_flags: Sequence[str] = ()
) -> AsyncIterator[LocalSwarm]:
    """A swarm whose processes are all gone when the context ends, however it ends.

    Args:
      log_folder: existing folder for one log file a process.
      environment: variables to set for every process, beside this one's own.
      network_flags: for every process, such as `--insecure-loopback`; see `dmoe_jax.cli.network.NetworkOptions`.
    """
    async with trio.open_nursery() as nursery:
        swarm = LocalSwarm(nursery, log_folder, environment or {}, network_flags)
        try:
            yield swarm
        finally:
            with trio.CancelScope(shield=True):
                # Last started, first ended: trainers leave before nodes, nodes before the DHT peer.
                for process in reversed(swarm.processes):
                    if process.is_running:
                        process.process.send_signal(signal.SIGTERM)
                async with trio.open_nursery() as ending:
                    for process in swarm.processes:
                        ending.start_soon(swarm.end, process)
            nursery.cancel_scope.cancel()


def deal_experts(num_nodes: int, *, num_layers: int, grid_size: tuple[int, ...]) -> list[list[str]]:
    """The experts of each node, dealt out in turn, so that every layer and grid row loses a few when one dies."""
    uids = [str(uid) for layer in range(num_layers) for uid in all_uids(layer_prefix(layer), grid_size)]
    # A step of one more per row keeps a node's experts from forming a column of the grid.
    hands: list[list[str]] = [[] for _ in range(num_nodes)]
    for index, uid in enumerate(uids):
        hands[(index + index // grid_size[-1]) % num_nodes].append(uid)
    return hands


async def start_nodes(
    swarm: LocalSwarm, hands: Sequence[Sequence[str]], flags_of: Callable[[int], Sequence[str]]
) -> list[SwarmProcess]:
    """Start one DHT peer, then a node for each hand of experts, all at once; returns the nodes when all are ready.

    Args:
      swarm: where they run.
      hands: the experts of each node.
      flags_of: further flags of `dmoe node`, by the node's index.

    Raises:
      ProcessFailed: one of them did not start.
    """
    dht = await swarm.start("dht", ["dht"])
    nodes: dict[int, SwarmProcess] = {}

    async def start(index: int) -> None:
        command = ["node", "--join", dht.contact, *flags_of(index), "--experts", *hands[index]]
        nodes[index] = await swarm.start(f"node{index}", command)

    async with trio.open_nursery() as nursery:
        for index in range(len(hands)):
            nursery.start_soon(start, index)
    return [nodes[index] for index in range(len(hands))]


def trainer_folders(out: Path, count: int) -> list[Path]:
    """A run folder for each trainer process: `out` for the first, the others' beside it."""
    return [out if index == 0 else out.parent / f"{out.name}.trainer{index}" for index in range(count)]


def averaging_flags(*, num_processes: int, every: int, seed: int, index: int) -> list[str]:
    """Flags of `dmoe train` for the trainer process `index` of several that average their trunks in one group.

    They begin with equal parameters; text and dropout are each one's own.
    """
    averaging = ["--average-every", str(every), "--average-side", str(num_processes)]
    return ["--seed", str(seed), "--data-seed", str(seed + index), *(averaging if num_processes > 1 else [])]


async def start_trainers(swarm: LocalSwarm, commands: Sequence[Sequence[str]]) -> list[SwarmProcess]:
    """Start a trainer process for each command; the first has this process's terminal."""
    trainers = [await swarm.start_in_foreground("trainer0", commands[0])]
    for index, command in enumerate(commands[1:], start=1):
        trainers.append(await swarm.start_in_background(f"trainer{index}", command))
    return trainers


async def wait_for_others(trainers: Sequence[SwarmProcess]) -> None:
    """Let the other trainer processes finish: they began together with the first, which is done.

    Raises:
      ProcessFailed: one ended with an error of its own.
    """
    with trio.move_on_after(_OTHERS_GRACE_S):
        for trainer in trainers:
            status = await trainer.process.wait()
            if status not in (0, -signal.SIGKILL):
                raise ProcessFailed(f"{trainer.name} ended with status {status}: {last_lines(trainer.log)}")


async def _copy_output(process: SwarmProcess, ready: trio.Event) -> None:
    """Copy standard output to the log, where standard error goes too, and look for the contact."""
    stdout = process.process.stdout
    assert stdout is not None
    text = ""
    with process.log.open("a") as log:
        async for chunk in stdout:
            log.write(chunk.decode(errors="replace"))
            log.flush()
            if not process.contact:
                text += chunk.decode(errors="replace")
                found = _JOIN_LINE.search(text)
                # The line must be whole: a contact cut in two would still match.
                if found is not None and "\n" in text[found.end() :]:
                    process.contact = found[1]
                    ready.set()
    ready.set()


def last_lines(log: Path, count: int = 3) -> str:
    """The end of a log in one line."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return " / ".join(lines[-count:]) if lines else "it printed nothing"
