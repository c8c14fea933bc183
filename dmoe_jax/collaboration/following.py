"""Taking the swarm's state where others are further, and giving it to those who need it."""

import math
import random
from collections.abc import Mapping
from typing import Any

import jax

from dmoe_jax.averaging.donor import is_finite_state, table_of
from dmoe_jax.collaboration.forming import StepForming
from dmoe_jax.collaboration.peer_state import PeerState
from dmoe_jax.collaboration.standing import Standing
from dmoe_jax.types import PyTree
from net.averaging.collaboration.board import ProgressBoard
from net.averaging.collaboration.progress import CHAIN_BYTES
from net.averaging.state.download import download_state
from net.averaging.state.sharing import SharedState, StateSharing, StateSharingConfig, StateSource
from net.dht.node import DhtNode
from net.errors import NetError
from net.rpc.base import Caller

_TIMEOUT_S = 600.0
_CONFIG = StateSharingConfig(announce_period_s=10.0, max_lag=0)


class Following:
    """Keeps this peer where the swarm is.

    Args:
      state, standing: of this peer.
      caller: places and serves the calls. dht: where donors are found. name: of the collaboration.
      forming: whether a step is coming. board: who is how far.
      rng: chooses among donors.
    """

    def __init__(
        self,
        state: PeerState,
        standing: Standing,
        *,
        caller: Caller,
        dht: DhtNode,
        name: str,
        forming: StepForming,
        board: ProgressBoard,
        rng: random.Random,
    ) -> None:
        self._state = state
        self._standing = standing
        self._caller = caller
        self._dht = dht
        self._name = name
        self._forming = forming
        self._board = board
        self._rng = rng

    async def serve(self) -> None:
        """Give the state to newcomers, until cancelled."""
        source = StateSource(lambda: self._standing.step, self._shared_state)
        await StateSharing(self._caller, self._dht, prefix=self._name, source=source, config=_CONFIG).run()

    async def keep_up(self) -> bool:
        """Take the state of whoever is further, if somebody is; whether that was done."""
        standing = self._standing
        leader = self._board.view.leader
        if leader is None or self._forming.coming is not None or standing.where is None:
            return False
        taken = await self._download(min_version=leader.step)
        if taken is None or (taken.version, taken.facts["trained"]) <= (standing.step, standing.trained):
            self._board.refresh()
            await self._board.wait_for_news()
            return False
        await self._state.take(taken.tensors)
        standing.totals.samples_lost += standing.gathered
        standing.totals.states_taken += 1
        standing.moved(taken.version, taken.facts["chain"], taken.facts["trained"])
        self._forming.changed()
        return True

    async def _download(self, *, min_version: int) -> SharedState | None:
        table = table_of(self._state.shared)
        try:
            return await download_state(
                self._caller,
                self._dht,
                prefix=self._name,
                rng=self._rng,
                config=_CONFIG,
                min_version=min_version,
                timeout_s=_TIMEOUT_S,
                attempts=3,
                expects=lambda version, offered: version >= self._standing.step and offered == table,
                accepts=lambda state: is_finite_state(state) and _is_chain(state.facts),
            )
        except NetError as error:
            self._standing.totals.reasons[f"no state: {type(error).__name__}"] += 1
            return None

    async def _shared_state(self) -> SharedState:
        """What a newcomer takes."""
        step, tree = await self.snapshot()
        facts = {"chain": self._standing.chain, "trained": float(self._standing.trained)}
        return SharedState(version=step, tensors=tuple(jax.tree.leaves(tree)), facts=facts)

    async def snapshot(self) -> tuple[int, PyTree]:
        """The step, and a copy of the state after it on the host."""
        standing = self._standing
        while True:
            before, under_way = standing.step, standing.under_way
            if under_way is not None:
                # What is averaged is in the copy: whoever takes it has nothing under way.
                await under_way.done.wait()
            last = None if under_way is None else under_way.averaged
            whole = None if last is None else (last.mean, last.weight, last.notes)
            tree = await self._state.snapshot(whole)
            if (before, under_way) == (standing.step, standing.under_way):
                return before, tree


def _is_chain(facts: Mapping[str, Any]) -> bool:
    chain, trained = facts.get("chain"), facts.get("trained")
    is_named = isinstance(chain, bytes) and len(chain) == CHAIN_BYTES
    return is_named and isinstance(trained, float) and math.isfinite(trained)
