"""All-reduce and blocking sockets in turn, round after round, with a process for each member."""

import itertools
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from experiments.allreduce_speed.member import digest_of, vector_of
from experiments.allreduce_speed.settings import SpeedSettings
from experiments.bench import Experiment, Run
from experiments.blocking_sockets import temporary_certificate
from experiments.processes import HelperFailed, HelperProcess, open_helpers
from experiments.results import Bar, Result
from experiments.rounds import SLICE, Measurement, Ratio, measure_rounds, round_figures

RATIOS = (
    Ratio("allreduce_tls_ratio", "wall_s", "rpc_tls", "blocking_tls", "<=", 3.0),
    Ratio("allreduce_plain_ratio", "wall_s", "rpc_plain", "blocking_plain", "<=", 3.0),
)
MEMORY_BAR = Bar(name="memory_ratio", bound=2.5)
"""The most that a member may need, over the vector."""


def measure(run: Run[SpeedSettings]) -> None:
    """Measure all rounds, with the members of both sides on both networks."""
    settings = run.settings
    size = max(1, int(settings.mib * 2**20) // 4)
    common: dict[str, Any] = {"peers": settings.peers, "size": size, "seed": settings.seed}
    common["expected"] = expected_digest(**common)
    with ExitStack() as stack:
        certificate = str(stack.enter_context(temporary_certificate()))
        measurements: list[Measurement] = []
        # The two sides of a ratio stand beside each other.
        for network, side in itertools.product(("tls", "plain"), ("blocking", "rpc")):
            own = common | {"side": side, "certificate": certificate if network == "tls" else None}
            each = [own | {"index": index} for index in range(settings.peers)]
            members = stack.enter_context(open_helpers("experiments.allreduce_speed.member", each))
            measurements.append(partial(exchange, f"{side}_{network}", members))
        measure_rounds(run, measurements, RATIOS, rounds=3 if settings.quick else settings.rounds)


def expected_digest(peers: int, size: int, seed: int) -> str:
    """Digest of the mean of all vectors, summed in member order, which everybody must get to the last bit."""
    total = vector_of(0, size, seed)
    for index in range(1, peers):
        total += vector_of(index, size, seed)
    return digest_of(total / np.float32(peers))


def exchange(name: str, members: Sequence[HelperProcess]) -> dict[str, dict[str, float]]:
    """Let all members of one side exchange their vectors: from the first start to the last end, processor time of all,
    and of ours memory of the greediest, where the system says.

    Raises:
      HelperFailed: a member has ended, perhaps because its average is not the mean of all vectors.
    """
    order = {"group": secrets.token_hex(16), "members": [member.hello["where"] for member in members]}
    for member in members:
        member.tell(**order)
    answers = [member.hear() for member in members]
    record = {
        "wall_s": max(answer["ended"] for answer in answers) - min(answer["started"] for answer in answers),
        "cpu_s": sum(answer["cpu_s"] for answer in answers),
    }
    grown = [answer["grown_bytes"] for answer in answers if answer.get("grown_bytes") is not None]
    return {name: record | ({"grown_bytes": max(grown)} if grown else {})}


def summarise(run: Run[SpeedSettings]) -> Result | None:
    """Compute the ratios and what they are made of; None before the first round. The warm-up counts for memory."""
    settings, slices = run.settings, run.records(SLICE)
    rounds = round_figures(slices, RATIOS, ("wall_s", "cpu_s"))
    if rounds is None:
        return None
    grown = [record["grown_bytes"] for record in slices if "grown_bytes" in record]
    memory_ratio = max(grown) / (settings.mib * 2**20) if grown else None
    return Result(
        title="Butterfly all-reduce beside blocking sockets",
        figures={"peers": settings.peers, "mib": settings.mib, "memory_ratio": memory_ratio, **rounds},
        bars=[*(ratio.bar for ratio in RATIOS), MEMORY_BAR],
    )


EXPERIMENT = Experiment(measure=measure, summarise=summarise, causes=(HelperFailed,))
