"""Many asynchronous trainers in one process, each remote call delayed: wall time of a step over its critical path."""

import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import trio
from rich.console import Console
from rich.table import Table

from dmoe_jax.cli.common import fail, parse_command_line
from dmoe_jax.data.batches import SegmentStream
from dmoe_jax.device import ThreadDevice
from dmoe_jax.directory import open_expert_directory
from dmoe_jax.grid import all_uids
from dmoe_jax.layer_config import LayerConfig
from dmoe_jax.mixture.fan_out import CallPolicy, CallStatistics, ExpertCaller
from dmoe_jax.mixture.remote import MixtureConfig, RemoteMixture
from dmoe_jax.models import transformer_xl as txl
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.node.server import NodeConfig, open_expert_node
from dmoe_jax.routing.product_key import product_key
from dmoe_jax.runs.report import write_report
from dmoe_jax.runs.run_folder import FIGURE, RunFolder
from dmoe_jax.trainer import Trainer
from dmoe_jax.trunk import SharedTrunk
from experiments.overlap.figure import overlap_figure
from net.clock import SwarmClock
from net.dht.node import DhtNode, open_dht_node
from net.identity import Address, Contact, PeerId
from net.peer_health import PeerHealth
from net.rpc.base import Body, Caller, Handler, Reply, Request
from net.rpc.peer import open_rpc_peer
from net.transport.tcp import TcpTransport
from net.wire.tensors import Outgoing


@dataclass(frozen=True, kw_only=True)
class OverlapSettings:
    """Measure how well asynchronous trainers hide the latency of remote experts, over real TCP on loopback."""

    quick: bool = False
    """Three steps instead of ten."""
    seed: int = 0
    """Seed of parameters and text."""
    out: Path | None = None
    """Run folder; default: runs/ and the time."""
    json: bool = False
    """Print the headline figures as one JSON object on the last line."""
    trainers: int = 64
    """Asynchronous trainers in this process."""
    delay_s: float = 1.0
    """Delay that a node adds to every forward and backward call, seconds."""
    steps: int = 10
    """Rounds; in each every trainer takes one step."""
    num_layers: int = 2
    """DMoE layers; a step waits once forward and once backward for each."""


GRID = (2, 2)
BAR = 1.5
"""A round may take this multiple of the waits on its critical path."""


class DelayedCaller:
    """A peer whose expert calls are served late: `delay_s` after they arrive, as from far away."""

    def __init__(self, caller: Caller, delay_s: float) -> None:
        self._caller = caller
        self._delay_s = delay_s

    @property
    def peer_id(self) -> PeerId:
        """See `Caller.peer_id`."""
        return self._caller.peer_id

    @property
    def address(self) -> Address | None:
        """See `Caller.address`."""
        return self._caller.address

    @property
    def health(self) -> PeerHealth:
        """Who does not answer, as the caller behind this one knows it."""
        return self._caller.health

    def add_handler(self, method: str, handler: Handler, *, max_concurrent: int = 64) -> None:
        """Register the handler, behind the delay if it serves experts."""

        async def delayed(request: Request) -> Reply:
            await trio.sleep(self._delay_s)
            return await handler(request)

        serves_experts = method in ("expert.forward", "expert.backward")
        self._caller.add_handler(method, delayed if serves_experts else handler, max_concurrent=max_concurrent)

    def remove_handler(self, method: str) -> None:
        """See `Caller.remove_handler`."""
        self._caller.remove_handler(method)

    async def call(
        self,
        target: Contact | Address,
        method: str,
        body: Body,
        tensors: Sequence[Outgoing] = (),
        *,
        timeout_s: float,
    ) -> Reply:
        """See `Caller.call`."""
        return await self._caller.call(target, method, body, tensors, timeout_s=timeout_s)


def main() -> None:
    """Entry point."""
    settings = parse_command_line(OverlapSettings, prog="python -m experiments.overlap", args=None)
    try:
        folder = RunFolder.create(settings.out, settings, name="overlap")
    except (ValueError, OSError) as error:
        fail(str(error), prog="overlap")
    console = Console(stderr=settings.json)
    headline = trio.run(_measure, settings, folder, console)
    rounds = [record["wall_s"] for record in folder.metrics() if record["kind"] == "round"]
    overlap_figure(rounds, headline["critical_path_s"], BAR, settings.trainers, folder.path / FIGURE)
    write_report(
        folder,
        headline,
        title="Overlap of asynchronous trainers",
        figure_text="Wall time of each round beside the waits on its critical path",
    )
    table = Table(title="Overlap of asynchronous trainers", show_header=False, title_justify="left")
    for name, value in headline.items():
        table.add_row(name.replace("_", " "), f"{value:.4g}" if isinstance(value, float) else str(value))
    console.print(table)
    if settings.json:
        print(json.dumps(headline))


async def _measure(settings: OverlapSettings, folder: RunFolder, console: Console) -> dict[str, Any]:
    steps = 3 if settings.quick else settings.steps
    critical_path_s = 2 * settings.num_layers * settings.delay_s
    async with _open_trainers(settings) as trainers:
        console.print("one step alone, to compile")
        await trainers[0].step()
        rounds = []
        for number in range(steps):
            started = time.perf_counter()
            async with trio.open_nursery() as nursery:
                for trainer in trainers:
                    nursery.start_soon(trainer.step)
            rounds.append(time.perf_counter() - started)
            folder.log("round", step=number + 1, wall_s=rounds[-1], critical_path_s=critical_path_s)
            console.print(f"round {number + 1}/{steps}: {rounds[-1]:.2f} s for a critical path of {critical_path_s} s")
    median = float(np.median(rounds))
    return {
        **{name: asdict(settings)[name] for name in ("trainers", "delay_s", "num_layers")},
        "rounds": steps,
        "critical_path_s": critical_path_s,
        "median_wall_s": median,
        "overlap_ratio": median / critical_path_s,
    }


@asynccontextmanager
async def _open_trainers(settings: OverlapSettings) -> AsyncIterator[list[Trainer]]:
    """Two nodes and one process of trainers, all here, joined by TCP."""
    config = TransformerXLConfig(
        vocab_size=500,
        num_layers=settings.num_layers,
        grid_size=GRID,
        k_best=2,
        layer=LayerConfig(d_model=32, num_heads=2, d_ff=64, seq_len=16, mem_len=16),
    )
    router, device = product_key(GRID), ThreadDevice()
    async with AsyncExitStack() as stack:
        rng = random.Random(settings.seed)
        peers = []
        for listen in (Address("127.0.0.1", 0), Address("127.0.0.1", 0), None):
            peer = open_rpc_peer(TcpTransport(), peer_id=PeerId.draw(rng), listen=listen)
            peers.append(DelayedCaller(await stack.enter_async_context(peer), settings.delay_s))
        first = [peers[0].address] if peers[0].address is not None else []
        dhts = [
            await stack.enter_async_context(
                open_dht_node(
                    peer,
                    clock=SwarmClock.wall(),
                    rng=rng,
                    initial_peers=first if index else [],
                    client_mode=peer.address is None,
                )
            )
            for index, peer in enumerate(peers)
        ]
        await _serve(stack, settings, config, peers[:2], dhts, device)
        directory = await stack.enter_async_context(open_expert_directory(dhts[-1]))
        caller = ExpertCaller(peers[-1], directory, CallStatistics())
        policy = CallPolicy(grace_s=60.0, timeout_s=60.0)
        mixtures = [
            RemoteMixture(
                expert=config.expert(),
                router=router,
                directory=directory,
                caller=caller,
                device=device,
                config=MixtureConfig(prefix=f"layer{layer}", k_best=2, policy=policy),
            )
            for layer in range(settings.num_layers)
        ]
        model = txl.TransformerXL(config, router, mixtures)
        trunk = SharedTrunk(txl.init_trunk(jax.random.key(settings.seed), config, router), optax.adam(1e-3), device)
        text = np.random.default_rng(settings.seed).integers(0, config.vocab_size, 20_000)
        yield [
            Trainer(
                i,
                model,
                trunk,
                SegmentStream(text, batch_size=1, seq_len=16, shard=i, num_shards=settings.trainers),
            )
            for i in range(settings.trainers)
        ]


async def _serve(
    stack: AsyncExitStack,
    settings: OverlapSettings,
    config: TransformerXLConfig,
    peers: Sequence[DelayedCaller],
    dhts: Sequence[DhtNode],
    device: ThreadDevice,
) -> None:
    """Open one expert node on each peer; experts are dealt out in turn."""
    uids = [str(uid) for layer in range(settings.num_layers) for uid in all_uids(f"layer{layer}", GRID)]
    optimizer = optax.adam(1e-3)
    for index, peer in enumerate(peers):
        backends = {
            uid: ExpertBackend(config.expert(), optimizer, config.expert().init(jax.random.key(number)))
            for number, uid in enumerate(uids)
            if number % len(peers) == index
        }
        # A round brings up to one row a trainer to one expert.
        await device.run(next(iter(backends.values())).warm_up, settings.trainers)
        node = open_expert_node(
            peer,
            dhts[index],
            backends,
            device=device,
            config=NodeConfig(max_concurrent_calls=4 * settings.trainers),
        )
        await stack.enter_async_context(node)
