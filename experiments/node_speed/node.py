"""The node's process, a helper of the measurement.

It serves the experts of a case over TLS and says where. It answers orders {"do": ...}: "count" with its counters;
"bare" with the seconds of bare calls of the same programs, for which nobody may be calling it.

The expert is hivemind's `ffn` in Flax, about 8 d_model^2 parameters, with Adam: norm(x + Dense_d(gelu(Dense_4d(x)))).
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import trio
from flax import linen as nn
from jax import monitoring
from jaxtyping import Array, Float

from dmoe_jax import Expert, NodeConfig, expert_from_linen, open_swarm
from dmoe_jax.experts.base import init_by_uid
from dmoe_jax.node.programs import expert_programs
from dmoe_jax.runs.setting_up import set_up_jax
from experiments.node_speed.settings import Case
from experiments.processes import memory_bytes, orders, run_helper, say

PREFIX = "ffn"
"""Experts are `ffn.0`, `ffn.1` and so on."""

ADAM = optax.adam(1e-3)
"""Each expert's optimiser, with the step size that is the default of hivemind's benchmark. One object: compiled code is
found by it."""

COMPILED_EVENT = "/jax/core/compile/backend_compile_duration"
"""JAX records it once for each program that XLA compiles, or takes out of the cache on disk instead."""


class HivemindFeedforward(nn.Module):
    """`FeedforwardBlock` of hivemind 1.1.12 (`moe/server/layers/common.py`): one hidden layer of 4 d_model units, GELU
    in its approximation by tanh, one LayerNorm with epsilon 1e-12 behind the residual connection."""

    d_model: int

    @nn.compact
    def __call__(self, x: Float[Array, "batch d_model"]) -> Float[Array, "batch d_model"]:
        """The block's output, of the input's shape."""
        hidden = nn.gelu(nn.Dense(4 * self.d_model)(x), approximate=True)
        return nn.LayerNorm(epsilon=1e-12)(x + nn.Dense(self.d_model)(hidden))


def hivemind_ffn(d_model: int) -> Expert:
    """The expert of this width; equal widths give the same object."""
    example = jax.ShapeDtypeStruct((1, d_model), np.float32)
    return expert_from_linen(HivemindFeedforward(d_model), example, name="hivemind_ffn", check=False)


def bare_calls(case: Case, seed: int) -> Callable[[int, float], float]:
    """Make experts to be called by a loop over their programs, forward and backward with the optimiser's step.

    The experts are others of the same kind and number as the node's, so that the loop finds as little in the caches as
    the node does. A call gets NumPy arrays and ends when its result is one, as a node's batch does.

    Returns: the loop: (rows of each call, seconds to go on) -> mean seconds of a forward and the backward behind it.
    """
    expert, key, rng = hivemind_ffn(case.d_model), jax.random.key(seed), np.random.default_rng(seed)
    programs = expert_programs(expert, ADAM)
    params = [init_by_uid(key, expert, "bare", (index,)) for index in range(case.experts)]
    opt_states = [ADAM.init(each) for each in params]

    def call(index: int, x: np.ndarray, grads: np.ndarray) -> None:
        np.asarray(programs.apply(params[index], (x,), None))
        finite, params[index], opt_states[index], input_grads = programs.grad_and_update(
            params[index], opt_states[index], (x,), grads, None, np.float32(0)
        )
        np.asarray(finite), np.asarray(input_grads[0])

    def loop(rows: int, for_s: float) -> float:
        x, grads = rng.normal(size=(2, rows, case.d_model)).astype(np.float32)
        for index in 2 * list(range(case.experts)):  # warms up, and may compile
            call(index, x, grads)
        began, took_s, count = time.perf_counter(), 0.0, 0
        while took_s < for_s:
            call(count % case.experts, x, grads)
            took_s, count = time.perf_counter() - began, count + 1
        return took_s / count

    return loop


async def serve(*, case: dict[str, Any], seed: int) -> None:
    """Serve a case until standard input closes."""
    set_up_jax()
    imported = memory_bytes()
    own, compiled = Case(**case), list[str]()

    def note(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == COMPILED_EVENT:
            compiled.append(event)

    monitoring.register_event_duration_secs_listener(note)
    async with open_swarm(listen="127.0.0.1:0", seed=seed) as swarm:
        served = await swarm.serve(
            {f"{PREFIX}.[0:{own.experts}]": hivemind_ffn(own.d_model)},
            optimizer=ADAM,
            config=NodeConfig(max_batch_rows=own.max_batch_rows, warm_up_rows=own.max_batch_rows),
        )
        # Memory that the node may take beyond its imports: 1.3 times its parameters and optimiser states, and 150 MB.
        most_bytes = 1.3 * sum(backend.nbytes for backend in served.backends.values()) + 150e6
        say(contact=swarm.contact)
        bare: Callable[[int, float], float] | None = None  # until it is asked for: its memory would count
        async for order in orders():
            if order["do"] == "count":
                status, now = served.node.status(), memory_bytes()
                ratio = None if now is None or imported is None else (now[0] - imported[0]) / most_bytes
                counters = {"rows": status["rows"], "batches": status["batches"], "compilations": len(compiled)}
                say(**counters, memory_ratio=ratio)
            else:
                if bare is None:
                    bare = await trio.to_thread.run_sync(bare_calls, own, seed)
                say(call_s=await trio.to_thread.run_sync(bare, order["rows"], order["for_s"]))


if __name__ == "__main__":
    run_helper(serve)
