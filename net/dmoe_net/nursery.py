"""Nurseries: for what runs behind an open context manager, and for one work many times."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

import trio


@asynccontextmanager
async def background_nursery() -> AsyncIterator[trio.Nursery]:
    """A nursery that is cancelled when the block ends. An exception of the block comes out as it is; one of a
    background task ends the block and comes out in a group."""
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        try:
            yield nursery
        except Exception as error:
            failure = error
        finally:
            nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def for_each(work: Callable[..., Awaitable[object]], *arguments: Iterable[object]) -> None:
    """Do a work for the arguments, as `map` would hand them on, all at once."""
    async with trio.open_nursery() as nursery:
        for each in zip(*arguments, strict=True):
            nursery.start_soon(work, *each)
