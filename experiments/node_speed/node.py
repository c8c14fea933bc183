"""The node's process, a helper of the measurement.

It serves the experts of a case over TLS and says where, how much memory its imports took and how much its experts have.
It answers orders {"do": ...}: "count" with its counters; "bare" with the seconds of bare calls of the same programs,
for which nobody may be calling it; "save" by serving anew, with checkpoints.
"""

import itertools
import time
from functools import partial
from typing import Any

import jax
import numpy as np
import trio
from jax import monitoring

from dmoe_jax.experts.base import init_by_uid
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.node.programs import expert_programs
from dmoe_jax.runs.setting_up import set_up_jax
from dmoe_jax.swarm.opening import open_swarm
from dmoe_jax.swarm.serving import Served
from experiments.node_speed.cases import Case
from experiments.node_speed.expert import ADAM, PREFIX, hivemind_ffn
from experiments.processes import memory_bytes, orders, run_helper, say

COMPILED_EVENT = "/jax/core/compile/backend_compile_duration"
"""JAX records it once for each program that XLA compiles, or takes out of the cache on disk instead."""


class CompilationCounter:
    """Counts the programs that this process compiles, from now on. There is no end to it: one for each process."""

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0
        """So far; of threads that compile at once, together."""
        monitoring.register_event_duration_secs_listener(self._note)

    def _note(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        del kwargs
        if event == COMPILED_EVENT:
            self.count, self.seconds = self.count + 1, self.seconds + duration_secs


class BareCalls:
    """A loop over the programs of a node's experts, forward and backward with the optimiser's step, and nothing else.

    The experts are others of the same kind and number, so that the loop finds as little in the caches as the node does.
    A call gets NumPy arrays and ends when its result is one, as a node's batch does.

    Args:
      case: the experts.
      seed: of what is asked.
    """

    def __init__(self, case: Case, seed: int) -> None:
        expert = hivemind_ffn(case.d_model)
        self._programs = expert_programs(expert, ADAM)
        key = jax.random.key(seed)
        self._params = [init_by_uid(key, expert, "bare", (index,)) for index in range(case.experts)]
        self._opt_states = [ADAM.init(params) for params in self._params]
        self._d_model = case.d_model
        self._rng = np.random.default_rng(seed)

    def calls(self, rows: int, *, for_s: float) -> dict[str, float]:
        """Call the experts in turn, after two rounds that warm up and may compile.

        Args:
          rows: of each call.
          for_s: seconds to go on.
        Returns: `forward_s` and `backward_s`, mean seconds of a forward and of a backward with its step; and
          `cpu_share`, processor seconds of the process a second.
        """
        x, grads = self._rng.normal(size=(2, rows, self._d_model)).astype(np.float32)
        for index in 2 * list(range(len(self._params))):
            self._call(index, x, grads)
        forward_s = backward_s = 0.0
        count, began, cpu_s = 0, time.perf_counter(), time.process_time()
        for index in itertools.cycle(range(len(self._params))):
            took = self._call(index, x, grads)
            forward_s, backward_s, count = forward_s + took[0], backward_s + took[1], count + 1
            if (took_s := time.perf_counter() - began) >= for_s:
                break
        cpu_share = (time.process_time() - cpu_s) / took_s
        return {"forward_s": forward_s / count, "backward_s": backward_s / count, "cpu_share": cpu_share}

    def _call(self, index: int, x: np.ndarray, grads: np.ndarray) -> tuple[float, float]:
        """Seconds of one forward and one backward."""
        started = time.perf_counter()
        np.asarray(self._programs.apply(self._params[index], (x,), None))
        between = time.perf_counter()
        finite, self._params[index], self._opt_states[index], input_grads = self._programs.grad_and_update(
            self._params[index], self._opt_states[index], (x,), grads, None, np.float32(0)
        )
        np.asarray(finite), np.asarray(input_grads[0])
        return between - started, time.perf_counter() - between


async def serve(*, case: dict[str, Any], seed: int) -> None:
    """Serve a case until standard input closes.

    Args:
      case: the fields of a `Case`.
      seed: of the experts, and of what is asked in bare calls.
    """
    set_up_jax()
    held = memory_bytes()
    compilations = CompilationCounter()
    own, began = Case(**case), time.perf_counter()
    async with open_swarm(listen="127.0.0.1:0", seed=seed) as swarm:
        begin = partial(
            swarm.serve,
            {f"{PREFIX}.[0:{own.experts}]": hivemind_ffn(own.d_model)},
            optimizer=ADAM,
            config=NodeConfig(max_batch_rows=own.max_batch_rows, warm_up_rows=own.max_batch_rows),
        )
        served = await begin()
        say(
            contact=swarm.contact,
            import_bytes=None if held is None else held[0],
            state_bytes=state_bytes(served),
            start_s=time.perf_counter() - began,
            programs=compilations.count,
            compile_s=compilations.seconds,
        )
        bare: BareCalls | None = None  # made when it is asked for: it would count as the node's memory
        async for order in orders():
            if order["do"] == "count":
                say(**counters(served), compilations=compilations.count)
            elif order["do"] == "bare":
                if bare is None:
                    bare = await trio.to_thread.run_sync(BareCalls, own, seed)
                calls = partial(bare.calls, order["rows"], for_s=order["for_s"])
                say(**await trio.to_thread.run_sync(calls))
            else:
                await served.close()
                served = await begin(checkpoint_dir=order["folder"], checkpoint_period_s=order["period_s"])
                say(served=True)


def state_bytes(served: Served) -> int:
    """Bytes of the parameters and optimiser states that are served, without what arrays weigh beside their data."""
    return sum(leaf.nbytes for backend in served.backends.values() for leaf in jax.tree.leaves(backend.state))


def counters(served: Served) -> dict[str, Any]:
    """Return counters of what a node and its process have used and done so far."""
    status = served.node.status()
    return {
        **{name: status[name] for name in ("rows", "batches", "busy_s")},
        "cpu_s": time.process_time(),
        "memory_bytes": memory_bytes(),
    }


if __name__ == "__main__":
    run_helper(serve)
