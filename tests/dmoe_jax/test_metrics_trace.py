"""The trace of a run's calls and steps: what is in it, how it is laid out, what is kept, in virtual time."""

import itertools
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trio

import dmoe_net
from dmoe_jax.machine.device import CostModel, InlineDevice
from dmoe_jax.metrics.trace import Trace
from dmoe_jax.mixture.statistics import CallRecord
from dmoe_jax.models.mlp import MLP, Batch, MLPConfig
from dmoe_jax.routing.product_key import product_key
from dmoe_jax.swarm.opening import open_swarm
from dmoe_jax.trainer import StepSpan
from dmoe_net.identity import Address, Contact, PeerId

FIRST, SECOND = (Contact(PeerId(bytes([index]) * 32), Address(f"10.0.0.{index}", 1)) for index in (1, 2))


def call(contact: Contact, began: float, ended: float, outcome: str = "ok") -> CallRecord:
    return CallRecord(
        method="expert.forward", uid="ffn.0.1", contact=contact, rows=4, outcome=outcome, began=began, ended=ended
    )


def written(trace: Trace, folder: Path) -> dict[str, Any]:
    """The trace as a viewer reads it from a file."""
    trace.write(folder / "new" / "trace.json")
    found: dict[str, Any] = json.loads((folder / "new" / "trace.json").read_text())
    return found


def happened(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_hosts_have_tracks_and_calls_at_once_have_lanes(tmp_path: Path) -> None:
    """The second call to the first host overlaps the first, and has a new lane; the third begins as the first ends."""
    trace = Trace(100.0)
    for record in (
        call(FIRST, 101.0, 101.5),
        call(FIRST, 101.25, 102.0),
        call(SECOND, 101.25, 101.75, "timeout"),
        call(FIRST, 101.5, 103.0),
        StepSpan(trainer=1, began=100.5, ended=103.25, outcome="ok"),
    ):
        trace.add(record)
    found = written(trace, tmp_path)
    names = {event["pid"]: event["args"]["name"] for event in found["traceEvents"] if event["ph"] == "M"}
    assert list(names.values()) == ["trainers", "01010101 at 10.0.0.1:1", "02020202 at 10.0.0.2:1"]
    rows = [(names[each["pid"]][:8], each["tid"], each["ts"], each["dur"], each["cat"]) for each in happened(found)]
    assert rows == [
        ("trainers", 1, 0.5e6, 2.75e6, "ok"),
        ("01010101", 0, 1.0e6, 0.5e6, "ok"),
        ("02020202", 0, 1.25e6, 0.5e6, "failed"),
        ("01010101", 1, 1.25e6, 0.75e6, "ok"),
        ("01010101", 0, 1.5e6, 1.5e6, "ok"),
    ]
    details = {"uid": "ffn.0.1", "kind": "forward", "rows": 4, "outcome": "timeout"}
    assert [each["args"] for each in happened(found) if each["cat"] == "failed"] == [details]
    assert found["otherData"] == {"events_kept": 5, "events_dropped": 0}


def test_the_latest_events_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of five; the file says how many are missing."""
    monkeypatch.setattr("dmoe_jax.metrics.trace.MAX_EVENTS", 3)
    trace = Trace(0.0)
    for index in range(5):
        trace.add(call(FIRST, float(index), index + 0.5))
    found = written(trace, tmp_path)
    assert [each["ts"] for each in happened(found)] == [2e6, 3e6, 4e6]
    assert found["otherData"] == {"events_kept": 3, "events_dropped": 2}


async def simulated() -> tuple[Trace, int]:
    """A node whose batches take half a second, and a trainer that makes three steps; the trace, and answered calls."""
    config = MLPConfig(input_dim=4, num_classes=2, d_model=4, num_layers=1, grid_size=(2,), k_best=2)
    rng = np.random.default_rng(0)
    x, labels = jnp.asarray(rng.normal(size=(6, 4)), jnp.float32), jnp.asarray(rng.integers(0, 2, 6), jnp.int32)
    device = InlineDevice(CostModel(call_s=0.5))
    async with (
        dmoe_net.simulate(latency=dmoe_net.Constant(0.05)) as network,
        open_swarm(network=network, host="node", seed=0, device=device) as first,
    ):
        await first.serve({"layer0.[0:2]": config.expert()}, optimizer=optax.sgd(0.1))
        async with open_swarm(first.contact, network=network, host="trainer", seed=1) as swarm:
            model = MLP.on(swarm, config, product_key((2,)))
            trainers = swarm.trainer(model, optax.sgd(0.1), itertools.repeat(Batch(x, labels)))
            trace = Trace(trio.current_time())
            swarm.watch_calls(trace.add)
            trainers.trainers[0].on_span = trace.add
            await trainers.run(3)
            return trace, swarm.statistics.ok


@pytest.mark.slow
def test_a_simulated_run_is_traced_in_virtual_time(tmp_path: Path) -> None:
    """Each step asks two experts forward and backward of one device: 0.5 s for each batch and 0.1 s for the way."""
    trace, answered = dmoe_net.run(simulated)
    events = happened(written(trace, tmp_path))
    calls, steps = ([each for each in events if (each["name"] == "step") == wanted] for wanted in (False, True))
    assert len(calls) == answered == 12
    assert [each["args"]["kind"] for each in calls[:4]] == ["forward"] * 2 + ["backward"] * 2
    assert {each["args"]["uid"] for each in calls} == {"layer0.0", "layer0.1"}
    assert {each["args"]["rows"] for each in calls} == {6}
    # The second of two waits for the first: they overlap, in lanes of their own.
    assert {each["tid"] for each in calls} == {0, 1}
    assert sorted(each["dur"] for each in calls[:2]) == [pytest.approx(0.6e6, abs=1e4), pytest.approx(1.1e6, abs=1e4)]
    # Before its first call the trainer asks the DHT who serves the layer, which takes a round trip.
    assert [each["dur"] for each in steps] == [pytest.approx(seconds * 1e6, abs=3e4) for seconds in (2.3, 2.2, 2.2)]
    assert steps[1]["ts"] == pytest.approx(steps[0]["ts"] + steps[0]["dur"], abs=1.0)
