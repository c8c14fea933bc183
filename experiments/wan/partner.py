"""The other process of part `loop`: it averages whenever the measured one does, and trains nothing.

It says where it is joined, and answers each order with how many averages it has; see `experiments.processes`.
"""

import jax.numpy as jnp
import optax
import trio

from dmoe_jax import open_swarm
from dmoe_jax.averaging import Round
from dmoe_jax.optim import moshpit_average
from dmoe_jax.peers.security import Plain
from experiments.processes import orders, run_helper, say
from experiments.wan.loop_settings import CONFIG, NAME, params_of


async def _average(num_params: int) -> None:
    """Average with whoever looks for a group, one round after the other."""
    optimizer = moshpit_average(optax.identity(), every=1)
    params, done = params_of(num_params), 0

    def count(round_: Round) -> None:
        nonlocal done
        done += round_.received > 0

    async with (
        open_swarm(listen="127.0.0.1:0", security=Plain(), seed=1) as swarm,
        swarm.averager(params, optimizer, name=NAME, config=CONFIG, on_round=count) as averager,
        trio.open_nursery() as nursery,
    ):

        async def rounds() -> None:
            state = optimizer.init(params)
            zeros = {name: jnp.zeros_like(value) for name, value in params.items()}
            while True:
                _, state = optimizer.update(zeros, state, params)
                state = await averager.step(state, params, wait=True)

        nursery.start_soon(rounds)
        say(contact=swarm.contact)
        async for _ in orders():
            say(averages=done)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    run_helper(_average)
