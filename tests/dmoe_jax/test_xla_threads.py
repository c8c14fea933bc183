"""XLA's threads: how many, who gets how many, and programs that a single one cannot run."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dmoe_jax.experts import Expert, expert_from_functions
from dmoe_jax.machine.xla_threads import share_of_threads, xla_threads
from dmoe_jax.node import host_calls
from dmoe_jax.node.host_calls import TooFewThreadsError
from dmoe_jax.node.programs import ExpertPrograms
from dmoe_jax.runs.setting_up import set_up_jax


def cores(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """A machine with so many cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(count), raising=False)


@pytest.mark.parametrize(("asked", "threads"), [("3", 3), ("1", 1), ("", 8), ("0", 8), ("many", 8)])
def test_how_many_there_are(monkeypatch: pytest.MonkeyPatch, asked: str, threads: int) -> None:
    """There are as many as NPROC says, or as there are cores."""
    cores(monkeypatch, 8)
    monkeypatch.setenv("NPROC", asked)
    assert xla_threads() == threads


@pytest.mark.parametrize(
    ("count", "processes", "may_call_host", "threads"),
    [(2, 4, False, 1), (2, 4, True, 2), (16, 4, False, 4), (16, 4, True, 4), (1, 1, False, 1), (2, 1, False, 2)],
)
def test_shares(monkeypatch: pytest.MonkeyPatch, count: int, processes: int, may_call_host: bool, threads: int) -> None:
    """Equal ones, at least one thread; two where the host may be called."""
    cores(monkeypatch, count)
    assert share_of_threads(processes, may_call_host=may_call_host) == threads


def test_jax_says_whether_it_has_computed() -> None:
    """JAX's private function is where it was: without it, `connect` takes every process for one that has computed."""
    from jax._src.xla_bridge import backends_are_initialized

    jax.local_devices()
    assert backends_are_initialized()


def on_host(params: Any, x: jax.Array) -> jax.Array:
    y = x @ params["w"]
    seen = jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(y.shape, y.dtype), jax.lax.stop_gradient(y))
    return y * jax.lax.stop_gradient(seen)


def expert(apply: Any = on_host) -> Expert:
    """An expert that calls the host, unless it is another one; `dmoe node` finds it here, too."""
    init = lambda key: {"w": jnp.ones((4, 4))}  # noqa: E731
    return expert_from_functions(init, apply, np.ones((1, 4), np.float32), check=False)


def test_calls_of_the_host_beside_a_loop_need_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused where the loop's own calls may hold all threads."""
    host = ExpertPrograms(expert(), optax.adam(1e-3))
    monkeypatch.setattr(host_calls, "has_own_devices", lambda: True)
    monkeypatch.setattr(host_calls, "make_room", lambda: False)
    with pytest.raises(TooFewThreadsError, match=r"call connect\(\) before JAX computes"):
        host.compile(1)
    monkeypatch.setattr(host_calls, "make_room", lambda: True)
    host.compile(1)


def test_calls_of_the_host_need_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused before anything is compiled, with a word of what helps; others are not."""
    monkeypatch.setenv("NPROC", "1")
    host = ExpertPrograms(expert(), optax.adam(1e-3))
    with pytest.raises(TooFewThreadsError, match="--xla-threads 2"):
        host.compile(1)
    assert not host.warm
    ExpertPrograms(expert(lambda params, x: jnp.sin(x @ params["w"])), None).compile(1)
    monkeypatch.setenv("NPROC", "2")
    host.compile(1)
    assert host.calls_host


def test_programs_are_cached_by_the_number_of_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They are divided among so many, so one folder for each number but the usual one."""
    before = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    monkeypatch.setenv("DMOE_XLA_CACHE", str(tmp_path))
    monkeypatch.setenv("MALLOC_ARENA_MAX", "")  # leaves the memory of this process as it is
    cores(monkeypatch, 2)
    try:
        for threads, folder in (("1", tmp_path / "threads-1"), ("2", tmp_path), ("5", tmp_path / "threads-5")):
            monkeypatch.setenv("NPROC", threads)
            set_up_jax()
            assert jax.config.jax_compilation_cache_dir == str(folder)  # type: ignore[attr-defined]
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.slow
def test_a_node_refuses_in_one_line(tmp_path: Path) -> None:
    """No traceback, neither of the choice of a strategy nor of serving."""
    flags = ["--expert", f"{__file__}:expert", "--experts", "ffn.[0:2]", "--xla-threads", "1", "--insecure-loopback"]
    command, environment = [sys.executable, "-m", "dmoe_jax.cli", "node", *flags], os.environ | {"DMOE_XLA_CACHE": ""}
    pipes = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run(command, cwd=tmp_path, env=environment, **pipes)
    assert done.returncode == 2
    assert done.stderr.startswith("dmoe: error: an expert calls the host")
    assert len(done.stderr.splitlines()) == 1
