"""Ctrl-C while a jitted program calls the host.

A KeyboardInterrupt in a host callback comes out of JAX as a JaxRuntimeError, which a loop that catches
KeyboardInterrupt in order to save and leave would miss. So an interrupt that meets a callback is put off until the main
thread has left the callback. A second Ctrl-C in the same callback is not put off.
"""

import inspect
import signal
import threading
from collections.abc import Callable
from types import FrameType

from jax.experimental import io_callback

_AGAIN_S = 2e-3
"""Seconds until an interrupt that was put off is tried again."""


def put_off_in_callbacks() -> Callable[[], None]:
    """Put off interrupts in host callbacks, if this is the main thread and nobody else handles them.

    Returns a function that undoes it.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        return lambda: None
    handler = _Handler()
    signal.signal(signal.SIGINT, handler)

    def undo() -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is handler:
            signal.signal(signal.SIGINT, before)

    return undo


class _Handler:
    def __init__(self) -> None:
        self._put_off = False
        self._is_retry = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        is_retry, self._is_retry = self._is_retry, False
        if _in_callback(frame) and (is_retry or not self._put_off):
            self._put_off = True
            timer = threading.Timer(_AGAIN_S, self._retry)
            timer.daemon = True
            timer.start()
        elif self._put_off or not is_retry:
            self._put_off = False
            signal.default_int_handler(number, frame)

    def _retry(self) -> None:
        if self._put_off:
            self._is_retry = True
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _in_callback(frame: FrameType | None) -> bool:
    """True if JAX's code for callbacks is among the frames."""
    jax_file = inspect.unwrap(io_callback).__code__.co_filename
    while frame is not None and frame.f_code.co_filename != jax_file:
        frame = frame.f_back
    return frame is not None
