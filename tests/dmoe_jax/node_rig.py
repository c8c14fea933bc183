"""One expert node and one trainer on a direct network, for the tests of the node."""

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import jax
import numpy as np
import optax
import trio

from dmoe_jax.experts.feedforward import feedforward
from dmoe_jax.experts.transformer_xl import transformer_xl_layer
from dmoe_jax.machine.device import CostModel, Device, InlineDevice
from dmoe_jax.metrics.node import node_families
from dmoe_jax.mixture.expert_calls import BACKWARD, FORWARD, Answer, outcomes_of_untrusted
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.node.server import ExpertNode, open_expert_node
from dmoe_jax.node.sharding import PlacedDevice
from dmoe_net.clock import SwarmClock
from dmoe_net.dht.node import open_dht_node
from dmoe_net.identity import Address, Contact, PeerId
from dmoe_net.keys import Identity
from dmoe_net.rpc.base import Caller, Reply
from dmoe_net.wire.tensors import plain
from tests.net.direct_network import DirectCaller, DirectNetwork

HOST = Address("node", 1)
EXPERT = feedforward(d_model=4)
XL = transformer_xl_layer(d_model=4, num_heads=2, d_ff=8, seq_len=3, mem_len=2)
SGD = optax.sgd(0.1)
"""One object, so that what one test compiles serves the others."""


async def ask_expert(
    caller: Caller, node: Address | Contact, method: str, body: dict[str, Any], *tensors: Any, timeout_s: float = 100.0
) -> Reply:
    """Call one expert, which the body names, with all rows of the first tensor; raises what its node answered."""
    count = plain(tensors[0]).shape[0] if tensors and plain(tensors[0]).ndim else 0
    part = {name: value for name, value in body.items() if name in ("uid", "id", "seen")}
    body = {name: value for name, value in body.items() if name not in part}
    body["parts"] = [{**part, "rows": count}]
    index = np.arange(count, dtype=np.int32)
    reply = await caller.call(node, method, body, (index, *tensors), timeout_s=timeout_s)
    ((_, outcome),) = outcomes_of_untrusted(reply, {0: count})
    if not isinstance(outcome, Answer):
        raise outcome
    return Reply(body={"updates": outcome.updates}, tensors=outcome.tensors)


class Rig:
    """One node and one trainer on a direct network, and what a test asks of them."""

    def __init__(self, node: ExpertNode, backends: dict[str, ExpertBackend], trainer: DirectCaller) -> None:
        self.node, self.backends, self.trainer = node, backends, trainer

    async def call(self, method: str, body: dict[str, Any], *tensors: Any, timeout_s: float = 100.0) -> Reply:
        """Call the node; of experts ask the one that the body names, for all rows of the first tensor."""
        if method not in (FORWARD, BACKWARD):
            return await self.trainer.call(HOST, method, body, tensors, timeout_s=timeout_s)
        return await ask_expert(self.trainer, HOST, method, body, *tensors, timeout_s=timeout_s)

    async def forward(self, uid: str, *tensors: Any, timeout_s: float = 100.0) -> Reply:
        return await self.call("expert.forward", {"uid": uid}, *tensors, timeout_s=timeout_s)

    async def backward(self, uid: str, request_id: bytes, *tensors: Any, timeout_s: float = 100.0) -> Reply:
        body = {"uid": uid, "id": request_id}
        return await self.call("expert.backward", body, *tensors, timeout_s=timeout_s)

    def shown(self) -> dict[str, dict[tuple[str, ...], Any]]:
        """The node's metrics by name: each one's values by those of their labels."""
        found: dict[str, dict[tuple[str, ...], Any]] = {}
        for family in node_families(self.node.recorder, self.node.status()):
            for sample in family.samples:
                found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
        return found


class AsideDevice(InlineDevice):
    """Compiles beside the device, in five seconds of virtual time for each bucket."""

    compiles_aside = True

    async def aside(self, function: Callable[..., Any], *args: Any) -> Any:
        await trio.sleep(5.0)
        return await super().aside(function, *args)


@asynccontextmanager
async def open_rig(
    *,
    cost: CostModel | None = None,
    config: NodeConfig | None = None,
    device: Device | Sequence[PlacedDevice] | None = None,
    backends: dict[str, ExpertBackend] | None = None,
) -> AsyncIterator[Rig]:
    network = DirectNetwork(latency_s=0.01)
    identity = Identity.from_seed(b"h" * 32)
    host = network.caller(HOST, identity.peer_id)
    trainer = network.caller(None, PeerId.draw(random.Random(2)))
    backends = backends or {
        "ffn.0.1": ExpertBackend(EXPERT, SGD, EXPERT.init(jax.random.key(0))),
        "ffn.2.3": ExpertBackend(EXPERT, SGD, EXPERT.init(jax.random.key(1))),
        "xl.0": ExpertBackend(XL, SGD, XL.init(jax.random.key(2))),
    }
    clock, device = SwarmClock(start_s=50.0), device or InlineDevice(cost or CostModel())
    async with (
        open_dht_node(host, identity=identity, clock=clock, rng=random.Random(3)) as host_dht,
        open_expert_node(host, host_dht, backends, device=device, config=config or NodeConfig()) as node,
    ):
        yield Rig(node, backends, trainer)


def rows(count: int, width: int = 4, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32)
