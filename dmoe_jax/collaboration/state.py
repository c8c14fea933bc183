"""A peer's standing in a collaboration, and all that is decided by it, without I/O.

Theory of operation. A peer gathers samples for the step after its last one; a chain names the steps before it
(`dmoe_net.averaging.collaboration.progress`). When all peers together are about to have a whole batch, the step is
*coming*: its group forms beside the computing, and begins when the batch is foretold to be full. With delayed updates
an averaging may be *under way* beside the next batch; until it is over nobody knows what that batch comes after
(`where`).

`view` is the swarm as of the last reports. `now` is swarm time, which may be set; `local_s` is this machine's time, by
which durations go.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from dmoe_jax.collaboration.settings import CollaborationConfig, CollaborationTotals, GlobalStep
from dmoe_net.averaging.collaboration.progress import Forecast, Pace, Report, next_chain
from dmoe_net.averaging.collaboration.rounds import Averaged
from dmoe_net.averaging.grouping.group import Group, Role
from dmoe_net.identity import Address, PeerId

_AWAY = 4.0
"""Multiple of the usual time of a micro-batch after which, and `late_s` more, the others do without this peer."""
_LATE_S = 1.0
"""Seconds after the time foretold for a full batch at which this peer stops waiting for it."""
_MOST_LEADS = 8
"""Largest multiple of the time that was set in which groups form."""
_ANSWERS = 8.0
"""Lead in multiples of the time that others took to answer. Forming takes four, for peers are told, ask each other and
join; and if the batch is full already, only half of the lead is left."""
_PAUSE_S = 0.2
"""Seconds added to that lead: a peer that asked too early pauses before it asks again."""


class Move(Enum):
    """Next thing to do for a peer that has ended a micro-batch."""

    COMPUTE = auto()  # the next one
    WAIT = auto()  # until something changes
    STEP = auto()  # with the group that forms
    CATCH_UP = auto()  # with those that have made the step already


@dataclass(slots=True, eq=False)
class ComingStep:
    """A step about to be made."""

    step: int
    """Number of steps before it."""
    chain: bytes
    """Names these."""
    begins_at: float
    group: Group | None = None
    """Its members; None while they are looked for, and if nobody was found."""
    has_company: bool = False
    """True if others were at this step when its group was looked for; False: this peer makes it alone."""
    is_found: bool = False
    """True once `group` is what it will be."""


@dataclass(slots=True, eq=False)
class UnderWay:
    """An averaging, perhaps beside the next batch."""

    own_samples: float
    """Samples of this peer in it."""
    stopped_at: float
    """When this peer had ended its last micro-batch for it; its own time."""
    mark: str = ""
    """Name for the other processes of a replica."""
    averaged: Averaged | None = None
    """Its result; None if there is none."""
    is_over: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class CollaborationState:
    """Everything that a peer knows of its part, but for its parameters and the others' reports."""

    config: CollaborationConfig
    chain: bytes
    """Names the steps that led here: peers with the same have the same parameters."""
    since: float
    """Its own time when it began its next micro-batch, or to wait after its last one."""
    last_step_at: float
    """Its own time when the last step was made or taken over."""
    step: int = 0
    """Global steps of the swarm that it has made or taken over."""
    trained: float = 0.0
    """Samples in all steps so far, of all peers: the swarm's place in the data."""
    gathered: float = 0.0
    """Samples that it has gathered for the step to come."""
    coming: ComingStep | None = None
    """The step whose group forms, or averages."""
    under_way: UnderWay | None = None
    """With delayed updates: the averaging beside this batch."""
    waits: bool = False
    """True from the end of a micro-batch until the loop may go on."""
    micro_batch: int = 1
    """Samples of the last one."""
    pace: Pace = field(default_factory=Pace)
    lead_factor: float = 1.0
    """Grows where no group is found."""
    answer_s: float = 0.0
    """Seconds that the slowest of those who answered took, when the others were told last."""
    totals: CollaborationTotals = field(default_factory=CollaborationTotals)
    """Counts of what has become of its work."""

    @property
    def where(self) -> tuple[int, bytes] | None:
        """Step and chain of the batch that is gathered; None until it is known what became of the one before."""
        if self.under_way is not None and not self.under_way.is_over:
            return None
        return self.step, self.chain

    @property
    def is_averaging(self) -> bool:
        """True if it averages with a group now, and waits for that."""
        return self.waits and self.coming is not None and self.coming.group is not None

    def is_away(self, local_s: float) -> bool:
        """True if the loop has long been doing something other than its micro-batch: the others neither wait for this
        peer nor need it for a step."""
        usual_s = self.pace.seconds_for(self.micro_batch)
        return not self.waits and usual_s > 0 and local_s - self.since - _AWAY * usual_s > self.config.late_s

    def report(self, peer_id: PeerId, address: Address | None, role: Role, *, now: float, local_s: float) -> Report:
        """Tell of this peer.

        The micro-batch that is being computed counts for what it is worth by now. A peer that waits for the end of the
        batch counts as computing until then: otherwise the foretold end would move away while everybody waits for it.
        One that has brought nothing to that batch does not: the others fill it, or nobody does.
        """
        rate = 0.0 if self.waits and not self.gathered else self.pace.rate
        return Report(
            peer_id=peer_id,
            address=None if role is Role.CLIENT else address,
            role=role,
            step=self.step,
            chain=self.chain,
            samples=self.gathered + min(rate * (local_s - self.since), float(self.micro_batch)),
            rate=rate,
            at=now,
            trained=self.trained,
        )

    def lead_s(self, view: Forecast) -> float:
        """Seconds between the forming of groups and the end of the batch.

        At most half of a batch, and at least the time that forming takes, judged by how soon others answer; longer
        after steps for which no group was found.
        """
        needed = _ANSWERS * self.answer_s + _PAUSE_S if self.answer_s else self.config.lead_s
        lead_s = max(min(self.config.lead_s, view.batch_s / 2), needed)
        return min(self.lead_factor * lead_s, _MOST_LEADS * self.config.lead_s)

    def ends_at(self, view: Forecast) -> float:
        """Swarm time at which the batch is full or the step begins, as far as is known."""
        return view.ends_at if self.coming is None else min(view.ends_at, self.coming.begins_at)

    def due(self, view: Forecast, *, now: float, local_s: float) -> float | None:
        """Swarm time at which the step at hand begins, if it is time to look for its group."""
        if self.coming is not None or self.where is None or self.is_away(local_s):
            return None
        lead_s = self.lead_s(view)
        if view.ends_at - now > lead_s or view.leader is not None or view.samples <= 0:
            return None
        return max(view.ends_at, now + lead_s / 2 if view.others else now)

    def begin(self, at: float) -> ComingStep:
        self.coming = ComingStep(self.step, self.chain, at)
        return self.coming

    def heard(
        self, where: tuple[int, bytes], at: float | None, view: Forecast, *, now: float, local_s: float
    ) -> float | None:
        """Hear where another peer is, and perhaps when its step begins; return when it begins here, if it does.

        Of several times the latest stands, for everybody hears of it.
        """
        if self.is_away(local_s) or where != self.where:
            return None
        coming, set_s = self.coming, self.config.lead_s
        known = None if coming is None or coming.is_found else coming.begins_at
        if at is None or at > now + 2 * _MOST_LEADS * set_s:
            return known
        if coming is None:
            # Whoever says so cannot make a batch of nothing: it must be nearly full by what everybody reports.
            if view.ends_at - now > 4 * max(set_s, self.lead_s(view), at - now):
                return None
            coming = self.begin(max(now, at))
        elif known is not None and at > known:
            coming.begins_at = at
        return coming.begins_at

    def over(self, view: Forecast) -> None:
        """Close the coming step, made or not.

        Groups form for longer next time if nobody was found, unless others were and have made it meanwhile.
        """
        coming, self.coming = self.coming, None
        is_lost = coming is not None and coming.has_company and coming.group is None and view.leader is None
        self.lead_factor = min(max((2.0 if is_lost else 0.9) * self.lead_factor, 1.0), _MOST_LEADS)

    def took_in(self, samples: int, took_s: float | None, local_s: float) -> None:
        """Count a micro-batch that has ended. It took `took_s` to compute; None: since the loop went on."""
        self.pace.measured(samples, local_s - self.since if took_s is None else took_s)
        self.since, self.waits, self.micro_batch = local_s, True, samples
        self.gathered += samples

    def goes_on(self, local_s: float) -> None:
        """Begin the next micro-batch."""
        self.since, self.waits = local_s, False

    def has_time_for_more(self, view: Forecast, now: float) -> bool:
        """True if another micro-batch would end before the step begins, or not further after it than before."""
        return now + self.pace.seconds_for(self.micro_batch) / 2 <= self.ends_at(view)

    def is_rested(self, local_s: float) -> bool:
        """True if this peer has computed nothing for as long as a micro-batch takes it.

        It computes then, though the others may be too quick for it: it would never learn that it has become quicker.
        """
        return local_s - self.since >= self.pace.seconds_for(self.micro_batch)

    def latest(self, view: Forecast, now: float) -> float:
        """Swarm time until which a step that should begin is waited for."""
        return max(self.ends_at(view), now) + _LATE_S

    def next_move(self, view: Forecast, *, now: float, latest: float) -> Move:
        """Decide what to do where there is no time for another micro-batch.

        After `latest` this peer computes all the same, for a batch that others may not fill.
        """
        if self.coming is not None:
            return Move.COMPUTE if self._is_short_alone(view) else Move.STEP
        is_known = self.where is not None
        if is_known and view.leader is not None:
            return Move.CATCH_UP
        return Move.COMPUTE if self.has_time_for_more(view, now) or (is_known and now > latest) else Move.WAIT

    def _is_short_alone(self, view: Forecast) -> bool:
        """True if this peer, which has told nobody when its step begins, lacks half a micro-batch or more.

        Its last micro-batch took longer than foretold.
        """
        assert self.coming is not None
        is_alone = not view.others and view.leader is None and not self.coming.has_company
        return is_alone and self.gathered + self.micro_batch / 2 <= self.config.target_batch_size

    def settled(self, begun: UnderWay, averaged: Averaged, local_s: float) -> GlobalStep:
        """Account for a step that is made, and which `step` counts already."""
        self.chain = next_chain(self.chain, averaged.group_id)
        self.trained += averaged.weight
        self.totals.steps += 1
        self.totals.alone += not averaged.attempts
        self.totals.samples += begun.own_samples
        self.totals.whole += averaged.weight
        gathered_s, self.last_step_at = local_s - self.last_step_at, local_s
        return GlobalStep(
            number=self.step,
            peers=len(averaged.members),
            samples=averaged.weight,
            own_samples=begun.own_samples,
            gathered_s=gathered_s,
            averaged_s=local_s - begun.stopped_at,
            attempts=averaged.attempts,
        )

    def moved(self, step: int, chain: bytes, trained: float, local_s: float) -> None:
        """Go elsewhere; what was gathered is lost."""
        self.totals.samples_lost += self.gathered
        self.step, self.chain, self.trained = step, chain, trained
        self.gathered, self.under_way, self.last_step_at = 0.0, None, local_s

    def saved(self) -> dict[str, Any]:
        """Return all that JSON can hold of it, beside the step."""
        return {"chain": self.chain.hex(), "samples_trained": self.trained}

    def restore(self, step: int, saved: Mapping[str, Any], local_s: float) -> None:
        """Go on from a step and what was `saved` of it."""
        self.gathered = 0.0
        self.moved(step, bytes.fromhex(saved["chain"]), float(saved["samples_trained"]), local_s)
