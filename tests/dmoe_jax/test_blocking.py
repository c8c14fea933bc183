"""A swarm without `async`: the same methods, waited for, and an end to every wait."""

import inspect
import itertools
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import optax
import pytest
import trio

from dmoe_jax.autodiff import Recording
from dmoe_jax.collaboration import CollaborationConfig
from dmoe_jax.experts.feedforward import feedforward
from dmoe_jax.model import Model, Outcome
from dmoe_jax.optim.moshpit import moshpit_average
from dmoe_jax.peers.security import Plain
from dmoe_jax.routing import product_key
from dmoe_jax.swarm.blocking import BlockingSwarm, Closed, connect
from dmoe_jax.swarm.serving import told_when_slow
from dmoe_jax.swarm.swarm import Swarm
from dmoe_net.errors import DialFailed


def distance(weight: Any, place: Any) -> Any:
    return (weight - place) ** 2


class Quadratic(Model):
    """One number that is to become the batch's; no expert."""

    def init(self, key: Any) -> Any:
        return jnp.zeros(())

    async def forward(self, run: Recording, params: Any, batch: Any, state: Any, keys: Any) -> Outcome:
        return Outcome(loss=run(distance, params, batch))


@pytest.fixture(scope="module")
def swarm() -> Iterator[BlockingSwarm]:
    with connect(security=Plain()) as swarm:
        yield swarm


def test_methods_are_those_of_the_swarm(swarm: BlockingSwarm) -> None:
    """Arguments and docstrings show as they are there; what is served, trained and averaged is waited for."""
    for name in ("serve", "mixture", "trainer", "averager", "collaboration", "collaborate", "experts", "members"):
        ours, theirs = getattr(swarm, name), getattr(Swarm, name)
        assert inspect.getdoc(ours) == inspect.getdoc(theirs)
        assert {"self", *inspect.signature(ours).parameters} >= set(inspect.signature(theirs).parameters)
    served = swarm.serve({"ffn.0": feedforward(d_model=2)}, optimizer=None, warm_up_rows=1)
    assert served.uids == tuple(swarm.experts()) == ("ffn.0",)
    assert [member.role for member in swarm.members()] == ["node"]
    with pytest.raises(ValueError, match=r"serves 1 experts already, among them ffn.0; .* in one call"):
        swarm.serve({"other.0": feedforward(d_model=2)}, optimizer=None)
    assert swarm.mixture("ffn", feedforward(d_model=2), product_key((1,)), k_best=1).check() == 1
    served.close()
    assert swarm.experts() == {}
    optimizer = moshpit_average(optax.sgd(0.25), every=1)
    trainers = swarm.trainer(Quadratic(), optimizer, iter([jnp.ones(())] * 3), params=jnp.zeros(()))
    trainers.run(2)
    # 0 -> 0.5 -> 0.75
    assert (trainers.step, float(trainers.params), trainers.evaluate([jnp.ones(())]).loss) == (2, 0.75, 0.0625)
    with swarm.averager(trainers.params, optimizer, name="run") as averager:
        state = averager.step(optimizer.init(trainers.params), trainers.params)
        assert averager.catch_up(0, {"params": trainers.params, "opt_state": state}) is None
        assert (averager.totals.done, averager.is_left_behind) == (0, False)
    sgd, nought, quick = optax.sgd(0.25), jnp.zeros(()), {"config": CollaborationConfig(lead_s=0.1)}
    with swarm.collaboration(nought, sgd, target_batch_size=4, name="own", **quick) as peer:
        for expected in (0.0, 0.5):
            peer.add(2 * (peer.params - 1.0), samples=2)
            assert float(peer.params) == expected
        assert (peer.step, peer.totals.alone) == (1, 1)
    batches = itertools.repeat(jnp.ones(()))
    with swarm.collaborate(Quadratic(), sgd, batches, target_batch_size=2, params=nought, **quick) as together:
        together.run(2)
        assert (together.step, float(together.params)) == (2, 0.75)
        assert together.evaluate([jnp.ones(())]).loss == 0.0625

    async def forward(run: Recording, params: Any, place: Any) -> Any:
        return run(distance, params, place)

    assert swarm.value_and_grad(forward)(jnp.ones(()), nought) == (1.0, 2.0)


def test_what_a_call_raises_comes_out(swarm: BlockingSwarm) -> None:
    """Its own errors; and a wait inside the swarm's thread, which would never end, is refused."""
    with pytest.raises(ValueError, match=r"ffn\.\["):
        swarm.serve({"ffn.[": feedforward(d_model=2)}, optimizer=None)
    with pytest.raises(ValueError, match=r"an expert prefix is 1 to 64 letters, digits, '_' or '-', got 'ffn\."):
        swarm.mixture("ffn.", feedforward(d_model=2), product_key((1,)))

    async def wait_inside() -> None:
        swarm.experts()

    with pytest.raises(RuntimeError, match="await the function instead"):
        swarm.run(wait_inside)
    with pytest.raises(DialFailed):
        connect("127.0.0.1:1", security=Plain())


def test_a_thread_that_runs_trio_itself_may_wait(swarm: BlockingSwarm) -> None:
    """As in a notebook whose cells are run by trio; its loop stands still meanwhile."""

    async def cell() -> Any:
        return swarm.experts()

    assert trio.run(cell) == {}


def test_closing_ends_what_is_waited_for() -> None:
    """Calls under way and later ones raise `Closed`; closing twice does nothing."""
    swarm = connect(security=Plain())
    begun, closed = threading.Event(), threading.Event()

    async def sleep() -> None:
        async with trio.open_nursery() as nursery:  # the cancellation comes out of it in a group
            nursery.start_soon(trio.sleep_forever)
            begun.set()

    def wait() -> None:
        with pytest.raises(Closed, match="during the call"):
            swarm.run(sleep)
        closed.set()

    threading.Thread(target=wait).start()
    assert begun.wait(10)
    swarm.close()
    swarm.close()
    assert closed.wait(10)
    with pytest.raises(Closed, match="is closed"):
        swarm.experts()


FORKED = """
import os, sys, warnings
from dmoe_jax import connect
warnings.simplefilter("ignore")  # JAX's own, of forks
swarm = connect(seed=1)
child = os.fork()
if not child:
    try:
        swarm.experts()
    except RuntimeError as error:
        print(error, flush=True)
    swarm.close()
    sys.exit(3)
status = os.waitpid(child, 0)[1]
print(os.waitstatus_to_exitcode(status), swarm.experts())
"""


def test_a_fork_ends_and_is_told_that_it_has_no_swarm() -> None:
    """It has none of the threads that it would wait for; its parent goes on."""
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, check=True, text=True, timeout=60)
    told, ended = done.stdout.splitlines()
    assert re.match(r"process \d+ was forked from process \d+, which has the swarm; .* call connect here", told)
    assert ended == "3 {}"


def test_whoever_serves_is_told_what_takes_long(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    """From Python, unless they asked to be told themselves."""
    wait = threading.Event.wait
    monkeypatch.setattr(threading.Event, "wait", lambda self, timeout=None: wait(self, timeout and timeout / 1000))
    with told_when_slow(None) as note:
        note("compiling 1 of 2")
        while not caplog.messages:
            time.sleep(0.001)
    assert caplog.messages[0] in ("serve, after 0 s: preparing experts", "serve, after 0 s: compiling 1 of 2")
    told: list[str] = []
    with told_when_slow(told.append) as note:
        note("compiling 1 of 2")
    assert told == ["compiling 1 of 2"]
