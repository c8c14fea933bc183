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

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import optax
import trio

from dmoe_jax.arrays import PyTree
from dmoe_jax.averaging import Round, TreeAverager, TreeAveragerConfig, open_tree_averager
from dmoe_jax.collaboration import (
    Collaboration,
    CollaborationConfig,
    CollaborativeTrainers,
    GlobalStep,
    open_collaboration,
)
from dmoe_jax.directory.members import Facts, Member, list_members, listed_member, node_statuses, traffic
from dmoe_jax.experts.base import Expert
from dmoe_jax.machine.device import Device
from dmoe_jax.mesh.layout import MeshLike, MeshShape
from dmoe_jax.mixture.config import MixtureConfig
from dmoe_jax.mixture.fan_out import ExpertCaller, OnCall
from dmoe_jax.mixture.remote import RemoteMixture
from dmoe_jax.model import Batch, Model, State, Trained
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.node.sharding import PlacedDevice, node_devices
from dmoe_jax.optim.collaborative import LossScale, Shared, collaborative
from dmoe_jax.peers.peer import SwarmPeer
from dmoe_jax.placement.config import PlacementConfig
from dmoe_jax.routing.base import Router
from dmoe_jax.swarm.serving import Served, ServedExpert, Serving, told_when_slow
from dmoe_jax.trainer import SharingTrainers, first_params, iterators_of, make_trainers


class Swarm:
    """This process's place in a swarm. Made by `open_swarm`; everything that it starts ends with it."""

    def __init__(
        self, name: str, peer: SwarmPeer, caller: ExpertCaller, device: Device, nursery: trio.Nursery, *, seed: int
    ) -> None:
        self.name = name
        """The swarm's name, under which its members find each other."""
        self.peer = peer
        """This process's connections and DHT node."""
        self.rpc = peer.rpc
        """Places and serves calls."""
        self.dht = peer.dht
        """Finds peers and records."""
        self.peer_id = peer.rpc.peer_id
        """Id of this process."""
        self.directory = caller.directory
        """Finds living experts."""
        self.device = device
        """Runs XLA work off the event loop."""
        self.statistics = caller.statistics
        """Totals of this process's expert calls."""
        self.seed = seed
        """Seed of everything that is drawn here, unless a call gives its own."""
        self._caller = caller
        self._nursery = nursery
        self._token = trio.lowlevel.current_trio_token()
        self._served: Served | None = None

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
        checkpoint_dir: str | Path | None = None,
        checkpoint_period_s: float = 60.0,
        placement: PlacementConfig | None = None,
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
            which share the experts; without `devices` there is one mesh, of the first devices. A `MeshShape` may bring
            a rule of its own by which arrays lie on it.
          checkpoint_dir: folder in which each expert is saved by itself, and from which it is taken up, whoever saved
            it; nodes may share it.
          checkpoint_period_s: most seconds between checkpoints of an expert that learns; one more is made at the end.
          placement: claim those of the experts that have too few living holders, take up more whenever the node of some
            has died or left, and share the experts with other nodes that hold them; see `dmoe_jax.placement`. Experts
            begin with the state that another holder has, else with what `checkpoint_dir`, which all nodes should share,
            has of them, else with their seeds. With claims this returns when there is nothing more to claim for now.
            None: this node holds the experts that are named and no others, and warns of others that do.
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
        with told_when_slow(on_progress) as told:
            serving = Serving(
                peer=self.peer,
                devices=node_devices(self.device, devices, mesh),
                config=config,
                folder=None if checkpoint_dir is None else Path(checkpoint_dir),
                period_s=checkpoint_period_s,
                placement=placement or PlacementConfig(),
                compiling=compiling,
                on_progress=told,
            )
            hand = await serving.prepare(experts, optimizer, seed=self.seed if seed is None else seed)
            served: Served = await self._nursery.start(serving.run, hand)
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
        mixture = RemoteMixture(
            expert=expert,
            router=router,
            caller=self._caller,
            device=self.device,
            config=replace(config or MixtureConfig(), prefix=prefix, **settings),
            seed=self.seed if seed is None else seed,
        )

        def prefetch() -> None:
            with suppress(RuntimeError):  # the swarm is being closed
                self._nursery.start_soon(self.directory.prefetch, prefix, router.grid_size)

        # So that the first step does not wait for the records. `BlockingSwarm` makes mixtures in other threads.
        if trio.lowlevel.in_trio_run():
            prefetch()
        else:
            self._token.run_sync_soon(prefetch)
        return mixture

    def trainer(
        self,
        model: Model[Batch, State],
        optimizer: optax.GradientTransformation,
        batches: Iterator[Batch] | Sequence[Iterator[Batch]],
        *,
        params: PyTree | None = None,
        mesh: MeshLike | None = None,
        seed: int | None = None,
    ) -> SharingTrainers[Batch, State]:
        """Asynchronous trainers of one model: they share its parameters and do not wait for each other.

        Args:
          model: what they train.
          optimizer: optimiser of the model's own parameters; its schedules count the updates of all trainers together.
          batches: one iterator of batches for each trainer; a single iterator makes one trainer.
          params: parameters to begin with; None: `model.init`, from the seed. Those that lie on several devices, each
            with a `NamedSharding` of its own, stay there: then leave `mesh` out.
          mesh: such as "data=2,model=4": the parameters and the optimiser's state are split over the axis `model` of
            this process's first devices, rows of a batch over `data`. One that takes more devices than this process has
            lies on those of all processes of `jax.distributed`: then each calls this alike, with one iterator of the
            same batches, and they train as one. A `dmoe_jax.mesh.MeshShape` may bring a rule of
            its own by which arrays lie on it, a `jax.sharding.Mesh` of these axes brings its devices. None: the
            parameters stay where they are, on JAX's default device if they are on none.
          seed: seed of initial parameters and of all chance in training; None: the swarm's.

        Raises:
          ValueError: there are no batches, or several iterators for a trunk on several processes, they are no
            iterators, a parameter is no number, there are not so many devices, or the rule does not fit a parameter.
        """
        seed = self.seed if seed is None else seed
        return make_trainers(model, optimizer, batches, params=params, mesh=mesh, seed=seed, device=self.device)

    @asynccontextmanager
    async def averager(
        self,
        params: PyTree,
        optimizer: optax.GradientTransformation,
        *,
        name: str,
        state: Callable[[], tuple[int, PyTree]] | None = None,
        config: TreeAveragerConfig = TreeAveragerConfig(),  # noqa: B008 (frozen)
        on_round: Callable[[Round], None] = lambda done: None,
    ) -> AsyncIterator[TreeAverager]:
        """This process's part in averaging with others, for a training loop of one's own. See `open_tree_averager`."""
        async with (
            open_tree_averager(
                self.peer,
                params,
                optimizer=optimizer,
                name=name,
                state=state,
                config=config,
                device=self.device,
                on_round=on_round,
            ) as averager,
            self.announced("averager", lambda: {"group": name, **averager.totals.facts()}),
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
                self.peer,
                params,
                together=collaborative(optimizer, shared=average, outer=outer, loss_scale=loss_scale),
                name=name,
                config=replace(config, target_batch_size=target_batch_size),
                device=self.device,
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
        mesh: MeshLike | None = None,
        seed: int | None = None,
        config: CollaborationConfig = CollaborationConfig(),  # noqa: B008 (frozen)
        on_step: Callable[[GlobalStep], None] = lambda done: None,
    ) -> AsyncIterator[CollaborativeTrainers[Batch, State]]:
        """Train one model with all who give the same name, as one machine with a large batch (DeDLOC).

        Args:
          model, optimizer, batches, mesh, seed: as of `trainer`; the optimiser is the same for all, and counts global
            steps.
          params: parameters to begin with, if nobody else has begun; None: `model.init`, from the seed.
          target_batch_size, average, outer, name, config, on_step: as of `collaboration`; `model.meaning` stands.
        """
        several, seed = iterators_of(batches), self.seed if seed is None else seed
        params = first_params(model, params, mesh, seed=seed, num_trainers=len(several))
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

    async def generate(self, model: Trained, prompts: Sequence[Any], **options: Any) -> list[Any]:
        """Continue each prompt with the experts of this swarm, which answer and do not learn from it.

        For more of the model's work in this swarm take `model.on(swarm)`.

        Args:
          model: of `dmoe_jax.load_run`.
          prompts, options: as of `AsyncTrainedModel.generate`, and so are result and errors.
        """
        found: list[Any] = await model.on(self).generate(prompts, **options)
        return found

    def announced(self, role: str, facts: Callable[[], Facts]) -> AbstractAsyncContextManager[None]:
        """List this process in the swarm in a role, such as "trainer", as long as the block lasts.

        Args:
          facts: returns what `dmoe status` shows of it, every ten seconds; see `dmoe_jax.directory.members.Member`.
        """
        contact = self.peer.own_contact
        return listed_member(self.dht, self.name, contact, lambda: {"role": role, **facts(), **traffic(self.rpc)})

    def watch_calls(self, on_call: OnCall | None) -> None:
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
