"""Watchers of a run of `dmoe train`: scrapers, a trace, and `dmoe status`."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import trio

from dmoe_jax.averaging import Round
from dmoe_jax.collaboration import Collaboration, GlobalStep
from dmoe_jax.metrics.families import counter
from dmoe_jax.metrics.monitor import Monitor
from dmoe_jax.metrics.trace import Trace
from dmoe_jax.metrics.training import TrainingRecorder, call_families, collaboration_families, training_families
from dmoe_jax.mixture.statistics import CallRecord
from dmoe_jax.swarm.swarm import Swarm
from dmoe_jax.trainer import AnyTrainers, StepSpan
from dmoe_jax.training.balance import balance, mean_balance, trunk_bias_range
from dmoe_jax.training.engine import Totals
from dmoe_jax.training.swarm_engine import SwarmEngine


class Watching:
    """Hears of a run, for scrapers, the trace and the swarm. Made by `watching`."""

    def __init__(self, swarm: Swarm, monitor: Monitor, trace: Trace | None) -> None:
        self._monitor = monitor
        self._trace = trace
        self._averages: deque[Round | GlobalStep] = deque()
        self._recorder = TrainingRecorder()
        self._met: dict[str, Any] = {}  # facts on the last average
        self._engine: SwarmEngine | None = None  # None until the run loop begins
        self._before: tuple[float, Totals] | None = None
        swarm.watch_calls(self._call)
        monitor.why_not_ready = lambda: "waiting for experts"
        monitor.show(partial(call_families, self._recorder, swarm.statistics))
        text = "Time in which the device worked."
        monitor.show(lambda: [counter("dmoe_device_busy_seconds_total", text, swarm.device.busy_s)])

    def found_experts(self) -> None:
        """Hear that every layer has a living expert."""
        self._monitor.why_not_ready = lambda: ""

    def steps_of(self, trainers: AnyTrainers) -> None:
        """Watch the steps of these trainers."""
        for trainer in trainers.trainers:
            trainer.on_span = self._span

    def collaboration(self, peer: Collaboration) -> None:
        """Show this collaboration."""
        self._monitor.show(partial(collaboration_families, peer))

    def begins(self, engine: SwarmEngine, unit: str) -> None:
        """Hear that the run loop begins; `unit` names the engine's items."""
        self._engine = engine
        self._monitor.show(
            lambda: training_families(
                self._recorder, engine.totals(), step=engine.step, loss=engine.last_loss, unit=unit
            )
        )

    @property
    def step(self) -> int:
        """Steps of the run so far."""
        return 0 if self._engine is None else self._engine.step

    def facts(self) -> dict[str, Any]:
        """Facts that this trainer tells the swarm: state, step, loss, items a second and balance of the load since the
        last time, failed calls, and averages with the mark of the last group."""
        engine = self._engine
        if engine is None:
            return {"state": "waiting", "step": 0}
        now, totals, loss = time.monotonic(), engine.totals(), engine.last_loss
        state = "compiling" if loss is None else "training"
        facts: dict[str, Any] = {"state": state, "step": engine.step, "failed_calls": totals.calls_failed, **self._met}
        if loss is not None and math.isfinite(loss):
            facts["loss"] = loss
        if self._before is not None and now > self._before[0]:
            before = self._before[1]
            facts["items_per_s"] = (totals.items - before.items) / (now - self._before[0])
            windows = [balance(uids, totals, before) for uids in engine.layers.values()]
            figures = {
                "load_entropy": mean_balance(windows)["load_entropy"] if windows else None,
                "bias_range": trunk_bias_range(engine.state()),
            }
            facts |= {name: figure for name, figure in figures.items() if figure is not None}
        self._before = now, totals
        return facts

    def averaged(self, done: Round | GlobalStep) -> None:
        """Hear of a round of averaging, or of a step of a collaboration, that is over."""
        self._averages.append(done)
        if isinstance(done, GlobalStep):
            self._recorder.global_step(done)
        else:
            self._recorder.round(done)
            if not done.why_lost:
                count = self._met.get("averages", 0) + 1
                self._met = {"averages": count, "met": done.group, "met_peers": done.peers}

    def records(self) -> list[tuple[str, Mapping[str, object]]]:
        """Records, for the run's metrics, of the averages since the last call."""
        return [_record(self._averages.popleft()) for _ in range(len(self._averages))]

    def _call(self, record: CallRecord) -> None:
        self._recorder.call(record)
        if self._trace is not None:
            self._trace.add(record)

    def _span(self, span: StepSpan) -> None:
        self._recorder.step(span)
        if self._trace is not None:
            self._trace.add(span)


def _record(done: Round | GlobalStep) -> tuple[str, Mapping[str, object]]:
    if isinstance(done, GlobalStep):
        return "global_step", asdict(done)
    if done.why_lost:
        return "event", {"name": "average_lost", "detail": done.why_lost}
    return "average", {
        "round": done.number,
        "peers": done.peers,
        "peers_lost": len(done.lost),
        "received": done.received,
        "sent_bytes": done.moved_bytes,
        "took_s": done.took_s,
    }


@contextmanager
def watching(swarm: Swarm, monitor: Monitor, trace_to: Path | None, say: Callable[[str], None]) -> Iterator[Watching]:
    """Watch a run while the block runs, and at its end, however that comes, write a trace of it, if it has a file. One
    that cannot be written ends no run: the user is told."""
    trace = None if trace_to is None else Trace(trio.current_time())
    try:
        yield Watching(swarm, monitor, trace)
    finally:
        swarm.watch_calls(None)
        if trace is not None and trace_to is not None:
            try:
                trace.write(trace_to)
            except OSError as error:
                say(f"--trace: cannot write {trace_to}: {error.strerror or error}")
            else:
                say(f"trace: {trace_to}")
