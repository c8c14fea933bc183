"""What `dmoe up` shows to scrapers: how its processes are, and where to find the metrics of each.

`/targets` is what Prometheus' HTTP service discovery reads (`http_sd_configs`): every process has a port of its own,
which the system chose, and new ones appear there by themselves.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping

from dmoe_jax.cli.local_view import TrainerWatch
from dmoe_jax.metrics.families import Family, by_label, labelled
from dmoe_jax.processes import LocalSwarm, SwarmProcess


class LocalMetrics:
    """Figures of a local swarm.

    Args:
      announce: this machine as others reach it, in place of the addresses that the processes listen at; None: as they
        are.
    """

    def __init__(self, announce: str | None) -> None:
        self._announce = announce
        self._swarm: LocalSwarm | None = None
        self._trainers: Mapping[str, TrainerWatch] = {}

    def began(self, swarm: LocalSwarm, trainers: Mapping[str, TrainerWatch]) -> None:
        """The swarm is open; its processes come one by one."""
        self._swarm, self._trainers = swarm, trainers

    def targets(self) -> bytes:
        """Where the processes that run show their metrics, as JSON."""
        found = []
        for process in self._processes:
            host, _, port = process.metrics.rpartition(":")
            if process.is_running and port:
                labels = {"process": process.name, "command": process.kind}
                found.append({"targets": [f"{self._announce or host}:{port}"], "labels": labels})
        return json.dumps(found).encode()

    def families(self) -> Iterator[Family]:
        """The processes by command and state, and how far the trainers are."""
        states = Counter((process.kind, _state_of(process)) for process in self._processes)
        counts = (({"command": kind, "state": state}, count) for (kind, state), count in sorted(states.items()))
        yield labelled("gauge", "dmoe_up_processes", "Processes of the swarm, by command and state.", counts)
        steps = {name: watch.step for name, watch in self._trainers.items()}
        yield by_label("gauge", "dmoe_up_trainer_step", "Updates of each trainer process.", "process", steps)

    def why_not_ready(self) -> str:
        """Which nodes do not serve; empty if all do that run, and there is one."""
        nodes = [process for process in self._processes if process.kind == "node" and process.is_running]
        starting = [node.name for node in nodes if not node.contact]
        if starting:
            return f"not serving yet: {', '.join(starting)}"
        return "" if nodes else "no node runs"

    @property
    def _processes(self) -> list[SwarmProcess]:
        return [] if self._swarm is None else self._swarm.processes


def _state_of(process: SwarmProcess) -> str:
    if not process.is_running:
        return "ended"
    return "serving" if process.contact else "running"
