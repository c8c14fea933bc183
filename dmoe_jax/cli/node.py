"""`dmoe node`: serve experts."""

import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import trio
import tyro

from dmoe_jax.claims.records import check_claimable
from dmoe_jax.cli.common import (
    UsageError,
    changed,
    check_at_least,
    check_positive,
    check_seed,
    flag_of,
    mistakes_in_one_line,
    set_up_jax,
)
from dmoe_jax.cli.dht import DhtCommand
from dmoe_jax.cli.distributed import DistributedOptions, end_soon
from dmoe_jax.cli.lifecycle import EXIT_INTERRUPTED, Stop
from dmoe_jax.cli.network import join_line, join_swarm
from dmoe_jax.cli.speech import say
from dmoe_jax.grid import ExpertUid, expand_grid_pattern
from dmoe_jax.layer_config import LayerConfig, Route
from dmoe_jax.metrics.node import node_families
from dmoe_jax.metrics.process import peer_families
from dmoe_jax.xla_threads import set_xla_threads
from net.rpc.faults import FaultPlan

if TYPE_CHECKING:  # they need JAX, which `dmoe --help` does not wait for
    import optax

    from dmoe_jax.claims.claiming import ClaimConfig
    from dmoe_jax.experts import Expert
    from dmoe_jax.node.config import NodeConfig
    from dmoe_jax.node.devices import PlacedDevice
    from dmoe_jax.peer import SwarmPeer
    from dmoe_jax.replicas import ReplicaConfig
    from dmoe_jax.serving import Served
    from dmoe_jax.swarm import Swarm

_DEFAULT_EXPERTS = ("layer0.[0:4].[0:4]", "layer1.[0:4].[0:4]")

_MOST_XLA_THREADS = 256
"""More than a machine has cores only cost memory: XLA makes them all."""
_LEAST_AVERAGE_PERIOD_S = 23
"""The time-outs of `dmoe_jax.replicas.config.ReplicaConfig` together."""

_OF_ADAM = ("learning_rate", "warmup_steps", "weight_decay", "grad_clip", "staleness_power")


@dataclass(frozen=True, kw_only=True)
class NodeCommand(DhtCommand):
    """Serve experts to the trainers of a swarm. Experts learn from the gradients that trainers send.

    Stopped by SIGTERM or Ctrl-C, a node refuses new calls, withdraws its experts, answers what it has accepted, saves
    and ends, all within 15 seconds.
    """

    LEAVE_TIMEOUT_S: ClassVar[float] = 15.0

    experts: tuple[str, ...] = ()
    """Experts to serve: uids such as layer0.3.1, or patterns such as layer0.[0:2].[0:4]. A node that has claimed one of
    them gives it up to this one, whatever it has learnt: with --checkpoint-dir it goes on from what was saved.
    Default: layer0.[0:4].[0:4] layer1.[0:4].[0:4], and with --claim none."""
    claim: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Also serve up to so many experts of --of that no other node serves, and take up more whenever the node of some
    has died or left. They begin with what --checkpoint-dir, which all nodes should share, has of them, else with
    their seeds."""
    of: Annotated[tuple[str, ...], tyro.conf.arg(metavar="PATTERN [PATTERN ...]")] = ()
    """Which experts may be claimed: patterns such as 'ffn.[0:32].[0:32]'."""
    swarm: str = "dmoe"
    """Name under which the node is listed."""
    kind: Annotated[str, tyro.conf.arg(name="expert", metavar="KIND")] = "transformer_xl"
    """What an expert is: transformer_xl, feedforward (takes --d-model), or my_file.py:my_expert, an Expert or a
    function without arguments that returns one (see dmoe_jax.experts.as_expert)."""
    expert: Annotated[LayerConfig, tyro.conf.arg(name="")] = field(default_factory=LayerConfig)
    """Shape of one expert."""
    route: Route = "sequence"
    """What a transformer_xl expert serves: sequence, it is a whole layer; token, it is the feed-forward network of a
    layer, whose attention stays with the trainers. They need the same --route."""
    optimizer: Annotated[str | None, tyro.conf.arg(metavar="FILE.py:NAME")] = None
    """What experts learn with: my_file.py:my_optimizer, an Optax transformation or a function without arguments that
    returns one. Default: Adam, with the step size and so on given here."""
    learning_rate: float = 1e-3
    """Step size of each expert's Adam."""
    warmup_steps: int = 0
    """Updates of an expert in which its step size rises from 0."""
    weight_decay: float = 0.0
    """L2 penalty on an expert's parameters, added to their gradients before Adam."""
    grad_clip: float = 1.0
    """Bound on the norm of an expert's gradient in one update."""
    staleness_power: float = 0.5
    """An update is divided by (1 + s) to this power, s being the expert's updates since the forward pass that it
    belongs to, and stale ones get no momentum; 0: plain Adam. With many trainers it wants a larger
    --learning-rate."""
    freeze_experts: bool = False
    """Answer backward requests without learning from them: the control run that shows what experts contribute."""
    seed: int = 0
    """Seed of the experts' initial parameters; with the uid it decides them, on whichever node they live. And of
    --faults."""
    checkpoint_dir: Path | None = None
    """Folder for the experts, each saved by itself; those that are there already go on from where they were, whichever
    node saved them. Nodes may share it."""
    checkpoint_period_s: float = 60.0
    """Seconds that an expert's newest checkpoint may be old, if it has learnt since; one more is made when the node is
    stopped. Where saving takes over a third of it checkpoints become older, and a warning says how old."""
    replicate: bool = False
    """Serve the experts beside other nodes that serve them too, all with this flag: begin with the state that they have
    there, share the load, and average with them. Without it a warning names the others. Not together with --claim."""
    average_period_s: float = 30.0
    """Seconds between two averages with the other nodes, the same on all of them; at least 23. With --replicate."""
    warm_up_rows: int = 16
    """Compile for batches of up to this many samples before announcing the experts."""
    max_batch_rows: int = 256
    """Most samples of one XLA call."""
    strategy: Literal["auto", "single", "stacked"] = "auto"
    """How experts are run: single, each by programs of its own; stacked, many of a kind by one program, which pays for
    small ones; auto, as their size and the device suggest."""
    devices: str | None = None
    """JAX devices of this machine over which the experts are spread, each expert on one: 0-7, 0,2,5 or all. Default:
    the first one."""
    mesh: str | None = None
    """Spread each expert over several devices, such as data=2,model=4: rows of a batch over data, parameters and
    optimiser state over model. With --devices as many meshes as these make up share the experts: 8 devices and model=4
    make two. Default: an expert lives on one device."""
    xla_threads: int | None = None
    """Threads that XLA computes with on a CPU. Default: as many as there are cores, or as NPROC says. Nodes that share
    a machine do better with their share of its cores. Experts that call the host need two, or stop for ever."""
    processes: Annotated[DistributedOptions, tyro.conf.arg(name="")] = field(default_factory=DistributedOptions)
    """Whether the node is several processes."""
    announce_period_s: float = 10.0
    """Seconds between announcements in the DHT; they are valid three times as long."""
    faults: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FAULT=RATE [FAULT=RATE ...]")] = ()
    """Misbehave on purpose in a share of expert calls: refuse, hang, die, garbage, wrong_shape, late=RATE:MEAN_S."""

    def run(self) -> int:
        """Serve until interrupted; the exit status."""
        try:
            return super().run()
        except SystemExit as failed:
            self.processes.end(failed.code)
            raise

    async def _serve(self, stop: Stop) -> int:
        faults = self._check()
        if self.xla_threads is not None:
            set_xla_threads(self.xla_threads)
        set_up_jax()
        await self.processes.initialize()
        from dmoe_jax.swarm import open_swarm

        with mistakes_in_one_line():
            self._check_devices()
            config, claim, replicas = self._node_config(), self._claim_config(), self._replica_config()
            expert, optimizer = await trio.to_thread.run_sync(
                lambda: (self._make_expert(), self._make_optimizer()), abandon_on_cancel=True
            )
        if self.processes.follows:
            return await self._follow(stop, expert, optimizer)
        joining = join_swarm(self.network, join=self.join, listen=self.listen, faults=faults)
        async with (
            self._opened_lead(stop) as placed,
            self.metrics.opened("node") as monitor,
            joining as peer,
            open_swarm(peer=peer, name=self.swarm, seed=self.seed) as swarm,
        ):
            monitor.show(partial(peer_families, peer))
            # Joined first: a taken port or an unreachable swarm is reported before minutes of compilation.
            say(f"Node {peer.rpc.peer_id.short} has joined the swarm at {peer.rpc.address}")
            if claim is not None and self.checkpoint_dir is None:
                say("Without --checkpoint-dir, experts of a node that died begin again with their seeds")
            started, doing = time.perf_counter(), "joined, not serving yet"
            monitor.why_not_ready = lambda: doing

            def said(text: str) -> None:
                nonlocal doing
                doing = text
                say(text)

            serving = partial(
                swarm.serve,
                dict.fromkeys(self._named(), expert),
                optimizer=optimizer,
                config=config,
                devices=self.devices if placed is None else placed,
                mesh=self.mesh if placed is None else None,
                checkpoint_dir=self.checkpoint_dir,
                checkpoint_period_s=self.checkpoint_period_s,
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
        """Raise `UsageError` if flags are out of range or do not go together; else what is to go wrong on purpose."""
        check_positive(self, "announce_period_s", "checkpoint_period_s", "warm_up_rows", "learning_rate", "grad_clip")
        check_at_least(1, self, "max_batch_rows")
        check_seed(self, "seed")
        if self.xla_threads is not None and not 1 <= self.xla_threads <= _MOST_XLA_THREADS:
            raise UsageError(f"--xla-threads must be from 1 to {_MOST_XLA_THREADS}, got {self.xla_threads}")
        if self.checkpoint_dir is not None and self.checkpoint_dir.exists() and not self.checkpoint_dir.is_dir():
            raise UsageError(f"--checkpoint-dir must be a folder, or a name for one; {self.checkpoint_dir} is a file")
        check_at_least(0, self, "warmup_steps", "weight_decay", "staleness_power")
        if self.replicate:
            check_at_least(_LEAST_AVERAGE_PERIOD_S, self, "average_period_s")
        self._count_experts()
        self.processes.check(devices=self.devices)
        if self.processes.distributed is not None and (self.claim is not None or self.replicate):
            raise UsageError("--distributed does not go together with --claim or --replicate yet")
        others = {"--claim": self.claim, "--mesh": self.mesh, "--distributed": self.processes.distributed}
        for flag, value in others.items():
            if self.strategy == "stacked" and value is not None:
                raise UsageError(f"--strategy stacked does not go together with {flag}")
        return self._fault_plan()

    async def _begin(
        self, swarm: "Swarm", serving: "Callable[..., Awaitable[Served]]", claim: "ClaimConfig | None"
    ) -> "Served":
        """Serve, compiling what other processes of this machine do not compile already."""
        from dmoe_jax.cli.compiling import compiled_once

        waiting = _listed_as_waiting(swarm, self._count_experts(), claim)
        once = compiled_once(self._programs(), while_waiting=waiting)
        # A node that claims is listed already while it waits, and claims its experts.
        before, compiling = (once, nullcontext()) if claim is None else (nullcontext(), once)
        async with before:
            with mistakes_in_one_line():
                return await serving(compiling=compiling)
        raise AssertionError("nothing swallows exceptions")

    def _say_what_is_served(self, served: "Served", peer: "SwarmPeer", *, took_s: float) -> None:
        node = served.node
        more = "" if node.claims is None else f" and may claim {node.claims()['room']} more"
        say(f"Node {peer.rpc.peer_id.short} serves {len(served.uids)} experts{more}, ready after {took_s:.1f} s")
        if self.replicate:
            say(f"Slots of its experts (slot:experts): {node.status()['replicas']['summary']}")
        say(join_line("train", self.network, peer))
        if self.faults:
            say(f"This node misbehaves on purpose: --faults {' '.join(self.faults)}")

    def _node_config(self) -> "NodeConfig":
        from dmoe_jax.node.config import NodeConfig

        return NodeConfig(
            swarm=self.swarm,
            max_batch_rows=self.max_batch_rows,
            max_waiting_rows=max(NodeConfig().max_waiting_rows, 16 * self.max_batch_rows),
            warm_up_rows=self.warm_up_rows,
            strategy=self.strategy,
            announce_period_s=self.announce_period_s,
            record_lifetime_s=3 * self.announce_period_s,
        )

    def _claim_config(self) -> "ClaimConfig | None":
        from dmoe_jax.claims.claiming import ClaimConfig

        return None if self.claim is None else ClaimConfig(max_experts=self.claim, of=self.of)

    def _replica_config(self) -> "ReplicaConfig | None":
        from dmoe_jax.replicas import ReplicaConfig

        if self.replicate and self.claim is not None:
            raise UsageError("--replicate has no use beside --claim: a node claims only what nobody else serves")
        if self.replicate:
            return ReplicaConfig(average_period_s=self.average_period_s)
        if "average_period_s" in changed(self):
            raise UsageError("--average-period-s would have no effect without --replicate")
        return None

    def _check_devices(self) -> None:
        """Raise ValueError if there are not so many devices."""
        from dmoe_jax.device import ThreadDevice
        from dmoe_jax.node.devices import node_devices
        from dmoe_jax.node.lockstep import mesh_of_all

        if self.processes.distributed is None:
            node_devices(ThreadDevice(), self.devices, self.mesh)
        else:
            mesh_of_all(self.mesh)

    @asynccontextmanager
    async def _opened_lead(self, stop: Stop) -> AsyncIterator["tuple[PlacedDevice, ...] | None"]:
        """The devices of all processes, if there are several."""
        from dmoe_jax.node.lockstep import mesh_of_all, open_lead

        if self.processes.distributed is None:
            yield None
            return
        async with open_lead(
            host=self.processes.host,
            mesh=mesh_of_all(self.mesh),
            on_lost=end_soon,
            on_leave_asked=stop.request_for_another,
        ) as placed:
            yield placed

    async def _follow(self, stop: Stop, expert: "Expert", optimizer: "optax.GradientTransformation | None") -> int:
        """Do as process 0 does until it leaves; the exit status. Being asked to stop ends the whole node, in order."""
        from dmoe_jax.node.lockstep import follow, mesh_of_all

        async def until_told_to_stop() -> None:
            # Process 0 leaves within the time that a node has, and tells us.
            with stop.body(leave_timeout_s=2 * self.LEAVE_TIMEOUT_S):
                await trio.sleep_forever()
            say("asks process 0 to leave")

        say(f"process {self.processes.process_id} does as process 0 does")
        await follow(
            dict.fromkeys((str(uid) for pattern in self._named() for uid in expand_grid_pattern(pattern)), expert),
            optimizer,
            host=self.processes.host,
            seed=self.seed,
            mesh=mesh_of_all(self.mesh),
            on_lost=end_soon,
            until_told_to_stop=until_told_to_stop,
        )
        return 0

    def _programs(self) -> str:
        """What is compiled, told from what other nodes compile."""
        rates = [getattr(self, name) for name in (*_OF_ADAM, "freeze_experts", "warm_up_rows")]
        return repr((self.kind, self.expert, self.route, self.optimizer, rates, self.strategy, self.devices, self.mesh))

    def _make_optimizer(self) -> "optax.GradientTransformation | None":
        """What the experts learn with; None: nothing is learnt."""
        from dmoe_jax.recipe import Recipe, make_optimizer
        from dmoe_jax.user_file import user_optimizer

        if self.optimizer is None:
            recipe = Recipe(total_steps=None, **{name: getattr(self, name) for name in _OF_ADAM})
            return None if self.freeze_experts else make_optimizer(recipe)
        for name in changed(self):
            if name in (*_OF_ADAM, "freeze_experts"):
                raise UsageError(f"{flag_of(name)} would have no effect beside --optimizer")
        return user_optimizer(self.optimizer)

    def _make_expert(self) -> "Expert":
        from dmoe_jax.experts import EXPERTS, make_expert
        from dmoe_jax.experts.transformer_xl import layer_expert
        from dmoe_jax.user_file import load_from_file, user_expert

        if self.kind == "transformer_xl":
            return layer_expert(self.expert, self.route)
        if self.route != "sequence":
            raise UsageError(f"--route {self.route} would have no effect beside --expert {self.kind}")
        taken: set[str] = set()
        if self.kind in EXPERTS:
            taken = set(inspect.signature(EXPERTS[self.kind]).parameters)
        else:
            load_from_file(self.kind, kind="expert", choices=sorted(EXPERTS))
        for name in changed(self.expert):
            if name not in taken:
                raise UsageError(f"{flag_of(name)} would have no effect beside --expert {self.kind}")
        if self.kind not in EXPERTS:
            return user_expert(self.kind)
        return make_expert(self.kind, **{name: value for name, value in asdict(self.expert).items() if name in taken})

    def _named(self) -> tuple[str, ...]:
        """The patterns of --experts, or what it stands for by default, and those of --of.

        Raises:
          UsageError: --claim and --of do not go together.
        """
        if self.claim is None:
            if self.of:
                raise UsageError("--of would have no effect without --claim N")
            return self.experts or _DEFAULT_EXPERTS
        check_at_least(1, self, "claim")
        if not self.of:
            raise UsageError("--claim needs --of PATTERN: which experts may be claimed, such as 'ffn.[0:32].[0:32]'")
        return self.experts + self.of

    def _count_experts(self) -> int:
        """How many experts the node serves from the start.

        Raises:
          UsageError: the patterns are malformed, name an expert twice, or too many to claim.
        """
        patterns: dict[ExpertUid, str] = {}
        with mistakes_in_one_line():
            for pattern in self._named():
                for uid in expand_grid_pattern(pattern):
                    if uid in patterns:
                        flags = "--experts" if self.claim is None else "--experts and --of together"
                        raise UsageError(
                            f"{flags} must name no expert twice, got {uid} in {patterns[uid]} and in {pattern}"
                        )
                    patterns[uid] = pattern
            claimed = {str(uid): uid for uid, pattern in patterns.items() if pattern in self.of}
            if self.claim is not None:
                check_claimable(claimed)
        return len(patterns) - len(claimed)

    def _fault_plan(self) -> FaultPlan | None:
        if not self.faults:
            return None
        try:
            plan = FaultPlan.parse(self.faults, seed=self.seed)
        except ValueError as error:
            raise UsageError(f"--faults: {error}") from error
        # The DHT and the status stay honest: what is studied is a swarm whose experts fail.
        return replace(plan, methods=("expert.",))


@asynccontextmanager
async def _listed_as_waiting(swarm: "Swarm", num_experts: int, claim: "ClaimConfig | None") -> AsyncIterator[None]:
    """While another process compiles what this node needs. One that claims is listed anyway."""
    say("waiting for another process, which compiles the same")
    if claim is not None:
        yield
        return
    async with swarm.announced("node", lambda: {"state": "waiting", "experts": num_experts}):
        yield
