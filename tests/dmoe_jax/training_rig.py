"""A small swarm, and small runs of `dmoe train` over it, for tests of the command."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import optax

from dmoe_jax.cli.averaging import AveragingOptions
from dmoe_jax.cli.network import NetworkOptions
from dmoe_jax.cli.train import TrainCommand
from dmoe_jax.cli.train_options import CallOptions, DataOptions, LanguageModelOptions, OptimizerOptions, RunOptions
from dmoe_jax.experts.transformer_xl import layer_expert
from dmoe_jax.layer_config import LayerConfig
from dmoe_jax.security import Plain
from dmoe_jax.swarm import Served, Swarm, open_swarm

SIZES = LayerConfig(d_model=8, num_heads=2, d_ff=8, seq_len=4, mem_len=4)
OPTIMIZER = optax.sgd(0.1)
"""Of all experts: equal experts with the same optimiser share their compiled code."""


@asynccontextmanager
async def served_swarm(sizes: LayerConfig = SIZES) -> AsyncIterator[tuple[Served, Swarm]]:
    """A node with a 2x2 grid in one layer, and a client that has joined it, over TCP."""
    async with open_swarm(listen="127.0.0.1:0", security=Plain(), seed=0) as node:
        experts = {"layer0.[0:2].[0:2]": layer_expert(sizes)}
        served = await node.serve(experts, optimizer=OPTIMIZER, warm_up_rows=2)
        async with open_swarm(node.contact, listen=None, security=Plain(), seed=0) as client:
            yield served, client


def command(out: Path, text: str, **changes: Any) -> TrainCommand:
    """A small run; changes are flags by name, whichever group they belong to."""
    groups: dict[str, Any] = {
        "data": DataOptions(data=text, num_trainers=2, batch_size=2),
        "language": LanguageModelOptions(layer=SIZES, num_layers=1, grid_size=(2, 2)),
        "calls": CallOptions(k_best=2, timeout_s=120.0, wait_s=2.0),
        "optimizer": OptimizerOptions(),
        "averaging": AveragingOptions(),
        "run_length": RunOptions(steps=8, eval_every=4, checkpoint_every=4, eval_tokens=64, final_eval_tokens=128),
    }
    own = {each.name for each in fields(TrainCommand)} - set(groups)
    settings: dict[str, Any] = {"join": ("127.0.0.1:1",), "network": NetworkOptions(insecure_loopback=True), "out": out}
    settings |= {name: changes.pop(name) for name in own & set(changes)}
    for name, group in groups.items():
        here = {each.name for each in fields(group)} & set(changes)
        settings[name] = replace(group, **{each: changes.pop(each) for each in here})
    assert not changes
    return TrainCommand(**settings)
