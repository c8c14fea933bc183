"""Part `tokens`: how many bytes cross the lines for each token that is trained, as the simulated network counts them.

Eight machines compute 512 tokens a second each. With *gradients* every step of the optimiser is one of all machines
together. With *pseudo-gradients* (DiLoCo) and *parameters* (Moshpit averaging as `dmoe train --average-every` does it)
each machine takes steps of its own, with its eighth of the batch, and they meet every so many of these. With *sparse
pseudo-gradients* (SparseLoCo, `dmoe train --average-compression top-k`) only the largest of them travel.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
import trio
from matplotlib.axes import Axes

from dmoe_jax.averaging import TreeAveragerConfig, open_tree_averager
from dmoe_jax.machine.device import InlineDevice
from dmoe_jax.optim import ErrorFeedback, moshpit_average
from dmoe_jax.peers.peer import SIM_PORT, PeerConfig, open_peer
from dmoe_jax.runs.report import ReportTable
from dmoe_jax.runs.style import GREY, dress
from dmoe_net.identity import Address
from dmoe_net.transport.sim import Constant, HostOptions, run, simulate
from dmoe_net.transport.sim.network import SimNetwork
from experiments.bench import Run
from experiments.collaborative.scenes import Played, play
from experiments.collaborative.world import PeerSpec, World
from experiments.panels import series_style
from experiments.results import Bar
from experiments.wan.problem import vector_of
from experiments.wan.settings import WanSettings

Method = Literal["gradients", "pseudo-gradients", "parameters", "sparse pseudo-gradients"]
METHODS: tuple[Method, ...] = ("gradients", "pseudo-gradients", "parameters", "sparse pseudo-gradients")

NUM_PEERS = 8
TOKENS_PER_S = 512
"""Tokens a second of each machine."""
EVERY = {"gradients": 1, "pseudo-gradients": 50, "parameters": 10, "sparse pseudo-gradients": 50}
"""Steps between two averages: of DiLoCo (Douillard et al. 2023, the shortest of its ablation), and of `dmoe up`."""

SPARSE = ErrorFeedback()
"""64 values of each 4,096 in two bits: SparseLoCo's setting."""

MICRO_BATCHES = 4
"""Micro-batches of a machine for each step with gradients: the swarm finds the end of a batch by them."""

ROUND_TRIP_MS, LINE_BPS = 100.0, 100e6
_SKIPPED = 1
"""Averages before counting begins, in which peers find each other."""

BARS: tuple[Bar, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes, tokens and averages that were counted, and the seconds that they took."""

    nbytes: int
    """Delivered to all hosts together: frames with their headers, whatever they are for."""
    tokens: float
    """Trained by all machines meanwhile."""
    averages: int
    """Meanwhile."""
    seconds: float
    """Virtual."""


def measure(run_: Run[WanSettings]) -> None:
    """Count for each method, size of the model and batch."""
    settings = run_.settings
    for num_params in settings.model_sizes:
        for batch in settings.batch_sizes:
            for method in METHODS:
                run_.say(f"tokens: {num_params:,} parameters, {batch:,} tokens a step, {method}")
                found = traffic_of(method, num_params=num_params, batch=batch, seed=settings.seed)
                run_.log(
                    "tokens",
                    method=method,
                    num_params=num_params,
                    batch=batch,
                    every=EVERY[method],
                    nbytes=found.nbytes,
                    tokens=found.tokens,
                    averages=found.averages,
                    seconds=found.seconds,
                )


def traffic_of(method: Method, *, num_params: int, batch: int, seed: int) -> Traffic:
    """Let eight machines train, and count from one average to a later one.

    Args:
      method: what they average.
      num_params: of the model, float32.
      batch: tokens of a step of the optimiser, of all machines together.
    """
    if method in ("parameters", "sparse pseudo-gradients"):
        return run(_average, method, num_params, batch, seed, seed=seed)
    return _collaboration(method, num_params=num_params, batch=batch, seed=seed)


def _averages_of(method: Method) -> int:
    """Return the number of averages to count: where they are rare, what happens in between is as regular."""
    return 8 if method == "gradients" else 2


def _collaboration(method: Method, *, num_params: int, batch: int, seed: int) -> Traffic:
    micro_batch = batch // NUM_PEERS // (MICRO_BATCHES if method == "gradients" else 1)
    found: list[Traffic] = []

    async def body(world: World, played: Played) -> None:
        for index in range(NUM_PEERS):
            world.start(PeerSpec(name=f"peer{index}", sample_s=1 / TOKENS_PER_S, micro_batch=micro_batch))
        await world.wait_for_step(_SKIPPED)
        first, nbytes, began = world.step, world.network.statistics().nbytes, trio.current_time()
        await world.wait_for_step(first + _averages_of(method))
        played.lives = world.lives
        tokens = [samples for number, _, samples in played.steps() if number > first]
        found.append(
            Traffic(
                nbytes=world.network.statistics().nbytes - nbytes,
                tokens=sum(tokens),
                averages=len(tokens),
                seconds=trio.current_time() - began,
            )
        )

    play(
        body,
        target=batch * EVERY[method],
        seed=seed,
        latency_s=ROUND_TRIP_MS / 2000,
        lines=HostOptions(up_bps=LINE_BPS, down_bps=LINE_BPS),
        problem=vector_of(num_params, "gradients" if method == "gradients" else "pseudo_gradients"),
    )
    return found[0]


async def _average(method: Method, num_params: int, batch: int, seed: int) -> Traffic:
    line = HostOptions(up_bps=LINE_BPS, down_bps=LINE_BPS)
    rounds, counts = _Counter(), _averages_of(method)
    async with simulate(seed=seed, latency=Constant(ROUND_TRIP_MS / 2000), hosts=line) as network:
        for index in range(NUM_PEERS):
            network.start(f"peer{index}", _moshpit_peer, network, index, method, num_params, batch, rounds)
        await rounds.wait_for(NUM_PEERS * _SKIPPED)
        tokens, nbytes, began = rounds.tokens, network.statistics().nbytes, trio.current_time()
        await rounds.wait_for(NUM_PEERS * (_SKIPPED + counts))
        return Traffic(
            nbytes=network.statistics().nbytes - nbytes,
            tokens=rounds.tokens - tokens,
            averages=counts,
            seconds=trio.current_time() - began,
        )


class _Counter:
    """Counter of the tokens and averages of all machines of Moshpit averaging."""

    def __init__(self) -> None:
        self.tokens = 0
        self._rounds = 0
        self._changed = trio.Event()

    def add_round(self, received: float) -> None:
        """One of them has an average."""
        self._rounds += received > 0
        self._changed.set()
        self._changed = trio.Event()

    async def wait_for(self, rounds: int) -> None:
        while self._rounds < rounds:
            await self._changed.wait()


async def _moshpit_peer(
    network: SimNetwork, index: int, method: Method, num_params: int, batch: int, counter: _Counter
) -> None:
    sparse = SPARSE if method == "sparse pseudo-gradients" else None
    optimizer = moshpit_average(optax.sgd(1e-3), every=EVERY[method])
    if sparse is not None:
        outer = optax.sgd(1.0)
        optimizer = moshpit_average(
            optax.sgd(1e-3), every=EVERY[method], what="pseudo_gradients", outer=outer, compress=sparse
        )
    params = {"w": jnp.zeros(num_params)}
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    grads = {"w": jnp.full(num_params, 1e-3)}
    config = TreeAveragerConfig(side=NUM_PEERS)
    joins = [Address("peer0", SIM_PORT)] if index else []
    async with (
        open_peer(joins, PeerConfig(network=network, host=f"peer{index}", seed=index)) as place,
        open_tree_averager(
            replace(place, rng=random.Random(index)),
            params,
            optimizer=optimizer,
            name="run",
            config=config,
            device=InlineDevice(),
            on_round=lambda done: counter.add_round(done.received),
        ) as averager,
    ):
        while True:
            await trio.sleep(batch / NUM_PEERS / TOKENS_PER_S)
            counter.tokens += batch // NUM_PEERS
            updates, state = update(grads, state, params)
            params = optax.apply_updates(params, updates)
            state = await averager.step(state, params)


def figures(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Bytes a token by method, of the largest model with the smallest batch."""
    largest = max((each["num_params"], -each["batch"]) for each in records)
    return {
        f"bytes_per_token_{record['method'].replace('-', '_').replace(' ', '_')}": record["nbytes"] / record["tokens"]
        for record in records
        if (record["num_params"], -record["batch"]) == largest
    }


def table(records: Sequence[dict[str, Any]]) -> ReportTable:
    """A row for each size and batch, a column for each method."""
    cases = sorted({(each["num_params"], each["batch"]) for each in records})
    rows = []
    for case in cases:
        own = {each["method"]: each for each in records if (each["num_params"], each["batch"]) == case}
        rows.append((*case, *(_per_token(own[method]) if method in own else None for method in METHODS)))
    return ReportTable(
        title="Bytes for each token",
        head=("parameters", "tokens a step", *(f"{each}, every {EVERY[each]}" for each in METHODS)),
        rows=rows,
        note=f"Everything that {NUM_PEERS} hosts were sent, over the tokens that they trained meanwhile.",
    )


def draw(axes: Axes, records: Sequence[dict[str, Any]]) -> None:
    """Bytes a token over the size of the model, a line for each method and batch."""
    batches = sorted({each["batch"] for each in records})
    for index, method in enumerate(METHODS):
        color, _ = series_style(index)
        for batch, line in zip(batches, ("-", "--", ":"), strict=False):
            own = [each for each in records if (each["method"], each["batch"]) == (method, batch)]
            sizes = [each["num_params"] for each in own]
            label = method if line == "-" else None
            axes.plot(sizes, [_per_token(each) for each in own], "o" + line, color=color, ms=3, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(top=30 * axes.get_ylim()[1])  # room for the legend
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    axes.set_ylabel("bytes a token, all lines together", fontsize=9, color=GREY)
    axes.set_xticks(sorted({each["num_params"] for each in records}))
    axes.set_xticklabels([f"{each / 1e6:.2g} M" for each in sorted({each["num_params"] for each in records})])
    axes.minorticks_off()
    dashed = f"; dashed: {batches[1] // 1024} Ki tokens a step" if len(batches) > 1 else ""
    dress(axes, f"Traffic{dashed}", "parameters of the model")


def _per_token(record: dict[str, Any]) -> float:
    return float(record["nbytes"] / record["tokens"])
