"""Processes that need the same programs: one compiles them, the others wait; nobody waits for what is there."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import jax
import pytest
import trio
import trio.testing

from dmoe_jax.cli.compiling import compiled_once


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """XLA's cache in a folder of its own."""
    before = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    jax.config.update("jax_compilation_cache_dir", before)


class Processes:
    """Some that come to the same block, each with a file of its own as processes have."""

    def __init__(self) -> None:
        self.events: list[str] = []

    @asynccontextmanager
    async def _waiting(self, name: str) -> AsyncIterator[None]:
        self.events.append(f"{name} waits")
        yield

    async def compile(self, name: str, programs: str = "experts", *, fails: bool = False) -> None:
        try:
            async with compiled_once(programs, while_waiting=self._waiting(name)):
                self.events.append(f"{name} begins")
                await trio.testing.wait_all_tasks_blocked(0.05)
                if fails:
                    raise KeyError(name)
                self.events.append(f"{name} ends")
        except KeyError:
            self.events.append(f"{name} fails")


async def test_others_wait_until_the_first_one_is_done(cache: Path) -> None:
    """Two wait for the first and then go on beside each other; who comes later waits for nobody."""
    processes = Processes()
    async with trio.open_nursery() as nursery:
        for name in "abc":
            nursery.start_soon(processes.compile, name)
    first, *others = processes.events
    leader = first[0]
    assert first == f"{leader} begins"
    assert others[:3] == [*[f"{name} waits" for name in (each[0] for each in others[:2])], f"{leader} ends"]
    assert sorted(event[2:] for event in others[3:]) == ["begins", "begins", "ends", "ends"]
    processes.events.clear()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(processes.compile, "d")
        nursery.start_soon(processes.compile, "e")
    assert [event[2:] for event in processes.events] == ["begins", "begins", "ends", "ends"]


async def test_a_failure_and_other_programs_keep_nobody(cache: Path) -> None:
    """If the first one fails the next compiles; one with other programs, or without a cache, does not wait at all."""
    processes = Processes()
    await processes.compile("a", fails=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(processes.compile, "b")
        nursery.start_soon(processes.compile, "c", "others")
    assert not any("waits" in event for event in processes.events)
    (cache / "file").write_text("no folder")
    for none in ("", str(cache / "file")):
        jax.config.update("jax_compilation_cache_dir", none)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(processes.compile, "d")
            nursery.start_soon(processes.compile, "e")
    assert not any("waits" in event for event in processes.events)
