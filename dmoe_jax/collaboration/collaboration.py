"""A peer's part in training with one large batch; see `dmoe_jax.collaboration`."""

import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio

from dmoe_jax.arrays import PyTree
from dmoe_jax.averaging.donor import is_finite_state
from dmoe_jax.averaging.replica import CopyTogether, replica_of
from dmoe_jax.collaboration.following import Following
from dmoe_jax.collaboration.forming import StepForming
from dmoe_jax.collaboration.peer_state import PeerState
from dmoe_jax.collaboration.replica import Leading, Led, agreed_chain
from dmoe_jax.collaboration.settings import CollaborationConfig, CollaborationTotals, GlobalStep
from dmoe_jax.collaboration.state import CollaborationState, Move, UnderWay
from dmoe_jax.machine.device import Device, ThreadDevice
from dmoe_jax.optim.collaborative import Collaborative
from dmoe_jax.peers.peer import SwarmPeer
from dmoe_net.averaging.collaboration.rounds import Averaged
from dmoe_net.averaging.grouping.group import Group, Role
from dmoe_net.averaging.grouping.group_key import MoshpitGrid
from dmoe_net.averaging.plan import AveragingPlan, announce_plan
from dmoe_net.nursery import background_nursery

_log = logging.getLogger(__name__)

_NO_ACCIDENT = 3
"""Number of steps in a row without the others that is no accident."""


class Collaboration:
    """This peer among those that make one large batch together. Made by `Swarm.collaboration`."""

    def __init__(
        self,
        training: PeerState,
        forming: StepForming,
        following: Following,
        *,
        led: Led | None = None,
        on_step: Callable[[GlobalStep], None],
    ) -> None:
        self.standing = forming.state
        """Step, chain and samples of this peer."""
        self.totals = self.standing.totals
        """Counts of this peer's work."""
        self.board = forming.board
        """Reports of everybody; `board.view` is the whole swarm, as this peer sees it."""
        self.rounds = forming.rounds
        """Finds groups and averages in them."""
        self.device = training.device
        """Runs what changes the state."""
        self._training = training
        self._forming = forming
        self._following = following
        self._on_step = on_step
        self._remarks = Remarks(self.standing.config.target_batch_size, self.totals)
        self._averaged_s = 0.0
        self._leading, self._led = following.leading, led

    @property
    def params(self) -> PyTree:
        """The parameters now; they are never donated."""
        return self._training.now.params

    @property
    def scale(self) -> Any:
        """Factor for the loss; None without a `LossScale`."""
        return self._training.now.scale

    @property
    def step(self) -> int:
        """Global steps of the swarm that this peer has made or taken over."""
        return self.standing.step

    @property
    def state(self) -> PyTree:
        """All that checkpoints and newcomers get: everything but what this peer has gathered itself."""
        return self._training.shared

    def facts(self) -> Mapping[str, Any]:
        """Facts for `dmoe status`: the whole swarm as this peer sees it."""
        if self._led is not None:
            return {"step": self.step}
        view = self.board.view
        return {
            "step": view.peers[0].step,
            "gathered": round(view.samples),
            "target": self.standing.config.target_batch_size,
            "samples_per_s": float(view.rate),
            "peers": " + ".join(f"{view.count(role)} {role.value}" for role in Role if view.count(role)),
            "averaged_s": self._averaged_s,
        }

    async def add(self, grads: PyTree, *, samples: int, took_s: float | None = None) -> bool:
        """Take in the mean gradient of a micro-batch; make the global step if it is due.

        Args:
          grads: of `params`; times `scale` if there is one.
          samples: how many it is a mean of.
          took_s: seconds of computing them; None: since the last call returned.

        Returns: True if the parameters have changed.
        """
        await self.gather(grads, samples=samples)
        return await self.gathered(samples, took_s)

    async def gather(self, grads: PyTree, *, samples: int) -> None:
        """Take in a gradient, of several that are computed side by side; then call `gathered` once for all."""
        if not (samples > 0):
            raise ValueError(f"a micro-batch has a positive number of samples, got {samples}")
        await self._training.gather(grads, samples)

    async def gathered(self, samples: int, took_s: float | None = None) -> bool:
        """Make the global step if so many gathered samples make it due, and take the swarm's state if it is ahead.

        Args: took_s: as of `add`, whose result is returned.
        """
        if self._led is not None:
            return await self._follow()
        changed = await self._gathered(samples, took_s)
        await self._let_go_on(changed)
        return changed

    async def _gathered(self, samples: int, took_s: float | None) -> bool:
        if self._leading is not None:
            await self._leading.copy_if_wanted()
        state, board, now = self.standing, self.board, self._forming.peer.dht.clock.now
        stopped_at, changed = trio.current_time(), False
        state.took_in(samples, took_s, stopped_at)
        while not state.has_time_for_more(board.view, now()):
            latest = state.latest(board.view, now())
            while (move := state.next_move(board.view, now=now(), latest=latest)) is Move.WAIT:
                await self._forming.news()
            if move is Move.COMPUTE:
                break
            changed |= await (self._step(stopped_at) if move is Move.STEP else self._following.catch_up())
            if changed and state.is_rested(trio.current_time()):
                break
        if changed or state.coming is None:
            changed |= await self._following.catch_up()
        self._remarks.gathered()
        state.goes_on(trio.current_time())
        return changed

    async def catch_up(self) -> bool:
        """Take the state of somebody that is further, if there is anybody; return True if that was done."""
        if self._led is not None:
            return await self._follow()
        changed = await self._following.catch_up()
        await self._let_go_on(changed)
        return changed

    async def _let_go_on(self, changed: bool) -> None:
        if self._leading is not None:
            await self._leading.go_on(changed)

    async def _follow(self) -> bool:
        """Do as the first process of this replica does."""
        assert self._led is not None
        changed = await self._led.until_told_to_go_on()
        made, self._led.made = self._led.made, []
        for done in made:
            self.totals.steps += 1
            self.totals.alone += not done.attempts
            self.totals.samples += done.own_samples
            self.totals.whole += done.samples
            self._averaged_s = done.averaged_s
            self._on_step(done)
        return changed

    async def _order(self, kind: str, **facts: Any) -> None:
        """Have the other processes of this replica do as this one does next."""
        if self._leading is not None:
            await self._leading.order(kind, **facts)

    async def _step(self, stopped_at: float) -> bool:
        """Bring what is gathered to the step that is coming, and step with what all brought.

        Returns True if the parameters have changed. This peer ended its last micro-batch at `stopped_at`.
        """
        state, coming = self.standing, self.standing.coming
        assert coming is not None
        while not coming.is_found:
            await self._forming.changes()
        view = self.board.view
        try:
            if coming.group is None and (view.others or view.leader is not None):
                state.totals.reasons["no group found"] += coming.has_company
                return False
            await self._order("contribution")
            own = await self._training.contribution()
            mark = "" if self._leading is None else self._leading.next_mark()
            begun = UnderWay(own.weight, stopped_at, mark)
            await self._order(
                "average",
                mark=mark,
                alone=coming.group is None,
                beside=state.config.delayed,
                number=state.step + 1,
                chain=state.chain,
            )
            if state.config.delayed:
                return await self._step_with_the_last(begun, coming.group, own)
            averaged = await self._forming.average(coming.group, own, mark)
            if averaged is None:
                return False
            state.gathered = 0.0
            await self._order("step", mark=mark)
            await self._training.step(averaged)
            state.step += 1
            self._settled(begun, averaged)
            return True
        finally:
            state.over(self.board.view)
            self._forming.changed()

    async def _step_with_the_last(self, begun: UnderWay, group: Group | None, own: Averaged) -> bool:
        """Make the step whose averaging ran beside this batch, and average this batch beside the next one."""
        state, last = self.standing, self.standing.under_way
        state.under_way, state.gathered = begun, 0.0
        state.step += 1
        if last is None or last.averaged is None:
            await self._order("empty")
            await self._training.empty()
        else:
            await self._order("step", mark=last.mark)
            await self._training.step(last.averaged)

        async def average_beside() -> None:
            begun.averaged = await self._forming.average(group, own, begun.mark)
            if state.under_way is begun:  # else another peer's state was taken meanwhile
                if begun.averaged is None:
                    state.totals.samples_lost += begun.own_samples
                else:
                    self._settled(begun, begun.averaged)
            begun.is_over = True
            self._forming.changed()

        self._forming.nursery.start_soon(average_beside)
        return last is not None and last.averaged is not None

    def _settled(self, begun: UnderWay, averaged: Averaged) -> None:
        """All members of the group have the average, and know it."""
        state = self.standing
        if not self._training.is_exact(averaged.mean):  # else who follows with what travels would come to other numbers
            self._following.log.keep(state.step, state.chain, averaged)
        done = state.settled(begun, averaged, trio.current_time())
        self.board.advanced(averaged.members, state.step, state.chain)
        self._averaged_s = done.averaged_s
        self._following.in_step()
        self._remarks.stepped(done, num_behind=self.board.view.num_behind)
        if self._leading is not None:
            self._leading.made(done)
        self._on_step(done)

    async def snapshot(self) -> tuple[int, PyTree]:
        """The step, and a copy of `state` after it on the host."""
        return await self._following.snapshot()

    def saved_facts(self) -> dict[str, Any]:
        """The rest, as JSON can hold it."""
        return self.standing.saved()

    def restore(self, step: int, state: PyTree, facts: Mapping[str, Any]) -> None:
        """Go on from `snapshot` and `saved_facts`; not while a gradient is computed.

        A swarm that was stopped as a whole so goes on where the furthest of its peers was.
        """
        self._training.restore(state)
        self.standing.restore(step, facts, trio.current_time())
        self.board.refresh()


@dataclass(slots=True)
class Remarks:
    """Warnings, each once in the log, of a collaboration that loses work or has batches far above its target."""

    target: int
    """Samples of a whole batch."""
    totals: CollaborationTotals
    _num_alone: int = 0
    _num_missed: int = 0
    _lost: float = 0.0
    _said: set[str] = field(default_factory=set)

    def stepped(self, done: GlobalStep, *, num_behind: int) -> None:
        """Look at a step that this peer has made while so many with gradients reported from earlier ones."""
        self._num_missed = 0
        self._num_alone = self._num_alone + 1 if done.peers == 1 and num_behind else 0
        if self._num_alone == _NO_ACCIDENT:
            self._say(
                "alone",
                f"the last {_NO_ACCIDENT} steps, up to {done.number}, were made by this peer alone while {num_behind} "
                f"others report from earlier steps and do not get in step: their samples are lost. A step took "
                f"{done.gathered_s:.2g} s; a larger target_batch_size than {self.target} gives them time",
            )
        if done.samples > 2 * self.target:
            self._say(
                "large",
                f"step {done.number} has {done.samples:.0f} samples of {done.peers} peers, more than twice the target "
                f"of {self.target}: are micro-batches too large? {done.own_samples:.0f} samples are this peer's",
            )

    def gathered(self) -> None:
        """Look at what followed from a micro-batch."""
        lost, self._lost = self.totals.samples_lost - self._lost, self.totals.samples_lost
        self._num_missed += lost > 0
        if self._num_missed == _NO_ACCIDENT:
            reasons = ", ".join(f"{count} times {reason}" for reason, count in self.totals.reasons.items())
            self._say(
                "missed",
                f"others made steps without this peer {_NO_ACCIDENT} times in a row: {self._lost:.0f} of its samples "
                f"are in no step, {self.totals.samples:.0f} are ({reasons or 'they were faster'})",
            )

    def _say(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            _log.warning(text)


@asynccontextmanager
async def open_collaboration(
    peer: SwarmPeer,
    params: PyTree,
    *,
    together: Collaborative,
    name: str,
    config: CollaborationConfig = CollaborationConfig(),  # noqa: B008 (frozen)
    device: Device | None = None,
    on_step: Callable[[GlobalStep], None] = lambda done: None,
) -> AsyncIterator[Collaboration]:
    """This peer's part in a collaboration, as long as the block lasts.

    It has taken the swarm's state when the block begins, if there is a swarm that has made a step.

    Args:
      peer: reports, finds groups, and draws its place on the grid.
      params: of the model. Peers with others of these shapes and meaning (`config.meaning`) join all the same: the
        swarm's are taken.
      together: the optimiser; see `dmoe_jax.optim.collaborative`.
      name: peers that give the same name train together; 1 to 64 letters, digits, '_' or '-'.
      device: runs what changes the state; None: a worker thread of its own. In virtual time, an `InlineDevice`.
      on_step: called after each global step, in the event loop.

    Raises:
      ValueError: an argument is out of range, or a parameter is not of floating-point numbers.
    """
    training = PeerState(together, params, device or ThreadDevice())
    layout, local_s = training.layout, trio.current_time()
    if layout.rounding:
        _log.warning("collaboration %r: %s", name, layout.rounding)
    # The first line keeps those apart who bring their weights with the chunks, and cut the vector as `cautious` says,
    # and those who do not, or otherwise.
    told = f"weights with chunks, unknown lines are slow\n{together.shared} {config.target_batch_size}\n{layout.schema}"
    grid = MoshpitGrid(side=config.side, dims=1)
    plan = AveragingPlan.of(size=layout.size, grid=grid, schema=told, meaning=config.meaning)
    within = plan.within(name)
    settings = f"{together.shared} {config!r}"
    async with (
        replica_of(peer, params, name=name, settings=settings) as replica,
        background_nursery() as nursery,
    ):
        chain = training.digest() if replica is None else await agreed_chain(replica, training)
        state = CollaborationState(config=config, chain=chain, since=local_s, last_step_at=local_s)
        forming = StepForming(state=state, peer=peer, plan=plan, name=within, nursery=nursery, replica=replica)
        with contextlib.closing(forming.rounds):
            leading, led = None, None
            if replica is not None:
                copies = CopyTogether(replica, peer, prefix=within, is_of_use=is_finite_state)
                parts: dict[str, Any] = {"replica": replica, "training": training, "state": state, "together": copies}
                if replica.leads:
                    leading = Leading(**parts)
                else:
                    led = Led(**parts, rounds=forming.rounds, nursery=nursery, caller=peer.rpc, prefix=within)
                    nursery.start_soon(led.serve)
            following = Following(training=training, forming=forming, leading=leading)
            collaboration = Collaboration(training, forming, following, led=led, on_step=on_step)
            if led is None:
                nursery.start_soon(forming.board.run)
                await forming.board.wait_for_news()
            await collaboration.catch_up()
            if led is None:
                nursery.start_soon(announce_plan, peer.dht, name, plan)
                nursery.start_soon(forming.run)
                nursery.start_soon(following.serve)
            yield collaboration
