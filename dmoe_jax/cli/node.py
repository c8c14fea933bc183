"""`dmoe node`: serve experts."""

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import trio
import tyro

from dmoe_jax.cli.common import UsageError, set_up_jax
from dmoe_jax.cli.lifecycle import EXIT_INTERRUPTED, Stop, run_until_done
from dmoe_jax.cli.network import JoinTexts, ListenOptions, NetworkOptions
from dmoe_jax.cli.swarm import join_line, join_swarm
from dmoe_jax.grid import ExpertUid, expand_grid_pattern
from dmoe_jax.layer_config import LayerConfig
from net.rpc.faults import FaultPlan


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
    expert: Annotated[LayerConfig, tyro.conf.arg(name="")] = field(default_factory=LayerConfig)
    """Shape of one expert."""
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
        from dmoe_jax.device import ThreadDevice
        from dmoe_jax.node.server import NodeConfig, open_expert_node

        for name in ("announce_period_s", "checkpoint_period_s"):
            if not getattr(self, name) > 0:
                raise UsageError(f"--{name.replace('_', '-')} must be positive, got {getattr(self, name)}")
        for name in ("warmup_steps", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise UsageError(f"--{name.replace('_', '-')} must not be negative, got {getattr(self, name)}")
        uids, faults = self._uids(), self._fault_plan()
        set_up_jax()
        device = ThreadDevice()
        try:
            config = NodeConfig(
                swarm=self.swarm,
                max_batch_rows=self.max_batch_rows,
                announce_period_s=self.announce_period_s,
                record_lifetime_s=3 * self.announce_period_s,
            )
        except ValueError as error:
            raise UsageError(str(error)) from error
        async with join_swarm(self.network, join=self.join, listen=self.listen, faults=faults) as peer:
            # Joined first: a taken port or an unreachable swarm is reported before minutes of compilation.
            started = time.perf_counter()
            backends = await device.run(self._make_backends, uids)
            saver = self._saver(backends, device)
            print(f"{len(uids)} experts ready after {time.perf_counter() - started:.1f} s", flush=True)
            async with open_expert_node(peer.rpc, peer.dht, backends, device=device, config=config):
                print(f"Node {peer.rpc.peer_id.short} serves {len(uids)} experts on {peer.rpc.address}")
                print(join_line("train", self.network, peer), flush=True)
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

    def _saver(self, backends: dict[str, Any], device: Any) -> Any:
        """The `dmoe_jax.node.saving.ExpertSaver` of this node, after restoring what it finds; None without a folder."""
        if self.checkpoint_dir is None:
            return None
        from dmoe_jax.node.saving import ExpertSaver

        try:
            saver = ExpertSaver(self.checkpoint_dir, backends, device)
            restored = saver.restore()
        except (ValueError, OSError) as error:
            raise UsageError(str(error)) from error
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

    def _fault_plan(self) -> FaultPlan | None:
        if not self.faults:
            return None
        try:
            plan = FaultPlan.parse(self.faults, seed=self.seed)
        except ValueError as error:
            raise UsageError(f"--faults: {error}") from error
        # The DHT and the status stay honest: what is studied is a swarm whose experts fail.
        return replace(plan, methods=("expert.",))

    def _make_backends(self, uids: list[ExpertUid]) -> dict[str, Any]:
        """A warm `dmoe_jax.node.backend.ExpertBackend` for each uid."""
        import jax
        import optax

        from dmoe_jax.experts.base import init_by_uid
        from dmoe_jax.experts.transformer_xl import layer_expert
        from dmoe_jax.node.backend import ExpertBackend
        from dmoe_jax.recipe import decay_learning_weights

        expert = layer_expert(self.expert)
        rate: Any = self.learning_rate
        if self.warmup_steps:
            rate = optax.linear_schedule(0.0, self.learning_rate, self.warmup_steps)
        decay = [decay_learning_weights(self.weight_decay)] if self.weight_decay else []
        optimizer = optax.chain(optax.clip_by_global_norm(self.grad_clip), *decay, optax.adam(rate))
        base = jax.random.key(self.seed)
        backends = {
            str(uid): ExpertBackend(
                expert,
                None if self.freeze_experts else optimizer,
                init_by_uid(base, expert, uid.prefix, uid.coordinates),
            )
            for uid in uids
        }
        next(iter(backends.values())).warm_up(self.warm_up_rows)
        return backends
