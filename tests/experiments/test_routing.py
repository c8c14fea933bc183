"""The calls that go to a slow node: how they are counted, and a small run."""

from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from dmoe_jax.routing import balanced, product_key
from dmoe_jax.runs.run_folder import RunFolder
from experiments.bench import Run
from experiments.routing import measurement
from experiments.routing.measurement import Scene, slow_node_shares
from experiments.routing.settings import RoutingSettings


def run_of(path: Path, **flags: object) -> Run[RoutingSettings]:
    settings = RoutingSettings(**flags)  # type: ignore[arg-type]
    return Run(settings=settings, folder=RunFolder.create(path, {}), console=Console(quiet=True))


def test_shares_are_taken_where_the_bars_say(tmp_path: Path) -> None:
    """Windows of 25 updates, slow from 200 to 400: the fourth window after that, and the last four of the run."""
    run = run_of(tmp_path)
    assert measurement.summarise(run) is None
    shares = np.ones(24)
    shares[8:16], shares[11] = 0.7, 0.2
    shares[16:20], shares[20:] = 0.6, 0.9
    for seed, factor in enumerate((1.0, 0.5)):
        run.log("slow_node", router="balanced", seed=seed, shares=(factor * shares).tolist())
    run.log("slow_node", router="product_key", seed=0, shares=np.full(24, 0.8).tolist())
    result = measurement.summarise(run)
    assert result is not None
    figures = result.figures
    assert figures["before_share"] == pytest.approx(0.75)
    assert (figures["slow_share"], figures["slow_share_min"]) == (pytest.approx(0.15), pytest.approx(0.1))
    assert figures["recovered_share"] == pytest.approx(0.675)
    assert figures["slow_share_product_key"] == pytest.approx(0.8)
    assert result.missed_bars == []
    shares_of = {name: {seed: run["slow_share"] for seed, run in seeds.items()} for name, seeds in result.runs.items()}
    assert shares_of == {"balanced": pytest.approx({0: 0.2, 1: 0.1}), "product_key": pytest.approx({0: 0.8})}
    assert result.headline["bars_not_decided"] == ["recovered_share"]  # 0.9 and 0.45
    assert len(measurement.draw(run, result).axes) == 1


@pytest.mark.slow
def test_a_slow_node_loses_calls_and_gets_them_back() -> None:
    """The code of a real swarm in virtual time."""
    scene = Scene(num_updates=140, slow_from=50, slow_until=90, num_trainers=4, window=10)
    shares = slow_node_shares(balanced(product_key((4, 4))), scene, seed=1)
    assert shares.shape == (14,)
    assert shares[7:9].mean() < 0.5 < 0.75 < shares[:5].mean()
    assert shares[11:].mean() > 0.6
