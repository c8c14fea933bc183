"""Calls that are served without a task of their own.

Theory of operation. A handler that only puts work somewhere would spend its task on waiting, and a task with its
deadline and its events costs more than the putting. So such a handler begins a call and returns: it is given a function
to be called with the answer, once there is one, and returns another for the case that nobody wants it any more.

Nobody watches the deadline of such a call to the millisecond. A caller that lives says itself when it has given up; of
one that does not, `TasklessCalls.sweep` gives up what is overdue.
"""

import logging
from collections.abc import Callable

import trio

from net.errors import CallFailed
from net.identity import Address
from net.rpc.base import Reply, Request
from net.rpc.service import Method

_log = logging.getLogger(__name__)

Answer = Callable[[Reply | CallFailed], None]
"""To be called with what is to be said, once, at any time, in the thread of the event loop. Where nobody waits any more
nothing happens."""

GiveUp = Callable[[], None]
"""Called if nobody wants an answer any more."""


class TasklessHandler:
    """A handler, for `Caller.add_handler`, that begins a call and returns.

    Args:
      begin: begins a call. What it raises is the answer, as with any other handler. It is called while frames are read:
        it must not take long.
    """

    def __init__(self, begin: Callable[[Request, Answer], GiveUp]) -> None:
        self.begin = begin

    async def __call__(self, request: Request) -> Reply:
        """Serve a call in a task, where there is one anyhow."""
        outcomes: list[Reply | CallFailed] = []
        is_answered = trio.Event()

        def answer(outcome: Reply | CallFailed) -> None:
            if not outcomes:
                outcomes.append(outcome)
                is_answered.set()

        give_up = self.begin(request, answer)
        try:
            await is_answered.wait()
        except trio.Cancelled:
            if not outcomes:
                give_up()
            raise
        (outcome,) = outcomes
        if isinstance(outcome, CallFailed):
            raise outcome
        return outcome


class _Call:
    """One that has been begun."""

    __slots__ = ("deadline", "give_up", "method")

    def __init__(self, method: Method, deadline: float) -> None:
        self.method = method
        self.deadline = deadline
        self.give_up: GiveUp | None = None


class TasklessCalls:
    """Those of one connection that have been begun and not answered.

    Args:
      reply: says what is the answer to a call, by its id; may raise what makes it fail instead.
      fail: says that it failed.
      forget: nobody waits for it.
    """

    def __init__(
        self,
        *,
        reply: Callable[[int, Reply], None],
        fail: Callable[[int, CallFailed], None],
        forget: Callable[[int], None],
    ) -> None:
        self._reply = reply
        self._fail = fail
        self._forget = forget
        self._calls: dict[int, _Call] = {}

    def begin(
        self,
        call_id: int,
        request: Request,
        method: Method,
        handler: TasklessHandler,
        *,
        caller: Address,
        deadline: float,
    ) -> None:
        """Begin a call, whose place is taken already.

        Args:
          caller: for the log.
          deadline: seconds of trio's clock.
        """
        call = self._calls[call_id] = _Call(method, deadline)

        def answer(outcome: Reply | CallFailed) -> None:
            # Its id may be another call's by now.
            if self._calls.get(call_id) is call:
                self._end(call_id)
                self._say(call_id, outcome, method, caller)

        try:
            give_up = handler.begin(request, answer)
        except Exception as error:
            answer(method.failure_of(error, caller))
            return
        if self._calls.get(call_id) is call:  # else it is answered already
            call.give_up = give_up

    def _say(self, call_id: int, outcome: Reply | CallFailed, method: Method, caller: Address) -> None:
        if isinstance(outcome, CallFailed):
            self._fail(call_id, outcome)
            return
        try:
            self._reply(call_id, method.check(outcome))
        except Exception as error:
            self._fail(call_id, method.failure_of(error, caller))

    def give_up(self, call_id: int) -> bool:
        """Nobody wants the answer to a call any more; whether it is one of these."""
        if call_id not in self._calls:
            return False
        give_up, method = self._calls[call_id].give_up, self._calls[call_id].method
        self._end(call_id)
        self._forget(call_id)
        if give_up is not None:
            try:
                give_up()
            except Exception:
                _log.exception("a call of %r could not be given up", method.name)
        return True

    def sweep(self, now: float) -> None:
        """Give up what is overdue."""
        for call_id in [each for each, call in self._calls.items() if call.deadline <= now]:
            self.give_up(call_id)

    def close(self) -> None:
        """The connection has ended."""
        for call_id in list(self._calls):
            self.give_up(call_id)

    def _end(self, call_id: int) -> None:
        call = self._calls.pop(call_id)
        call.method.num_running -= 1
        # It leads to the answer, and so to this call: a circle, in which large arrays would wait for the collector.
        call.give_up = None
