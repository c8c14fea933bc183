"""Beginning and end of a command: logging, signals, one-line errors, and leaving in order.

A command that is asked to stop (SIGINT, SIGTERM, SIGHUP, or the end of the process that started it) must still be able
to talk: a node withdraws its experts from the DHT. So only the command's *body* is cancelled first, and the contexts
around it close from the inside out. Whatever is not over in time, or at a second signal, is cancelled as a whole.
"""

import atexit
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import trio

from dmoe_jax.machine.disk import CheckpointError, FolderInUse
from dmoe_jax.peers.joining import NotAdmitted
from dmoe_jax.runs.endings import EXIT_AGAIN, EXIT_INTERRUPTED, UsageError, ending_signals, fail, one_line
from dmoe_jax.runs.processes import ProcessFailed
from dmoe_net.averaging.replica import ReplicaLost
from dmoe_net.errors import HandshakeFailed, ListenFailed, NetError, NoQuorum, PeerBusy, PeerUnavailable
from dmoe_net.keys import IdentityError, IdentityInUse

_MISTAKES = (NetError, IdentityError, UsageError, ProcessFailed, CheckpointError, FolderInUse)
"""Errors that are told in one line: they are the swarm's or the user's, not ours. Any other error is a bug and keeps
its traceback."""

_CUT = (NetError, trio.BrokenResourceError, trio.ClosedResourceError)
"""Errors of a command that is leaving already, whose connections are cut: they fail nothing."""

_PASSING = (PeerUnavailable, PeerBusy, NoQuorum, ReplicaLost, FolderInUse, IdentityInUse)
"""Errors that time may heal: who is away may come back, and who holds a folder or a key may end."""


class Stop:
    """Ends the command when somebody asks for it."""

    def __init__(self, everything: trio.CancelScope, leave_timeout_s: float) -> None:
        self._everything = everything
        self._leave_timeout_s = leave_timeout_s
        self._body: trio.CancelScope | None = None
        self.is_wanted = False
        """True once somebody has asked for it."""

    @contextlib.contextmanager
    def body(self, *, patience: float = 1) -> Iterator[trio.CancelScope]:
        """Part of a command that runs until it is stopped, and then ends quietly, while the command goes on for as long
        as it may take to leave, times `patience`."""
        with trio.CancelScope() as scope:
            self._body = scope
            self._leave_timeout_s *= patience
            try:
                yield scope
            finally:
                self._body = None

    def request(self) -> None:
        """End the body if the command has one just now, else everything; the second time everything anyhow."""
        self.is_wanted = True
        if self._body is None or self._body.cancel_called:
            self._everything.cancel()
        else:
            self._body.cancel()
            self._everything.deadline = trio.current_time() + self._leave_timeout_s

    def request_for_another(self) -> None:
        """End the body for another process, which does not press: a command that is leaving already goes on with it."""
        if self._body is not None and not self._body.cancel_called:
            self.request()


def run_until_done(
    main: Callable[[Stop], Awaitable[int]], *, exit_on_stdin_eof: bool = False, leave_timeout_s: float = 5.0
) -> int:
    """Run an async command to its end, or until it is stopped; return the exit status.

    Args:
      main: the command. It may mark its body with the `Stop` that it is given; one without is cancelled as a whole.
      exit_on_stdin_eof: also stop when standard input closes: the process that started this one is gone.
      leave_timeout_s: most seconds from the first wish to the end. Withdrawing takes at most two, closing connections
        little; nodes answer what they have accepted and save.

    Raises:
      SystemExit: after one line, with status 2 for a mistake of the user's, 75 for a failure that time may heal, 1 for
        any other; see docs/how_to/commands.md.
    """
    status = 1
    try:
        status = _run(main, exit_on_stdin_eof, leave_timeout_s)
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else 1
        raise
    finally:
        if _threads_at_work():
            atexit.register(_end_beside_threads, status)  # before JAX's, which it has registered already
    return status


def _run(main: Callable[[Stop], Awaitable[int]], exit_on_stdin_eof: bool, leave_timeout_s: float) -> int:
    level = os.environ.get("DMOE_LOGLEVEL", "WARNING").upper()
    if level not in logging.getLevelNamesMapping():
        raise UsageError(f"DMOE_LOGLEVEL must be a level such as INFO or DEBUG, got {level!r}")
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    status = EXIT_INTERRUPTED
    stop: Stop | None = None

    async def supervise() -> None:
        nonlocal status, stop
        async with trio.open_nursery() as nursery:
            stop = Stop(nursery.cancel_scope, leave_timeout_s)
            await nursery.start(_stop_on_signal, stop)
            if exit_on_stdin_eof:
                nursery.start_soon(_stop_on_stdin_eof, stop)
            status = await main(stop)
            nursery.cancel_scope.cancel()

    try:
        trio.run(supervise)
    except BaseException as error:
        errors = BaseExceptionGroup("", [error])
        is_cut = stop is not None and stop.is_wanted and errors.split(_CUT)[1] is None
        if is_cut or errors.subgroup(KeyboardInterrupt) is not None:
            return EXIT_INTERRUPTED
        mistakes, bugs = errors.split(_MISTAKES)
        # A process that failed explains whatever else went wrong beside it.
        leaf: BaseException | None = errors.subgroup(ProcessFailed) or (mistakes if bugs is None else None)
        if leaf is None:
            raise
        while isinstance(leaf, BaseExceptionGroup):
            leaf = leaf.exceptions[0]
        fail(one_line(leaf), status=_status_of(leaf))
    return status


def _threads_at_work() -> bool:
    """True if a command that was cancelled has left work behind in a thread: trio names it after its function then."""
    return any(" from " in thread.name for thread in threading.enumerate())


def _end_beside_threads(status: int) -> None:
    """End the process at once if such work goes on still. As it ends, Python throws an exception through a thread that
    comes back from JAX, which aborts the process."""
    if _threads_at_work():
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # it has no reader, is closed, or missing
                stream.flush()
        os._exit(status)


def _status_of(error: BaseException) -> int:
    """Exit status for what ended a command."""
    if isinstance(error, UsageError | ProcessFailed):
        return error.status
    if isinstance(error, ListenFailed):
        return EXIT_AGAIN if error.is_taken else 1
    # Another secret, version or peer than was meant stays so until somebody changes it.
    is_passing = isinstance(error, _PASSING) and not isinstance(error, NotAdmitted | HandshakeFailed)
    return EXIT_AGAIN if is_passing else 1


async def _stop_on_signal(stop: Stop, task_status: trio.TaskStatus[None]) -> None:
    with trio.open_signal_receiver(*ending_signals()) as signals:
        task_status.started()
        async for _ in signals:
            stop.request()


async def _stop_on_stdin_eof(stop: Stop) -> None:
    # In a thread: Windows knows no other way, and a non-blocking pipe would be one for whoever shares it, too.
    if sys.stdin is not None:  # else it is at its end already
        read = partial(os.read, sys.stdin.fileno(), 4096)
        name = "standard input"  # not trio's: such a thread does no harm at the end
        while await trio.to_thread.run_sync(read, thread_name=name, abandon_on_cancel=True):
            pass
    stop.request()
