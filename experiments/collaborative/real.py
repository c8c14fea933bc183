"""The part `real`: processes over TLS on this machine train together, while each kind of them is killed once.

This module is the processes' program too (`experiments.processes`). Each trainer writes its `Life` to a file before
others can have a micro-batch of it: a kill leaves nothing unknown.
"""

import math
import os
import pickle
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import trio

from dmoe_jax import CollaborationConfig, Tls
from dmoe_jax.collaboration import open_collaboration
from dmoe_jax.peers.peer import PeerConfig, SwarmPeer, open_peer
from dmoe_jax.runs.setting_up import set_up_jax
from dmoe_net.averaging.collaboration.assisting import assist_collaboration
from experiments.collaborative.regression import regression
from experiments.collaborative.world import Life, PeerSpec, compare_with_one_machine, train
from experiments.processes import open_helpers, orders, run_helper, say

_AUXILIARY = "auxiliary"
_SAMPLE_S = {"trainer0": 0.01, "trainer1": 0.02, "trainer2": 0.04, "trainer3": 0.1, "client": 0.03, _AUXILIARY: 0.0}
"""Seconds a sample of each machine: slept, so that all of them fit onto one. The auxiliary one only reduces."""

_CONFIG = CollaborationConfig(target_batch_size=1024, lead_s=2.0, timeout_s=30.0, silence_s=2.0)
_STEP_TIMEOUT_S = 300.0


async def take_part(*, name: str, machine: str, folder: str, join: Sequence[str]) -> None:
    """Train, or only reduce, until standard input ends.

    Args:
      name: of this process. machine: one of `_SAMPLE_S`.
      folder: has the file `secret` of the swarm; a trainer's life is kept in the file of its name.
      join: contact of another process; empty for the first.
    """
    listen = None if machine == "client" else "127.0.0.1:0"
    async with (
        open_peer(join, PeerConfig(listen=listen, security=Tls(secret=Path(folder, "secret")))) as place,
        trio.open_nursery() as nursery,
    ):
        say(pid=os.getpid(), contact=None if listen is None else place.contact)
        if machine == _AUXILIARY:
            rng, config = random.Random(name), _CONFIG.rounds()
            nursery.start_soon(
                partial(assist_collaboration, place.rpc, place.dht, prefix="run", rng=rng, config=config)
            )
        else:
            life = Life(name, PeerSpec(name=machine, sample_s=_SAMPLE_S[machine]), 0.0)
            nursery.start_soon(_train, place, life, Path(folder))
        async for _ in orders():
            pass
        nursery.cancel_scope.cancel()


async def _train(place: SwarmPeer, life: Life, folder: Path) -> None:
    def save() -> None:
        written = folder / f"{life.name}.new"
        written.write_bytes(pickle.dumps(replace(life, peer=None)))
        written.replace(folder / life.name)

    problem = regression()
    async with open_collaboration(
        place, problem.params, together=problem.together, name="run", config=_CONFIG, on_step=life.made
    ) as peer:
        await train(peer, life, problem, on_batch=save)


class _Swarm:
    """The processes, which end with the stack."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        folder.mkdir(parents=True)
        self._folder, self._stack = folder.resolve(), stack
        secret = self._folder / "secret"
        secret.touch(mode=0o600)
        secret.write_text(os.urandom(32).hex())
        self._join: list[str] = []
        self._pids: dict[str, int] = {}
        """Process ids of the living, by name."""
        self._killed_at: dict[str, float] = {}
        """Times of the kills, by name."""

    def start(self, machine: str) -> None:
        """Start a process; where one was killed another peer takes its place."""
        name = f"{machine}.{sum(each.startswith(machine) for each in self._killed_at)}"
        settings = {"name": name, "machine": machine, "folder": str(self._folder), "join": self._join}
        (process,) = self._stack.enter_context(open_helpers("experiments.collaborative.real", [settings]))
        self._pids[name] = process.hello["pid"]
        self._join = self._join or [process.hello["contact"]]

    def kill(self, machine: str) -> float:
        """kill -9 the process of this machine; return the seconds until another one has made the next step."""
        number, name = self.step() + 1, next(each for each in self._pids if each.startswith(machine))
        os.kill(self._pids.pop(name), signal.SIGKILL)
        self._killed_at[name] = time.monotonic()
        self.wait_for_step(number)
        return time.monotonic() - self._killed_at[name]

    def lives(self) -> list[Life]:
        """Return what the trainers have written."""
        lives: list[Life] = [pickle.loads(path.read_bytes()) for path in sorted(self._folder.glob("*.[0-9]"))]
        return [replace(life, ended=self._killed_at.get(life.name)) for life in lives]

    def step(self) -> int:
        """Return the furthest step that any process has written."""
        return max((number for life in self.lives() for number in life.stepped), default=0)

    def wait_for_step(self, number: int) -> None:
        """Wait until some process has made the step.

        Raises:
          TimeoutError: nobody has in time.
        """
        until = time.monotonic() + _STEP_TIMEOUT_S
        while self.step() < number:
            if time.monotonic() > until:
                raise TimeoutError(f"step {number} was not made within {_STEP_TIMEOUT_S:g} s")
            time.sleep(0.05)


def play_real(folder: Path, *, minutes: float, told: Callable[[str], None]) -> dict[str, float]:
    """Train for so long, with a kill -9 at a quarter, a half and three quarters of the time.

    Returns: `equal_over_tls`, the largest relative difference of parameters to those of one machine, up to the last
      step that all living trainers have; `real_next_step_s`, the longest time from a kill to the next step;
      `real_steps`.
    """
    took_s: list[float] = []
    with ExitStack() as stack:
        swarm = _Swarm(folder, stack)
        for machine in _SAMPLE_S:
            swarm.start(machine)
        swarm.wait_for_step(2)
        began = time.monotonic()
        for quarter, machine in enumerate(("trainer1", "client", _AUXILIARY), 1):
            time.sleep(max(0.0, began + quarter / 4 * 60 * minutes - time.monotonic()))
            took_s.append(swarm.kill(machine))
            told(f"killed {machine}; the next step came {took_s[-1]:.1f} s later")
            swarm.start(machine)
        time.sleep(max(0.0, began + 60 * minutes - time.monotonic()))
        swarm.wait_for_step(swarm.step() + 2)
        lives = swarm.lives()
    last = min(max(life.params) for life in lives if life.ended is None and life.params)
    found = compare_with_one_machine(regression(), lives, last)
    return {
        "equal_over_tls": math.nan if found.unexplained or found.chains_apart else found.difference,
        "real_next_step_s": max(took_s),
        "real_steps": last,
    }


if __name__ == "__main__":
    set_up_jax()
    run_helper(take_part)
