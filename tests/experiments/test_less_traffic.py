"""The experiment on what peers send: bytes by hand, every method learns, payloads are checked, and the command."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dmoe_net.wire.sparse import sparse_nbytes
from experiments.less_traffic import measurement, training
from experiments.less_traffic.__main__ import main
from experiments.less_traffic.methods import make_method
from experiments.less_traffic.settings import MethodName
from experiments.less_traffic.training import Lane, all_batches, train
from experiments.moshpit_sgd.tasks import Task

PEERS, SIZE = 4, 100
NAMES = get_args(MethodName)
TARGET = np.linspace(-1, 1, SIZE).astype(np.float32)


def quadratic() -> Task:
    """Half the squared distance to a point, seen with noise by each peer: the gradient is the way to it."""

    def batches(peer: int, num_peers: int, seed: int) -> Iterator[Any]:
        rng = np.random.default_rng([seed, peer, num_peers])
        while True:
            yield (TARGET + 0.1 * rng.normal(size=SIZE)).astype(np.float32)

    def loss(params: Any, batch: Any, carry: Any) -> Any:
        return 0.5 * jnp.sum((params["w"] - batch) ** 2), carry

    return Task(
        init=lambda key: {"w": jax.random.normal(key, (SIZE,))},
        carry=(),
        loss=loss,
        batches=batches,
        evaluate=lambda params: 0.5 * jnp.mean((params["w"] - TARGET) ** 2),
        optimizer=optax.sgd(0.1),
        target=0.0,
    )


def method_of(name: MethodName, inner_rate: Any = 0.1, outer_rate: Any = 1.0) -> Any:
    return make_method(name, optax.sgd(inner_rate), outer_rate, sizes=(SIZE,), peers=PEERS, every=10)


def test_bytes_by_hand() -> None:
    """100 numbers among 4: an all-reduce sends 2 * 3/4 * 400 = 600 bytes; a whole all-gather three payloads."""
    steps = 100
    sent = {name: method_of(name).rounds(steps) * method_of(name).sent_nbytes for name in NAMES}
    assert sent["every_step"] == 100 * 600
    assert sent["diloco"] == sent["streaming_diloco"] == 10 * 600
    assert sent["noloco"] == 10 * 800
    assert sent["sparta"] == pytest.approx(100 * 0.005 * 600)
    # One short block of 100 with ceil(100 / 64) = 2 kept: l = 5, 2 + (99 >> 5) = 5 bits, 10 bits, 4 bits.
    payload = 8 + 4 + 1 + 2 + 1
    assert sent["sparse_gradients"] == 100 * 3 * payload
    assert sent["sparse_diloco"] == 20 * 3 * payload  # every fifth step


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_method_learns(name: MethodName) -> None:
    """From a loss of about 0.6 down to the noise of the batches; every lane as if it were alone. Of sparse pseudo-
    gradients two numbers of a hundred leave in each of 40 averagings: most have been sent hardly once."""
    task, steps = quadratic(), 200
    batches = all_batches(task, peers=PEERS, steps=steps, seed=0)
    lanes = [Lane(seed=0, inner_rate=0.05, outer_rate=0.5), Lane(seed=0, inner_rate=0.0, outer_rate=0.5)]

    def make(inner_rate: Any, outer_rate: Any) -> Any:
        return method_of(name, inner_rate, outer_rate)

    both = jax.tree.map(lambda leaf: np.stack([leaf] * 2), batches)
    learnt, still = train(task, make, lanes, batches=both, peers=PEERS)
    start = float(task.evaluate(task.init(jax.random.key(0))))
    bound = 0.2 if name in ("sparse_diloco", "sparser_diloco") else 0.05
    assert learnt.losses[-1] < bound * start
    assert still.losses[-1] == pytest.approx(start, rel=1e-5)
    assert learnt.steps[-1] == steps
    assert len(learnt.losses) == 10
    alone = train(task, make, lanes[:1], batches=jax.tree.map(lambda leaf: leaf[None], batches), peers=PEERS)[0]
    assert alone.losses == pytest.approx(learnt.losses, rel=1e-4)


def test_averaging_every_step_is_one_machine_with_the_large_batch() -> None:
    """theta <- theta - rate (theta - mean over peers of x), by hand."""
    task = quadratic()
    batches = all_batches(task, peers=PEERS, steps=10, seed=3)
    lane = Lane(seed=3, inner_rate=0.1, outer_rate=1.0)
    outcome = train(
        task,
        lambda inner, outer: method_of("every_step", inner, outer),
        [lane],
        batches=jax.tree.map(lambda leaf: leaf[None], batches),
        peers=PEERS,
    )[0]
    theta = np.asarray(task.init(jax.random.key(3))["w"], np.float64)
    for batch in batches:
        theta -= 0.1 * (theta - batch.mean(axis=0))
    assert outcome.losses[-1] == pytest.approx(0.5 * np.mean((theta - TARGET) ** 2), rel=1e-5)
    assert outcome.own_loss == pytest.approx(outcome.losses[-1], rel=1e-5)


def test_payloads_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A payload that says something else than what was averaged ends the run."""
    task = quadratic()
    batches = jax.tree.map(lambda leaf: leaf[None], all_batches(task, peers=PEERS, steps=10, seed=0))
    lanes = [Lane(seed=0, inner_rate=0.1, outer_rate=1.0)]
    real = training.mean_of_sparse
    monkeypatch.setattr(training, "mean_of_sparse", lambda vectors, weights: 1.01 * real(vectors, weights))
    with pytest.raises(RuntimeError, match="the payloads' mean is not the mean"):
        train(task, lambda *rates: method_of("sparse_diloco", *rates), lanes, batches=batches, peers=PEERS)


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
    assert figures["diloco_bytes_ratio"] == 50
    assert figures["sparse_loss_ratio"] == pytest.approx(1.01)
    assert figures["sparse_payload_ratio"] == 200  # 400 an averaging to 2
    assert figures["sparser_sent_ratio"] == 200  # 600 an averaging to 3


def test_ratio_of_large_models() -> None:
    """84 bytes a block of 16,384."""
    assert pytest.approx(195.0476, abs=1e-4) == measurement.BLOCK_RATIO
    assert sparse_nbytes(measurement.SparseCoding(), [4096]) == 92


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Report, figure and headline of a short run; the search names step sizes."""
    monkeypatch.setattr(measurement, "make_task", lambda name: quadratic())
    flags = ["--steps", "20", "--every", "10", "--peers", "4", "--seeds", "2", "--json"]
    main(args=[*flags, "--methods", "every_step", "sparse_diloco", "--out", str(tmp_path / "run")])
    headline = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert headline["sparse_payload_ratio"] == pytest.approx(400 / 16)
    assert (tmp_path / "run" / "figure.png").stat().st_size > 0
    assert "sparse pseudo-gradients" in (tmp_path / "run" / "report.md").read_text()
    main(args=[*flags, "--search", "--methods", "diloco", "--out", str(tmp_path / "search")])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["diloco_inner_rate"] in (1e-3, 3e-3, 1e-2)
