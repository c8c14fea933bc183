"""`dmoe train` from corpus to report, over TCP: what a run leaves behind, how it goes on, what it refuses."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest

from dmoe_jax.cli.assembly import checked_router
from dmoe_jax.cli.common import UsageError
from dmoe_jax.cli.network import NetworkOptions
from dmoe_jax.cli.options import ExpertOptions
from dmoe_jax.cli.swarm import SwarmPeer, join_swarm
from dmoe_jax.cli.train import TrainCommand
from dmoe_jax.cli.training import run_training
from dmoe_jax.runs.run_folder import read_metrics
from net.clock import SwarmClock
from net.errors import NoQuorum, PeerTimeout
from tests.dmoe_jax.small_swarm import SmallSwarm, open_small_swarm, tcp_callers

SIZES = ExpertOptions(d_model=16, num_heads=2, d_ff=24, seq_len=8, mem_len=8)


@asynccontextmanager
async def swarm_and_peer(sizes: ExpertOptions = SIZES) -> AsyncIterator[tuple[SmallSwarm, SwarmPeer, str]]:
    """Two nodes with a 2x2 grid in one layer, and a client that has joined them."""
    clock = SwarmClock.wall()  # as the command's own peer has it
    expert, optimizer = sizes.make_expert(), optax.sgd(0.1)
    async with (
        tcp_callers(3) as callers,
        open_small_swarm(callers, expert, optimizer, prefixes=["layer0"], grid_size=(2, 2), clock=clock) as swarm,
        join_swarm(NetworkOptions(insecure_loopback=True), join=[str(callers[0].address)]) as peer,
    ):
        yield swarm, peer, str(callers[0].address)


def command(address: str, out: Path, **changes: Any) -> TrainCommand:
    settings: dict[str, Any] = {
        "join": (address,),
        "out": out,
        "data": "embedded",
        "num_trainers": 2,
        "batch_size": 2,
        "steps": 8,
        "expert": SIZES,
        "num_layers": 1,
        "grid_size": (2, 2),
        "k_best": 2,
        "eval_every": 4,
        "checkpoint_every": 4,
        "eval_tokens": 256,
        "final_eval_tokens": 512,
        "timeout_s": 120.0,  # the nodes of this process compile within their first calls
    }
    return TrainCommand(**settings | changes)


async def run(settings: TrainCommand, peer: SwarmPeer) -> int:
    """As the command does it: the router is tried, then the run begins."""
    return await run_training(settings, peer, checked_router(settings))


async def test_a_run_its_folder_and_its_resumption(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Eight steps leave a whole folder; resuming to twelve, now compressed, goes on in model, text and totals."""
    out = tmp_path / "run"
    async with swarm_and_peer() as (swarm, peer, address):
        assert await run(command(address, out, json=True), peer) == 0
        headline = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert headline["steps"] == 8
        assert headline["training_tokens"] == 8 * 2 * 8
        assert headline["evaluated_tokens"] == 512
        assert headline["calls_failed"] == 0
        assert headline["perplexity_over_unigram"] > 0
        assert sum(backend.update_count for backend in swarm.backends.values()) > 0
        names = {path.name for path in out.iterdir()}
        assert names == {"config.json", "metrics.jsonl", "figure.png", "report.md", "checkpoints"}
        kinds = {record["kind"] for record in read_metrics(out / "metrics.jsonl")}
        assert kinds == {"baseline", "train", "eval", "calls", "experts", "balance", "headline"}

        with pytest.raises(UsageError, match="not empty"):
            await run(command(address, out), peer)

        assert await run(command(address, out, steps=12, resume=True, json=True, compression="bfloat16"), peer) == 0
        headline = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (headline["steps"], headline["training_tokens"]) == (12, 12 * 2 * 8)
        steps = [record["step"] for record in read_metrics(out / "metrics.jsonl") if record["kind"] == "train"]
        assert sorted(steps) == list(range(1, 13))


async def test_one_living_expert_is_enough_to_know_the_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts whose node has just died are asked in vain, and the next one says what all are; if none does, a line."""
    async with swarm_and_peer() as (_, peer, address):
        wider = ExpertOptions(d_model=32, num_heads=2, d_ff=24, seq_len=8, mem_len=8)
        call = peer.rpc.call
        num_lost = 0

        async def lossy_call(target: Any, method: str, *args: Any, **kwargs: Any) -> Any:
            nonlocal num_lost
            if method == "expert.info" and num_lost > 0:
                num_lost -= 1
                raise PeerTimeout("silence")
            return await call(target, method, *args, **kwargs)

        monkeypatch.setattr(peer.rpc, "call", lossy_call)
        for lose, error, line in [(3, UsageError, "other shapes"), (4, NoQuorum, "none of 4 answers; .*silence")]:
            num_lost = lose
            with pytest.raises(error, match=line):
                await run(command(address, tmp_path, expert=wider), peer)
            assert num_lost == 0


async def test_what_does_not_fit_the_swarm_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """Other shapes than the nodes', sizes that contradict each other, a resumption of nothing: one sentence each."""
    out = tmp_path / "run"
    async with swarm_and_peer() as (_, peer, address):
        wider = ExpertOptions(d_model=32, num_heads=2, d_ff=24, seq_len=8, mem_len=8)
        with pytest.raises(UsageError, match=r"other shapes: .*hidden float32\[8, 16\].*needs hidden float32\[8, 32\]"):
            await run(command(address, out, expert=wider), peer)
        with pytest.raises(UsageError, match="k_best is at most the number of cells"):
            await run(command(address, out, k_best=5), peer)
        with pytest.raises(UsageError, match="whole segment for each"):
            await run(command(address, out, batch_size=100_000), peer)
        assert not out.exists()
        with pytest.raises(UsageError, match="no checkpoint in"):
            await run(command(address, out, resume=True), peer)


async def test_experts_that_drop_need_a_trainer_that_drops(tmp_path: Path) -> None:
    """With a rate of its own it trains with them; where only one side drops, a line says which flag to give."""
    dropping = replace(SIZES, dropout=0.5)
    rates = {"embedding_dropout": 0.1, "input_dropout": 0.1, "output_dropout": 0.1, "weight_decay": 1e-4}
    out = tmp_path / "run"
    async with swarm_and_peer(dropping) as (swarm, peer, address):
        with pytest.raises(UsageError, match=r"--dropout, .* above 0: the nodes' experts take dropout keys"):
            await run(command(address, out), peer)
        ours = replace(SIZES, dropout=0.3)
        assert await run(command(address, out, expert=ours, steps=2, eval_every=2, **rates), peer) == 0
        metrics = read_metrics(out / "metrics.jsonl")
        assert [record["step"] for record in metrics if record["kind"] == "train"] == [1, 2]
        assert sum(backend.update_count for backend in swarm.backends.values()) > 0
    async with swarm_and_peer() as (_, peer, address):
        with pytest.raises(UsageError, match=r"no --dropout, .*: the nodes' experts take no dropout keys"):
            await run(command(address, tmp_path / "other", expert=dropping), peer)


USER_ROUTERS = """
import jax.numpy as jnp
from dmoe_jax.routing import Scores
from dmoe_jax.routing.base import top_k_router

def mine(grid_size):
    init = lambda key, d_model: jnp.zeros((d_model, 4))
    return top_k_router("mine", grid_size, init, lambda w, x, **_: x @ w, flat=True)

def diverging(grid_size):
    # Its auxiliary loss drives a number up, a learning rate at each update; the schedule's first one is 0.
    def scores(params, x, **_):
        logits = x @ params["w"] + jnp.where(params["clock"] > 1.5e-3, jnp.nan, 0.0)
        return Scores((logits,), (params["clock"],))
    return top_k_router(
        "diverging",
        grid_size,
        lambda key, d_model: {"w": jnp.zeros((d_model, 4)), "clock": jnp.zeros(())},
        scores,
        flat=True,
        aux_loss=lambda scores, indices, mask: -scores.extras[0],
    )
"""


async def test_a_router_of_the_users_own_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three lines in a file; their name is in the settings and the headline, and the experts' balance is on record."""
    (tmp_path / "routers.py").write_text(USER_ROUTERS)
    out = tmp_path / "run"
    async with swarm_and_peer() as (_, peer, address):
        spec = f"{tmp_path / 'routers.py'}:mine"
        assert await run(command(address, out, router=spec, json=True), peer) == 0
    headline = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert headline["router"] == "mine"
    settings = json.loads((out / "config.json").read_text())["settings"]
    assert (settings["router"], settings["router_name"]) == (spec, "mine")
    metrics = read_metrics(out / "metrics.jsonl")
    balances = [record for record in metrics if record["kind"] == "balance"]
    assert {record["layer"] for record in balances} == {"layer0"}
    # Eight steps of two sequences, each through two experts; what one record counts, the next one does not.
    assert sum(sum(record["histogram"]) for record in balances) == 8 * 2 * 2
    load = [record for record in metrics if record["kind"] == "experts"][-1]["load"]
    assert headline["dead_experts"] == 4 - len(load)
    assert headline["load_cv"] == pytest.approx(np.std([*load.values(), *[0] * (4 - len(load))]) / 8)
    assert headline["share_lost"] == 0


async def test_scores_that_become_nan_end_the_run(tmp_path: Path) -> None:
    """In one line that names the router, after the report and a checkpoint; not in step after step that is lost."""
    (tmp_path / "routers.py").write_text(USER_ROUTERS)
    out = tmp_path / "run"
    async with swarm_and_peer() as (_, peer, address):
        settings = command(address, out, router=f"{tmp_path / 'routers.py'}:diverging", num_trainers=1)
        with pytest.raises(UsageError, match=r"'diverging': .* scores in layer0 are NaN.*; stopped at step 3$"):
            await run(settings, peer)
    metrics = read_metrics(out / "metrics.jsonl")
    assert [record["step"] for record in metrics if record["kind"] == "train"] == [1, 2, 3]
    events = [(record["name"], record["step"]) for record in metrics if record["kind"] == "event"]
    assert events == [("failed", 3)]
    assert "scores in layer0 are NaN" in (out / "report.md").read_text()
    assert any((out / "checkpoints").iterdir())
