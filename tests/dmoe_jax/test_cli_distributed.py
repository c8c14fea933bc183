"""`dmoe train --distributed`: two processes make one run, which goes on in one process or in two."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from dmoe_jax.experts.transformer_xl import layer_expert
from dmoe_jax.peers.security import Plain
from dmoe_jax.runs.run_folder import RunFolder
from dmoe_jax.swarm.opening import open_swarm
from tests.dmoe_jax.training_rig import OPTIMIZER, SIZES, text_of_few_words

FLAGS = (
    "--insecure-loopback --num-trainers 1 --batch-size 4 --d-model 8 --num-heads 2 --d-ff 8 --seq-len 4 --mem-len 4 "
    "--num-layers 1 --grid-size 2 2 --k-best 2 --timeout-s 60 --wait-s 60 --eval-every 4 --eval-tokens 64 "
    "--final-eval-tokens 128"
)
EXPERTS = {"layer0.[0:2].[0:2]": layer_expert(SIZES, "sequence")}


class Run:
    """Processes of `dmoe train` that make one run; each with four devices."""

    def __init__(self, folder: Path, number: int, flags: Sequence[str], *, together: bool = True) -> None:
        port = 25000 + 10 * (os.getpid() % 500) + number
        env = os.environ | {"JAX_PLATFORMS": "cpu", "NPROC": "16"}
        env["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
        self.logs = [folder / f"{number}.{index}.log" for index in range(1 + together)]
        self.processes = []
        for index, log in enumerate(self.logs):
            command = [sys.executable, "-m", "dmoe_jax.cli", "train", *flags]
            if together:
                command += ["--distributed", f"127.0.0.1:{port}", "--num-processes", "2", "--process-id", str(index)]
            options: dict[str, Any] = {"env": env, "cwd": Path(__file__).parents[2], "stderr": subprocess.STDOUT}
            with log.open("w") as stdout:
                self.processes.append(subprocess.Popen(command, stdout=stdout, **options))

    async def statuses(self) -> list[int]:
        return [await trio.to_thread.run_sync(process.wait, 300) for process in self.processes]

    @property
    def said(self) -> list[str]:
        """Words of each; gloo's are among them."""
        return [log.read_text() for log in self.logs]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


async def ended(run: Run) -> tuple[list[int], list[str]]:
    try:
        return await run.statuses(), run.said
    finally:
        run.close()


def steps_of(out: Path) -> list[int]:
    return [record["step"] for record in RunFolder(out).metrics() if record["kind"] == "train"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("together", ["--average-every 3", "--target-batch-size 32"], ids=["averaged", "large batch"])
async def test_two_processes_make_one_run(together: str, tmp_path: Path) -> None:
    """It is evaluated and saved, goes on in one process, and in two again; process 1 says and writes nothing."""
    out = tmp_path / "run"
    async with open_swarm(listen="127.0.0.1:0", security=Plain()) as node:
        await node.serve(EXPERTS, optimizer=OPTIMIZER, warm_up_rows=4)
        flags = [*FLAGS.split(), "--join", node.contact, "--data", text_of_few_words(tmp_path)]
        flags += ["--out", str(out), "--mesh", "data=4,model=2", *together.split()]
        statuses, said = await ended(Run(tmp_path, 0, [*flags, "--steps", "8"]))
        assert statuses == [0, 0], said
        assert steps_of(out) == list(range(1, 9))
        assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["4", "8"]
        assert "final, over 128" in said[0]
        told = [line for line in said[1].splitlines() if "WARNING" not in line]  # of calls that fail on a busy machine
        assert not any(word in line for line in told for word in ("corpus", "experts", "step", "validation", "report"))
        resumed = [*flags, "--resume", "--steps"]
        statuses, said = await ended(Run(tmp_path, 1, [*resumed, "10", "--mesh", "data=1"], together=False))
        assert statuses == [0], said
        statuses, said = await ended(Run(tmp_path, 2, [*resumed, "12"]))
        assert statuses == [0, 0], said
        assert "continuing from step 10" in said[0]
        assert steps_of(out) == list(range(1, 13))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("index", "number", "expected", "line"),
    [
        (1, signal.SIGKILL, [75, -9], "of this replica is gone"),
        (0, signal.SIGTERM, [130, 75], "process 0 of this replica: it was stopped"),
    ],
    ids=["killed", "stopped"],
)
async def test_a_lost_process_ends_the_run_for_now(
    index: int, number: int, expected: list[int], line: str, tmp_path: Path
) -> None:
    """The other one ends with status 75, and says why."""
    out = tmp_path / "run"
    async with open_swarm(listen="127.0.0.1:0", security=Plain()) as node:
        await node.serve(EXPERTS, optimizer=OPTIMIZER, warm_up_rows=4)
        flags = [*FLAGS.split(), "--join", node.contact, "--data", text_of_few_words(tmp_path), "--out", str(out)]
        run = Run(tmp_path, 3, [*flags, "--steps", "100000", "--eval-every", "100000"])
        try:
            while not (out / "metrics.jsonl").exists() or len(steps_of(out)) < 3:
                assert run.processes[0].poll() is None, run.said
                await trio.sleep(0.2)
            run.processes[index].send_signal(number)
            assert await run.statuses() == expected, run.said
            assert line in run.said[1 - index]
            # After a kill XLA may wait for the dead: then there is no time for a report.
            assert (out / "report.md").exists() or number == signal.SIGKILL
        finally:
            run.close()
