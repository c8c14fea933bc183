"""CPU devices of their own for experts that share a process with somebody's jitted loop.

XLA's CPU client runs at most 32 programs of a device at once. A loop that does not read its results fills all of these
places; a layer's host callback (`mixture.flax_layers`) in the first of them waits for an expert. If the expert's
program needed a place, or one of the threads that callbacks hold, both would wait for ever. Another client has places
and threads of its own.
"""

import functools
from typing import Any

import jax


@functools.cache
def own_cpu_devices() -> tuple[jax.Device, ...]:
    """As many devices as JAX has on the CPU, of another client than JAX's; the same ones in every call.

    Raises RuntimeError if this version of JAX cannot make them.
    """
    try:
        from jaxlib.xla_client import make_cpu_client

        client: Any = make_cpu_client(num_devices=jax.local_device_count("cpu"))
        return tuple(client.local_devices())
    except (ImportError, AttributeError, TypeError) as error:
        raise RuntimeError(
            f"JAX {jax.__version__} has no second CPU client ({error}), without which experts and a loop under jit "
            "would stop each other: serve the experts from another process (dmoe node)"
        ) from error


def has_own_devices() -> bool:
    """True if experts of this process were given such devices."""
    return own_cpu_devices.cache_info().currsize > 0
