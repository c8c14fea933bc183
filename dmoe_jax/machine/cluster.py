"""The processes that JAX has found to compute as one."""


def coordinator_host() -> str:
    """Host of the process through which the others have found each other, number 0, as they reach it. JAX has been
    initialised as one of several processes by then."""
    # Nothing public tells: where JAX finds a cluster by itself, it alone knows.
    from jax._src.distributed import global_state

    address = global_state.coordinator_address
    assert address is not None, "jax.distributed.initialize comes first"
    host: str = address.rpartition(":")[0].strip("[]")
    return host
