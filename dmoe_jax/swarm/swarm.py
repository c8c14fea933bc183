"""A swarm in one object: serve experts, mix them, train over them, average with others.

    async with open_swarm() as swarm:                                       # the first peer of a new swarm
        await swarm.serve({"ffn.[0:4].[0:4]": feedforward(d_model=64)}, optimizer=optax.adam(1e-3))
        print(swarm.contact)                                                # what others join through

    async with open_swarm(join="PEERID@HOST:PORT") as swarm:                # somewhere else
        mixture = swarm.mixture("ffn", feedforward(d_model=64), product_key((4, 4)), k_best=4)
        trainers = swarm.trainer(MyModel(mixture), optax.adam(1e-3), batches)
        await trainers.run(1000)

The same code runs over TLS, over plain TCP (`security=Plain()`) and on a simulated network in virtual time
(`network=`, see `dmoe_net.transport.sim`). `dmoe_jax.connect` is the same without `async`, for notebooks and existing
loops.
"""

import functools
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import optax
import trio

from dmoe_jax.arrays import PyTree
from dmoe_jax.averaging.settings import DEFAULTS, Round, TreeAveragerConfig
from dmoe_jax.averaging.tree_averager import TreeAverager, open_tree_averager
from dmoe_jax.claims.claiming import ClaimConfig
from dmoe_jax.claims.host import Claimable, claimable_of, fixed_of
from dmoe_jax.collaboration import Collaboration, CollaborationConfig, GlobalStep, open_collaboration
from dmoe_jax.collaboration.trainers import CollaborativeTrainers
from dmoe_jax.directory.directory import DirectoryConfig, ExpertDirectory, open_expert_directory
from dmoe_jax.directory.members import Member, list_members, listed_member, node_statuses
from dmoe_jax.experts.base import Expert
from dmoe_jax.machine.device import Device, InlineDevice, ThreadDevice
from dmoe_jax.mixture.config import MixtureConfig
from dmoe_jax.mixture.fan_out import ExpertCaller
from dmoe_jax.mixture.remote import RemoteMixture
from dmoe_jax.mixture.statistics import CallRecord, CallStatistics
from dmoe_jax.model import Batch, Model, State
from dmoe_jax.node.backend import ExpertBackend, make_backends
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.node.saving import ExpertSaver
from dmoe_jax.node.sharding import MeshShape, PlacedDevice, ShardingRule, all_of, node_devices, shard_largest_dimension
from dmoe_jax.optim.collaborative import LossScale, Shared, collaborative
from dmoe_jax.peers.joining import Target
from dmoe_jax.peers.peer import PeerConfig, Seams, SwarmPeer, open_peer
from dmoe_jax.peers.security import Security, Tls
from dmoe_jax.replicas import ReplicaConfig
from dmoe_jax.routing.base import Router
from dmoe_jax.swarm.serving import Served, ServedExpert, Serving
from dmoe_jax.trainer import Trainers, iterators_of
from dmoe_jax.trunk import SharedTrunk
from dmoe_net.dht.node import DhtNode
from dmoe_net.dht.records import Value
from dmoe_net.identity import Address, PeerId
from dmoe_net.nursery import background_nursery
from dmoe_net.rpc.base import Caller
from dmoe_net.rpc.bulk import MemoryBudget
from dmoe_net.rpc.faults import FaultPlan
from dmoe_net.transport.sim.network import SimNetwork
from dmoe_net.wire.compression import Compression

_log = logging.getLogger(__name__)

_SLOW_S = 5.0
"""Seconds after which the log tells the progress of `serve`."""


@contextmanager
def told_when_slow(on_progress: Callable[[str], None] | None) -> Iterator[Callable[[str], None]]:
    """Pass on the progress that the block tells; without `on_progress` to the log, after five seconds and then ever
    less often, so that nobody waits for minutes without a word."""
    if on_progress is not None:
        yield on_progress
        return
    doing, done, began = "preparing experts", threading.Event(), time.monotonic()

    def note(text: str) -> None:
        nonlocal doing
        doing = text

    def tell() -> None:  # in a thread: in virtual time, and while XLA compiles, nothing else runs
        pause_s = _SLOW_S
        while not done.wait(pause_s):
            _log.warning("serve, after %.0f s: %s", time.monotonic() - began, doing)
            pause_s *= 2

    threading.Thread(target=tell, daemon=True).start()
    try:
        yield note
    finally:
        done.set()


class Swarm:
    """This process's place in a swarm. Made by `open_swarm`; everything that it starts ends with it."""

    def __init__(
        self,
        name: str,
        peer: SwarmPeer,
        directory: ExpertDirectory,
        device: Device,
        nursery: trio.Nursery,
        *,
        seed: int,
        statistics: CallStatistics,
    ) -> None:
        self.name = name
        """The swarm's name, under which its members find each other."""
        self.peer = peer
        """This process's connections and DHT node."""
        self.directory = directory
        """Finds living experts."""
        self.device = device
        """Runs XLA work off the event loop."""
        self.statistics = statistics
        """Totals of this process's expert calls."""
        self.seed = seed
        """Seed of everything that is drawn here, unless a call gives its own."""
        self._caller = ExpertCaller(peer.rpc, directory, statistics)
        self._nursery = nursery
        self._served: Served | None = None

    @property
    def rpc(self) -> Caller:
        """Places and serves calls."""
        return self.peer.rpc

    @property
    def dht(self) -> DhtNode:
        """Finds peers and records."""
        return self.peer.dht

    @property
    def peer_id(self) -> PeerId:
        """Id of this process."""
        return self.peer.rpc.peer_id

    @property
    def contact(self) -> str:
        """PEERID@HOST:PORT, what others join through. Raises ValueError if this peer listens nowhere."""
        return self.peer.contact

    async def serve(
        self,
        experts: Mapping[str, Expert],
        *,
        optimizer: optax.GradientTransformation | None,
        seed: int | None = None,
        config: NodeConfig | None = None,
        warm_up_rows: int | None = None,
        devices: str | int | Sequence[PlacedDevice] | None = None,
        mesh: MeshShape | str | None = None,
        sharding_rule: ShardingRule = shard_largest_dimension,
        checkpoint_dir: str | Path | None = None,
        checkpoint_period_s: float = 60.0,
        claim: ClaimConfig | None = None,
        replicas: ReplicaConfig | None = None,
        on_progress: Callable[[str], None] | None = None,
        compiling: AbstractAsyncContextManager[object] = nullcontext(),  # noqa: B008 (stateless)
    ) -> Served:
        """Serve experts to the trainers of the swarm, who teach them by the gradients that they send.

        Returns once the experts are compiled and announced; from then on they are served in the background. A process
        serves all its experts, of several layers and kinds, by one call: a second one needs the first one's closed.

        Args:
          experts: uid such as "ffn.3.1", or pattern such as "ffn.[0:4].[0:4]" -> network; see `dmoe_jax.experts`.
          optimizer: any Optax optimiser, of each expert by itself; None: the experts answer and never learn.
          seed: with the uid it decides an expert's initial parameters, on whichever node it lives. None: the swarm's.
          config: settings of batches and announcements.
          warm_up_rows: compile for batches of up to so many rows before announcing; larger ones follow when they are
            wanted, beside the serving. None: as configured.
          devices: local JAX devices over which the experts are spread, each expert on one, about as many bytes on each:
            their numbers as "0-7", "0,2,5" or "all", or a count. In virtual time a number of simulated devices, which
            work at the same time. None: JAX's default device. For a node that spans processes, what
            `dmoe_jax.node.lockstep.open_lead` yields.
          mesh: such as "data=2,model=4": each expert is spread over a mesh of so many of the devices, rows of a batch
            over `data`, parameters and optimiser state over `model`. More devices make several meshes side by side,
            which share the experts; without `devices` there is one mesh, of the first devices.
          sharding_rule: says of each array of an expert how it lies on the mesh.
          checkpoint_dir: folder in which each expert is saved by itself, and from which it is taken up, whoever saved
            it; nodes may share it.
          checkpoint_period_s: most seconds between checkpoints of an expert that learns; one more is made at the end.
          claim: serve only those of the experts that nobody else serves, at most so many, and take up more whenever the
            node of some has died or left; see `dmoe_jax.claims`. They begin with what `checkpoint_dir`, which all nodes
            should share, has of them, else with their seeds. Returns when there is nothing more to claim for now.
          replicas: serve the experts beside others who serve them too: begin with their state, share the load, and
            average with them. All of them need it. None: whoever else serves one of them is warned of by name.
          on_progress: told the progress in a few words. None: after five seconds the log warns with it.
          compiling: is entered while programs are compiled, so that processes of one machine may wait for each other.

        Raises:
          ValueError: this peer listens nowhere or serves experts already, a pattern is malformed or names an expert
            twice, the optimiser cannot work on a node, a checkpoint is of an expert of another shape, there are not so
            many devices, or the rule does not fit an array.
          FolderInUse: another process saves one of these experts in `checkpoint_dir`. OSError: it cannot be written to.
        """
        if self.rpc.address is None:
            raise ValueError("experts cannot be served by a client; give open_swarm(listen='HOST:PORT')")
        if self._served is not None and not self._served.is_closed:
            raise ValueError(
                f"this process serves {len(self._served.uids)} experts already, among them {self._served.uids[0]}; "
                "close these first, or name the experts of all layers in one call: "
                "serve({'layer0.[0:4]': expert, 'layer1.[0:4]': other}, ...)"
            )
        config = replace(config or NodeConfig(), swarm=self.name)
        if warm_up_rows is not None:
            config = replace(config, warm_up_rows=warm_up_rows)
        if claim is not None and replicas is not None:
            raise ValueError("replicas has no use beside claim: a node claims only what nobody else serves")
        seed = self.seed if seed is None else seed
        own = node_devices(self.device, devices, mesh, sharding_rule)
        places = [each.place for each in own]
        with told_when_slow(on_progress) as told:
            claimable: Claimable | None = None
            if claim is not None:
                prepare = functools.partial(claimable_of, seed=seed, places=places)
                claimable = await all_of(own).run(prepare, experts, claim, optimizer)
                experts = fixed_of(experts, claim)
            backends: dict[str, ExpertBackend] = {}
            if claimable is None or experts:
                make = functools.partial(make_backends, seed=seed, places=places)
                backends = await all_of(own).run(make, experts, optimizer)
            saver = None if checkpoint_dir is None else ExpertSaver(Path(checkpoint_dir), backends, own)
            # Those that claim or replicate share a folder: they hand experts to each other, or serve the same ones.
            alone = claim is None and replicas is None
            if saver is not None and (restored := await saver.restore(alone=alone)):
                several = f"{len(restored)} of {len(backends)} experts"
                told(f"{several} go on from {checkpoint_dir} ({sum(restored.values())} updates)")
            serving = Serving(
                peer=self.peer,
                devices=own,
                backends=backends,
                config=config,
                saver=saver,
                period_s=checkpoint_period_s,
                claimable=claimable,
                replicas=replicas,
                compiling=compiling,
                on_progress=told,
            )
            served: Served = await self._nursery.start(serving.run)
        self._served = served
        return served

    async def close_served(self) -> None:
        """Stop serving, if experts are served: see `Served.close`."""
        if self._served is not None:
            await self._served.close()

    def mixture(
        self,
        prefix: str,
        expert: Expert,
        router: Router,
        *,
        config: MixtureConfig | None = None,
        seed: int | None = None,
        **settings: Any,
    ) -> RemoteMixture:
        """A DMoE layer over the experts `prefix.i.j` of this swarm; `await mixture.check()` says whether there are any.

        Args:
          prefix: the part of the experts' uids that names the layer. expert: their network, for its shapes.
          router: chooses the experts of each sample; see `dmoe_jax.routing`.
          config: settings of its calls; None: the defaults of `MixtureConfig`.
          seed: seed of dropout in experts that take keys; None: the swarm's.
          settings: fields of the config that are to be others, such as k_best=2, timeout_s=10.0, compression="float16".

        Raises:
          ValueError: a setting is out of range. TypeError: there is no such setting.
        """
        if "compression" in settings:
            settings["compression"] = Compression(settings["compression"])
        return RemoteMixture(
            expert=expert,
            router=router,
            caller=self._caller,
            device=self.device,
            config=replace(config or MixtureConfig(), prefix=prefix, **settings),
            seed=self.seed if seed is None else seed,
        )

    def trainer(
        self,
        model: Model[Batch, State],
        optimizer: optax.GradientTransformation,
        batches: Iterator[Batch] | Sequence[Iterator[Batch]],
        *,
        params: PyTree | None = None,
        seed: int | None = None,
    ) -> Trainers[Batch, State, SharedTrunk]:
        """Asynchronous trainers of one model: they share its parameters and do not wait for each other.

        Args:
          model: what they train.
          optimizer: optimiser of the model's own parameters; its schedules count the updates of all trainers together.
          batches: one iterator of batches for each trainer; a single iterator makes one trainer.
          params: parameters to begin with; None: `model.init`, from the seed.
          seed: seed of initial parameters and of all chance in training; None: the swarm's.

        Raises:
          ValueError: there are no batches, they are no iterators, or a parameter is no number.
        """
        several, seed = iterators_of(batches), self.seed if seed is None else seed
        params = model.init(jax.random.key(seed)) if params is None else params
        return Trainers(model, SharedTrunk(params, optimizer, self.device), several, seed=seed)

    @asynccontextmanager
    async def averager(
        self,
        params: PyTree,
        optimizer: optax.GradientTransformation,
        *,
        name: str,
        state: Callable[[], tuple[int, PyTree]] | None = None,
        config: TreeAveragerConfig = DEFAULTS,
        on_round: Callable[[Round], None] = lambda done: None,
    ) -> AsyncIterator[TreeAverager]:
        """This process's part in averaging with others, for a training loop of one's own. See `open_tree_averager`."""
        async with (
            open_tree_averager(
                self.rpc,
                self.dht,
                params,
                optimizer=optimizer,
                name=name,
                state=state,
                config=config,
                device=self.device,
                rng=self.peer.rng,
                on_round=on_round,
            ) as averager,
            self.announced("averager", lambda: {"group": name, "averages": averager.totals.done}),
        ):
            yield averager

    @asynccontextmanager
    async def collaboration(
        self,
        params: PyTree,
        optimizer: optax.GradientTransformation,
        *,
        target_batch_size: int = 4096,
        average: Shared = "gradients",
        outer: optax.GradientTransformation | None = None,
        loss_scale: LossScale | None = None,
        name: str = "collaboration",
        config: CollaborationConfig = CollaborationConfig(),  # noqa: B008 (frozen)
        on_step: Callable[[GlobalStep], None] = lambda done: None,
    ) -> AsyncIterator[Collaboration]:
        """This process's part in one large batch, for a training loop of one's own. See `open_collaboration`, and for
        optimizer, average (`shared` there), outer and loss_scale `collaborative`.

        Args:
          target_batch_size: samples (for a language model: tokens) of all processes that make a step; that of `config`
            is not looked at.
        """
        async with (
            open_collaboration(
                self.rpc,
                self.dht,
                params,
                together=collaborative(optimizer, shared=average, outer=outer, loss_scale=loss_scale),
                name=name,
                config=replace(config, target_batch_size=target_batch_size),
                device=self.device,
                rng=self.peer.rng,
                on_step=on_step,
            ) as peer,
            self.announced("collaborator", lambda: {"group": name, **peer.facts()}),
        ):
            yield peer

    @asynccontextmanager
    async def collaborate(
        self,
        model: Model[Batch, State],
        optimizer: optax.GradientTransformation,
        batches: Iterator[Batch] | Sequence[Iterator[Batch]],
        *,
        target_batch_size: int = 4096,
        average: Shared = "gradients",
        outer: optax.GradientTransformation | None = None,
        name: str = "collaboration",
        params: PyTree | None = None,
        seed: int | None = None,
        config: CollaborationConfig = CollaborationConfig(),  # noqa: B008 (frozen)
        on_step: Callable[[GlobalStep], None] = lambda done: None,
    ) -> AsyncIterator[CollaborativeTrainers[Batch, State]]:
        """Train one model with all who give the same name, as one machine with a large batch (DeDLOC).

        Args:
          model, optimizer, batches, seed: as of `trainer`; the optimiser is the same for all, and counts global steps.
          params: parameters to begin with, if nobody else has begun; None: `model.init`, from the seed.
          target_batch_size, average, outer, name, config, on_step: as of `collaboration`; `model.meaning` stands.
        """
        several, seed = iterators_of(batches), self.seed if seed is None else seed
        params = model.init(jax.random.key(seed)) if params is None else params
        async with self.collaboration(
            params,
            optimizer,
            target_batch_size=target_batch_size,
            average=average,
            outer=outer,
            name=name,
            config=replace(config, meaning=model.meaning or config.meaning),
            on_step=on_step,
        ) as peer:
            yield CollaborativeTrainers(model, peer, several, seed=seed)

    def announced(self, role: str, facts: Callable[[], Mapping[str, Value]]) -> AbstractAsyncContextManager[None]:
        """List this process in the swarm in a role, such as "trainer", as long as the block lasts.

        Args:
          facts: returns what `dmoe status` shows of it, every ten seconds; see `dmoe_jax.directory.members.Member`.
        """
        contact = self.peer.own_contact
        return listed_member(self.dht, self.name, self.peer_id, contact, lambda: {"role": role, **facts()})

    def watch_calls(self, on_call: Callable[[CallRecord], None] | None) -> None:
        """Call a function with each expert call of this process that has ended, from now on; None: nobody."""
        self._caller.on_call = on_call

    async def members(self) -> tuple[Member, ...]:
        """Members of the swarm: nodes, those that still compile too, trainers, averagers and auxiliary peers."""
        return await list_members(self.dht, self.name)

    async def experts(self) -> dict[str, ServedExpert]:
        """Every expert that a node of this swarm serves now, by uid; of replicas the one with the most updates. Nodes
        that do not answer are left out."""
        members, found = await self.members(), dict[str, ServedExpert]()
        contacts = {each.peer_id: each.contact for each in members if each.role == "node" and each.contact is not None}
        for peer_id, status in (await node_statuses(self.rpc, members)).items():
            updates = status.get("updates")
            for uid, count in updates.items() if isinstance(updates, dict) else ():
                if isinstance(count, int) and (uid not in found or count > found[uid].updates):
                    found[uid] = ServedExpert(contact=contacts[peer_id], updates=count)
        return dict(sorted(found.items()))


@asynccontextmanager
async def open_swarm(
    join: Target | Sequence[Target] = (),
    *,
    listen: str | Address | None = "auto",
    announce: str | None = None,
    security: Security = Tls(),  # noqa: B008 (frozen)
    network: SimNetwork | None = None,
    host: str = "",
    name: str = "dmoe",
    seed: int | None = None,
    device: Device | None = None,
    faults: FaultPlan | None = None,
    directory: DirectoryConfig = DirectoryConfig(),  # noqa: B008 (frozen)
    memory_budget: int | str | MemoryBudget | None = None,
    testing: Seams | None = None,
) -> AsyncIterator[Swarm]:
    """Take part in a swarm until the block ends.

    Args:
      join: peers to join through, as HOST:PORT, or PEERID@HOST:PORT to make sure who is there. None starts a new swarm.
      listen: HOST:PORT to be called at, port 0 for one that the system chooses; None: this peer only calls, and can
        serve nothing. "auto": on loopback if there is nobody to join or only on this machine, else None; in a
        simulation, at `host`.
      announce: host under which others reach this peer, if it is not the one that it listens on.
      security: `Tls` (the default) or `Plain`.
      network: a simulated network, in virtual time, instead of a real one. host: this peer's on it, its alone.
      name: the swarm's: members find each other under it.
      seed: seed of what this process draws. In a simulation its identity follows from it and the host. None: chance.
      device: runs XLA work; None: a worker thread, in a simulation the calling task.
      faults: errors of this peer's answers, on purpose.
      directory: settings of the look-up of experts.
      memory_budget: bytes, or a text such as "256MiB", that averages and states under way may hold in this process
        beyond the few MiB that each begins with, at least 1 MiB; swarms of one process may share a `MemoryBudget`. With
        less than a long line wants they take longer. None: 512 MiB.
      testing: parts that a test or an experiment puts in the place of this swarm's.

    Raises:
      ValueError: an address or file cannot be used, or the budget is none; the message names it.
      DialFailed: nobody answers among the peers to join through, or another peer than the one that was named.
      ListenFailed: the port is taken.
    """
    config = PeerConfig(
        listen=listen,
        announce=announce,
        security=security,
        network=network,
        host=host,
        seed=seed,
        faults=faults,
        memory_budget=memory_budget,
    )
    statistics = None if testing is None else testing.statistics
    async with (
        open_peer(join, config, testing) as peer,
        swarm_of(peer, name=name, seed=seed or 0, device=device, directory=directory, statistics=statistics) as swarm,
    ):
        yield swarm


@asynccontextmanager
async def swarm_of(
    peer: SwarmPeer,
    *,
    name: str = "dmoe",
    seed: int = 0,
    device: Device | None = None,
    directory: DirectoryConfig = DirectoryConfig(),  # noqa: B008 (frozen)
    statistics: CallStatistics | None = None,
) -> AsyncIterator[Swarm]:
    """The swarm of a peer that has joined already, until the block ends.

    Args:
      statistics: totals to go on counting in; None: new ones.
      name, seed, device, directory: as of `open_swarm`.
    """
    if device is None:
        device = InlineDevice() if peer.is_simulated else ThreadDevice()
    async with (
        open_expert_directory(peer.dht, swarm=name, config=directory) as experts,
        background_nursery() as nursery,
    ):
        swarm = Swarm(name, peer, experts, device, nursery, seed=seed, statistics=statistics or CallStatistics())
        try:
            yield swarm
        finally:
            await swarm.close_served()
