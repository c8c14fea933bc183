"""A swarm without `async`: for notebooks, scripts, and training loops that exist already.

    with connect("PEERID@HOST:PORT") as swarm:
        print(swarm.experts())
        mixture = swarm.mixture("ffn", feedforward(d_model=64), product_key((4, 4)))

In a notebook leave the `with` out and call `swarm.close()` in the end: the swarm lives on between cells. trio runs in a
thread of its own; every method here waits for it, from whatever thread it is called, also where an event loop of
another kind runs already, as in Jupyter. Ctrl-C cancels what is being waited for.
"""

import atexit
import concurrent.futures
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar

import optax
import trio

from dmoe_jax.autodiff import value_and_grad
from dmoe_jax.averaging import AveragingTotals, Round, TreeAverager, TreeAveragerConfig
from dmoe_jax.experts.base import Expert
from dmoe_jax.flax_layers import BlockingMixture, make_room
from dmoe_jax.joining import Target
from dmoe_jax.members import Member
from dmoe_jax.mixture.statistics import CallStatistics
from dmoe_jax.model import Evaluation, Model
from dmoe_jax.routing.base import Router
from dmoe_jax.swarm import Served, ServedExpert, Swarm, open_swarm
from dmoe_jax.trainer import StepRecord, Trainers
from dmoe_jax.types import PyTree
from net.wire.compression import Compression

_T = TypeVar("_T")


class Closed(RuntimeError):
    """The swarm was closed, or its thread has ended."""


class TrioThread:
    """trio in a thread of its own, and the way into it from other threads."""

    def __init__(self) -> None:
        self._token: trio.lowlevel.TrioToken | None = None
        self._nursery: trio.Nursery | None = None
        self._ready = threading.Event()
        self._stop: trio.Event | None = None
        self._thread = threading.Thread(target=trio.run, args=(self._main,), name="dmoe_jax swarm", daemon=True)
        self._thread.start()
        self._ready.wait()

    def run(self, function: Callable[..., Awaitable[_T]], *args: Any) -> _T:
        """`await function(*args)` in the thread, and wait for it; from any other thread, several at once.

        A KeyboardInterrupt while waiting cancels the call.

        Raises:
          Closed: the thread has ended, or does so before the call is over.
          RuntimeError: called in the thread itself, which would wait for itself for ever.
          Whatever the function raises.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("this is the swarm's own thread: await the function instead of waiting for it")
        future: concurrent.futures.Future[_T] = concurrent.futures.Future()
        scope = trio.CancelScope()

        async def call() -> None:
            try:
                with scope:
                    future.set_result(await function(*args))
            except BaseException as error:
                if not isinstance(error, Exception):
                    future.set_exception(Closed("the swarm was closed during the call"))
                    raise
                future.set_exception(error)
            if not future.done():
                future.set_exception(Closed("the call was cancelled"))

        self._soon(lambda: self._start(call))
        try:
            return future.result()
        except KeyboardInterrupt:
            with contextlib.suppress(Closed):
                self._soon(scope.cancel)
            raise

    def close(self) -> None:
        """End everything that runs in the thread, in order, and the thread. Doing it twice does nothing."""
        with contextlib.suppress(Closed):
            self._soon(lambda: None if self._stop is None else self._stop.set())
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _start(self, call: Callable[[], Awaitable[None]]) -> None:
        assert self._nursery is not None
        self._nursery.start_soon(call)

    def _soon(self, function: Callable[[], object]) -> None:
        try:
            assert self._token is not None
            self._token.run_sync_soon(function)
        except trio.RunFinishedError:
            raise Closed("the swarm is closed") from None

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._stop = trio.Event()
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._ready.set()
            await self._stop.wait()
            nursery.cancel_scope.cancel()


class BlockingSwarm:
    """A `dmoe_jax.swarm.Swarm` whose methods wait. Made by `connect`; a context manager that closes it."""

    def __init__(self, thread: TrioThread, swarm: Swarm, leave: Callable[[], None]) -> None:
        self.swarm = swarm
        """The swarm itself, for use inside `run`."""
        self._thread = thread
        self._leave = leave
        atexit.register(self.close)

    def __enter__(self) -> "BlockingSwarm":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the swarm: served experts are withdrawn, connections closed. Doing it twice does nothing."""
        atexit.unregister(self.close)
        self._leave()

    def run(self, function: Callable[..., Awaitable[_T]], *args: Any) -> _T:
        """`await function(*args)` where the swarm lives, and wait for the result; see `TrioThread.run`."""
        return self._thread.run(function, *args)

    @property
    def contact(self) -> str:
        """PEERID@HOST:PORT, what others join through."""
        return self.swarm.contact

    @property
    def statistics(self) -> CallStatistics:
        """Totals of this process's expert calls."""
        return self.swarm.statistics

    def experts(self) -> dict[str, ServedExpert]:
        """Every expert that is served now, by uid; see `Swarm.experts`."""
        return self.run(self.swarm.experts)

    def members(self) -> tuple[Member, ...]:
        """Nodes, trainers and averagers of the swarm; see `Swarm.members`."""
        return self.run(self.swarm.members)

    def serve(
        self, experts: Mapping[str, Expert], *, optimizer: optax.GradientTransformation | None, **options: Any
    ) -> "BlockingServed":
        """Serve experts in the background; see `Swarm.serve` for the options."""

        async def serve() -> Served:
            return await self.swarm.serve(experts, optimizer=optimizer, **options)

        return BlockingServed(self._thread, self.run(serve))

    def mixture(
        self,
        prefix: str,
        expert: Expert,
        router: Router,
        *,
        k_best: int = 4,
        k_min: int = 1,
        grace_s: float = 1.0,
        timeout_s: float = 10.0,
        compression: Compression | str = Compression.NONE,
        on_shortfall: Literal["skip", "raise"] = "skip",
        max_skipped: float = 1.0,
        seed: int | None = None,
    ) -> BlockingMixture:
        """A DMoE layer for loops under `jit`; arguments as of `Swarm.mixture`.

        Its `linen()` and `nnx(...)` are layers of an ordinary Flax model, see `dmoe_jax.flax_layers`; its `remote` is
        the layer for `autodiff`.
        """
        remote = self.swarm.mixture(
            prefix,
            expert,
            router,
            k_best=k_best,
            k_min=k_min,
            grace_s=grace_s,
            timeout_s=timeout_s,
            compression=compression,
            on_shortfall=on_shortfall,
            max_skipped=max_skipped,
            seed=seed,
        )
        return BlockingMixture(remote, self._thread)

    def value_and_grad(
        self, forward: Callable[..., Awaitable[Any]], *, has_aux: bool = False
    ) -> Callable[..., tuple[Any, PyTree]]:
        """`dmoe_jax.autodiff.value_and_grad` that waits: (params, *args) -> (loss, gradients)."""
        differentiated = value_and_grad(forward, has_aux=has_aux)
        return lambda params, *args: self.run(differentiated, params, *args)

    def trainer(
        self,
        model: Model,
        optimizer: optax.GradientTransformation,
        batches: Iterator[Any] | Sequence[Iterator[Any]],
        *,
        params: PyTree | None = None,
        seed: int | None = None,
    ) -> "BlockingTrainers":
        """Asynchronous trainers of one model; arguments as of `Swarm.trainer`."""

        async def make() -> Trainers:
            return self.swarm.trainer(model, optimizer, batches, params=params, seed=seed)

        return BlockingTrainers(self._thread, self.run(make))

    @contextlib.contextmanager
    def averager(
        self,
        params: PyTree,
        optimizer: optax.GradientTransformation,
        *,
        name: str,
        state: Callable[[], tuple[int, PyTree]] | None = None,
        config: TreeAveragerConfig = TreeAveragerConfig(),  # noqa: B008 (frozen)
        on_round: Callable[[Round], None] = lambda done: None,
    ) -> "Iterator[BlockingAverager]":
        """Averaging for a training loop of one's own; arguments as of `Swarm.averager`."""
        opened = self.swarm.averager(params, optimizer, name=name, state=state, config=config, on_round=on_round)
        with _held_open(self._thread, opened) as averager:
            yield BlockingAverager(self._thread, averager)


class BlockingServed:
    """Experts that this process serves; see `dmoe_jax.swarm.Served`."""

    def __init__(self, thread: TrioThread, served: Served) -> None:
        self._thread = thread
        self.served = served

    @property
    def uids(self) -> tuple[str, ...]:
        """Which experts."""
        return self.served.uids

    def close(self) -> None:
        """Withdraw the experts from the swarm."""
        self._thread.run(self.served.close)


class BlockingTrainers:
    """Trainers that are waited for; see `dmoe_jax.trainer.Trainers`."""

    def __init__(self, thread: TrioThread, trainers: Trainers) -> None:
        self._thread = thread
        self.trainers = trainers

    @property
    def params(self) -> PyTree:
        """The model's parameters as they are now."""
        return self.trainers.params

    @property
    def step(self) -> int:
        """Updates so far."""
        return self.trainers.step

    def run(
        self,
        num_steps: int,
        on_step: Callable[[StepRecord], None] = lambda record: None,
        on_lost: Callable[[int, Exception], None] = lambda trainer, error: None,
    ) -> None:
        """Make `num_steps` further updates; the callbacks run in the swarm's thread."""
        self._thread.run(self.trainers.run, num_steps, on_step, on_lost)

    def evaluate(self, batches: Iterable[Any]) -> Evaluation:
        """The model's evaluation with the parameters as they are now."""
        return self._thread.run(self.trainers.evaluate, batches)


class BlockingAverager:
    """Averaging that is waited for; see `dmoe_jax.averaging.TreeAverager`."""

    def __init__(self, thread: TrioThread, averager: TreeAverager) -> None:
        self._thread = thread
        self.averager = averager

    @property
    def totals(self) -> AveragingTotals:
        """What the rounds so far came to."""
        return self.averager.totals

    @property
    def is_left_behind(self) -> bool:
        """Whether others are far ahead, so that `catch_up` is worth it."""
        return self.averager.is_left_behind

    def step(self, opt_state: PyTree, params: PyTree, *, wait: bool = False) -> PyTree:
        """After each update: begins a round that is due, puts in what has arrived. Returns the optimiser's state."""

        async def step() -> PyTree:
            return await self.averager.step(opt_state, params, wait=wait)

        return self._thread.run(step)

    def catch_up(self, version: int, tree: PyTree, *, min_lead: int = 1) -> tuple[int, PyTree] | None:
        """The whole state of the peer that is furthest, if it is `min_lead` ahead; else None."""

        async def catch_up() -> tuple[int, PyTree] | None:
            return await self.averager.catch_up(version, tree, min_lead=min_lead)

        return self._thread.run(catch_up)


def connect(join: Target | Sequence[Target] = (), **options: Any) -> BlockingSwarm:
    """Take part in a swarm from ordinary code; arguments as of `dmoe_jax.swarm.open_swarm`.

    Call it before JAX computes anything, where remote layers are to be used under `jit`. Then 16 of their calls may
    wait at once, else hardly one (see `dmoe_jax.flax_layers.make_room`).

    Raises:
      ValueError, NetError: as of `open_swarm`.
    """
    make_room()
    thread = TrioThread()
    stack = contextlib.ExitStack()
    stack.callback(thread.close)
    try:
        swarm = stack.enter_context(_held_open(thread, open_swarm(join, **options)))
    except BaseException:
        stack.close()
        raise
    return BlockingSwarm(thread, swarm, stack.close)


@contextlib.contextmanager
def _held_open(thread: TrioThread, opened: contextlib.AbstractAsyncContextManager[_T]) -> Iterator[_T]:
    """Hold an asynchronous context manager open in the thread. One task enters it and leaves it, as trio demands."""
    inside: concurrent.futures.Future[_T] = concurrent.futures.Future()
    leave = trio.Event()
    outcome: concurrent.futures.Future[None] = concurrent.futures.Future()

    async def hold() -> None:
        try:
            async with opened as value:
                inside.set_result(value)
                await leave.wait()
        except BaseException as error:
            (outcome if inside.done() else inside).set_exception(
                error if isinstance(error, Exception) else Closed("the swarm was closed")
            )
            if not isinstance(error, Exception):
                raise
        else:
            outcome.set_result(None)

    thread._soon(lambda: thread._start(hold))
    value = inside.result()
    try:
        yield value
    finally:
        with contextlib.suppress(Closed):
            thread._soon(leave.set)
            outcome.result()
