"""A process of callers, a helper of the measurement: each asks as a trainer does, through a `RemoteMixture`.

An order {"begin", "end"} has all callers make layer calls, forward and then backward, from now until `end` is past;
what ends between the two counts. Times are of `time.perf_counter`, whose clock the processes of a machine share.
"""

import math
import random
import time
from typing import Any

import jax
import numpy as np
import trio

from dmoe_jax import open_swarm
from dmoe_jax.directory.grid import ExpertUid
from dmoe_jax.mixture.expert_calls import ExpertCall
from dmoe_jax.mixture.remote import Choice
from dmoe_jax.routing import product_key
from dmoe_net import NetError
from experiments.exits import one_line_errors
from experiments.node_speed.node import PREFIX, hivemind_ffn
from experiments.node_speed.settings import Case
from experiments.processes import orders, run_helper, say


async def call(*, case: dict[str, Any], contact: str, callers: int, seed: int) -> None:
    """Call a node whenever that is ordered, with so many of the case's callers; each has a seed of its own."""
    # Nothing is computed here, and a GPU's memory is the node's.
    jax.config.update("jax_platforms", "cpu")
    own = Case(**case)
    async with open_swarm(contact, listen=None) as swarm:
        # It waits for every answer, and its router is never asked.
        mixture = swarm.mixture(
            PREFIX,
            hivemind_ffn(own.d_model),
            product_key((own.experts,)),
            k_best=own.at_once,
            k_min=own.at_once,
            grace_s=math.inf,
            timeout_s=120.0,
            on_shortfall="raise",
        )
        await mixture.check()
        living = await mixture.living()
        if len(living) != own.experts:
            raise ConnectionError(f"expected {own.experts} experts of {own.name}, found {len(living)}")

        def choice(rng: random.Random, rows: int) -> Choice:
            """All rows to `at_once` experts, as a router would have chosen them."""
            chosen, every_row = rng.sample(sorted(living), own.at_once), np.arange(rows)
            calls = tuple(
                ExpertCall(
                    uid=str(ExpertUid(PREFIX, place)), contact=living[place], rows=every_row, slots=np.full(rows, slot)
                )
                for slot, place in enumerate(chosen)
            )
            return Choice(np.broadcast_to(np.array(chosen, np.int32), (rows, own.at_once, 1)), calls)

        async def make_calls(rng: random.Random, begin: float, end: float, counts: list[int]) -> None:
            """Make one caller's layer calls until a slice is over: draw experts, ask them, send gradients back.

            The samples of a call that ended in the slice count whole, though it began before; in return those of the
            last one, which ends later, do not count.
            """
            draw = np.random.default_rng(rng.getrandbits(32)).normal
            x = draw(size=(own.rows, own.d_model)).astype(np.float32)
            grads = draw(size=(own.rows, own.at_once, own.d_model)).astype(np.float32)
            while time.perf_counter() < end:
                # Mixed: uniform in the logarithm, as many from 1 to 2 as from 128 to 256.
                rows = max(1, round(own.rows ** rng.random())) if own.is_mixed else own.rows
                _, answered, residual = await mixture.forward(choice(rng, rows), [x[:rows]])
                await mixture.backward(residual, grads[:rows])
                if begin <= time.perf_counter() < end:
                    counts.append(rows * own.at_once)
                if not answered.all() or mixture.statistics.failures:
                    raise ConnectionError(f"calls of {own.name} failed: {mixture.statistics.failures}")

        chance = [random.Random(seed + number) for number in range(callers)]
        say(ready=True)
        async for order in orders():
            counts: list[int] = []
            async with trio.open_nursery() as nursery:
                for rng in chance:
                    nursery.start_soon(make_calls, rng, order["begin"], order["end"], counts)
            say(samples=sum(counts))


if __name__ == "__main__":
    with one_line_errors("node_speed", expected=(ConnectionError, NetError)):
        run_helper(call)
