"""A small swarm, and small runs of `dmoe train` over it, for tests of the command."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import optax
import pytest

from dmoe_jax.cli import main
from dmoe_jax.cli.train import TrainCommand
from dmoe_jax.experts.transformer_xl import layer_expert
from dmoe_jax.layer_config import LayerConfig
from dmoe_jax.peers.security import Plain
from dmoe_jax.runs.command_line import parse_command_line
from dmoe_jax.runs.flags import as_flags, flags_of
from dmoe_jax.swarm.opening import open_swarm
from dmoe_jax.swarm.serving import Served
from dmoe_jax.swarm.swarm import Swarm

SIZES = LayerConfig(d_model=8, num_heads=2, d_ff=8, seq_len=4, mem_len=4)
OPTIMIZER = optax.sgd(0.1)
"""Optimiser of all experts: equal experts with the same optimiser share their compiled code."""


@asynccontextmanager
async def served_swarm(sizes: LayerConfig = SIZES) -> AsyncIterator[tuple[Served, Swarm]]:
    """A node with a 2x2 grid in one layer, and a client that has joined it, over TCP."""
    async with open_swarm(listen="127.0.0.1:0", security=Plain(), seed=0) as node:
        experts = {"layer0.[0:2].[0:2]": layer_expert(sizes, "sequence")}
        served = await node.serve(experts, optimizer=OPTIMIZER, warm_up_rows=2)
        async with open_swarm(node.contact, listen=None, security=Plain(), seed=0) as client:
            yield served, client


_LANGUAGE: dict[str, Any] = {"layer": SIZES, "num_layers": 1, "grid_size": (2, 2), "k_best": 2, "timeout_s": 120.0}
_SMALL: dict[str, Any] = {"num_trainers": 2, "batch_size": 2, "wait_s": 60.0}
_SMALL |= {"steps": 8, "eval_every": 4, "checkpoint_every": 4}
_SMALL |= {"eval_tokens": 64, "final_eval_tokens": 128, "insecure_loopback": True}


def command(out: Path, text: str, **changes: Any) -> TrainCommand:
    """A small run; changes are flags, whichever group they belong to, or the layer."""
    wishes = _SMALL | ({} if "model" in changes else _LANGUAGE) | {"out": out, "data": text} | changes
    command = _with(TrainCommand(join=("127.0.0.1:1",)), wishes)
    assert not wishes
    return command


def _with(options: Any, wishes: dict[str, Any]) -> Any:
    """The options with those of the wishes that are theirs, which are taken out."""
    keys = {flag.field: flag.key for flag in flags_of(options)}
    values: dict[str, Any] = {}
    for name in (each.name for each in fields(options)):
        value = getattr(options, name)
        # What a nested group has by the same name is asked for there.
        if is_dataclass(value) and name != "layer":
            values[name] = _with(value, wishes)
        elif keys.get(name, name) in wishes:
            values[name] = wishes.pop(keys.get(name, name))
    return replace(options, **values)


def parsed(command: Callable[..., Any], **flags: Any) -> Any:
    """The command with these flags, as its command line is read."""
    return parse_command_line(command, prog="dmoe", args=as_flags(flags))


def text_of_few_words(folder: Path) -> str:
    """A file with a text to train on."""
    file = folder / "my.txt"
    file.write_text("the cat sat on the mat .\n" * 1000)
    return str(file)


def outcome(args: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit status and standard error of `dmoe ARGS`."""
    with pytest.raises(SystemExit) as exit_:
        main(args)
    return int(exit_.value.code or 0), capsys.readouterr().err
