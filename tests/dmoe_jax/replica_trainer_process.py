"""Sets JAX up for one of two processes of four devices each, before anything computes; then it is `replica_trainer`."""

import json
import sys

import jax
import trio

if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_enable_preemption_service", False)
    times = {"heartbeat_timeout_seconds": 10, "shutdown_timeout_seconds": 10}
    jax.distributed.initialize(settings["coordinator"], 2, settings["index"], **times)
    from tests.dmoe_jax.replica_trainer import main

    trio.run(main, settings)
