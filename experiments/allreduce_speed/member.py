"""A member's process: `python -m experiments.allreduce_speed.member ...`, started by `member_process`.

It prints where it listens, answers each line on standard input with one of its own, and ends with its standard input.
"""

import json
import os
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import trio
import tyro

from experiments.allreduce_speed import rpc_side
from experiments.allreduce_speed.blocking_side import BlockingMember
from experiments.allreduce_speed.vectors import Vector, digest_of, vector_of
from net.averaging.reduction.all_reduce import AllReduceConfig
from net.identity import Address, Contact


@dataclass(frozen=True, kw_only=True)
class MemberSettings:
    """Take part in measurements until standard input closes."""

    side: Literal["rpc", "blocking"]
    """Ours or the baseline."""
    network: Literal["tls", "plain"]
    """Encrypted or not."""
    index: int
    """Its place among the members."""
    peers: int
    """Members."""
    size: int
    """Numbers in the vector."""
    seed: int
    """Of all vectors."""
    certificate: Path
    """Certificate and key of the baseline, PEM."""
    chunk_bytes: int
    """As in `AllReduceConfig`."""
    window_bytes: int
    """As in `AllReduceConfig`."""


def main() -> None:
    """Entry point."""
    settings = tyro.cli(MemberSettings)
    if settings.side == "rpc":
        trio.run(_serve_rpc, settings)
    else:
        _serve_blocking(settings)


async def _serve_rpc(settings: MemberSettings) -> None:
    config = AllReduceConfig(chunk_bytes=settings.chunk_bytes, window_bytes=settings.window_bytes)
    async with rpc_side.open_member(encrypted=settings.network == "tls", config=config) as member:
        _say(where=member.contact.full)
        before_bytes = _memory_bytes("VmRSS")
        vector = vector_of(settings.index, settings.size, settings.seed)
        async for order in _orders():
            measured = await _exchange(member, order, vector)
            _say(**measured, grown_bytes=_memory_bytes("VmHWM") - before_bytes)


async def _exchange(member: rpc_side.RpcMember, order: dict[str, Any], vector: Vector) -> dict[str, Any]:
    contacts = [Contact.parse(text) for text in order["members"]]
    cpu_s = time.process_time()
    started, ended, average = await member.exchange(contacts, bytes.fromhex(order["group"]), vector)
    cpu_s = time.process_time() - cpu_s
    return {"started": started, "ended": ended, "cpu_s": cpu_s, "digest": digest_of(average)}


async def _orders() -> AsyncIterator[dict[str, Any]]:
    rest = b""
    # A duplicate: closing standard input itself would surprise the interpreter's end.
    async with trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())) as stream:
        async for data in stream:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                yield json.loads(line)


def _serve_blocking(settings: MemberSettings) -> None:
    member = BlockingMember(
        settings.index,
        part_bytes=settings.size * 4 // settings.peers,
        certificate=settings.certificate if settings.network == "tls" else None,
    )
    _say(where=str(member.address))
    for number, line in enumerate(sys.stdin):
        order = json.loads(line)
        if number == 0:
            member.connect([Address.parse(text) for text in order["members"]])
        cpu_s = time.process_time()
        started, ended = member.exchange()
        _say(started=started, ended=ended, cpu_s=time.process_time() - cpu_s)


def _say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def _memory_bytes(name: str) -> int:
    """VmRSS: what this process holds; VmHWM: the most that it ever held. 0 where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


if __name__ == "__main__":
    main()
