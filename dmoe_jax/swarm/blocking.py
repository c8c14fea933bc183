"""A swarm without `async`: for notebooks, scripts, and training loops that exist already.

    with connect("PEERID@HOST:PORT") as swarm:
        print(swarm.experts())
        mixture = swarm.mixture("ffn", feedforward(d_model=64), product_key((4, 4)))

In a notebook leave the `with` out and call `swarm.close()` in the end. trio runs in a thread of its own; every method
here is one of `swarm` or `trainer` that is carried out there and waited for, from whatever thread it
is called, also beside an event loop of another kind, as in Jupyter. Callbacks run in the swarm's thread. Ctrl-C cancels
what is being waited for; in a layer under `jit` it comes as soon as the program has ended (`machine.interrupts`).
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import inspect
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import jax
import trio

from dmoe_jax.arrays import PyTree
from dmoe_jax.autodiff import value_and_grad
from dmoe_jax.machine.device import ThreadDevice
from dmoe_jax.machine.interrupts import put_off_in_callbacks
from dmoe_jax.machine.xla_threads import make_room
from dmoe_jax.mixture.flax_layers import BlockingMixture
from dmoe_jax.swarm.opening import open_swarm
from dmoe_jax.swarm.serving import Served
from dmoe_jax.swarm.swarm import Swarm

_P = ParamSpec("_P")
_T = TypeVar("_T")
_W = TypeVar("_W")


class Closed(RuntimeError):
    """The swarm was closed, its thread has ended, or this process is a fork of the one that has it."""


def _keep_backends() -> None:
    # JAX's threads are not in a fork: as Python ends, destructors would wait for them for ever, or crash.
    gc.freeze()
    modules = [vars(module) for name, module in [*sys.modules.items()] if name.partition(".")[0] in ("jax", "jaxlib")]
    clients = {device.client for device in jax.local_devices()}
    alive = [each for client in clients for each in (client, *client.live_executables(), *client.live_arrays())]
    for kept in [*alive, *(value for module in modules for value in module.values())]:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


@functools.cache
def _prepare_for_forks() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_keep_backends)


class TrioThread:
    """trio in a thread of its own, and the way into it from other threads."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._stop = trio.Event()
        ready: Future[tuple[trio.lowlevel.TrioToken, trio.Nursery]] = Future()

        async def main() -> None:
            async with trio.open_nursery() as nursery:
                ready.set_result((trio.lowlevel.current_trio_token(), nursery))
                await self._stop.wait()
                nursery.cancel_scope.cancel()

        self._thread = threading.Thread(target=trio.run, args=(main,), name="dmoe_jax swarm", daemon=True)
        self._thread.start()
        self._token, self._nursery = ready.result()

    def run(self, function: Callable[..., Awaitable[_T]], *args: Any) -> _T:
        """`await function(*args)` in the thread, and wait for it; from any other thread, several at once. A
        KeyboardInterrupt while waiting cancels the call.

        Raises:
          Closed: the thread has ended, or does so before the call is over; or this process was forked and has none.
          RuntimeError: called in the thread itself, which would wait for itself for ever.
        """
        if self.is_elsewhere:
            raise Closed(
                f"process {os.getpid()} was forked from process {self._pid}, which has the swarm; a fork has no "
                "threads: call connect here, or start processes with multiprocessing's method 'spawn'"
            )
        if threading.current_thread() is self._thread:
            raise RuntimeError("this is the swarm's own thread: await the function instead of waiting for it")
        # Not `trio.from_thread.run`: that refuses threads in which a trio of their own runs, such as a notebook's.
        answer: Future[_T] = Future()
        scope = trio.CancelScope()

        async def call() -> None:
            try:
                with scope:
                    answer.set_result(await function(*args))
            except Exception as error:
                answer.set_exception(error)
            except BaseException:  # also a group of nothing but cancellations
                answer.set_exception(Closed("the swarm was closed during the call"))
                raise
            if not answer.done():
                answer.set_exception(Closed("the call was cancelled"))

        def start() -> None:
            try:
                self._nursery.start_soon(call)
            except RuntimeError:  # it has just been closed to newcomers
                answer.set_exception(Closed("the swarm is closed"))

        try:
            self._token.run_sync_soon(start)
            return answer.result()
        except trio.RunFinishedError:
            raise Closed("the swarm is closed") from None
        except KeyboardInterrupt:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(scope.cancel)
            raise

    @property
    def is_elsewhere(self) -> bool:
        """True in a process that was forked from the one with the thread."""
        return os.getpid() != self._pid

    @contextlib.contextmanager
    def held_open(self, opened: AbstractAsyncContextManager[_T]) -> Iterator[_T]:
        """Hold an asynchronous context manager open. One task enters it and leaves it, as trio demands."""
        leave, left = trio.Event(), trio.Event()
        failures: list[Exception] = []

        async def hold(task_status: trio.TaskStatus[_T]) -> None:
            is_open = False
            try:
                async with opened as value:
                    is_open = True
                    task_status.started(value)
                    await leave.wait()
            except Exception as error:
                if not is_open:
                    raise
                failures.append(error)
            finally:
                left.set()

        async def end() -> None:
            leave.set()
            await left.wait()

        value: _T = self.run(self._nursery.start, hold)
        try:
            yield value
        finally:
            with contextlib.suppress(Closed):
                self.run(end)
            if failures:
                raise failures[0]

    def close(self) -> None:
        """End everything that runs in the thread, in order, and the thread; in a forked process do nothing."""
        if self.is_elsewhere:
            return
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._stop.set)
        if threading.current_thread() is not self._thread:
            self._thread.join()


class Waiting(Generic[_T]):
    """Stands for an object that lives in a `TrioThread`: its attributes are those of the object, and its asynchronous
    methods are carried out in the thread and waited for."""

    def __init__(self, inner: _T, thread: TrioThread) -> None:
        self.inner = inner
        """The object itself, for use inside `BlockingSwarm.run`."""
        self._thread = thread

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if not inspect.iscoroutinefunction(found):
            return found

        @functools.wraps(found)
        def wait(*args: Any, **kwargs: Any) -> Any:
            return self._thread.run(functools.partial(found, *args, **kwargs))

        return wait

    def __dir__(self) -> Iterable[str]:
        return {*super().__dir__(), *dir(self.inner)}


def _holding(
    method: Callable[Concatenate[Swarm, _P], AbstractAsyncContextManager[_T]],
) -> Callable[Concatenate["BlockingSwarm", _P], AbstractContextManager[Waiting[_T]]]:
    """Make the method return an ordinary context manager, whose value waits."""

    @functools.wraps(method)
    @contextlib.contextmanager
    def hold(self: "BlockingSwarm", *args: _P.args, **kwargs: _P.kwargs) -> Iterator[Waiting[_T]]:
        with self._thread.held_open(method(self.swarm, *args, **kwargs)) as value:
            yield Waiting(value, self._thread)

    return hold


def _making(
    method: Callable[Concatenate[Swarm, _P], _T], wrap: Callable[[_T, TrioThread], _W]
) -> Callable[Concatenate["BlockingSwarm", _P], _W]:
    """Wrap the method's result. It runs here, since the swarm's thread must not wait for JAX."""

    @functools.wraps(method)
    def make(self: "BlockingSwarm", *args: _P.args, **kwargs: _P.kwargs) -> _W:
        return wrap(method(self.swarm, *args, **kwargs), self._thread)

    return make


class BlockingSwarm(Waiting[Swarm]):
    """A `dmoe_jax.Swarm` whose methods wait. Made by `connect`; a context manager that closes it.

    `mixture` gives a layer for loops under `jit`: its `linen()` and `nnx(...)` are layers of an ordinary Flax model,
    see `dmoe_jax.mixture.flax_layers`; its `remote` is the layer for `autodiff` and for a `Model`.
    """

    mixture = _making(Swarm.mixture, BlockingMixture)
    trainer = _making(Swarm.trainer, Waiting)
    averager = _holding(Swarm.averager)
    collaboration = _holding(Swarm.collaboration)
    collaborate = _holding(Swarm.collaborate)

    def __init__(self, swarm: Swarm, thread: TrioThread, leave: Callable[[], None]) -> None:
        super().__init__(swarm, thread)
        self.swarm = swarm
        """The swarm itself, for use inside `run`."""
        self._leave = leave
        atexit.register(self.close)

    def __enter__(self) -> "BlockingSwarm":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the swarm: served experts are withdrawn, connections closed. Doing it twice does nothing."""
        atexit.unregister(self.close)
        self._leave()

    def run(self, function: Callable[..., Awaitable[_T]], *args: Any) -> _T:
        """`await function(*args)` where the swarm lives, and wait for the result; see `TrioThread.run`."""
        return self._thread.run(function, *args)

    @functools.wraps(Swarm.serve)
    def serve(self, *args: Any, **kwargs: Any) -> Waiting[Served]:
        return Waiting(self.run(functools.partial(self.swarm.serve, *args, **kwargs)), self._thread)

    def value_and_grad(
        self, forward: Callable[..., Awaitable[Any]], *, has_aux: bool = False
    ) -> Callable[..., tuple[Any, PyTree]]:
        """`dmoe_jax.autodiff.value_and_grad` that waits: (params, *args) -> (loss, gradients)."""
        return functools.partial(self.run, value_and_grad(forward, has_aux=has_aux))


def _arguments_of(
    opener: Callable[_P, AbstractAsyncContextManager[Swarm]],
) -> Callable[[Callable[..., BlockingSwarm]], Callable[_P, BlockingSwarm]]:
    """Give a function the arguments of `opener`, for readers and type checkers."""

    def give(function: Callable[..., BlockingSwarm]) -> Callable[_P, BlockingSwarm]:
        function.__signature__ = inspect.signature(opener).replace(return_annotation=BlockingSwarm)  # type: ignore[attr-defined]
        return function

    return give


@_arguments_of(open_swarm)
def connect(*args: Any, **options: Any) -> BlockingSwarm:
    """Take part in a swarm from ordinary code, until it is closed; arguments as of `dmoe_jax.open_swarm`.

    Call it before JAX computes anything, where remote layers are to be used under `jit`: XLA then gets threads to spare
    for their calls, and for loops over several CPU devices (see `machine.xla_threads.make_room`). Experts served here
    have CPU devices of their own (`machine.own_devices`). In the main thread, Ctrl-C comes out of a layer under `jit`
    as KeyboardInterrupt.
    """
    make_room()
    _prepare_for_forks()
    thread = TrioThread()
    with contextlib.ExitStack() as stack:
        stack.callback(thread.close)
        stack.callback(put_off_in_callbacks())
        options.setdefault("device", ThreadDevice(beside_loop=True))
        swarm = stack.enter_context(thread.held_open(open_swarm(*args, **options)))
        return BlockingSwarm(swarm, thread, stack.pop_all().close)
