"""`dmoe node`: serve experts."""

import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import trio
import tyro

from dmoe_jax.cli.checks import check_seed
from dmoe_jax.cli.dht import DhtCommand
from dmoe_jax.cli.distributed import NodeDevices, failing_at_once
from dmoe_jax.cli.lifecycle import Stop
from dmoe_jax.cli.network import MemberOptions, join_line, join_swarm
from dmoe_jax.cli.node_options import (
    CopyOptions,
    HandOptions,
    KindOptions,
    LearningOptions,
    SavingOptions,
    ServingOptions,
)
from dmoe_jax.metrics.node import node_families
from dmoe_jax.metrics.process import peer_families
from dmoe_jax.runs.endings import EXIT_INTERRUPTED, UsageError, mistakes_in_one_line
from dmoe_jax.runs.speech import say
from dmoe_net.rpc.faults import FaultPlan

if TYPE_CHECKING:  # they need JAX, which `dmoe --help` does not wait for
    from dmoe_jax.swarm.serving import Served
    from dmoe_jax.swarm.swarm import Swarm


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
    devices: Annotated[NodeDevices, tyro.conf.arg(name="")] = field(default_factory=NodeDevices)
    seed: int = 0
    """Seed of the experts' initial parameters; with the uid it decides them, on whichever node they live. And of
    --faults."""
    faults: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FAULT=RATE [FAULT=RATE ...]")] = ()
    """Misbehave on purpose in a share of expert calls: refuse, hang, die, garbage, wrong_shape, late=RATE:MEAN_S."""

    def run(self) -> int:
        with failing_at_once():
            return super().run()

    async def _serve(self, stop: Stop) -> int:
        faults = self._check()
        await self.devices.set_up()
        from dmoe_jax.swarm.opening import swarm_of

        with mistakes_in_one_line():
            self.devices.check_there()
            placement = self.copies.placement(self.hand)
            expert, optimizer = await trio.to_thread.run_sync(
                lambda: (self.kind.make(), self.learning.make()), abandon_on_cancel=True
            )
        if self.devices.follows:
            await self.devices.follow(stop, dict.fromkeys(self.hand.uids(), expert), optimizer, seed=self.seed)
            return 0
        with mistakes_in_one_line():
            begin = partial(self.saving.begin, self.hand.uids(), expert, optimizer, self.kind.settings)
            if num_begun := await trio.to_thread.run_sync(begin, abandon_on_cancel=True):
                say(f"{num_begun} experts begin as in {self.saving.init}")
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
            if placement.claims and not placement.replicates and self.saving.checkpoint_dir is None:
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
                config=self.serving,
                devices=self.devices.devices if placed is None else placed,
                mesh=self.devices.mesh if placed is None else None,
                checkpoint_dir=self.saving.checkpoint_dir,
                checkpoint_period_s=self.saving.checkpoint_period_s,
                placement=placement,
                on_progress=said,
            )
            backends: Mapping[str, Any] = {}
            with stop.body():
                served = await self._begin(swarm, serving)
                node, backends = served.node, served.backends
                monitor.show(lambda: node_families(node.recorder, node.status()))
                monitor.why_not_ready = lambda: "" if node.state == "serving" else node.state
                self._say_what_is_served(served, swarm, took_s=time.perf_counter() - started)
                await trio.sleep_forever()
            monitor.why_not_ready = lambda: "leaving"
            learnt = sum(backend.update_count > 0 for backend in backends.values())
            if learnt and self.saving.checkpoint_dir is None and not placement.replicates:
                say(f"What {learnt} of {len(backends)} experts have learnt is not kept: there was no --checkpoint-dir")
        return EXIT_INTERRUPTED

    def _check(self) -> FaultPlan | None:
        """Raise `UsageError` if flags are out of range or do not go together; else the plan of --faults."""
        check_seed(self, "seed")
        self.saving.check()
        self.hand.count()
        self.devices.check()
        if self.devices.distributed is not None and (self.hand.claim is not None or self.copies.replicas > 1):
            raise UsageError("--distributed does not go together with --claim or --replicas yet")
        others = {"--claim": self.hand.claim, "--mesh": self.devices.mesh, "--distributed": self.devices.distributed}
        for flag, value in others.items():
            if self.serving.strategy == "stacked" and value is not None:
                raise UsageError(f"--strategy stacked does not go together with {flag}")
        if not self.faults:
            return None
        with mistakes_in_one_line("--faults"):
            plan = FaultPlan.parse(self.faults, seed=self.seed)
        # The DHT and the status stay honest: what is studied is a swarm whose experts fail.
        return replace(plan, methods=("expert.",))

    async def _begin(self, swarm: "Swarm", serving: "Callable[..., Awaitable[Served]]") -> "Served":
        """Serve, compiling what other processes of this machine do not compile already."""
        from dmoe_jax.cli.compiling import compiled_once

        programs = repr((self.kind, self.learning, self.serving.warm_up_rows, self.serving.strategy, self.devices))
        with mistakes_in_one_line():
            if self.hand.claim is not None:  # it is listed already while it waits, and claims its experts
                return await serving(compiling=compiled_once(programs, while_waiting=nullcontext()))
            facts = {"state": "waiting", "experts": self.hand.count()}
            async with compiled_once(programs, while_waiting=swarm.announced("node", lambda: facts)):
                return await serving(compiling=nullcontext())

    def _say_what_is_served(self, served: "Served", swarm: "Swarm", *, took_s: float) -> None:
        node = served.node
        more = "" if node.claims is None else f" and may claim {node.claims()['room']} more"
        say(f"Node {swarm.peer_id.short} serves {len(served.uids)} experts{more}, ready after {took_s:.1f} s")
        say(join_line("train", self.network, swarm.peer))
        if self.faults:
            say(f"This node misbehaves on purpose: --faults {' '.join(self.faults)}")
