"""The experiment on what peers send: bytes by hand, every method learns, SPARTA by hand, and the command."""

import json
from functools import partial
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
import optax
import pytest

from experiments.bench import run_experiment
from experiments.less_traffic import measurement
from experiments.less_traffic.measurement import AXIS, Method, make_method, sparta, sparta_masks, train
from experiments.less_traffic.settings import LessTrafficSettings, MethodName
from tests.experiments.small_runs import POINT, quadratic

PEERS = 4
NAMES = get_args(MethodName)


def method_of(name: MethodName, rate: float = 0.1) -> Method:
    return make_method(name, optax.sgd(rate), sizes=(POINT.size,), peers=PEERS, every=10)


def test_bytes_by_hand() -> None:
    """100 numbers among 4: an all-reduce sends 2 * 3/4 * 400 = 600 bytes; a whole all-gather three payloads."""
    methods = {name: method_of(name) for name in NAMES}
    sent = {name: 100 // method.every * method.sent_nbytes for name, method in methods.items()}
    assert sent["every_step"] == 100 * 600
    assert sent["diloco"] == sent["streaming_diloco"] == 10 * 600
    assert sent["noloco"] == 10 * 800
    assert sent["sparta"] == pytest.approx(100 * 0.005 * 600)
    # One short block of 100 with ceil(100 / 64) = 2 kept: l = 5, 2 + (99 >> 5) = 5 bits, 10 bits, 4 bits.
    payload = 8 + 4 + 1 + 2 + 1
    assert sent["sparse_gradients"] == 100 * 3 * payload
    assert sent["sparse_diloco"] == 20 * 3 * payload  # every fifth step
    assert {name for name, method in methods.items() if method.last_nbytes == (400, 600)} == {
        "streaming_diloco",
        "noloco",
        "sparta",
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_method_learns(name: MethodName) -> None:
    """From a loss of about 0.6 down to the noise of the batches; every seed as if it were alone. Of sparse pseudo-
    gradients two numbers of a hundred leave in each of 40 averagings, of sparser ones one: not all have been sent."""
    task = quadratic()
    both = train(task, method_of(name, 0.05), [0, 1], steps=200, peers=PEERS)
    start = float(task.evaluate(task.init(jax.random.key(0))))
    assert both[0] < {"sparse_diloco": 0.2, "sparser_diloco": 0.5}.get(name, 0.05) * start
    assert train(task, method_of(name, 0.05), [0], steps=200, peers=PEERS) == pytest.approx(both[:1], rel=1e-4)


def test_sparta_against_plain_loops() -> None:
    """theta <- theta - rate g; those of the mask then are their mean over peers, the others stay."""
    rng, steps, share = np.random.default_rng(0), 5, 0.4
    start = rng.normal(size=(PEERS, 6)).astype(np.float32)
    grads = rng.normal(size=(steps, PEERS, 6)).astype(np.float32)
    optimizer = sparta(optax.sgd(0.1), share=share, seed=5)
    params, state = start, jax.vmap(optimizer.init)(start)

    @jax.jit
    @partial(jax.vmap, axis_name=AXIS)
    def update(params: Any, state: Any, grad: Any) -> Any:
        updates, state = optimizer.update(grad, state, params)
        return optax.apply_updates(params, updates), state

    theta, taken = start.astype(np.float64), 0
    for step in range(steps):
        params, state = update(params, state, grads[step])
        mask = sparta_masks(np.zeros(6), step, share=share, seed=5)
        theta -= 0.1 * grads[step]
        theta = np.where(mask, theta.mean(axis=0), theta)
        taken += int(mask.sum())
    assert 0 < taken < 6 * steps
    np.testing.assert_allclose(params, theta, rtol=1e-4, atol=1e-5)


def result(name: str, loss: float, *, payload: float, sent: float, rounds: int) -> dict[str, Any]:
    return {"method": name, "loss": loss, "payload_nbytes": payload, "sent_nbytes": sent, "rounds": rounds}


def test_figures_by_hand() -> None:
    """Ratios of mean losses; of an averaging's payload, whatever the number of averagings; of all bytes."""
    figures = measurement.figures_of(
        [
            result("every_step", 2.0, payload=4000, sent=6000, rounds=10),
            result("every_step", 4.0, payload=4000, sent=6000, rounds=10),
            result("diloco", 3.3, payload=80, sent=120, rounds=1),
            result("sparse_diloco", 3.03, payload=4, sent=12, rounds=2),
            result("sparser_diloco", 3.0, payload=2, sent=6, rounds=2),
        ]
    )
    assert figures["every_step_loss"] == 3.0
    assert figures["diloco_loss_ratio"] == pytest.approx(1.1)
    assert "diloco_loss_ratio_interval" not in figures  # of one seed
    assert figures["diloco_bytes_ratio"] == 50
    assert figures["sparse_loss_ratio"] == pytest.approx(1.01)
    assert figures["sparse_payload_ratio"] == 200  # 400 an averaging to 2
    assert figures["sparser_sent_ratio"] == 200  # 600 an averaging to 3


@pytest.mark.slow
def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Report, figure and headline of a short run."""
    monkeypatch.setattr(measurement, "make_task", lambda name: quadratic())
    flags = ["--steps", "50", "--seeds", "2", "--json", "--methods", "every_step", "sparse_diloco"]
    run_experiment(LessTrafficSettings, args=[*flags, "--out", str(tmp_path / "run")])
    headline = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert headline["sparse_payload_ratio"] == pytest.approx(400 / 16)
    assert (tmp_path / "run" / "figure.png").stat().st_size > 0
    labels = [line.split(",")[:2] for line in (tmp_path / "run" / "results.csv").read_text().splitlines()[1:]]
    assert labels == [["every_step", "0"], ["every_step", "1"], ["sparse_diloco", "0"], ["sparse_diloco", "1"]]
    assert "sparse diloco loss" in (tmp_path / "run" / "report.md").read_text()
