"""Flags of `dmoe node`: its experts, their optimiser, their checkpoints and their serving."""

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from dmoe_jax.cli.checks import check_at_least, check_no_effect, check_positive
from dmoe_jax.cli.init_flags import fitting, settings_of_experts
from dmoe_jax.directory.grid import ExpertUid, expand_grid_pattern
from dmoe_jax.layer_config import LayerConfig, Recipe, Route
from dmoe_jax.machine.disk import check_local
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.placement.config import PlacementConfig
from dmoe_jax.placement.survey import check_claimable
from dmoe_jax.runs.endings import UsageError, mistakes_in_one_line, one_line
from dmoe_jax.runs.flags import by_flags, flags_of, named_flags

if TYPE_CHECKING:  # they need JAX, which `dmoe --help` does not wait for
    import optax

    from dmoe_jax.experts import Expert

_DEFAULT_EXPERTS = ("layer0.[0:4].[0:4]", "layer1.[0:4].[0:4]")


@dataclass(frozen=True, kw_only=True)
class HandOptions:
    """Experts of a node."""

    experts: tuple[str, ...] = ()
    """Experts to serve: uids such as layer0.3.1, or patterns such as layer0.[0:2].[0:4]. Where enough others serve one
    of them, a node that has claimed it gives it up, whatever it has learnt: with --checkpoint-dir it goes on from what
    was saved. Default: layer0.[0:4].[0:4] layer1.[0:4].[0:4], and with --claim none."""
    claim: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Also serve up to so many experts of --of that no other node serves (with --replicas R: that fewer than R serve),
    and take up more whenever the node of some has died or left. They begin with the state that another node has, where
    several are to serve them, else with what --checkpoint-dir, which all nodes should share, has of them, else with
    their seeds."""
    of: Annotated[tuple[str, ...], tyro.conf.arg(metavar="PATTERN [PATTERN ...]")] = ()
    """Experts that may be claimed: patterns such as 'ffn.[0:32].[0:32]'."""

    def patterns(self) -> tuple[str, ...]:
        """Patterns of --experts, or its default, and of --of; raises UsageError if --claim and --of do not fit."""
        if self.claim is None:
            if self.of:
                raise UsageError("--of would have no effect without --claim N")
            return self.experts or _DEFAULT_EXPERTS
        check_at_least(1, self, "claim")
        if not self.of:
            raise UsageError("--claim needs --of PATTERN: which experts may be claimed, such as 'ffn.[0:32].[0:32]'")
        return self.experts + self.of

    def count(self) -> int:
        """Number of experts that the node serves from the start. Raises UsageError if the patterns are malformed, name
        an expert twice, or too many to claim."""
        patterns: dict[ExpertUid, str] = {}
        with mistakes_in_one_line():
            for pattern in self.patterns():
                for uid in expand_grid_pattern(pattern):
                    if uid in patterns:
                        flags = "--experts" if self.claim is None else "--experts and --of together"
                        both = f"{patterns[uid]} and in {pattern}"
                        raise UsageError(f"{flags} must name no expert twice, got {uid} in {both}")
                    patterns[uid] = pattern
            claimed = {str(uid): uid for uid, pattern in patterns.items() if pattern in self.of}
            if self.claim is not None:
                check_claimable(claimed)
        return len(patterns) - len(claimed)

    def uids(self) -> tuple[str, ...]:
        """Uids of all patterns."""
        return tuple(str(uid) for pattern in self.patterns() for uid in expand_grid_pattern(pattern))


@dataclass(frozen=True, kw_only=True)
class KindOptions:
    """Kind of an expert."""

    kind: Annotated[str, tyro.conf.arg(name="expert", metavar="KIND")] = "transformer_xl"
    """Kind of an expert: transformer_xl, feedforward (takes --d-model), or my_file.py:my_expert, an Expert or a
    function without arguments that returns one (see dmoe_jax.experts.as_expert)."""
    expert: Annotated[LayerConfig, tyro.conf.arg(name="")] = field(default_factory=LayerConfig)
    route: Route = "sequence"
    """Unit that a transformer_xl expert serves. sequence: it is a whole layer; token: it is the feed-forward network of
    a layer, whose attention stays with the trainers. They need the same --route."""

    def make(self) -> "Expert":
        """Make it. Raises UsageError for a flag of another kind, ValueError if there is no such kind or file."""
        from dmoe_jax.experts import EXPERTS, make_expert
        from dmoe_jax.experts.transformer_xl import layer_expert
        from dmoe_jax.experts.user_file import load_from_file, user_expert

        if self.kind == "transformer_xl":
            return layer_expert(self.expert, self.route)
        if self.route != "sequence":
            raise UsageError(f"--route {self.route} would have no effect beside --expert {self.kind}")
        taken: Collection[str] = ()
        make = partial(user_expert, self.kind)
        if self.kind in EXPERTS:
            taken, make = inspect.signature(EXPERTS[self.kind]).parameters, partial(make_expert, self.kind)
        else:
            load_from_file(self.kind, kind="expert", choices=sorted(EXPERTS))
        sizes = [*flags_of(self.expert)]
        check_no_effect(f"--expert {self.kind}", (flag for flag in sizes if flag.field not in taken))
        return make(**{flag.field: flag.value for flag in sizes if flag.field in taken})

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that decide the experts' shapes, by the names of their flags; none of an expert of one's own."""
        return settings_of_experts(self.expert, self.route) if self.kind == "transformer_xl" else {}


@named_flags("learning_rate", "warmup_steps", "weight_decay", "grad_clip", "staleness_power", "freeze_experts")
@dataclass(frozen=True, kw_only=True)
class ExpertRecipe(Recipe):
    """Training of each expert, by itself."""

    learning_rate: float = 1e-3
    warmup_steps: int = 0
    total_steps: int | None = None
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    freeze_experts: bool = False
    """Answer backward requests without learning from them: the control run that shows what experts contribute."""


@dataclass(frozen=True, kw_only=True)
class LearningOptions:
    """Optimiser of the experts."""

    optimizer: Annotated[str | None, tyro.conf.arg(metavar="FILE.py:NAME")] = None
    """Optimiser of the experts: my_file.py:my_optimizer, an Optax transformation or a function without arguments that
    returns one. Default: Adam, with the step size and so on given here."""
    recipe: Annotated[ExpertRecipe, tyro.conf.arg(name="")] = field(default_factory=ExpertRecipe)

    def make(self) -> "optax.GradientTransformation | None":
        """Make the optimiser; None: nothing is learnt. Raises UsageError for a flag that would have no effect,
        ValueError if the user's file has no optimiser."""
        from dmoe_jax.experts.user_file import user_optimizer
        from dmoe_jax.optim.recipe import make_optimizer

        if self.optimizer is None:
            return None if self.recipe.freeze_experts else make_optimizer(self.recipe)
        check_no_effect("--optimizer", flags_of(self.recipe))
        return user_optimizer(self.optimizer)


@dataclass(frozen=True, kw_only=True)
class SavingOptions:
    """Checkpoints of experts."""

    checkpoint_dir: Path | None = None
    """Folder for the experts, each saved by itself; those that are there already go on from where they were, whichever
    node saved them. Nodes may share it."""
    checkpoint_period_s: float = 60.0
    """Seconds that an expert's newest checkpoint may be old, if it has learnt since; one more is made when the node is
    stopped. Where saving takes over a third of it checkpoints become older, and a warning says how old."""
    init: Annotated[Path | None, tyro.conf.arg(metavar="EXPORT")] = None
    """Begin with the experts of a model that dmoe export wrote, and not with their seeds: where --checkpoint-dir has no
    checkpoint of one, it is written there. Trainers have an --init for the trunk."""

    def check(self) -> None:
        """Raise `UsageError` for a flag out of range."""
        check_positive(self, "checkpoint_period_s")
        if self.checkpoint_dir is not None and self.checkpoint_dir.exists() and not self.checkpoint_dir.is_dir():
            raise UsageError(f"--checkpoint-dir must be a folder, or a name for one; {self.checkpoint_dir} is a file")
        if self.init is not None and self.checkpoint_dir is None:
            raise UsageError("--init needs --checkpoint-dir: what experts begin with is written there")
        if self.checkpoint_dir is not None:
            with mistakes_in_one_line():
                check_local(self.checkpoint_dir, "--checkpoint-dir")

    def begin(
        self,
        uids: Collection[str],
        expert: "Expert",
        optimizer: "optax.GradientTransformation | None",
        settings: Mapping[str, Any],
    ) -> int:
        """Have the experts begin as --init says; return their number. Raises UsageError if the export's were made with
        other `settings`; ValueError and OSError as `begin_experts`."""
        from dmoe_jax.trained.imported import begin_experts

        if self.init is None or self.checkpoint_dir is None:
            return 0
        with fitting(self.init, settings) as path:
            return begin_experts(path, self.checkpoint_dir, uids, expert, optimizer)


@dataclass(frozen=True, kw_only=True)
class CopyOptions:
    """Experts that several nodes serve."""

    replicas: Annotated[int, tyro.conf.arg(metavar="R")] = 1
    """Nodes that are to serve each expert. With 2 or more, on all nodes alike, this one serves its experts beside the
    others that do: it begins with the state that they have there, shares the load, and averages with them. With --claim
    it takes up experts that fewer nodes serve. With 1 a warning names others that serve the same ones."""
    average_period_s: float | None = None
    """Seconds between two averages with the other nodes, the same on all of them; at least 23. With --replicas.
    Default: 30."""

    def placement(self, hand: HandOptions) -> PlacementConfig:
        """Settings of claims and copies. Raises UsageError for a flag."""
        if self.average_period_s is not None and self.replicas == 1:
            raise UsageError("--average-period-s would have no effect without --replicas R of 2 or more")
        try:
            config = PlacementConfig(max_experts=hand.claim or 0, of=hand.of, replicas=self.replicas)
            return config if self.average_period_s is None else replace(config, average_period_s=self.average_period_s)
        except ValueError as error:
            raise UsageError(by_flags(one_line(error), flags_of(self))) from error


@named_flags("warm_up_rows", "max_batch_rows", "strategy", "announce_period_s")
@dataclass(frozen=True, kw_only=True)
class ServingOptions(NodeConfig):
    """Serving of requests. An announcement is valid for three periods, and the queue has room for 16 batches."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_waiting_rows", max(self.max_waiting_rows, 16 * self.max_batch_rows))
        object.__setattr__(self, "record_lifetime_s", 3 * self.announce_period_s)
        super().__post_init__()
