"""Fixtures for the whole test run."""

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jax
import pytest

# What an example takes says nothing on a machine that does other things too; each test has a time limit.
hypothesis.settings.register_profile("dmoe", deadline=None)
hypothesis.settings.load_profile("dmoe")

# Tests compile much and compute little: unoptimised code is ready in two thirds of the time. Processes that tests start
# inherit the variable.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
jax.config.update("jax_disable_most_optimizations", os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] not in ("0", "false"))

# For the same reason XLA's older code generator for CPUs, which is ready in two thirds of the time, too; and one
# thread, since every test process has one core. XLA ends a process over a flag that it does not know, so these are
# for the versions they were tried with. What the variable says already comes after them and goes before them.
if jax.__version_info__[:2] == (0, 10):
    os.environ["XLA_FLAGS"] = (
        "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1 "
        f"--xla_cpu_multi_thread_eigen=false {os.environ.get('XLA_FLAGS', '')}"
    )


# Threads for host callbacks that wait, which XLA counts once, when JAX first computes. See mixture.flax_layers.
os.environ.setdefault("NPROC", str(16 + (os.cpu_count() or 1)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give slow tests ten minutes where they say nothing else: beside other work they take three times as long."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(600))


# Processes that tests start find the packages of this clone, wherever they start.
ROOT = Path(__file__).parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT), str(ROOT / "net"), *filter(None, [os.environ.get("PYTHONPATH")])]
)


class CompilationCounter:
    """Counts what XLA compiles while the test runs."""

    def __init__(self) -> None:
        self.count = 0

    def _on_event(self, event: str, duration: float, **_: object) -> None:
        del duration
        if event == "/jax/core/compile/backend_compile_duration":
            self.count += 1


@pytest.fixture
def compilations() -> Iterator[CompilationCounter]:
    """A counter of XLA compilations that starts at zero."""
    counter = CompilationCounter()
    jax.monitoring.register_event_duration_secs_listener(counter._on_event)
    yield counter
    jax.monitoring.unregister_event_duration_listener(counter._on_event)
