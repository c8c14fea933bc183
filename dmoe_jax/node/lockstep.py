"""A node that spans processes, on one host or several: one of them talks to the swarm, the others do as it does.

All processes have joined by `jax.distributed.initialize`, and hold each expert together on a mesh of all their devices.
Programs over it run only if all processes start the same ones in the same order. Process 0 serves; before each piece of
work it sends an *order* to the others, over a TCP connection to each. The programs themselves keep the processes
together, so that nobody answers orders, but for one byte when programs are compiled, and another one from a process
that has been told to stop: process 0 then leaves, and all others with it.

Process 0 tells through JAX where it listens, and a secret that the others show it. A process that is gone takes its
part of every expert along, so that the others end, too: they see its connection close. XLA may wait for ever for one
that is gone; whoever calls this must be ready to end the process (`on_lost`).
"""

import logging
import math
import queue
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import trio
from jax.experimental import multihost_utils

from dmoe_jax.arrays import PyTree
from dmoe_jax.directory.grid import parse_uid
from dmoe_jax.experts.base import Expert
from dmoe_jax.machine.device import ThreadDevice
from dmoe_jax.mesh.layout import Layout, MeshShape
from dmoe_jax.node.backend import make_backend
from dmoe_jax.node.programs import Batch, ExpertPrograms, Result, State, Work
from dmoe_jax.node.sharding import Place, PlacedDevice
from dmoe_jax.runs.processes import ProcessFailed
from dmoe_net.errors import RemoteProtocolError
from dmoe_net.nursery import background_nursery
from dmoe_net.types import Array
from dmoe_net.wire import codec
from dmoe_net.wire.fields import integer, several, text

logger = logging.getLogger(__name__)

SECRET_BYTES = 32
CONNECT_TIMEOUT_S = 60.0
_GREETING_TIMEOUT_S = 5.0
_MAX_GREETINGS = 1024
_LEAVE_TIMEOUT_S = 2.0
_MAX_WAITING_ORDERS = 64
_CHUNK_BYTES = 1 << 20

_CAME_TO_MEETING, _ASKS_TO_LEAVE = b"\0", b"\1"
"""Bytes that the others say to process 0."""

KINDS = ("make", "run", "compile", "gather", "load", "meet", "leave")
LENGTH_BYTES = 4
MAX_ORDER_BYTES = 2**40

_FIELDS = ("inputs", "output_grads", "keys", "staleness", "state")
_COUNT = integer(0, 2**62)
_TEXT = text(0, 256)
_SHAPE = several(integer(0, 2**40), 16)

_Parts = list[bytes | memoryview]
_Spec = tuple[str, np.dtype[Any], tuple[int, ...]]
"""Field, type and shape of an array of an order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One piece of work."""

    kind: str
    """"make" the expert; "run" a batch; "compile" for batches of `number` rows; "gather" the state; "load" a state;
    "meet", to say that what was ordered before is done; "leave", for good."""
    uid: str = ""
    """The expert."""
    number: int = 0
    arrays: Mapping[str, Sequence[Array]] = field(default_factory=dict)
    """`inputs`, `output_grads` and `keys` of a `Batch`, each as far as it has them, and its `staleness`, float32; or
    the leaves of a `state`."""

    def one(self, name: str) -> Array | None:
        """The only array of a field, or None."""
        return next(iter(self.arrays.get(name, ())), None)


Tell = Callable[[Order], None]
"""Sends an order on its way, without waiting for anything but a "meet"."""


def encode_order(order: Order) -> _Parts:
    """The bytes of an order, in parts that follow one another: a length, canonical CBOR, and the arrays as they lie in
    memory, which are not copied. Raises LocalProtocolError if it has too many arrays for its header."""
    rows: list[list[Any]] = []
    parts: _Parts = []
    for name, arrays in order.arrays.items():
        for array in arrays:
            array = np.ascontiguousarray(array).reshape(np.shape(array))
            rows.append([name, array.dtype.name, list(array.shape)])
            parts.append(array.reshape(-1).view(np.uint8).data)
    header = codec.encode({"kind": order.kind, "uid": order.uid, "number": order.number, "arrays": rows})
    return [len(header).to_bytes(LENGTH_BYTES, "big"), header, *parts]


def parse_header_untrusted(data: bytes) -> tuple[Order, tuple[_Spec, ...]]:
    """Read the CBOR of an order. Return the order without its arrays, and what these are. Raises RemoteProtocolError if
    it is none."""
    body = codec.decode_untrusted(data)
    told = body if isinstance(body, dict) else {}
    order = Order(
        kind=_TEXT.of_untrusted(told, "kind"),
        uid=_TEXT.of_untrusted(told, "uid"),
        number=_COUNT.of_untrusted(told, "number"),
    )
    try:
        specs = tuple(
            (name, jnp.dtype(dtype), _SHAPE.read_untrusted(shape, "shape")) for name, dtype, shape in told["arrays"]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RemoteProtocolError(
            f"expected field, type and shape of each array in an order, got {body!r:.80}"
        ) from error
    are_known = all(name in _FIELDS and not dtype.hasobject for name, dtype, _ in specs)
    if order.kind not in KINDS or not are_known or nbytes_of_arrays(specs) > MAX_ORDER_BYTES:
        raise RemoteProtocolError(f"expected an order of numbers, of at most {MAX_ORDER_BYTES} bytes, got {body!r:.80}")
    return order, specs


def nbytes_of_arrays(specs: Sequence[_Spec]) -> int:
    """Bytes of all arrays of an order."""
    return sum(dtype.itemsize * math.prod(shape) for _, dtype, shape in specs)


def with_arrays(order: Order, specs: Sequence[_Spec], body: bytearray) -> Order:
    """The order with its arrays, which are views of `body`."""
    arrays: dict[str, list[Array]] = {}
    start = 0
    for name, dtype, shape in specs:
        count = math.prod(shape)
        arrays.setdefault(name, []).append(np.frombuffer(body, dtype, count, start).reshape(shape))
        start += count * dtype.itemsize
    return Order(kind=order.kind, uid=order.uid, number=order.number, arrays=arrays)


def mesh_of_all(mesh: MeshShape | str | None) -> MeshShape:
    """The mesh that the devices of all processes make up; None: they share each expert. Raises ValueError if it has
    another number of devices than there are, or is written otherwise."""
    count = jax.device_count()
    shape = MeshShape.parse(mesh) if isinstance(mesh, str) else mesh or MeshShape(model=count)
    if shape.num_devices != count:
        raise ValueError(f"a mesh {shape} takes {shape.num_devices} devices, but all processes together have {count}")
    return shape


@asynccontextmanager
async def open_lead(
    *,
    host: str | None,
    mesh: MeshShape | None = None,
    on_lost: Callable[[str], None] = lambda text: None,
    on_leave_asked: Callable[[], None] = lambda: None,
) -> AsyncIterator[tuple[PlacedDevice, ...]]:
    """The `devices` that process 0 gives to `Swarm.serve`: while the block is open the others do as it does, and on
    leaving they are told to leave.

    Args:
      host: where the others reach this process; a name or address of this host, or None: all of its addresses.
      mesh: all devices of all processes; None: each expert is shared by all.
      on_lost: told that a process is gone, in a sentence, before the block is cancelled.
      on_leave_asked: called when one of the others has been told to stop. The block is to be left soon.

    Raises:
      ProcessFailed: a process is gone, or did not come within a minute.
    """
    listeners = await trio.open_tcp_listeners(0, host=host)
    secret = secrets.token_bytes(SECRET_BYTES)
    port = listeners[0].socket.getsockname()[1]
    await trio.to_thread.run_sync(_through_jax, port.to_bytes(2, "big") + secret)
    token = trio.lowlevel.current_trio_token()
    # No bound: the event loop never waits for a process, and before a second turn has begun the first is done by all.
    send, receive = trio.open_memory_channel[_Parts | None](float("inf"))

    followers = await _accept_all(listeners, secret)
    # At a meeting the device's thread waits here for True from each of the others; there is False when one is gone.
    came = queue.SimpleQueue[bool]()

    def tell(order: Order) -> None:
        token.run_sync_soon(send.send_nowait, encode_order(order))  # from the device's thread, or from this one
        if order.kind == "meet" and not all(came.get() for _ in followers):
            raise ProcessFailed("a process of the node is gone")

    async with background_nursery() as nursery, AsyncExitStack() as stack:
        for stream in followers.values():
            await stack.enter_async_context(stream)
        all_told, watching = trio.Event(), trio.CancelScope()
        nursery.start_soon(_watch, followers, came, watching, on_lost, on_leave_asked)
        nursery.start_soon(_telling, on_lost, _send_orders, receive, followers, all_told)
        try:
            yield _devices(mesh, tell)
        finally:
            watching.cancel()  # they close their ends as they leave
            with trio.move_on_after(_LEAVE_TIMEOUT_S, shield=True):
                tell(Order(kind="leave"))
                token.run_sync_soon(send.send_nowait, None)
                await all_told.wait()


async def follow(
    experts: Mapping[str, Expert],
    optimizer: optax.GradientTransformation | None,
    *,
    host: str,
    seed: int,
    mesh: MeshShape | None = None,
    on_lost: Callable[[str], None] = lambda text: None,
    until_told_to_stop: Callable[[], Awaitable[None]] = trio.sleep_forever,
) -> None:
    """Do as process 0 says until that leaves: for every other process.

    Args:
      experts, optimizer, seed, mesh: as process 0 serves them; `experts` by the uid of each.
      host: where process 0 is reached.
      on_lost: told that process 0 is gone, in a sentence.
      until_told_to_stop: returns when this process shall end. Process 0, which saves what was learnt, is asked to
        leave then; this goes on until it does.

    Raises:
      ProcessFailed: process 0 is gone, or cannot be reached.
    """
    told = await trio.to_thread.run_sync(_through_jax, bytes(2 + SECRET_BYTES), abandon_on_cancel=True)
    port, secret = int.from_bytes(told[:2], "big"), told[2:]
    try:
        with trio.fail_after(CONNECT_TIMEOUT_S):
            stream = await trio.open_tcp_stream(host, port)
            await stream.send_all(secret + jax.process_index().to_bytes(4, "big"))
    except (OSError, trio.TooSlowError, trio.BrokenResourceError) as error:
        raise ProcessFailed(f"process 0 of the node cannot be reached at {host}:{port}: {error}") from error
    (place,) = _devices(mesh, None)
    followed: dict[str, _Followed] = {}

    def obey(order: Order) -> None:
        uid = order.uid
        if order.kind == "make":
            followed[uid] = _Followed(parse_uid(uid), experts[uid], optimizer, seed=seed, place=place.place)
        else:
            followed[uid].obey(order)

    send, receive = trio.open_memory_channel[Order](_MAX_WAITING_ORDERS)
    async with stream, trio.open_nursery() as nursery:
        turn = trio.Lock()

        async def say(what: bytes) -> None:
            with suppress(trio.BrokenResourceError):  # whoever receives orders notices
                async with turn:
                    await stream.send_all(what)

        async def ask_to_leave() -> None:
            await until_told_to_stop()
            await say(_ASKS_TO_LEAVE)

        nursery.start_soon(_telling, on_lost, _receive_orders, stream, send)
        nursery.start_soon(ask_to_leave)
        async for order in receive:
            if order.kind == "leave":
                nursery.cancel_scope.cancel()
                break
            if order.kind == "meet":
                await say(_CAME_TO_MEETING)
                continue
            try:
                await place.device.run(obey, order)
            except Exception:
                # Process 0 failed in the same way, and has told who asked.
                logger.exception("an order to %s for expert %r failed", order.kind, order.uid)


class _LedPrograms:
    """The programs of one expert at process 0: the others are told of each piece of work before it begins."""

    def __init__(self, tell: Tell, uid: str, programs: ExpertPrograms) -> None:
        self._tell, self._uid, self._programs = tell, uid, programs
        self.size, self.nbytes, self.least_rows = programs.size, programs.nbytes, programs.least_rows
        self.warm, self.kind, self.at_once = programs.warm, programs.kind, programs.at_once
        self.most_together, self.begin_with = programs.most_together, programs.begin_with

    @property
    def calls_host(self) -> bool:
        return self._programs.calls_host

    def init(self, key_data: Any) -> PyTree:
        self._tell(Order(kind="make", uid=self._uid))
        return self._programs.init(key_data)

    def compile(self, bucket: int) -> None:
        self._tell(Order(kind="compile", uid=self._uid, number=bucket))
        self._programs.compile(bucket)
        self._tell(Order(kind="meet", uid=self._uid))  # warm is what is warm in all processes

    def begin(self, state: State, work: Sequence[Work]) -> tuple[State, Callable[[], list[Result]]]:
        ((_, batch, staleness),) = work
        arrays = {"inputs": batch.inputs, "staleness": (np.asarray(staleness, np.float32),)}
        if batch.output_grads is not None:
            arrays["output_grads"] = (batch.output_grads,)
        if batch.keys is not None:
            arrays["keys"] = (batch.keys,)
        self._tell(Order(kind="run", uid=self._uid, arrays=arrays))
        return self._programs.begin(state, work)

    def read(self, state: State, index: int) -> State:
        self._tell(Order(kind="gather", uid=self._uid))
        return self._programs.read(state, index)

    def write(self, state: State, index: int, saved: State) -> State:
        leaves = tuple(map(np.asarray, jax.tree.leaves(saved)))
        self._tell(Order(kind="load", uid=self._uid, arrays={"state": leaves}))
        return self._programs.write(state, index, saved)


class _Followed:
    """The part of an expert that another process than process 0 holds; arguments as of `make_backend`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        group = make_backend(*arguments, **options).group
        self._programs, self._state = group.programs, group.take()

    def obey(self, order: Order) -> None:
        """Do what process 0 does with the expert. Raises ValueError if the order does not fit it."""
        if order.kind == "run" and (staleness := order.one("staleness")) is not None:
            inputs = tuple(order.arrays["inputs"])
            batch = Batch(inputs=inputs, output_grads=order.one("output_grads"), keys=order.one("keys"))
            self._state, wait = self._programs.begin(self._state, [Work(0, batch, float(staleness))])
            wait()
        elif order.kind == "compile":
            self._programs.compile(order.number)
        elif order.kind == "gather":
            self._programs.read(self._state, 0)
        elif order.kind == "load":
            saved = jax.tree.unflatten(jax.tree.structure(self._state), order.arrays.get("state", ()))
            self._state = self._programs.write(self._state, 0, saved)
        else:
            raise ValueError(f"an expert cannot obey an order to {order.kind}")


def _devices(mesh: MeshShape | None, tell: Tell | None) -> tuple[PlacedDevice, ...]:
    layout = Layout(devices=tuple(jax.devices()), mesh_shape=mesh_of_all(mesh))
    # Compiling takes its turn: it is an order like others, and all processes obey in one order. And the event loop is
    # what tells the others: did it compute itself, it would wait for processes that know of nothing.
    device = ThreadDevice(compiles_beside=False, inline_s=0.0)
    led = None if tell is None else partial(_LedPrograms, tell)
    return (PlacedDevice(place=Place(layout=layout, led=led), device=device),)


def _through_jax(data: bytes) -> bytes:
    """The bytes that process 0 calls this with, for all processes, which call it at the same time with as many."""
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(np.frombuffer(data, np.uint8))).astype(np.uint8))


async def _accept_all(listeners: list[trio.SocketListener], secret: bytes) -> dict[int, trio.SocketStream]:
    """A connection to each other process, by its number. Whoever does not know the secret is turned away."""
    expected, found = set(range(1, jax.process_count())), dict[int, trio.SocketStream]()

    async def greet(stream: trio.SocketStream) -> None:
        with trio.move_on_after(_GREETING_TIMEOUT_S):
            greeting = await _receive_exactly(stream, SECRET_BYTES + 4)
            number = 0 if greeting is None else int.from_bytes(greeting[SECRET_BYTES:], "big")
            known = greeting is not None and secrets.compare_digest(bytes(greeting[:SECRET_BYTES]), secret)
            if known and number in expected - set(found):
                found[number] = stream
                if not expected - set(found):
                    nursery.cancel_scope.cancel()
                return
        await trio.aclose_forcefully(stream)

    # Not `trio.serve_listeners`, which closes each connection when it has been greeted.
    async def accept(listener: trio.SocketListener) -> None:
        while True:
            stream = await listener.accept()
            if len(nursery.child_tasks) < _MAX_GREETINGS:
                nursery.start_soon(greet, stream)
            else:
                await trio.aclose_forcefully(stream)

    with trio.move_on_after(CONNECT_TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            for listener in listeners if expected else ():
                nursery.start_soon(accept, listener)
    for listener in listeners:
        await listener.aclose()
    if missing := sorted(expected - set(found)):
        raise ProcessFailed(f"process {missing[0]} of the node did not connect within {CONNECT_TIMEOUT_S:.0f} s")
    return found


async def _send_orders(
    receive: trio.MemoryReceiveChannel[_Parts | None],
    followers: Mapping[int, trio.SocketStream],
    all_told: trio.Event,
) -> None:
    """Send each order to everybody, until there is None. Even when all else is cancelled: half an order is none."""
    with trio.CancelScope(shield=True):
        async for parts in receive:
            if parts is None:
                break
            for number, stream in followers.items():
                try:
                    for part in parts:
                        await stream.send_all(part)
                except trio.BrokenResourceError as error:
                    all_told.set()
                    raise _lost(number) from error
    all_told.set()


async def _watch(
    followers: Mapping[int, trio.SocketStream],
    came: queue.SimpleQueue[bool],
    scope: trio.CancelScope,
    on_lost: Callable[[str], None],
    on_leave_asked: Callable[[], None],
) -> None:
    """Hear what the others say. Raises ProcessFailed when one of them is gone."""

    async def hear(number: int, stream: trio.SocketStream) -> None:
        while (said := await _receive_exactly(stream, 1)) is not None:
            if said == _ASKS_TO_LEAVE:
                on_leave_asked()
            else:
                came.put(True)
        came.put(False)
        raise _lost(number)

    with scope:
        async with trio.open_nursery() as nursery:
            for number, stream in followers.items():
                nursery.start_soon(_telling, on_lost, hear, number, stream)


async def _receive_orders(stream: trio.SocketStream, send: trio.MemorySendChannel[Order]) -> None:
    while True:
        length = await _receive_exactly(stream, LENGTH_BYTES)
        nbytes = 0 if length is None else int.from_bytes(length, "big")
        if nbytes > (most := codec.MAX_ENCODED_BYTES):
            raise RemoteProtocolError(f"an order's header of {nbytes} bytes, at most {most} are allowed")
        if length is None or (header := await _receive_exactly(stream, nbytes)) is None:
            raise _lost(0)
        order, specs = parse_header_untrusted(bytes(header))
        if (body := await _receive_exactly(stream, nbytes_of_arrays(specs))) is None:
            raise _lost(0)
        await send.send(with_arrays(order, specs, body))
        if order.kind == "leave":
            return


async def _receive_exactly(stream: trio.SocketStream, nbytes: int) -> bytearray | None:
    """Receive so many bytes; return None if the other end closed or vanished before."""
    data = bytearray(nbytes)
    view, start = memoryview(data), 0
    while start < nbytes:
        try:
            chunk = await stream.receive_some(min(nbytes - start, _CHUNK_BYTES))
        except trio.BrokenResourceError:
            return None
        if not chunk:
            return None
        view[start : start + len(chunk)] = chunk
        start += len(chunk)
    return data


def _lost(number: int) -> ProcessFailed:
    return ProcessFailed(f"process {number} of the node is gone, and with it its part of every expert")


async def _telling(on_lost: Callable[[str], None], task: Callable[..., Awaitable[None]], *args: Any) -> None:
    """Do a task, and tell at once if it finds a process gone: what is cancelled then may never end."""
    try:
        await task(*args)
    except ProcessFailed as error:
        on_lost(str(error))
        raise
