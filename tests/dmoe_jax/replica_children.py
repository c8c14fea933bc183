"""Processes of replicas that tests start: they are told their settings, and say lines of JSON."""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

TIMEOUT_S = 240.0
ROOT = Path(__file__).parents[2]


class Process:
    """One process of a replica, and what it says."""

    def __init__(self, module: str, **settings: Any) -> None:
        # Threads enough for the programs of four devices, which wait for each other.
        env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "NPROC": "16"}
        command = [sys.executable, "-m", f"tests.dmoe_jax.{module}", json.dumps(settings)]
        self.log = open(settings["log"], "w+")  # noqa: SIM115 (closed with the process)
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, text=True, env=env, cwd=ROOT)
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                if line.startswith("{"):  # gloo prints, too
                    self._lines.put(json.loads(line))
        self._lines.put(None)

    def next(self, key: str, value: Any = None) -> dict[str, Any]:
        """The next thing that it says with this key, or this value of it."""
        end = time.monotonic() + TIMEOUT_S
        while True:
            said = self._lines.get(timeout=max(0.1, end - time.monotonic()))
            if said is None:
                self.log.seek(0)
                raise AssertionError(f"it ended with status {self.process.wait()}: {self.log.read()[-4000:]}")
            if key in said and value in (None, said[key]):
                return said

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        self.log.close()


def check_pieces(told: dict[str, Any], expected: dict[str, Any]) -> None:
    """All numbers of a process are those of one machine to 1e-5."""
    named = jax.tree_util.tree_leaves_with_path(expected)
    whole = {jax.tree_util.keystr(path): leaf for path, leaf in named if np.ndim(leaf)}
    assert told["pieces"].keys() == whole.keys()
    for name, pieces in told["pieces"].items():
        for place, numbers in pieces:
            where = tuple(slice(*each) for each in place)
            np.testing.assert_allclose(np.array(numbers), np.asarray(whole[name])[where], atol=1e-5)
