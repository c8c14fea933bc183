"""The processes that JAX has found to compute as one."""


def coordinator_address() -> str:
    """HOST:PORT of the process that the others found each other through, number 0, as they reach it. JAX has been
    initialised as one of several processes by then."""
    # Nothing public tells: where JAX finds a cluster by itself, it alone knows the address.
    from jax._src.distributed import global_state

    address = global_state.coordinator_address
    assert address is not None, "jax.distributed.initialize comes first"
    return str(address)
