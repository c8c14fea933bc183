"""Processes that need the same programs: one compiles them, the others wait; nobody waits for what is there."""

from collections.abc import AsyncIterator, Iterable, Iterator
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


async def compile_(events: list[str], name: str, programs: str = "experts", fails: bool = False) -> None:
    """One of some processes that come to the same block, each with a file of its own."""

    @asynccontextmanager
    async def waiting() -> AsyncIterator[None]:
        events.append(f"{name} waits")
        yield

    try:
        async with compiled_once(programs, while_waiting=waiting()):
            events.append(f"{name} begins")
            await trio.testing.wait_all_tasks_blocked(0.05)
            if fails:
                raise KeyError(name)
            events.append(f"{name} ends")
    except KeyError:
        events.append(f"{name} fails")


async def compile_all(events: list[str], *several: Iterable[str]) -> None:
    async with trio.open_nursery() as nursery:
        for name in several:
            nursery.start_soon(compile_, events, *name)


async def test_others_wait_until_the_first_one_is_done(cache: Path) -> None:
    """Two wait for the first and then go on beside each other; who comes later waits for nobody."""
    events = list[str]()
    await compile_all(events, "a", "b", "c")
    first, *others = events
    leader = first[0]
    assert first == f"{leader} begins"
    assert others[:3] == [*[f"{name} waits" for name in (each[0] for each in others[:2])], f"{leader} ends"]
    assert sorted(event[2:] for event in others[3:]) == ["begins", "begins", "ends", "ends"]
    events.clear()
    await compile_all(events, "d", "e")
    assert [event[2:] for event in events] == ["begins", "begins", "ends", "ends"]


async def test_a_failure_and_other_programs_keep_nobody(cache: Path) -> None:
    """If the first one fails the next compiles; one with other programs, or without a cache, does not wait at all."""
    events = list[str]()
    await compile_(events, "a", fails=True)
    await compile_all(events, ("b",), ("c", "others"))
    assert not any("waits" in event for event in events)
    (cache / "file").write_text("no folder")
    for none in ("", str(cache / "file")):
        jax.config.update("jax_compilation_cache_dir", none)
        await compile_all(events, "d", "e")
    assert not any("waits" in event for event in events)
