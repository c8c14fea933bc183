"""The mixture over real processes: a DHT peer, expert nodes and `dmoe train`, with the sizes and rates of a preset.

What decides the result is `dmoe train`'s own; this module translates a preset into its flags and those of the nodes,
keeps the processes, and says what came of it. The experts' checkpoints lie beside the run folder, so that a resumed run
finds them as it left them.
"""

import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import trio

from dmoe_jax.directory.grid import all_uids, layer_prefix
from dmoe_jax.layer_config import LayerConfig, Recipe
from dmoe_jax.machine.environment import SECRET_VARIABLE
from dmoe_jax.machine.xla_threads import share_of_threads
from dmoe_jax.runs.endings import UsageError
from dmoe_jax.runs.figure import training_figure
from dmoe_jax.runs.processes import (
    LocalSwarm,
    ProcessFailed,
    averaging_flags,
    check_status,
    deal,
    launch_nodes,
    open_local_swarm,
)
from dmoe_jax.runs.run_folder import FIGURE, RunFolder
from dmoe_jax.training.prepared_run import CHECKPOINT_FOLDER
from experiments.bench import Experiment, Run
from experiments.results import Result
from experiments.transformer_xl.measurement import HEADLINE, check
from experiments.transformer_xl.presets import sized_preset
from experiments.transformer_xl.settings import TransformerXLSettings, as_flags
from experiments.transformer_xl.training import make_plan, open_folder

NUM_TRAINERS = 4
"""Asynchronous trainers of all trainer processes, unless there are more of those; they share the preset's batch."""

_OTHERS_GRACE_S = 60.0
"""For the other trainer processes once the first is done."""

_QUICK_MINUTES = 0.8
"""After these a quick run stops even if there are updates left."""


async def measure(run: Run[TransformerXLSettings]) -> None:
    """Train dmoe over processes of this machine, or over the swarm that --join names.

    The trainer processes average their trunks; the figures are the first one's.

    Raises:
      ProcessFailed: a process did not start, or ended with an error; the first trainer has said why itself.
    """
    settings, logs = run.settings, run.folder.path / "logs"
    logs.mkdir(exist_ok=True)
    # Our own swarm needs no secret and shares the cores; another one has its own secret.
    environment = {SECRET_VARIABLE: os.environ.get(SECRET_VARIABLE, "")} if settings.join else None
    async with open_local_swarm(logs, environment) as swarm:
        contacts = settings.join or await _start_nodes(swarm, run)
        commands = [
            ["train", *trainer_flags(settings, contacts, trainer_folder(run.folder.path, index), index)]
            for index in range(settings.processes)
        ]
        trainers = [
            await swarm.launch(f"trainer{index}", words, in_foreground=index == 0)
            for index, words in enumerate(commands)
        ]
        try:
            status = await trainers[0].process.wait()
            if status == 0:
                with trio.move_on_after(_OTHERS_GRACE_S):
                    for trainer in trainers[1:]:
                        check_status(trainer, await trainer.process.wait())
        finally:
            # They leave first and write their reports, while the nodes are still there.
            with trio.CancelScope(shield=True):
                async with trio.open_nursery() as nursery:
                    for trainer in trainers:
                        nursery.start_soon(swarm.end, trainer)
    if status:
        raise UsageError(f"the first trainer process ended with status {status}; it has said why above")


def trainer_folder(out: Path, index: int) -> Path:
    """Run folder of a trainer process."""
    return out / f"trainer{index}"


async def _start_nodes(swarm: LocalSwarm, run: Run[TransformerXLSettings]) -> list[str]:
    """Start the nodes; whom to join them through."""
    settings, folder = run.settings, run.folder.path / "nodes"
    config = sized_preset(settings, "dmoe").config
    run.say(f"starting one DHT peer and {settings.nodes} expert nodes; they compile before they announce")
    uids = (uid for layer in range(config.num_layers) for uid in all_uids(layer_prefix(layer), config.grid_size))
    hands = [hand for hand in deal(uids, settings.nodes) if hand]  # of very many nodes some get none
    dht = await swarm.start("dht", ["dht"])
    await launch_nodes(swarm, dht, hands, lambda index: node_flags(settings, folder, index))
    nodes = swarm.of_kind("node")
    async with trio.open_nursery() as nursery:
        for node in nodes:
            nursery.start_soon(node.ready)
    run.say(f"{len(nodes)} nodes serve {sum(map(len, hands))} experts in {config.num_layers} layers")
    return [node.contact for node in nodes[:2]]


def node_flags(settings: TransformerXLSettings, folder: Path, index: int) -> list[str]:
    """Flags of `dmoe node` for one node of the preset, besides its experts and whom it joins.

    Args:
      folder: for the experts' checkpoints of all nodes.
      index: of this node.
    """
    preset = sized_preset(settings, "dmoe")
    return as_flags(
        {
            **_shape_and_rates(settings, preset.config.layer, preset.expert_recipe),
            "route": settings.route,
            "seed": settings.seed,
            "checkpoint_dir": folder / f"node{index}",
            "xla_threads": share_of_threads(settings.nodes, may_call_host=False),
        }
    )


def trainer_flags(settings: TransformerXLSettings, contacts: Sequence[str], out: Path, index: int = 0) -> list[str]:
    """Flags of `dmoe train` for the preset and what the settings change of it.

    Args:
      contacts: whom to join.
      out: this process's run folder.
      index: of the trainer process.
    """
    preset = sized_preset(settings, "dmoe")
    num_trainers = max(1, NUM_TRAINERS // settings.processes)
    batch_size = settings.batch_size or max(1, preset.batch_size // (num_trainers * settings.processes))
    plan = make_plan(settings, preset)
    config = asdict(preset.config) | {"route": settings.route}
    del config["vocab_size"], config["layer"]
    averaging = averaging_flags(
        num_processes=settings.processes, every=settings.average_every, seeds=(settings.seed, settings.seed + index)
    )
    return averaging + as_flags(
        {
            "join": tuple(contacts),
            "out": out,
            "resume": settings.resume and (out / CHECKPOINT_FOLDER).is_dir(),
            "data": settings.data,
            "router": settings.router,
            "steps": plan.steps,
            "max_minutes": _QUICK_MINUTES if settings.quick else 0.0,
            "num_trainers": num_trainers,
            "batch_size": batch_size,
            "eval_every": plan.eval_every,
            "checkpoint_every": plan.eval_every,
            "eval_tokens": plan.eval_items,
            # Only the first one's text at the end is read.
            "final_eval_tokens": plan.eval_items if index else plan.final_eval_items,
            **config,
            **_shape_and_rates(settings, preset.config.layer, preset.recipe),
            "learning_rate_floor": preset.recipe.floor,
        }
    )


def _shape_and_rates(settings: TransformerXLSettings, layer: LayerConfig, recipe: Recipe) -> dict[str, object]:
    rates = {name: getattr(recipe, name) for name in ("learning_rate", "warmup_steps", "weight_decay", "grad_clip")}
    rates["staleness_power"] = settings.staleness_power
    return asdict(replace(layer, compute_dtype=settings.compute_dtype)) | rates


def summarise(run: Run[TransformerXLSettings]) -> Result | None:
    """The figures of the first trainer process, whose report has the rest."""
    settings, folder = run.settings, RunFolder(trainer_folder(run.folder.path, 0))
    headlines = [record for record in folder.metrics() if record["kind"] == "headline"]
    if not headlines:
        return None
    figures = headlines[-1]  # of a run that ended early, too
    training_figure(folder.metrics(), run.folder.path / FIGURE, title=f"dmoe on {figures['corpus']}, {settings.size}")
    ours = {name: figures[name] for name in HEADLINE if name in figures}
    where = "a swarm that was running" if settings.join else f"one DHT peer and {settings.nodes} expert nodes"
    facts = {name: figures[name] for name in ("corpus", "router")}
    return Result(
        title=f"Transformer-XL on {figures['corpus']}: dmoe, {settings.size}, swarm",
        figures={"size": settings.size, "where": "swarm", **facts, "models": {"dmoe": ours}},
        shown={**facts, **ours},
        summary=f"Real processes: {settings.processes} of {max(1, NUM_TRAINERS // settings.processes)} asynchronous "
        f"trainers each, and {where}.",
        # Ports of today are of no use tomorrow.
        command=f"python -m experiments.transformer_xl {shlex.join(settings.flags('out', 'resume', 'json', 'join'))}",
    )


EXPERIMENT = Experiment[TransformerXLSettings](
    measure=measure,
    summarise=summarise,
    check=check,
    open_folder=open_folder,
    figure_text="Perplexity, load of the experts, throughput and failed calls of the first trainer process",
    causes=(ProcessFailed,),
)
