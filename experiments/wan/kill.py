"""Part `kill`: how long it takes from a SIGKILL in the middle of an averaging to the next global step."""

from collections.abc import Sequence
from statistics import median
from typing import Any

import trio
from matplotlib.axes import Axes

from dmoe_jax.runs.report import ReportTable
from dmoe_jax.runs.style import GREY, INK, KILLED, VALID, dress
from dmoe_net.transport.sim import HostOptions
from experiments.bench import Run
from experiments.collaborative.scenes import Played, play, unequal
from experiments.collaborative.world import World
from experiments.results import Bar
from experiments.wan.churn import LINE_BPS, NUM_PARAMS
from experiments.wan.problem import vector_of
from experiments.wan.settings import WanSettings

ROUND_TRIPS_MS = (20.0, 100.0, 200.0, 400.0)

_NUM_PEERS, _TARGET = 6, 384
_DOWN_S = 20.0
_AVERAGING_S = 0.35
"""Seconds of an averaging on the line alone, with six members: kills come within it, and within the votes after it."""

BARS = (Bar(name="kill_next_step_s", bound=10),)


def measure(run: Run[WanSettings]) -> None:
    """Kill peers one after the other at each round trip: killed processes, and machines that are unplugged."""
    settings = run.settings
    for round_trip_ms in ROUND_TRIPS_MS:
        for silent in (False, True):
            how = "unplugged" if silent else "killed"
            run.say(f"kill: {settings.chosen_kills} peers {how} while they average, {round_trip_ms:g} ms")
            played = play_kills(
                round_trip_ms=round_trip_ms, kills=settings.chosen_kills, silent=silent, seed=settings.seed
            )
            run.log(
                "kill",
                round_trip_ms=round_trip_ms,
                silent=silent,
                seconds=played.recovered_s,
                chains_apart=played.chains_apart,
            )


def play_kills(*, round_trip_ms: float, kills: int, silent: bool, seed: int) -> Played:
    """Six machines; one after the other dies in the middle of an averaging and comes back later.

    Args:
      round_trip_ms: between every two hosts.
      kills: how many.
      silent: whether their connections hang, as those of a machine that is unplugged, and do not break.
    """
    specs = unequal(_NUM_PEERS, slowest_s=0.25)

    async def body(world: World, played: Played) -> None:
        for spec in specs:
            world.start(spec)
        await world.wait_for_step(2)
        for number in range(kills):
            name = specs[number % _NUM_PEERS].name
            victim = next(life.peer for life in world.living if life.spec.name == name)
            assert victim is not None
            while victim.standing.is_averaging:  # an averaging from its beginning  # noqa: ASYNC110 (virtual time)
                await trio.sleep(0.005)
            while not victim.standing.is_averaging:  # noqa: ASYNC110
                await trio.sleep(0.005)
            await trio.sleep((number + 0.5) / kills * (_AVERAGING_S + round_trip_ms / 1000))
            step, killed_at = world.step, trio.current_time()
            world.kill(name, silent=silent)
            await world.wait_for_step(step + 1)
            played.recovered_s.append(trio.current_time() - killed_at)
            await trio.sleep(_DOWN_S)
            world.revive(name)
            await world.wait_for_step(world.step + 3)

    return play(
        body,
        target=_TARGET,
        seed=seed,
        latency_s=round_trip_ms / 2000,
        lines=HostOptions(up_bps=LINE_BPS, down_bps=LINE_BPS),
        problem=vector_of(NUM_PARAMS),
    )


def figures(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The longest of all, by kind of death."""
    found: dict[str, Any] = {}
    for name, silent in (("kill_next_step_s", False), ("unplug_next_step_s", True)):
        own = [each for record in records if record["silent"] == silent for each in record["seconds"]]
        if own:
            found |= {name: max(own), f"{name[:-2]}_median_s": median(own)}
    return found | {"kill_chains_apart": sum(each["chains_apart"] for each in records)}


def table(records: Sequence[dict[str, Any]]) -> ReportTable:
    """A row for each round trip and kind of death."""
    return ReportTable(
        title="From a kill in the middle of an averaging to the next global step",
        head=("round trip, ms", "how", "kills", "median, s", "least, s", "most, s"),
        rows=[
            (
                record["round_trip_ms"],
                "unplugged" if record["silent"] else "SIGKILL",
                len(record["seconds"]),
                median(record["seconds"]),
                min(record["seconds"]),
                max(record["seconds"]),
            )
            for record in records
        ],
        note="The connections of a process that is killed break; those of a machine that is unplugged hang.",
    )


def draw(axes: Axes, records: Sequence[dict[str, Any]]) -> None:
    """Seconds over round trips, a dot for each kill."""
    for silent, color, label in ((False, VALID, "SIGKILL"), (True, INK, "unplugged")):
        own = [record for record in records if record["silent"] == silent]
        trips = [record["round_trip_ms"] for record in own]
        axes.plot(trips, [median(record["seconds"]) for record in own], "-", color=color, label=label)
        for record in own:
            axes.plot([record["round_trip_ms"]] * len(record["seconds"]), record["seconds"], "o", color=color, ms=3)
    axes.axhline(BARS[0].bound, color=KILLED, linestyle=":", linewidth=1)
    axes.set_ylim(0, None)
    axes.set_ylabel("virtual seconds", fontsize=9, color=GREY)
    axes.legend(fontsize=8, frameon=False)
    dress(axes, "Killed while averaging: until the next step", "round trip (ms)")
