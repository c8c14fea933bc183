"""Fixtures for the whole test run."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

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


# Whom a user joins, and with which secret, is nothing to the tests.
for name in ("DMOE_JOIN", "DMOE_SWARM_SECRET_FILE"):
    os.environ.pop(name, None)


# Threads for host callbacks that wait, which XLA counts once, when JAX first computes. See mixture.flax_layers.
os.environ.setdefault("NPROC", str(16 + (os.cpu_count() or 1)))


DURATIONS = Path(__file__).with_name("durations.json")
"""Tests, and whole files, that took more than `QUICK_S` on two idle cores: `just test-all --save-durations`."""
QUICK_S, MOST_QUICK_S = 0.6, 60.0
"""Seconds that a quick test has; and of processor time, beyond which it fails: the first of a process to compile what
others use after it takes longer than by itself."""
taken: dict[str, float] = {}
"""Seconds of each test of this run, its fixtures included."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flag that saves durations."""
    parser.addoption("--save-durations", action="store_true", help=f"note the tests of over {QUICK_S:g} s as slow")


@pytest.hookimpl(tryfirst=True)  # before those that are not to run are taken out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests as slow by their durations, and give slow tests ten minutes where they say nothing else: beside other
    work they take three times as long."""
    known = json.loads(DURATIONS.read_text())
    for item in items:
        if item.nodeid in known or item.nodeid.partition("::")[0] in known:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(600))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a quick test that takes more of the processor than any quick test may."""
    began = time.process_time()
    yield
    spent_s = time.process_time() - began
    if spent_s > MOST_QUICK_S and not item.get_closest_marker("slow"):
        pytest.fail(f"took {spent_s:.1f} s of processor time; mark it slow, or add it to {DURATIONS.name}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note the seconds of a test."""
    taken[report.nodeid] = taken.get(report.nodeid, 0.0) + report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Save the durations of slow tests if that was asked for, once for all processes of the run."""
    if session.config.getoption("--save-durations") and not hasattr(session.config, "workerinput"):
        known = json.loads(DURATIONS.read_text())
        kept = {name: seconds for name, seconds in known.items() if name not in taken}
        slow = {name: round(seconds, 1) for name, seconds in taken.items() if seconds > QUICK_S}
        DURATIONS.write_text(json.dumps(dict(sorted({**kept, **slow}.items())), indent=0) + "\n")


# Processes that tests start find the packages of this clone, wherever they start.
ROOT = Path(__file__).parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT), str(ROOT / "net"), *filter(None, [os.environ.get("PYTHONPATH")])]
)


@pytest.fixture
def compilations() -> Iterator[SimpleNamespace]:
    """A counter of XLA compilations, `count`, that starts at zero."""
    counter = SimpleNamespace(count=0)

    def note(event: str, duration: float, **_: object) -> None:
        del duration
        counter.count += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(note)
    yield counter
    jax.monitoring.unregister_event_duration_listener(note)
