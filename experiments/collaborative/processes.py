"""Real processes over TLS that train together while each kind of them is killed once."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dmoe_jax.collaboration import GlobalStep
from experiments.collaborative.regression import regression
from experiments.collaborative.world import Comparison, Life, PeerSpec, compare_with_one_machine


@dataclass(frozen=True, slots=True, kw_only=True)
class RealPeer:
    """A process to be."""

    name: str
    role: str
    """"node", "client" or "auxiliary"."""
    sample_s: float = 0.02
    """Seconds of computing a sample: slept, so that all of them fit onto one machine."""


@dataclass(slots=True, eq=False)
class _Process:
    peer: RealPeer
    popen: "subprocess.Popen[str]"
    log: Path
    micro_batch: int
    killed: bool = False

    def close(self) -> None:
        """Wait for its end, which has been asked for; kill it if it does not come."""
        try:
            self.popen.wait(20)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        for stream in (self.popen.stdin, self.popen.stdout):
            assert stream is not None
            stream.close()


class RealSwarm:
    """Processes on this machine that find each other over TLS on loopback.

    Args:
      folder: of logs and the swarm's secret. target: samples of a step.
    """

    def __init__(self, folder: Path, *, target: int, micro_batch: int = 4) -> None:
        self._folder = folder
        self._shared: dict[str, Any] = {"target": target, "micro_batch": micro_batch, "secret": str(folder / "secret")}
        secret = folder / "secret"
        secret.touch(mode=0o600)
        secret.write_text(os.urandom(32).hex())
        self._contacts: list[str] = []
        self.processes: list[_Process] = []

    def start(self, peer: RealPeer) -> None:
        """Start a process; one of a peer that was killed is another peer."""
        number = sum(each.peer.name == peer.name for each in self.processes)
        name = f"{peer.name}.{number}"
        log = self._folder / f"{name}.jsonl"
        settings = self._shared | {
            "name": name,
            "role": peer.role,
            "join": self._contacts[:4],
            "log": str(log),
            "sample_s": peer.sample_s,
        }
        with (self._folder / f"{name}.err").open("w") as errors:
            popen = subprocess.Popen(
                [sys.executable, "-m", "experiments.collaborative.member", json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self.processes.append(_Process(peer, popen, log, self._shared["micro_batch"]))
        if peer.role != "client":
            assert popen.stdout is not None
            line = popen.stdout.readline()
            if not line:
                raise RuntimeError(f"{name} did not start: see {self._folder / name}.err")
            self._contacts.insert(0, json.loads(line)["contact"])

    def kill(self, name: str) -> None:
        """kill -9 the process of this peer."""
        process = next(each for each in self.processes if each.peer.name == name and not each.killed)
        process.killed = True
        process.popen.send_signal(signal.SIGKILL)
        process.close()

    def step(self) -> int:
        """The furthest step that any log has."""
        return max((record["now"] for each in self.processes for record in _records(each.log, "now")), default=0)

    def wait_for_step(self, number: int, *, timeout_s: float, say: Callable[[str], None] = lambda text: None) -> float:
        """Wait until some process has made the step; returns the seconds that it took.

        Raises:
          TimeoutError: nobody has in time.
        """
        began = told = time.monotonic()
        while self.step() < number:
            now = time.monotonic()
            if now - began > timeout_s:
                raise TimeoutError(f"step {number} was not made within {timeout_s:g} s")
            if now - told > 15:
                told = now
                say(self.line())
            time.sleep(0.05)
        return time.monotonic() - began

    def line(self) -> str:
        """Return a line on the present state of the swarm, as one of its processes sees it."""
        found = [record for each in self.processes if not each.killed for record in _records(each.log, "facts")]
        if not found:
            return "starting"
        facts = max(found, key=lambda record: record["now"])["facts"]
        speed = f"{facts['samples_per_s']:.0f} samples/s, averaged in {facts['averaged_s']:.2f} s"
        return f"step {facts['step']}: {facts['peers']}, {speed}"

    def end(self) -> None:
        """End all processes in order."""
        living = [each for each in self.processes if not each.killed]
        for process in living:
            assert process.popen.stdin is not None
            process.popen.stdin.close()
        for process in living:
            process.close()

    def lives(self) -> list[Life]:
        """Return the lives of the processes with gradients, as they wrote them down."""
        return [_life_of(each) for each in self.processes if each.peer.role != "auxiliary" and each.log.exists()]

    def assisted(self) -> int:
        """Steps in which an auxiliary process took part."""
        return sum(len(_records(each.log, "peers")) for each in self.processes if each.peer.role == "auxiliary")

    def compare(self) -> Comparison:
        """All processes beside one machine with the same samples, up to the last step that all living ones have."""
        lives = self.lives()
        last = min(max(life.params) for life in lives if life.ended is None and life.params)
        return compare_with_one_machine(regression(), lives, last)


@contextmanager
def real_swarm(folder: Path, *, target: int, micro_batch: int = 4) -> Iterator[RealSwarm]:
    """A swarm whose processes end with the block."""
    folder.mkdir(parents=True, exist_ok=True)
    swarm = RealSwarm(folder, target=target, micro_batch=micro_batch)
    try:
        yield swarm
    finally:
        swarm.end()


def _records(log: Path, with_field: str) -> list[dict[str, Any]]:
    if not log.exists():
        return []
    found = []
    for line in log.read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # its process was killed while it wrote
        if with_field in record:
            found.append(record)
    return found


def _life_of(process: _Process) -> Life:
    spec = PeerSpec(name=process.peer.name, sample_s=process.peer.sample_s, micro_batch=process.micro_batch)
    life = Life(process.log.stem, spec, 0.0, ended=1.0 if process.killed else None)
    structure = jax.tree.structure(regression().params)
    shapes = [leaf.shape for leaf in jax.tree.leaves(regression().params)]
    for record in _records(process.log, "batch"):
        life.batches.setdefault(record["step"], []).append(record["batch"])
    for record in _records(process.log, "now"):
        pairs = zip(record["params"], shapes, strict=True)
        leaves = [jnp.asarray(np.reshape(flat, shape), jnp.float32) for flat, shape in pairs]
        life.params[record["now"]] = jax.tree.unflatten(structure, leaves)
        life.chains[record["now"]] = bytes.fromhex(record["chain"])
        life.steps.extend(GlobalStep(**each) for each in record["steps"])
    return life
