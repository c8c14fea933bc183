"""`dmoe node`: serve experts."""

import inspect
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import trio
import tyro

from dmoe_jax.cli.common import (
    UsageError,
    changed,
    check_at_least,
    check_positive,
    flag_of,
    mistakes_in_one_line,
    set_up_jax,
)
from dmoe_jax.cli.dht import DhtCommand
from dmoe_jax.cli.distributed import DistributedOptions, end_soon
from dmoe_jax.cli.lifecycle import EXIT_INTERRUPTED, Stop
from dmoe_jax.cli.network import join_line, join_swarm
from dmoe_jax.grid import expand_grid_pattern
from dmoe_jax.layer_config import LayerConfig, Route
from dmoe_jax.metrics.node import node_families
from dmoe_jax.metrics.process import peer_families
from net.rpc.faults import FaultPlan

if TYPE_CHECKING:  # they need JAX, which `dmoe --help` does not wait for
    import optax

    from dmoe_jax.experts import Expert
    from dmoe_jax.node.devices import PlacedDevice
    from dmoe_jax.node.server import NodeConfig
    from dmoe_jax.swarm import Swarm

_OF_ADAM = ("learning_rate", "warmup_steps", "weight_decay", "grad_clip", "staleness_power")


@dataclass(frozen=True, kw_only=True)
class NodeCommand(DhtCommand):
    """Serve experts to the trainers of a swarm. Experts learn from the gradients that trainers send.

    Stopped by SIGTERM or Ctrl-C, a node refuses new calls, withdraws its experts, answers what it has accepted, saves
    and ends, all within 15 seconds.
    """

    LEAVE_TIMEOUT_S: ClassVar[float] = 15.0

    experts: tuple[str, ...] = ("layer0.[0:4].[0:4]", "layer1.[0:4].[0:4]")
    """Experts to serve: uids such as layer0.3.1, or patterns such as layer0.[0:2].[0:4]."""
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
    """Folder for the experts' checkpoints. If it holds some already, the experts go on from the latest."""
    checkpoint_period_s: float = 60.0
    """Seconds between checkpoints; one more is written when the node is stopped."""
    warm_up_rows: int = 16
    """Compile for batches of up to this many samples before announcing the experts."""
    max_batch_rows: int = 256
    """Most samples of one XLA call."""
    devices: str | None = None
    """JAX devices of this machine over which the experts are spread, each expert on one: 0-7, 0,2,5 or all. Default:
    the first one."""
    mesh: str | None = None
    """Spread each expert over several devices, such as data=2,model=4: rows of a batch over data, parameters and
    optimiser state over model. With --devices as many meshes as these make up share the experts: 8 devices and model=4
    make two. Default: an expert lives on one device."""
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
        check_positive(self, "announce_period_s", "checkpoint_period_s", "warm_up_rows", "learning_rate", "grad_clip")
        check_at_least(0, self, "warmup_steps", "weight_decay", "staleness_power")
        num_experts, faults = self._count_experts(), self._fault_plan()
        self.processes.check(devices=self.devices, checkpoint_dir=self.checkpoint_dir)
        set_up_jax()
        await self.processes.initialize()
        from dmoe_jax.cli.compiling import compiled_once
        from dmoe_jax.swarm import open_swarm

        with mistakes_in_one_line():
            self._check_devices()
            config = self._node_config()
            expert, optimizer = await trio.to_thread.run_sync(
                lambda: (self._make_expert(), self._make_optimizer()), abandon_on_cancel=True
            )
        if self.processes.follows:
            return await self._follow(stop, expert, optimizer)
        joining = join_swarm(self.network, join=self.join, listen=self.listen, faults=faults)
        async with (
            self._opened_lead() as placed,
            self.metrics.opened("node") as monitor,
            joining as peer,
            open_swarm(peer=peer, name=self.swarm, seed=self.seed) as swarm,
        ):
            monitor.show(partial(peer_families, peer))
            # Joined first: a taken port or an unreachable swarm is reported before minutes of compilation.
            print(f"Node {peer.rpc.peer_id.short} has joined the swarm at {peer.rpc.address}", flush=True)
            started, doing = time.perf_counter(), "joined, not serving yet"
            monitor.why_not_ready = lambda: doing

            def said(text: str) -> None:
                nonlocal doing
                doing = text
                print(text, flush=True)

            with stop.body():
                async with compiled_once(self._programs(), while_waiting=_listed_as_waiting(swarm, num_experts)):
                    with mistakes_in_one_line():
                        served = await swarm.serve(
                            dict.fromkeys(self.experts, expert),
                            optimizer=optimizer,
                            config=config,
                            devices=self.devices if placed is None else placed,
                            mesh=self.mesh if placed is None else None,
                            checkpoint_dir=self.checkpoint_dir,
                            checkpoint_period_s=self.checkpoint_period_s,
                            on_progress=said,
                        )
                node = served.node
                monitor.show(lambda: node_families(node.recorder, node.status()))
                monitor.why_not_ready = lambda: "" if node.state == "serving" else node.state
                took_s = time.perf_counter() - started
                print(f"Node {peer.rpc.peer_id.short} serves {num_experts} experts, ready after {took_s:.1f} s")
                print(join_line("train", self.network, peer), flush=True)
                if faults is not None:
                    print(f"This node misbehaves on purpose: --faults {' '.join(self.faults)}", flush=True)
                await trio.sleep_forever()
            monitor.why_not_ready = lambda: "leaving"
        return EXIT_INTERRUPTED

    def _node_config(self) -> "NodeConfig":
        from dmoe_jax.node.server import NodeConfig

        return NodeConfig(
            swarm=self.swarm,
            max_batch_rows=self.max_batch_rows,
            warm_up_rows=self.warm_up_rows,
            announce_period_s=self.announce_period_s,
            record_lifetime_s=3 * self.announce_period_s,
        )

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
    async def _opened_lead(self) -> AsyncIterator["tuple[PlacedDevice, ...] | None"]:
        """The devices of all processes, if there are several."""
        from dmoe_jax.node.lockstep import mesh_of_all, open_lead

        if self.processes.distributed is None:
            yield None
            return
        async with open_lead(host=self.processes.host, mesh=mesh_of_all(self.mesh), on_lost=end_soon) as placed:
            yield placed

    async def _follow(self, stop: Stop, expert: "Expert", optimizer: "optax.GradientTransformation | None") -> int:
        """Do as process 0 does until it leaves; the exit status. Being asked to stop ends the whole node."""
        from dmoe_jax.node.lockstep import follow, mesh_of_all

        del stop  # without a body: everything is cancelled, and process 0 notices
        print(f"process {self.processes.process_id} does as process 0 does", flush=True)
        await follow(
            dict.fromkeys((str(uid) for pattern in self.experts for uid in expand_grid_pattern(pattern)), expert),
            optimizer,
            host=self.processes.host,
            seed=self.seed,
            mesh=mesh_of_all(self.mesh),
            on_lost=end_soon,
        )
        return 0

    def _programs(self) -> str:
        """What is compiled, told from what other nodes compile."""
        rates = [getattr(self, name) for name in (*_OF_ADAM, "freeze_experts", "warm_up_rows")]
        return repr((self.kind, self.expert, self.route, self.optimizer, rates, self.devices, self.mesh))

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

    def _count_experts(self) -> int:
        with mistakes_in_one_line():
            uids = [uid for pattern in self.experts for uid in expand_grid_pattern(pattern)]
        if not uids or len(set(uids)) != len(uids):
            raise UsageError(f"--experts must name at least one expert and none twice, got {' '.join(self.experts)}")
        return len(uids)

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
async def _listed_as_waiting(swarm: "Swarm", num_experts: int) -> AsyncIterator[None]:
    """While another process compiles what this node needs."""
    print("waiting for another process, which compiles the same", flush=True)
    async with swarm.announced("node", lambda: {"state": "waiting", "experts": num_experts}):
        yield
