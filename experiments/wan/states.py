"""The download of a state by a newcomer, from one donor or several, on lines of given bandwidth and round trip."""

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import numpy as np
import trio

from dmoe_net.averaging.state.download import download_state
from dmoe_net.averaging.state.sharing import SharedState, StateSharing, StateSharingConfig, StateSource
from dmoe_net.clock import SwarmClock
from dmoe_net.dht.node import DhtNode, open_dht_node
from dmoe_net.identity import Address
from dmoe_net.keys import Identity
from dmoe_net.rpc.bulk import MemoryBudget
from dmoe_net.rpc.peer import RpcPeer, open_rpc_peer
from dmoe_net.transport.sim import Constant, HostOptions, SimNetwork, run, simulate
from experiments.wan.averaging import TICK_S

_ROOT = Address("donor0", 1)
_ARRAYS = 16
"""That the state consists of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """Time and memory that a newcomer took."""

    seconds: float
    """From its asking the DHT for donors to the whole state, virtual."""
    peak_bytes: int
    """The most that it took out of its memory budget."""


class WrongState(Exception):
    """The state that was downloaded is not the donors'."""


def download_times(
    *, donors: int, nbytes: int, up_gbps: float, down_gbps: float, round_trip_ms: float, budget_bytes: int, seed: int
) -> Download:
    """Let a newcomer download a state.

    Args:
      donors: that have it, the very same.
      nbytes: of the state.
      up_gbps: of each donor. down_gbps: of the newcomer.

    Raises:
      WrongState: it came out wrong.
    """
    return run(_download, donors, nbytes, up_gbps, down_gbps, round_trip_ms, budget_bytes, seed, seed=seed)


async def _download(
    donors: int, nbytes: int, up_gbps: float, down_gbps: float, round_trip_ms: float, budget_bytes: int, seed: int
) -> Download:
    def host(name: str) -> HostOptions:
        return HostOptions(down_bps=1e9 * down_gbps) if name == "new" else HostOptions(up_bps=1e9 * up_gbps)

    # Bytes that do not repeat with any period near a piece's, so that no two pieces are alike.
    values = np.random.default_rng(seed).integers(0, 2**32, nbytes // 4, np.uint32).view(np.float32)
    state = SharedState(version=1, tensors=tuple(np.array_split(values, _ARRAYS)), facts={"step": 1})

    async def snapshot() -> SharedState:
        return state

    source = StateSource(lambda: state.version, snapshot)
    latency = Constant(round_trip_ms / 2000)
    async with AsyncExitStack() as stack:
        network = await stack.enter_async_context(simulate(seed=seed, latency=latency, hosts=host, tick_s=TICK_S))
        nursery = await stack.enter_async_context(trio.open_nursery())
        for index in range(donors):
            caller, dht, _ = await stack.enter_async_context(_peer(network, f"donor{index}", budget_bytes, seed))
            sharing = StateSharing(caller, dht, prefix="wan", source=source, config=StateSharingConfig())
            nursery.start_soon(sharing.run)
        await trio.sleep(2.0)  # until all are announced
        caller, dht, rng = await stack.enter_async_context(_peer(network, "new", budget_bytes, seed))
        began = trio.current_time()
        found = await download_state(caller, dht, prefix="wan", rng=rng, config=StateSharingConfig())
        seconds = trio.current_time() - began
        nursery.cancel_scope.cancel()
        pairs = zip(found.tensors, state.tensors, strict=True) if found is not None else ()
        if found is None or not all(np.array_equal(a.view(np.uint32), b.view(np.uint32)) for a, b in pairs):
            raise WrongState("the state that was downloaded is not the donors'")
        return Download(seconds=seconds, peak_bytes=caller.bulk.budget.peak_bytes)
    raise AssertionError("unreachable: the block returns")


@asynccontextmanager
async def _peer(
    network: SimNetwork, name: str, budget_bytes: int, seed: int
) -> AsyncIterator[tuple[RpcPeer, DhtNode, random.Random]]:
    rng = random.Random(f"{seed}/{name}")
    identity = Identity.from_seed(rng.randbytes(32))
    async with (
        open_rpc_peer(
            network.transport(name, identity.peer_id),
            peer_id=identity.peer_id,
            listen=Address(name, 1),
            memory_budget=MemoryBudget(budget_bytes),
        ) as caller,
        open_dht_node(
            caller,
            identity=identity,
            clock=SwarmClock.virtual(),
            rng=rng,
            initial_peers=() if name == _ROOT.host else (_ROOT,),
        ) as dht,
    ):
        yield caller, dht, rng
