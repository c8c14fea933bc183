"""Recordings of a swarm: a file of its states, which `dmoe watch FOLDER` shows with a slider of time."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from dmoe_jax.live.events import State, about, line_of, step_of
from dmoe_jax.live.watcher import Watcher
from dmoe_net.nursery import background_nursery

if TYPE_CHECKING:
    from dmoe_jax.swarm.swarm import Swarm

RECORDING = "watch.jsonl"
"""File of a recording in its folder; see `dmoe_jax.live.events`."""


@asynccontextmanager
async def record_swarm(swarm: "Swarm", folder: str | Path, *, period_s: float = 2.0) -> AsyncIterator[Path]:
    """Record a swarm while the block runs, also in virtual time; yields the path of the file, `watch.jsonl`.

    `dmoe watch FOLDER` shows it. The recording asks the swarm's members by its network, as `dmoe watch --join` does: in
    a simulation their answers take part in the run, which is as repeatable as before.

    Args:
      swarm: the place in the swarm from which it is seen.
      folder: made if it is missing.
      period_s: seconds between two states, at least.

    Raises:
      ValueError: the folder has a recording already, or the period is not positive.
      OSError: the file cannot be written.
    """
    if not period_s > 0:
        raise ValueError(f"period_s must be positive, got {period_s}")
    path = Path(folder) / RECORDING
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        raise ValueError(f"{path} is there already; expected a folder without a recording")
    watcher = Watcher(rpc=swarm.rpc, dht=swarm.dht, swarm=swarm.name)
    before: State | None = None
    _append(path, about(f"swarm {swarm.name!r}", "recorded"))

    async def look() -> None:
        nonlocal before
        time_s, state = await watcher.look()
        _append(path, step_of(time_s, before, state))
        before = state

    async def record() -> None:
        while True:
            await look()
            await trio.sleep(period_s)

    async with background_nursery() as nursery:
        nursery.start_soon(record)
        yield path
        nursery.cancel_scope.cancel()
    await look()
    _append(path, line_of("end", trio.current_time() - watcher.began))


def _append(path: Path, line: str) -> None:
    """Append one line in one write; half a line would spoil the next one."""
    data = line.encode() + b"\n"
    with path.open("ab", buffering=0) as file:
        begin = file.tell()
        if file.write(data) != len(data):
            file.truncate(begin)
            raise OSError(f"only a part of a line could be written to {os.fspath(path)}")
