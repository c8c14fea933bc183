"""`dmoe node`: serve experts."""

import inspect
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import trio
import tyro

from dmoe_jax.claims.claiming import ClaimConfig
from dmoe_jax.claims.records import check_claimable
from dmoe_jax.cli.checks import check_at_least, check_no_effect, check_positive, check_seed
from dmoe_jax.cli.dht import DhtCommand
from dmoe_jax.cli.distributed import DeviceOptions
from dmoe_jax.cli.lifecycle import Stop
from dmoe_jax.cli.network import MemberOptions, join_line, join_swarm
from dmoe_jax.directory.grid import ExpertUid, expand_grid_pattern
from dmoe_jax.layer_config import LayerConfig, Recipe, Route
from dmoe_jax.machine.xla_threads import set_xla_threads
from dmoe_jax.metrics.node import node_families
from dmoe_jax.metrics.process import peer_families
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.runs.endings import EXIT_INTERRUPTED, UsageError, mistakes_in_one_line, one_line
from dmoe_jax.runs.flags import by_flags, flags_of, named_flags
from dmoe_jax.runs.setting_up import set_up_jax
from dmoe_jax.runs.speech import say
from dmoe_net.rpc.faults import FaultPlan

if TYPE_CHECKING:  # they need JAX, which `dmoe --help` does not wait for
    import optax

    from dmoe_jax.experts import Expert
    from dmoe_jax.peers.peer import SwarmPeer
    from dmoe_jax.replicas import ReplicaConfig
    from dmoe_jax.swarm.serving import Served
    from dmoe_jax.swarm.swarm import Swarm

_DEFAULT_EXPERTS = ("layer0.[0:4].[0:4]", "layer1.[0:4].[0:4]")


@dataclass(frozen=True, kw_only=True)
class HandOptions:
    """Experts of a node."""

    experts: tuple[str, ...] = ()
    """Experts to serve: uids such as layer0.3.1, or patterns such as layer0.[0:2].[0:4]. A node that has claimed one of
    them gives it up to this one, whatever it has learnt: with --checkpoint-dir it goes on from what was saved.
    Default: layer0.[0:4].[0:4] layer1.[0:4].[0:4], and with --claim none."""
    claim: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Also serve up to so many experts of --of that no other node serves, and take up more whenever the node of some
    has died or left. They begin with what --checkpoint-dir, which all nodes should share, has of them, else with
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
        """Number of experts that the node serves from the start.

        Raises:
          UsageError: the patterns are malformed, name an expert twice, or too many to claim.
        """
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

    def config(self) -> ClaimConfig | None:
        """Settings of its claims; None: it claims nothing."""
        return None if self.claim is None else ClaimConfig(max_experts=self.claim, of=self.of)


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
        """Make the expert.

        Raises:
          UsageError: a flag is for another kind. ValueError: there is no such kind or file.
        """
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
        """Make the optimiser; None: nothing is learnt.

        Raises:
          UsageError: a flag would have no effect. ValueError: the user's file has no optimiser.
        """
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

    def check(self) -> None:
        """Raise `UsageError` for a flag out of range."""
        check_positive(self, "checkpoint_period_s")
        if self.checkpoint_dir is not None and self.checkpoint_dir.exists() and not self.checkpoint_dir.is_dir():
            raise UsageError(f"--checkpoint-dir must be a folder, or a name for one; {self.checkpoint_dir} is a file")


@dataclass(frozen=True, kw_only=True)
class CopyOptions:
    """Experts that several nodes serve."""

    replicate: bool = False
    """Serve the experts beside other nodes that serve them too, all with this flag: begin with the state that they have
    there, share the load, and average with them. Without it a warning names the others. Not together with --claim."""
    average_period_s: float | None = None
    """Seconds between two averages with the other nodes, the same on all of them; at least 23. With --replicate.
    Default: 30."""

    def config(self) -> "ReplicaConfig | None":
        """Settings of the copies; None: this node serves its experts alone. Raises UsageError for a flag."""
        from dmoe_jax.replicas import ReplicaConfig

        if self.average_period_s is None:
            return ReplicaConfig() if self.replicate else None
        if not self.replicate:
            raise UsageError("--average-period-s would have no effect without --replicate")
        try:
            return ReplicaConfig(average_period_s=self.average_period_s)
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


@dataclass(frozen=True, kw_only=True)
class NodeCommand(DhtCommand):
    """Serve experts to the trainers of a swarm. Experts learn from the gradients that trainers send.

    Stopped by SIGTERM or Ctrl-C, a node refuses new calls, withdraws its experts, answers what it has accepted, saves
    and ends, all within 15 seconds.
    """

    LEAVE_TIMEOUT_S: ClassVar[float] = 15.0

    network: Annotated[MemberOptions, tyro.conf.arg(name="")] = field(default_factory=MemberOptions)
    hand: Annotated[HandOptions, tyro.conf.arg(name="")] = field(default_factory=HandOptions)
    kind: Annotated[KindOptions, tyro.conf.arg(name="")] = field(default_factory=KindOptions)
    learning: Annotated[LearningOptions, tyro.conf.arg(name="")] = field(default_factory=LearningOptions)
    saving: Annotated[SavingOptions, tyro.conf.arg(name="")] = field(default_factory=SavingOptions)
    copies: Annotated[CopyOptions, tyro.conf.arg(name="")] = field(default_factory=CopyOptions)
    serving: Annotated[ServingOptions, tyro.conf.arg(name="")] = field(default_factory=ServingOptions)
    devices: Annotated[DeviceOptions, tyro.conf.arg(name="")] = field(default_factory=DeviceOptions)
    seed: int = 0
    """Seed of the experts' initial parameters; with the uid it decides them, on whichever node they live. And of
    --faults."""
    faults: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FAULT=RATE [FAULT=RATE ...]")] = ()
    """Misbehave on purpose in a share of expert calls: refuse, hang, die, garbage, wrong_shape, late=RATE:MEAN_S."""

    def run(self) -> int:
        """Serve until interrupted; the exit status."""
        try:
            return super().run()
        except SystemExit as failed:
            self.devices.end(failed.code)
            raise

    async def _serve(self, stop: Stop) -> int:
        faults = self._check()
        if self.devices.xla_threads is not None:
            set_xla_threads(self.devices.xla_threads)
        set_up_jax()
        await self.devices.initialize()
        from dmoe_jax.swarm.opening import swarm_of

        with mistakes_in_one_line():
            self.devices.check_there()
            claim, replicas = self.hand.config(), self.copies.config()
            expert, optimizer = await trio.to_thread.run_sync(
                lambda: (self.kind.make(), self.learning.make()), abandon_on_cancel=True
            )
        if self.devices.follows:
            experts = {str(uid): expert for pattern in self.hand.patterns() for uid in expand_grid_pattern(pattern)}
            await self.devices.follow(stop, experts, optimizer, seed=self.seed)
            return 0
        joining = join_swarm(self.network, join=self.join, listen=self.listen, faults=faults)
        async with (
            self.devices.opened_lead(stop) as placed,
            self.metrics.opened("node") as monitor,
            joining as peer,
            swarm_of(peer, name=self.network.swarm, seed=self.seed) as swarm,
        ):
            monitor.show(partial(peer_families, peer))
            # Joined first: a taken port or an unreachable swarm is reported before minutes of compilation.
            say(f"Node {peer.rpc.peer_id.short} has joined the swarm at {peer.rpc.address}")
            if claim is not None and self.saving.checkpoint_dir is None:
                say("Without --checkpoint-dir, experts of a node that died begin again with their seeds")
            started, doing = time.perf_counter(), "joined, not serving yet"
            monitor.why_not_ready = lambda: doing

            def said(text: str) -> None:
                nonlocal doing
                doing = text
                say(text)

            serving = partial(
                swarm.serve,
                dict.fromkeys(self.hand.patterns(), expert),
                optimizer=optimizer,
                config=replace(self.serving, checkpoint_period_s=self.saving.checkpoint_period_s),
                devices=self.devices.devices if placed is None else placed,
                mesh=self.devices.mesh if placed is None else None,
                checkpoint_dir=self.saving.checkpoint_dir,
                claim=claim,
                replicas=replicas,
                on_progress=said,
            )
            with stop.body():
                served = await self._begin(swarm, serving, claim)
                node = served.node
                monitor.show(lambda: node_families(node.recorder, node.status()))
                monitor.why_not_ready = lambda: "" if node.state == "serving" else node.state
                self._say_what_is_served(served, peer, took_s=time.perf_counter() - started)
                await trio.sleep_forever()
            monitor.why_not_ready = lambda: "leaving"
        return EXIT_INTERRUPTED

    def _check(self) -> FaultPlan | None:
        """Raise `UsageError` if flags are out of range or do not go together; else the plan of --faults."""
        check_seed(self, "seed")
        self.saving.check()
        self.hand.count()
        self.devices.check()
        if self.copies.replicate and self.hand.claim is not None:
            raise UsageError("--replicate has no use beside --claim: a node claims only what nobody else serves")
        if self.devices.distributed is not None and (self.hand.claim is not None or self.copies.replicate):
            raise UsageError("--distributed does not go together with --claim or --replicate yet")
        others = {"--claim": self.hand.claim, "--mesh": self.devices.mesh, "--distributed": self.devices.distributed}
        for flag, value in others.items():
            if self.serving.strategy == "stacked" and value is not None:
                raise UsageError(f"--strategy stacked does not go together with {flag}")
        if not self.faults:
            return None
        try:
            plan = FaultPlan.parse(self.faults, seed=self.seed)
        except ValueError as error:
            raise UsageError(f"--faults: {error}") from error
        # The DHT and the status stay honest: what is studied is a swarm whose experts fail.
        return replace(plan, methods=("expert.",))

    async def _begin(
        self, swarm: "Swarm", serving: "Callable[..., Awaitable[Served]]", claim: ClaimConfig | None
    ) -> "Served":
        """Serve, compiling what other processes of this machine do not compile already."""
        from dmoe_jax.cli.compiling import compiled_once

        programs = repr((self.kind, self.learning, self.serving.warm_up_rows, self.serving.strategy, self.devices))
        before: AbstractAsyncContextManager[None] = nullcontext()
        compiling: AbstractAsyncContextManager[None] = nullcontext()
        if claim is None:
            facts = {"state": "waiting", "experts": self.hand.count()}
            before = compiled_once(programs, while_waiting=swarm.announced("node", lambda: facts))
        else:  # it is listed already while it waits, and claims its experts
            compiling = compiled_once(programs, while_waiting=nullcontext())
        async with before:
            with mistakes_in_one_line():
                served = await serving(compiling=compiling)
        return served

    def _say_what_is_served(self, served: "Served", peer: "SwarmPeer", *, took_s: float) -> None:
        node = served.node
        more = "" if node.claims is None else f" and may claim {node.claims()['room']} more"
        say(f"Node {peer.rpc.peer_id.short} serves {len(served.uids)} experts{more}, ready after {took_s:.1f} s")
        if self.copies.replicate:
            say(f"Slots of its experts (slot:experts): {node.status()['replicas']['summary']}")
        say(join_line("train", self.network, peer))
        if self.faults:
            say(f"This node misbehaves on purpose: --faults {' '.join(self.faults)}")
