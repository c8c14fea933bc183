"""A nursery for what runs behind an open context manager."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio


@asynccontextmanager
async def background_nursery() -> AsyncIterator[trio.Nursery]:
    """A nursery that is cancelled when the block ends, however it ends.

    An exception of the block comes out as it is: a bare nursery would wrap it once for each context manager that
    happens to be open around it. What a background task raises ends the block and comes out in a group.
    """
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
