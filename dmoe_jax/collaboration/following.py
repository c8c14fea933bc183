"""Taking the swarm's state where others are further, and giving it to those who need it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import trio

from dmoe_jax.arrays import PyTree, sent
from dmoe_jax.averaging.donor import is_finite_state, table_of
from dmoe_jax.collaboration.forming import StepForming
from dmoe_jax.collaboration.peer_state import PeerState
from dmoe_jax.collaboration.replica import Leading
from dmoe_net.averaging.collaboration.progress import CHAIN_BYTES, Report, next_chain
from dmoe_net.averaging.collaboration.rounds import Averaged
from dmoe_net.averaging.collaboration.step_log import POLL_S, StepFollower, StepLog
from dmoe_net.averaging.state.download import download_state
from dmoe_net.averaging.state.sharing import SharedState, StateSharing, StateSharingConfig, StateSource
from dmoe_net.errors import NetError
from dmoe_net.identity import Contact
from dmoe_net.nursery import background_nursery

_TIMEOUT_S = 600.0
_CONFIG = StateSharingConfig(announce_period_s=10.0, max_lag=0)


@dataclass(kw_only=True, eq=False)
class Following:
    """Keeps this peer where the swarm is."""

    training: PeerState
    forming: StepForming
    """Knows the others, and where this peer is."""
    leading: Leading | None = None
    """The other processes of this peer's replica; None: there are none."""

    def __post_init__(self) -> None:
        forming = self.forming
        self.state = forming.state
        self.log = StepLog(forming.peer.rpc, prefix=forming.name)
        """Keeps what steps bring, where somebody wants it."""
        self._follower = StepFollower(
            caller=forming.peer.rpc,
            prefix=forming.name,
            size=self.training.layout.size,
            donors=self._donors,
        )
        self._follows = trio.Event()

    def _donors(self) -> list[Contact]:
        """Whoever is further, and then those who may be soon."""
        return list(dict.fromkeys((*self.forming.board.ahead, *self.forming.board.contacts)))

    async def serve(self) -> None:
        """Give state and steps to newcomers, until cancelled."""
        source, forming = StateSource(lambda: self.state.step, self._shared_state), self.forming
        sharing = StateSharing(forming.peer.rpc, forming.peer.dht, prefix=forming.name, source=source, config=_CONFIG)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sharing.run)
            nursery.start_soon(self.log.run)
            nursery.start_soon(self._follow_along)

    def in_step(self) -> None:
        """Fetch no more: this peer has made a step with the others."""
        if self._follows.is_set():
            self._follows = trio.Event()
            if self.leading is not None:
                self.leading.follows = False

    async def catch_up(self) -> bool:
        """Go where whoever is further is, if somebody is; return True if that was done.

        What steps bring that are made meanwhile is fetched beside the state and applied to it; where only the last ones
        are missing, that is all that is fetched.
        """
        state, board = self.state, self.forming.board
        leader = board.view.leader
        if leader is None or state.coming is not None or state.where is None:
            return False
        self._follows.set()
        if self.leading is not None:
            await self.leading.watch(self._donors())
        await self._follower.ask()
        if await self._follow():
            return True
        if leader.chain == state.chain:  # with delayed updates: its last step is under way, and will be told
            await board.wait_for_news()
            return False
        taken: SharedState | None = None
        with trio.CancelScope() as downloading:
            async with background_nursery() as nursery:
                nursery.start_soon(self._follow_along, downloading)
                taken = await self._download(leader)
        if taken is None and await self._follow():
            return True
        return await self._take_state(leader, taken)

    async def _take_state(self, leader: Report, taken: SharedState | None) -> bool:
        """Go on from a state that was fetched; return True if it is further than this peer's."""
        state, board = self.state, self.forming.board
        if taken is None or (taken.version, taken.facts["trained"]) <= (state.step, state.trained):
            board.refresh()
            await board.wait_for_news()
            return False
        if self.leading is None:
            await self.training.take(taken.tensors)
        elif not await self.leading.take(taken):
            return False
        state.moved(taken.version, taken.facts["chain"], taken.facts["trained"], trio.current_time())
        state.totals.states_taken += 1
        await self._follower.ask()
        await self._follow()
        self.forming.arrived()
        return True

    async def _follow(self) -> bool:
        """Make the steps that were fetched and go on where this peer stands; return True if there were any."""
        state, has_moved = self.state, False
        while (brought := self._next) is not None:
            if self.leading is not None and not await self.leading.all_have(state.step, state.chain):
                self._follower.forget()  # it would keep this peer from fetching a state
                break
            # With delayed updates: what was averaged beside this batch comes first, before it is forgotten.
            last = state.under_way
            if last is not None and last.averaged is not None:
                if self.leading is not None:
                    await self.leading.order("step", mark=last.mark)
                await self.training.step(last.averaged)
            state.under_way = None
            if self.leading is not None:
                await self.leading.order("follow")
            await self.training.step(brought)
            chain = next_chain(state.chain, brought.group_id)
            state.moved(state.step + 1, chain, state.trained + brought.weight, trio.current_time())
            state.totals.steps_followed += 1
            has_moved = True
        if has_moved:
            self.forming.arrived()
        return has_moved

    @property
    def _next(self) -> Averaged | None:
        return self._follower.following(self.state.step, self.state.chain)

    async def _follow_along(self, downloading: trio.CancelScope | None = None) -> None:
        """Fetch what steps bring, from the moment that this peer has to catch up until it makes a step with others.

        Cancel `downloading` as soon as there is something to go on with from here, without a state.
        """
        while True:
            await self._follows.wait()
            await self._follower.ask()
            if downloading is not None and self._next is not None:
                downloading.cancel()
            await trio.sleep(POLL_S)

    async def _download(self, leader: Report) -> SharedState | None:
        """The state of whoever is furthest in the chain that goes on; None if it cannot be had."""
        table = table_of(self.training.shared)

        def is_of_use(shared: SharedState) -> bool:
            # Of two chains of a swarm that fell apart one is given up: not the one whose state is taken.
            if not _is_chain(shared.facts) or not is_finite_state(shared):
                return False
            return (shared.version, shared.facts["trained"], shared.facts["chain"]) >= leader.standing

        try:
            return await download_state(
                self.forming.peer.rpc,
                self.forming.peer.dht,
                prefix=self.forming.name,
                rng=self.forming.peer.rng,
                config=_CONFIG,
                min_version=leader.step,
                timeout_s=_TIMEOUT_S,
                attempts=3,
                expects=lambda version, offered: version >= self.state.step and offered == table,
                accepts=is_of_use,
            )
        except NetError as error:
            self.state.totals.reasons[f"no state: {type(error).__name__}"] += 1
            return None

    async def _shared_state(self) -> SharedState:
        if self.leading is not None:
            return await self.leading.next_copy()
        step, tree = await self.snapshot()
        facts = {"chain": self.state.chain, "trained": float(self.state.trained)}
        return SharedState(version=step, tensors=tuple(map(sent, jax.tree.leaves(tree))), facts=facts)

    async def snapshot(self) -> tuple[int, PyTree]:
        """Return the step, and a copy of the state after it on the host.

        Raises:
          ValueError: other processes hold a part of it.
        """
        state = self.state
        if self.training.layout.spans:
            raise ValueError(
                "no process holds the whole state of a model over several processes: save `state`, whose arrays Orbax "
                "writes from all of them"
            )
        while True:
            before, under_way = state.step, state.under_way
            while under_way is not None and not under_way.is_over:
                # What is averaged is in the copy: whoever takes it has nothing under way.
                await self.forming.changes()
            tree = await self.training.snapshot(None if under_way is None else under_way.averaged)
            if (before, under_way) == (state.step, state.under_way):
                return before, tree


def _is_chain(facts: Mapping[str, Any]) -> bool:
    chain, trained = facts.get("chain"), facts.get("trained")
    is_named = isinstance(chain, bytes) and len(chain) == CHAIN_BYTES
    return is_named and isinstance(trained, float) and math.isfinite(trained)
