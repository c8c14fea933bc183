"""Settings for the whole test run: strict JAX promotion, two XLA devices on the CPU, one compilation counter."""

from collections.abc import Iterator

import jax
import pytest

# Before any array is made. Rank promotion hides shape mistakes; Flax itself relies on dtype promotion in places.
jax.config.update("jax_numpy_rank_promotion", "raise")


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
