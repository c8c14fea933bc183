"""XLA's threads: how many, and who gets how many."""

from pathlib import Path

import jax
import pytest

from dmoe_jax import xla_threads
from dmoe_jax.runs.setting_up import set_up_jax
from dmoe_jax.xla_threads import share_of_threads


@pytest.mark.parametrize(("asked", "threads"), [("3", 3), ("1", 1), ("", 8), ("0", 8), ("many", 8)])
def test_how_many_there_are(monkeypatch: pytest.MonkeyPatch, asked: str, threads: int) -> None:
    """As NPROC says, or as many as there are cores."""
    monkeypatch.setattr(xla_threads, "usable_cores", lambda: 8)
    monkeypatch.setenv("NPROC", asked)
    assert xla_threads.xla_threads() == threads


@pytest.mark.parametrize(
    ("cores", "processes", "may_call_host", "threads"),
    [(2, 4, False, 1), (2, 4, True, 2), (16, 4, False, 4), (16, 4, True, 4), (1, 1, False, 1), (2, 1, False, 2)],
)
def test_shares(monkeypatch: pytest.MonkeyPatch, cores: int, processes: int, may_call_host: bool, threads: int) -> None:
    """Equal ones, at least one thread; two where the host may be called."""
    monkeypatch.setattr(xla_threads, "usable_cores", lambda: cores)
    assert share_of_threads(processes, may_call_host=may_call_host) == threads


def test_programs_are_cached_by_the_number_of_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They are divided among so many, so one folder for each number but the usual one."""
    before = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    monkeypatch.setenv("DMOE_XLA_CACHE", str(tmp_path))
    monkeypatch.setattr("dmoe_jax.runs.setting_up.keep_freed_memory", lambda: True)
    monkeypatch.setattr("dmoe_jax.runs.setting_up.usable_cores", lambda: 2)
    try:
        for threads, folder in (("1", tmp_path / "threads-1"), ("2", tmp_path), ("5", tmp_path / "threads-5")):
            monkeypatch.setenv("NPROC", threads)
            set_up_jax()
            assert jax.config.jax_compilation_cache_dir == str(folder)  # type: ignore[attr-defined]
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
