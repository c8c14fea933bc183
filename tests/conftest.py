"""Fixtures for the whole test run."""

from collections.abc import Iterator

import jax
import pytest


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
