"""`dmoe assist`: what it refuses, and a process that reduces for two peers who cannot be called."""

import json
import random
import signal
from typing import Any

import numpy as np
import pytest
import trio

from dmoe_jax.cli import main
from dmoe_jax.cli.assist import AssistCommand
from dmoe_jax.cli.network import NetworkOptions, join_swarm
from dmoe_jax.cli.status import read_members
from dmoe_jax.runs.endings import UsageError
from dmoe_net.averaging.averager import AveragingStep
from dmoe_net.averaging.config import AveragerConfig
from dmoe_net.averaging.grouping.group_key import MoshpitGrid
from dmoe_net.averaging.opening import open_averager
from dmoe_net.averaging.plan import AveragingPlan
from dmoe_net.averaging.reduction.partition import AllReduceConfig
from dmoe_net.averaging.speeds import Speeds
from dmoe_net.wire.compression import Compression
from tests.dmoe_jax.test_cli_swarm import running
from tests.dmoe_jax.training_rig import parsed

PEER = "ab" * 32 + "@127.0.0.1:1"


def test_flags_that_cannot_be_meant_are_refused() -> None:
    """The message names the flag; those that pass can be used."""
    for wishes, message in (
        ({"join": ()}, "--join needs"),
        ({"name": "a.b"}, "--name: a prefix is"),
        ({"up": -1.0}, "--up, --down: bandwidth up is from 1000 .*, got -125000"),
        ({"down": 1e9}, "--up, --down: bandwidth down"),
        ({"window_s": 0.0}, "--window-s, --timeout-s: "),
        ({"timeout_s": 1e9}, "--timeout-s: "),
    ):
        with pytest.raises(UsageError, match=message):
            parsed(AssistCommand, **({"join": (PEER,)} | wishes)).check()
    command = parsed(AssistCommand, join=(PEER,), up=8.0, down=80.0, timeout_s=12.0, compression="bfloat16")
    command.check()
    speeds = Speeds(up=1e6, down=1e7)
    assert command.meeting.speeds() == speeds
    assert command.averager() == AveragerConfig.of(
        window_s=5.0, timeout_s=12.0, compression=Compression.BFLOAT16, speeds=speeds
    )
    assert command.rounds().all_reduce == AllReduceConfig(timeout_s=12.0, compression=Compression.BFLOAT16)


async def average_as_client(contact: str, value: float, done: list[AveragingStep]) -> None:
    """A peer that listens nowhere, in a group of two; it goes on until somebody has reduced for it."""
    async with (
        join_swarm(NetworkOptions(insecure_loopback=True), join=[contact]) as peer,
        open_averager(
            *(peer.rpc, peer.dht, AveragingPlan.of(size=100_000, grid=MoshpitGrid(side=2, dims=1))),
            prefix="run",
            rng=random.Random(int(value)),
            config=AveragerConfig.of(window_s=5.0, timeout_s=20.0, compression=Compression.NONE),
        ) as averager,
    ):
        step = await averager.step(np.full(100_000, value, np.float32))
        done.append(step)


def test_two_clients_average_with_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    """It learns the size of their vectors, reduces all of both, tells of it, is listed as an auxiliary, and is gone
    from the list when it was stopped."""
    lines: list[str] = []
    done: list[AveragingStep] = []

    async def average(contact: str) -> None:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(average_as_client, contact, 1.0, done)
                nursery.start_soon(average_as_client, contact, 4.0, done)

    async def listed(contact: str) -> list[Any]:
        async with join_swarm(NetworkOptions(insecure_loopback=True), join=[contact]) as peer:
            members, _ = await read_members(peer, "dmoe")
        return [(member.role, member.info["group"]) for member in members]

    with running("dht", "--insecure-loopback") as (_, dht):
        flags = ["--join", dht, "--name", "run", "--window-s", "5", "--timeout-s", "20"]
        with running("assist", "--insecure-loopback", *flags, lines=lines) as (process, contact):
            trio.run(average, dht)
            assert process.stdout is not None
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
