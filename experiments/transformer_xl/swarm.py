"""The mixture over real processes: a DHT peer, expert nodes and `dmoe train`, with the sizes and rates of a preset.

What decides the result is `dmoe train`'s own; this module translates a preset into its flags and those of the nodes,
keeps the processes, and says what came of it. The experts' checkpoints lie beside the run folder, so that a resumed run
finds them as it left them.
"""

import functools
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import trio
from rich.console import Console
from rich.table import Table

from dmoe_jax.cli.common import UsageError, set_up_jax
from dmoe_jax.cli.network import SECRET_VARIABLE
from dmoe_jax.routing.check import check_router
from dmoe_jax.routing.registry import make_router
from dmoe_jax.runs.report import format_value, write_report
from dmoe_jax.runs.run_folder import RunFolder, plain
from experiments.local_swarm import (
    LocalSwarm,
    averaging_flags,
    deal_experts,
    open_local_swarm,
    start_nodes,
    start_trainers,
    trainer_folders,
    wait_for_others,
)
from experiments.supervision import run_supervised
from experiments.transformer_xl.presets import PRESETS, Preset
from experiments.transformer_xl.run import TransformerXLCommand

_PROG = "transformer_xl"

NUM_TRAINERS = 4
"""Asynchronous trainers of all trainer processes, unless there are more of those; they share the preset's batch."""

_QUICK_STEPS, _QUICK_MINUTES = 160, 0.8
"""Updates of a quick run, and when it stops even if there are updates left."""

_QUICK_EVAL_TOKENS, _QUICK_PAUSES = 8192, 4
"""Validation words of each evaluation of a quick run, and how many evaluations there are on the way."""

_REPORT_GRACE_S = 60.0
"""For the trainer to write its last checkpoint and its report; the trunk of the full size takes seconds."""

_HEADLINE = {
    "validation_perplexity": "validation_perplexity",
    "unigram_perplexity": "unigram_perplexity",
    "steps": "steps",
    "training_tokens": "tokens",
    "tokens_per_s": "tokens_per_s",
    "training_s": "training_s",
    "mean_trunk_staleness": "staleness",
    "share_lost": "failed_call_share",
    "steps_lost": "steps_lost",
    "averages_done": "averages_done",
    "averages_missed": "averages_missed",
    "load_cv": "load_cv",
    "load_entropy": "load_entropy",
    "dead_experts": "dead_experts",
}
"""The trainer's headline -> names that it shares with models trained elsewhere."""


def run_swarm(command: TransformerXLCommand) -> int:
    """Train dmoe over processes of this machine, or over the swarm that --join names; the exit status.

    The trainer processes average their trunks; the figures are the first one's.

    Raises:
      UsageError: for another model than dmoe, a router or a folder that will not do. Nothing is started then.
    """
    # Before any process is started: the nodes compile for half a minute.
    preset, out = _checked(command), _run_folder(command)
    return run_supervised(lambda: _run(command, preset, out), prog=_PROG)


def _checked(command: TransformerXLCommand) -> Preset:
    """The preset, once what can be known to be wrong has been looked at."""
    if command.model not in ((), ("dmoe",)):
        raise UsageError(f"--where swarm trains dmoe only, got --model {' '.join(command.model)}")
    preset = PRESETS["dmoe", command.size]
    set_up_jax()
    try:
        check_router(make_router(command.router, preset.grid_size), preset.grid_size, preset.d_model)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return preset


def _run_folder(command: TransformerXLCommand) -> Path:
    """Where the run goes: new or empty folders, or those of a run to be resumed. A resumed run may have trainer
    processes that are new: they take the others' state."""
    out = command.out or Path("runs") / time.strftime(f"{_PROG}-%Y%m%d-%H%M%S")
    first, *others = trainer_folders(out, command.processes)
    if command.resume and not _has_checkpoint(first):
        raise UsageError(f"there is no checkpoint in {first} to resume from")
    fresh = [folder for folder in others if not _has_checkpoint(folder)] if command.resume else [first, *others]
    for folder in fresh if command.resume else (*fresh, _node_folder(out)):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{folder} is not empty; --out must be new or empty, or --resume given")
    return out


def _has_checkpoint(folder: Path) -> bool:
    return (folder / "checkpoints").is_dir()


def _node_folder(out: Path) -> Path:
    """Beside the run folder, which belongs to the trainer."""
    return out.parent / f"{out.name}.nodes"


async def _run(command: TransformerXLCommand, preset: Preset, out: Path) -> int:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    logs = out.parent / f"{out.name}.logs"
    logs.mkdir(parents=True, exist_ok=True)
    # Our own swarm needs no secret and shares the cores; another one has its own secret.
    own = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
    environment = {SECRET_VARIABLE: os.environ.get(SECRET_VARIABLE, "")} if command.join else own
    async with open_local_swarm(logs, environment) as swarm:
        contacts = command.join or await _start_nodes(swarm, command, preset, out, console)
        folders = trainer_folders(out, command.processes)
        commands = [
            ["train", *trainer_flags(command, preset, contacts, folder, index)] for index, folder in enumerate(folders)
        ]
        trainers = await start_trainers(swarm, commands)
        try:
            status = await trainers[0].process.wait()
            if status == 0:
                await wait_for_others(trainers[1:])
        finally:
            # They leave first and write their reports, while the nodes are still there.
            with trio.CancelScope(shield=True):
                async with trio.open_nursery() as nursery:
                    for trainer in trainers:
                        nursery.start_soon(functools.partial(swarm.end, trainer, grace_s=_REPORT_GRACE_S))
    if status == 0:
        _report(command, out, console)
        console.print(f"run folder: {out}; logs of the processes: {logs}")
    # If not, the trainer has said why.
    return status


async def _start_nodes(
    swarm: LocalSwarm, command: TransformerXLCommand, preset: Preset, out: Path, console: Console
) -> list[str]:
    """Start the swarm; whom to join it through."""
    console.print(f"starting one DHT peer and {command.nodes} expert nodes; they compile before they announce")
    dealt = deal_experts(command.nodes, num_layers=preset.num_layers, grid_size=preset.grid_size)
    hands = [hand for hand in dealt if hand]  # of very many nodes some get none
    nodes = await start_nodes(swarm, hands, lambda index: node_flags(command, preset, _node_folder(out), index))
    console.print(f"{len(nodes)} nodes serve {sum(map(len, hands))} experts in {preset.num_layers} layers")
    return [node.contact for node in nodes[:2]]


def node_flags(command: TransformerXLCommand, preset: Preset, folder: Path, index: int) -> list[str]:
    """Flags of `dmoe node` for one node of the preset, besides its experts and whom it joins.

    Args:
      folder: for the experts' checkpoints of all nodes.
      index: of this node.
    """
    return _as_flags(
        {
            **_expert_shape(command, preset),
            "learning_rate": preset.expert_learning_rate,
            "warmup_steps": preset.expert_warmup_steps,
            "weight_decay": preset.weight_decay,
            "grad_clip": preset.expert_grad_clip,
            "seed": command.seed,
            "checkpoint_dir": folder / f"node{index}",
        }
    )


def trainer_flags(
    command: TransformerXLCommand, preset: Preset, contacts: Sequence[str], out: Path, index: int = 0
) -> list[str]:
    """Flags of `dmoe train` for the preset and what the command changes of it.

    Args:
      contacts: whom to join.
      out: this process's run folder.
      index: of the trainer process.
    """
    num_trainers = max(1, NUM_TRAINERS // command.processes)
    batch_size = command.batch_size or max(1, preset.batch_size // (num_trainers * command.processes))
    steps = command.steps or preset.steps
    eval_tokens, pauses = command.eval_tokens, preset.pauses
    if command.quick:
        pauses = _QUICK_PAUSES
        steps, eval_tokens = min(steps, _QUICK_STEPS), min(eval_tokens or _QUICK_EVAL_TOKENS, _QUICK_EVAL_TOKENS)
    eval_every = command.eval_every or math.ceil(steps / pauses)
    averaging = averaging_flags(
        num_processes=command.processes, every=command.average_every, seed=command.seed, index=index
    )
    return averaging + _as_flags(
        {
            "join": tuple(contacts),
            "out": out,
            "resume": command.resume and (index == 0 or _has_checkpoint(out)),
            "data": command.data,
            "router": command.router,
            "steps": steps,
            "max_minutes": _QUICK_MINUTES if command.quick else 0.0,
            "num_trainers": num_trainers,
            "batch_size": batch_size,
            "eval_every": eval_every,
            "checkpoint_every": eval_every,
            "eval_tokens": eval_tokens,
            # Only the first one's text at the end is read.
            "final_eval_tokens": eval_tokens if command.quick or index else 0,
            **_expert_shape(command, preset),
            **{
                name: getattr(preset, name)
                for name in (
                    "num_layers",
                    "grid_size",
                    "k_best",
                    "cutoffs",
                    "embedding_dropout",
                    "input_dropout",
                    "output_dropout",
                    "learning_rate",
                    "warmup_steps",
                    "weight_decay",
                    "grad_clip",
                )
            },
            "learning_rate_floor": 0.0,
        }
    )


def _expert_shape(command: TransformerXLCommand, preset: Preset) -> dict[str, object]:
    names = ("d_model", "num_heads", "d_ff", "seq_len", "mem_len", "dropout", "attention_dropout", "position_dropout")
    shape: dict[str, object] = {name: getattr(preset, name) for name in names}
    return shape | {"compute_dtype": "bfloat16" if command.bf16 else "float32"}


def _as_flags(values: Mapping[str, object]) -> list[str]:
    """`{"grid_size": (4, 4), "resume": False}` as `--grid-size 4 4`."""
    flags: list[str] = []
    for name, value in values.items():
        if value is False:
            continue
        flags.append("--" + name.replace("_", "-"))
        if value is not True:
            flags += [str(item) for item in (value if isinstance(value, tuple) else (value,))]
    return flags


def _report(command: TransformerXLCommand, out: Path, console: Console) -> None:
    """Say what came of it; the trainer's report gets the command that does all of it again."""
    folder = RunFolder(out)
    figures = next(record for record in reversed(folder.metrics()) if record["kind"] == "headline")
    ours = {name: figures.get(theirs) for theirs, name in _HEADLINE.items()}
    where = "a swarm that was running" if command.join else f"one DHT peer and {command.nodes} expert nodes"
    write_report(
        folder,
        {name: value for name, value in figures.items() if name != "kind"},
        title=f"Transformer-XL on {figures['corpus']}: dmoe, {command.size}, swarm",
        summary=f"Real processes: {command.processes} of {max(1, NUM_TRAINERS // command.processes)} asynchronous "
        f"trainers each, and {where}.",
        command=_own_command(command),
    )
    table = Table("", "dmoe", title="Transformer-XL", title_justify="left")
    for name, value in ours.items():
        table.add_row(name.replace("_", " "), format_value(value))
    console.print(table)
    if command.json:
        headline: dict[str, Any] = {
            "size": command.size,
            "where": "swarm",
            "corpus": figures["corpus"],
            "router": figures["router"],
            "models": {"dmoe": ours},
        }
        sys.stdout.flush()
        print(json.dumps(plain(headline)))


def _own_command(command: TransformerXLCommand) -> str:
    """The command line, with what differs from the defaults."""
    changed = {
        field.name: getattr(command, field.name)
        for field in fields(command)
        if getattr(command, field.name) != field.default and field.name not in ("out", "resume", "json")
    }
    return shlex.join(["python", "-m", "experiments.transformer_xl", *_as_flags(changed)])
