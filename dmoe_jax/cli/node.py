"""`dmoe node`: serve experts."""

import contextlib
import inspect
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import trio
import tyro

from dmoe_jax.cli.common import UsageError, check_swarm_name, one_line, set_up_jax
from dmoe_jax.cli.lifecycle import EXIT_INTERRUPTED, Stop, run_until_done
from dmoe_jax.cli.network import JoinTexts, ListenOptions, NetworkOptions
from dmoe_jax.cli.options import ExpertOptions
from dmoe_jax.cli.swarm import SwarmPeer, join_line, join_swarm
from dmoe_jax.grid import ExpertUid, expand_grid_pattern
from dmoe_jax.members import MAX_GRIDS, listed_member
from net.identity import Contact
from net.rpc.faults import FaultInjector, FaultPlan

if TYPE_CHECKING:  # they need JAX, which `dmoe --help` does not wait for
    import optax

    from dmoe_jax.device import Device
    from dmoe_jax.experts import Expert
    from dmoe_jax.node.backend import ExpertBackend
    from dmoe_jax.node.saving import ExpertSaver


@dataclass(frozen=True, kw_only=True)
class NodeCommand:
    """Serve experts to the trainers of a swarm. Experts learn from the gradients that trainers send."""

    experts: tuple[str, ...] = ("layer0.[0:4].[0:4]", "layer1.[0:4].[0:4]")
    """Experts to serve: uids such as layer0.3.1, or patterns such as layer0.[0:2].[0:4]."""
    join: JoinTexts = ()
    """Peers to join through, as HOST:PORT, or PEERID@HOST:PORT to make sure who is there. None starts a new swarm."""
    listen: Annotated[ListenOptions, tyro.conf.arg(name="")] = field(default_factory=ListenOptions)
    """Where it is called."""
    network: Annotated[NetworkOptions, tyro.conf.arg(name="")] = field(default_factory=NetworkOptions)
    """Who this process is and which swarm it belongs to."""
    swarm: str = "dmoe"
    """Name under which the node is listed."""
    kind: Annotated[str, tyro.conf.arg(name="expert", metavar="KIND")] = "transformer_xl"
    """What an expert is: transformer_xl, feedforward (takes --d-model), or my_file.py:my_expert, an Expert or a
    function without arguments that returns one (see dmoe_jax.experts.as_expert)."""
    expert: Annotated[ExpertOptions, tyro.conf.arg(name="")] = field(default_factory=ExpertOptions)
    """Shape of one expert."""
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
    announce_period_s: float = 10.0
    """Seconds between announcements in the DHT; they are valid three times as long."""
    faults: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FAULT=RATE [FAULT=RATE ...]")] = ()
    """Misbehave on purpose in a share of expert calls: refuse, hang, die, garbage, wrong_shape, late=RATE:MEAN_S."""
    exit_on_stdin_eof: bool = False
    """End when standard input closes (set by a process that starts this one and may be killed)."""

    def run(self) -> int:
        """Serve until interrupted; the exit status."""
        return run_until_done(self._serve, exit_on_stdin_eof=self.exit_on_stdin_eof)

    async def _serve(self, stop: Stop) -> int:
        self._check()
        uids, faults = self._uids(), self._fault_injector()
        set_up_jax()
        from dmoe_jax.device import ThreadDevice
        from dmoe_jax.node.server import NodeConfig, open_expert_node

        device = ThreadDevice()
        with _mistakes_in_one_line():
            config = NodeConfig(
                swarm=self.swarm,
                max_batch_rows=self.max_batch_rows,
                announce_period_s=self.announce_period_s,
                record_lifetime_s=3 * self.announce_period_s,
            )
            expert, optimizer = await trio.to_thread.run_sync(self._recipe, abandon_on_cancel=True)
        async with join_swarm(self.network, join=self.join, listen=self.listen, faults=faults) as peer:
            # Joined first: a taken port or an unreachable swarm is reported before minutes of compilation.
            print(f"Node {peer.rpc.peer_id.short} has joined the swarm at {peer.rpc.address}", flush=True)
            with stop.body() as compiling:
                backends = await self._compile(peer, uids, expert, optimizer, device)
                saver = self._saver(backends, device)
            if compiling.cancelled_caught:
                return EXIT_INTERRUPTED
            async with open_expert_node(peer.rpc, peer.dht, backends, device=device, config=config):
                print(f"Node {peer.rpc.peer_id.short} serves {len(uids)} experts on {peer.rpc.address}")
                print(join_line("train", self.network, peer.rpc), flush=True)
                if faults is not None:
                    print(f"This node misbehaves on purpose: --faults {' '.join(self.faults)}", flush=True)
                with stop.body():
                    if saver is None:
                        await trio.sleep_forever()
                    await saver.run(self.checkpoint_period_s)
            if saver is not None:
                # After the withdrawal: nobody sends gradients any more.
                with trio.CancelScope(shield=True):
                    await saver.save()
        return EXIT_INTERRUPTED

    def _check(self) -> None:
        check_swarm_name(self.swarm)
        for name in ("announce_period_s", "checkpoint_period_s", "warm_up_rows", "learning_rate", "grad_clip"):
            if not getattr(self, name) > 0:
                raise UsageError(f"--{name.replace('_', '-')} must be positive, got {getattr(self, name)}")
        for name in ("warmup_steps", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise UsageError(f"--{name.replace('_', '-')} must not be negative, got {getattr(self, name)}")
        if self.optimizer is None:
            return
        for each in fields(self):
            is_theirs = each.name in ("learning_rate", "warmup_steps", "weight_decay", "grad_clip", "freeze_experts")
            if is_theirs and getattr(self, each.name) != each.default:
                raise UsageError(f"--{each.name.replace('_', '-')} would have no effect beside --optimizer")

    async def _compile(
        self,
        peer: SwarmPeer,
        uids: Sequence[ExpertUid],
        expert: "Expert",
        optimizer: "optax.GradientTransformation | None",
        device: "Device",
    ) -> "dict[str, ExpertBackend]":
        """A backend for each uid, warm for --warm-up-rows; meanwhile the node is listed as compiling."""
        from dmoe_jax.node.backend import buckets_up_to, make_backends

        started = time.perf_counter()
        buckets = buckets_up_to(self.warm_up_rows)
        state = "starting"

        def info() -> dict[str, Any]:
            grids = sorted({uid.prefix for uid in uids})[:MAX_GRIDS]
            return {"role": "node", "state": state, "experts": len(uids), "grids": grids}

        assert peer.rpc.address is not None
        contact = Contact(peer.rpc.peer_id, peer.rpc.address)
        async with listed_member(
            peer.dht, self.swarm, peer.rpc.peer_id, contact, info, period_s=self.announce_period_s
        ):
            named = {str(uid): expert for uid in uids}
            backends = await device.run(lambda: make_backends(named, optimizer, seed=self.seed))
            for number, rows in enumerate(buckets, start=1):
                state = f"compiling {number} of {len(buckets)}"
                print(state, flush=True)
                # Equal experts share their compiled code.
                await device.run(next(iter(backends.values())).warm_up, rows)
        print(f"{len(uids)} experts ready after {time.perf_counter() - started:.1f} s", flush=True)
        return backends

    def _recipe(self) -> "tuple[Expert, optax.GradientTransformation | None]":
        """What to serve, and what it learns with; None: nothing is learnt."""
        from dmoe_jax.recipe import Recipe, make_optimizer
        from dmoe_jax.user_file import user_optimizer

        if self.optimizer is not None:
            return self._make_expert(), user_optimizer(self.optimizer)
        recipe = Recipe(
            learning_rate=self.learning_rate,
            warmup_steps=self.warmup_steps,
            total_steps=None,
            weight_decay=self.weight_decay,
            grad_clip=self.grad_clip,
        )
        return self._make_expert(), None if self.freeze_experts else make_optimizer(recipe)

    def _make_expert(self) -> "Expert":
        from dmoe_jax.experts import EXPERTS, make_expert
        from dmoe_jax.user_file import load_from_file, user_expert

        if self.kind == "transformer_xl":
            return self.expert.make_expert()
        given = {each.name: getattr(self.expert, each.name) for each in fields(self.expert)}
        if self.kind in EXPERTS:
            taken = set(inspect.signature(EXPERTS[self.kind]).parameters) & set(given)
        else:
            load_from_file(self.kind, kind="expert", choices=sorted(EXPERTS))
            taken = set()
        for each in fields(self.expert):
            if each.name not in taken and given[each.name] != each.default:
                raise UsageError(f"--{each.name.replace('_', '-')} would have no effect beside --expert {self.kind}")
        if self.kind in EXPERTS:
            return make_expert(self.kind, **{name: given[name] for name in taken})
        return user_expert(self.kind)

    def _saver(self, backends: "dict[str, ExpertBackend]", device: "Device") -> "ExpertSaver | None":
        """What keeps this node's checkpoints, after restoring what it finds; None without a folder."""
        if self.checkpoint_dir is None:
            return None
        from dmoe_jax.node.saving import ExpertSaver

        with _mistakes_in_one_line():
            saver = ExpertSaver(self.checkpoint_dir, backends, device)
            restored = saver.restore()
        if restored is not None:
            print(f"going on from a checkpoint in {self.checkpoint_dir} ({restored} updates)")
        return saver

    def _uids(self) -> list[ExpertUid]:
        try:
            uids = [uid for pattern in self.experts for uid in expand_grid_pattern(pattern)]
        except ValueError as error:
            raise UsageError(str(error)) from error
        if not uids or len(set(uids)) != len(uids):
            raise UsageError(f"--experts must name at least one expert and none twice, got {' '.join(self.experts)}")
        return uids

    def _fault_injector(self) -> FaultInjector | None:
        if not self.faults:
            return None
        try:
            plan = FaultPlan.parse(self.faults, seed=self.seed)
        except ValueError as error:
            raise UsageError(f"--faults: {error}") from error
        # The DHT and the status stay honest: what is studied is a swarm whose experts fail.
        return FaultInjector(replace(plan, methods=("expert.",)))


@contextlib.contextmanager
def _mistakes_in_one_line() -> Iterator[None]:
    """What a wrong setting or a wrong file of the user's raises is the user's to mend."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise UsageError(one_line(error)) from error
