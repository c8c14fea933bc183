"""`dmoe assist`: an auxiliary peer, which reduces averages for others and trains nothing."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import tyro

from dmoe_jax.cli.averaging_options import MeetingOptions
from dmoe_jax.cli.dht import DhtCommand
from dmoe_jax.cli.lifecycle import Stop
from dmoe_jax.cli.network import BudgetOptions, JoinTexts, MemberOptions, join_line, join_swarm
from dmoe_jax.directory.members import Facts, listed_member, traffic
from dmoe_jax.metrics.families import Family, counter
from dmoe_jax.metrics.process import peer_families
from dmoe_jax.runs.endings import EXIT_INTERRUPTED, UsageError, mistakes_in_one_line
from dmoe_jax.runs.speech import say
from dmoe_net.averaging.assisting import assist
from dmoe_net.averaging.averager import AveragingStep
from dmoe_net.averaging.collaboration.assisting import assist_collaboration, is_collaboration
from dmoe_net.averaging.collaboration.rounds import Averaged, RoundConfig
from dmoe_net.averaging.config import AveragerConfig
from dmoe_net.averaging.grouping.group_key import check_prefix
from dmoe_net.averaging.plan import AveragingPlan
from dmoe_net.averaging.reduction.partition import AllReduceConfig
from dmoe_net.dht.entries import Value
from dmoe_net.wire.compression import Compression

_ANNOUNCE_PERIOD_S = 5.0


@dataclass(frozen=True, kw_only=True)
class AssistCommand(DhtCommand):
    """Reduce averages for the trainers of a swarm, until interrupted: for a machine with a good line and no GPU.

    It needs no model and no data: it learns from the swarm what is averaged. It must be reachable, and helps groups in
    which three processes or more have something to average, or in which those that have cannot be called.
    """

    join: JoinTexts = ()
    """Peers to join through: HOST:PORT, PEERID@HOST:PORT to make sure who is there, or file:PATH, which lists some."""
    network: Annotated[MemberOptions, tyro.conf.arg(name="")] = field(default_factory=MemberOptions)
    meeting: Annotated[MeetingOptions, tyro.conf.arg(name="")] = field(default_factory=MeetingOptions)
    """As the --average-... flags of the trainers."""
    compression: Compression = Compression.NONE
    """Form of the answers on the wire; as --average-compression of the trainers."""
    budget: Annotated[BudgetOptions, tyro.conf.arg(name="")] = field(default_factory=BudgetOptions)

    def run(self) -> int:
        self.check()
        return super().run()

    def check(self) -> None:
        """Raise `UsageError` naming a flag that cannot be meant."""
        if not self.join:
            raise UsageError("--join needs at least one HOST:PORT: there is nobody to assist")
        checks = {"--name": lambda: check_prefix(self.meeting.name), "--up, --down": self.meeting.speeds}
        for flag, check in {**checks, "--window-s, --timeout-s": self.averager}.items():
            with mistakes_in_one_line(flag):
                check()

    def averager(self) -> AveragerConfig:
        """Settings of the averager of vectors."""
        return AveragerConfig.of(
            window_s=self.meeting.window_s,
            timeout_s=self.meeting.timeout_s,
            compression=self.compression,
            speeds=self.meeting.speeds(),
        )

    def rounds(self) -> RoundConfig:
        """Settings of the averaging for a collaboration."""
        all_reduce = AllReduceConfig(timeout_s=self.meeting.timeout_s, compression=self.compression)
        return RoundConfig(speeds=self.meeting.speeds(), all_reduce=all_reduce)

    async def _serve(self, stop: Stop) -> int:
        totals = _Totals(self.meeting.name)
        joining = join_swarm(self.network, join=self.join, listen=self.listen, budget=self.budget)
        async with self.metrics.opened("assist") as monitor, joining as peer:
            monitor.show(partial(peer_families, peer))
            monitor.show(totals.families)
            monitor.why_not_ready = lambda: "" if totals.state == "assisting" else "nobody averages yet"
            rpc, dht, name, rng = peer.rpc, peer.dht, self.meeting.name, random.SystemRandom()

            def facts() -> Facts:
                return {**totals.facts(), **traffic(rpc)}

            say(f"auxiliary peer {rpc.peer_id.short} listens on {rpc.address}")
            say(join_line("train", self.network, peer))
            async with listed_member(dht, self.network.swarm, peer.own_contact, facts, period_s=_ANNOUNCE_PERIOD_S):
                with stop.body():
                    if await is_collaboration(dht, name):
                        together = partial(assist_collaboration, config=self.rounds(), on_step=totals.count_step)
                        await together(rpc, dht, prefix=name, rng=rng, on_plan=totals.begin)
                    by_groups = partial(assist, config=self.averager(), on_round=totals.count)
                    await by_groups(rpc, dht, prefix=name, rng=rng, on_plan=totals.begin)
        say(f"assisted in {totals.rounds} rounds, {_megabytes(totals.moved_bytes)} each way")
        return EXIT_INTERRUPTED


class _Totals:
    """Rounds and bytes so far: for the terminal, and for `dmoe status`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.state = "waiting"
        """"waiting" until there is a plan of what is averaged, then "assisting"."""
        self.rounds = 0
        self.moved_bytes = 0.0

    def begin(self, plan: AveragingPlan) -> None:
        """Take the plan of what is averaged."""
        self.state = "assisting"
        say(f"{self._name}: averages of {plan.size:,} numbers in groups of {plan.grid.side}")

    def count(self, done: AveragingStep) -> None:
        """Count a round."""
        self.rounds += 1
        self.moved_bytes += done.moved_bytes
        moved = f"{_megabytes(done.moved_bytes)} each way, {_megabytes(self.moved_bytes)} in all"
        say(f"round {self.rounds}: {len(done.peers)} peers, {moved}")

    def count_step(self, done: Averaged) -> None:
        """Count a step of a collaboration."""
        self.rounds += 1
        say(f"step {self.rounds}: {len(done.members)} peers, {done.weight:,.0f} samples")

    def facts(self) -> Mapping[str, Value]:
        """Facts that the swarm is told."""
        facts: dict[str, Value] = {"role": "auxiliary", "state": self.state, "group": self._name}
        return facts | {"averages": self.rounds, "moved_mb": self.moved_bytes / 1e6}

    def families(self) -> list[Family]:
        """Figures for scrapers."""
        text = "Bytes of averages that went each way; those of steps of a collaboration are not counted."
        return [
            counter("dmoe_assist_rounds_total", "Rounds and steps assisted in.", self.rounds),
            counter("dmoe_assist_moved_bytes_total", text, self.moved_bytes),
        ]


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.1f} MB"
