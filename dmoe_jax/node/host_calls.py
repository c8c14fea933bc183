"""Programs that call the host: they may not run at the same time as one another, on however many devices.

A call to the host (`jax.pure_callback`, `io_callback`, `debug.callback`) holds one of XLA's threads until Python has
answered, and to give Python a large argument takes another one. XLA on a CPU has as many threads as there are cores: as
soon as each of them is held by such a call, all of them wait for ever. All devices of a process share these threads.
Where XLA has a single thread, none of them may run at all.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import jax

from dmoe_jax.machine.own_devices import has_own_devices
from dmoe_jax.machine.xla_threads import VARIABLE, make_room, xla_threads

_ONE_AT_A_TIME = threading.Lock()


class TooFewThreadsError(ValueError):
    """A program calls the host, and XLA has too few threads: it might never end."""


def calls_host(jaxpr: Any) -> bool:
    """Return True if anything in a (closed) jaxpr, branches and loops included, is a call to the host."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    # All such calls but pure ones are effects, of what is around them too; no expert should have other ones.
    return bool(jaxpr.effects) or any(
        "callback" in equation.primitive.name or any(map(calls_host, _jaxprs_in(tuple(equation.params.values()))))
        for equation in jaxpr.eqns
    )


def check_threads_for_host_calls() -> None:
    """Raise TooFewThreadsError unless XLA has threads for a program that calls the host, before it is compiled."""
    if jax.default_backend() != "cpu":
        return
    if has_own_devices() and not make_room():
        raise TooFewThreadsError(
            "an expert calls the host (jax.pure_callback, io_callback or debug.callback), for which it needs threads "
            "of XLA's that this process's own loop may hold: call connect() before JAX computes anything, on one CPU "
            "device, or serve the expert from another process"
        )
    if xla_threads() < 2:
        raise TooFewThreadsError(
            "an expert calls the host (jax.pure_callback, io_callback or debug.callback), for which XLA needs two "
            f"threads on a CPU, and has one: start the node with --xla-threads 2, or set {VARIABLE}=2 before JAX starts"
        )


def one_at_a_time(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which begins such programs and waits for them, so that on a CPU no other one is in there
    meanwhile; of the same name, which costs go by."""

    @functools.wraps(function)
    def alone(*args: Any) -> Any:
        with _ONE_AT_A_TIME if jax.default_backend() == "cpu" else nullcontext():
            return function(*args)

    return alone


def _jaxprs_in(param: Any) -> Iterator[Any]:
    if isinstance(param, tuple | list):
        for each in param:
            yield from _jaxprs_in(each)
    elif hasattr(param, "eqns") or hasattr(getattr(param, "jaxpr", None), "eqns"):
        yield param
