"""Model, data and optimiser of a run of `dmoe train`; the user's own model, from a file."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import optax
import trio

from dmoe_jax.cli.train_options import TrainOptions, TrunkRecipe
from dmoe_jax.data.positions import positioned
from dmoe_jax.directory.grid import all_uids
from dmoe_jax.experts.user_file import UserFileError, call_user, user_model, user_optimizer
from dmoe_jax.mixture.readiness import ExpertMismatch
from dmoe_jax.mixture.remote import RemoteMixture
from dmoe_jax.model import AnyModel, Model
from dmoe_jax.optim.recipe import make_optimizer
from dmoe_jax.routing.check import check_router
from dmoe_jax.routing.registry import make_router
from dmoe_jax.runs.endings import UsageError, mistakes_in_one_line
from dmoe_jax.swarm.swarm import Swarm
from dmoe_jax.training.progress import TrainingProgress
from dmoe_jax.training.swarm_engine import EvaluationBatches
from dmoe_jax.training.task import Task


@dataclass(frozen=True, kw_only=True)
class Training:
    """A run's model, the batches of its trainers, and its evaluation."""

    model: AnyModel
    task: Task
    batches: list[Iterator[Any]]
    """One iterator for each trainer."""
    evaluation: EvaluationBatches
    facts: Mapping[str, object]
    """Beginning of the headline."""

    @property
    def mixtures(self) -> tuple[RemoteMixture, ...]:
        """The model's remote mixtures, if it has them in an attribute of this name."""
        return tuple(getattr(self.model, "mixtures", ()))

    @property
    def layers(self) -> dict[str, tuple[str, ...]]:
        """Layer -> uids of its experts."""
        grids = {mixture.config.prefix: mixture.router.grid_size for mixture in self.mixtures}
        return {prefix: tuple(map(str, all_uids(prefix, grid_size))) for prefix, grid_size in grids.items()}

    async def wait_for_experts(self, wait_s: float, progress: TrainingProgress) -> None:
        """Wait until every layer has a living expert of the model's shapes. Raises NoQuorum, naming the layer, if there
        is none, UsageError if it has other shapes."""
        deadline = trio.current_time() + wait_s
        for mixture in self.mixtures:
            prefix, num_experts = mixture.config.prefix, math.prod(mixture.router.grid_size)
            try:
                with progress.phase(f"waiting for experts of {prefix!r}") as change:
                    living = await mixture.check(timeout_s=max(0.0, deadline - trio.current_time()), say=change)
            except ExpertMismatch as error:
                raise UsageError(f"{error}; give {_flags_to_mend(error)}") from error
            progress.say(f"{prefix}: {living} of {num_experts} experts alive")


def _flags_to_mend(error: ExpertMismatch) -> str:
    """Flags that make our model fit their experts."""
    theirs, ours = len(error.theirs), len(error.ours)
    if theirs == ours:
        return "--d-model, --num-heads, --seq-len and --mem-len as on the nodes"
    if theirs > ours:
        return "--dropout, --attention-dropout or --position-dropout above 0: the nodes' experts take dropout keys"
    return "no --dropout, --attention-dropout or --position-dropout: the nodes' experts take no dropout keys"


def trunk_optimizer(options: TrainOptions) -> optax.GradientTransformation:
    """The optimiser of the trunk; raises ValueError if a rate is out of range, or the user's file has none."""
    spec = options.trunk.optimizer
    if spec is None:
        return make_optimizer(trunk_recipe(options))
    try:
        return user_optimizer(spec)
    except UserFileError as error:
        hint = "it is the trunk's: what experts learn with is --optimizer of dmoe node and dmoe up"
        raise UserFileError(f"{error} ({hint})") from error


def trunk_recipe(options: TrainOptions) -> TrunkRecipe:
    """The recipe that trains the trunk, unless the user gives an optimiser."""
    return replace(options.trunk.recipe, total_steps=options.run_length.steps)


async def own_training(options: TrainOptions, swarm: Swarm) -> Training:
    """The user's own model, from a file; raises UsageError if it is not what `--model` asks for."""
    data, spec = options.data, options.model or ""

    def make() -> tuple[AnyModel, list[Iterator[Any]]]:
        model = call_user(spec, user_model(spec), swarm, kind="model")
        if not isinstance(model, Model):
            raise UserFileError(f"model {spec!r}: expected a dmoe_jax.model.Model, got {type(model).__name__}")
        make_batches = getattr(model, "batches", None)
        if not callable(make_batches):
            raise UserFileError(
                f"model {spec!r}: {type(model).__name__} has no batches(shard, num_shards, seed), an iterator of "
                "training batches"
            )
        shards = range(data.num_trainers)
        return model, [positioned(make_batches(shard, len(shards), data.chance_seed)) for shard in shards]

    with mistakes_in_one_line():
        model, batches = await trio.to_thread.run_sync(make, abandon_on_cancel=True)
    validation: Any = getattr(model, "validation", None)
    splits = ("valid",) if callable(validation) else ()
    return Training(
        model=model,
        task=Task(name=spec, unit=model.unit, splits=splits, meaning=model.meaning),
        batches=batches,
        evaluation=lambda split, max_items: (validation(), None),  # the user's data is read whole
        facts={"model": model.name, "trainers": data.num_trainers},
    )


async def check_before_joining(options: TrainOptions) -> None:
    """Raise `UsageError` naming the rate, or router, model or optimiser of the user's own, that will not do, before the
    swarm hears of us."""

    def look() -> None:
        trunk_optimizer(options)
        if options.model is not None:
            user_model(options.model)
            return
        language = options.language
        router = make_router(language.router, language.grid_size)
        check_router(router, language.grid_size, language.layer.d_model, in_order=language.route == "token")

    with mistakes_in_one_line():
        # In a thread: a file of the user's may import anything.
        await trio.to_thread.run_sync(look, abandon_on_cancel=True)
