"""Fixtures for the whole test run."""

import os
import shutil
import tempfile
from collections.abc import Iterator

import jax
import pytest

# Tests compile much and compute little: unoptimised code is ready in two thirds of the time. Processes that tests start
# inherit the variable.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
jax.config.update("jax_disable_most_optimizations", os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] not in ("0", "false"))


_CACHE = "JAX_COMPILATION_CACHE_DIR"


def pytest_configure(config: pytest.Config) -> None:
    """What one test has compiled no other compiles again, whichever process runs it; nothing outlives the run."""
    if hasattr(config, "workerinput") or _CACHE in os.environ:
        return
    folder = tempfile.mkdtemp(prefix="dmoe_jax_tests_")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    # For worker processes, which inherit it, and this one, which has imported JAX; and for `dmoe` processes of tests.
    os.environ |= {
        _CACHE: folder,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "DMOE_XLA_CACHE": folder,
    }
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


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
