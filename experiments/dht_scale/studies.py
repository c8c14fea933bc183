"""The studies: each lets something happen to a swarm in an empty world that it is given, and returns figures."""

import gc
import math
import random
import resource
import statistics
import time
from typing import Any

import numpy as np
import trio

from dmoe_jax.directory.directory import Announcer, ExpertDirectory, open_expert_directory
from dmoe_jax.directory.grid import all_uids, layer_prefix
from dmoe_jax.directory.members import listed_member
from dmoe_net import DhtNode, Heal, HostDown, Partition
from dmoe_net.dht.routing_table import key_id
from experiments.dht_scale.world import World, contact_of, dealt, keep_announced, one_each, square
from experiments.processes import memory_bytes

Figures = dict[str, Any]


async def cold(world: World, nodes: int, trials: int) -> Figures:
    """Time of a newcomer's first choice of four experts, one sample and 64, in a swarm with an expert a node."""
    grid = square(nodes)
    took: dict[int, list[float]] = {1: [], 64: []}
    queries, is_whole = list[int](), True
    numbers = np.random.default_rng(world.seed)
    await world.grow(nodes)
    announced_at = -math.inf
    for trial in range(trials):
        for batch, seconds in took.items():
            if trio.current_time() > announced_at + 200.0:
                await world.announcers(one_each(nodes), life_s=300.0)
                announced_at = trio.current_time()
            async with world.opened(f"reader{trial}-{batch}", listens=False) as dht:
                before = dht.statistics().queries
                async with open_expert_directory(dht) as directory:
                    began = trio.current_time()
                    is_whole &= await _chosen(directory, "layer0", grid, batch, numbers)
                    seconds.append(trio.current_time() - began)
                queries.append(dht.statistics().queries - before)
    return {
        "mean_s": statistics.mean(took[1]),
        "standard_error_s": statistics.stdev(took[1]) / len(took[1]) ** 0.5,
        "batch64_mean_s": statistics.mean(took[64]),
        "queries": statistics.mean(queries),
        "recall": float(is_whole),
    }


async def _chosen(
    directory: ExpertDirectory, layer: str, grid: tuple[int, int], batch: int, numbers: np.random.Generator
) -> bool:
    """Choose four experts for each sample of a batch with random scores; True if there were so many."""
    chosen, _ = await directory.beam_search(layer, [numbers.normal(size=(batch, side)) for side in grid], 4)
    return bool((chosen >= 0).all())


async def trainer(world: World, nodes: int, experts: int, layers: int, seconds: int) -> Figures:
    """Measure the directory's cost to a trainer with a step a second, 32 samples and four experts in each layer."""
    side = square(experts // layers)
    uids = [uid for layer in range(layers) for uid in all_uids(layer_prefix(layer), side)]
    numbers = np.random.default_rng(world.seed)
    world.light.counts_bytes = True
    await world.grow(nodes)
    blocks = dealt(uids, nodes)
    world.keep_announced(await world.announcers(blocks), blocks, world.nursery)
    async with world.opened("trainer", listens=False) as dht, open_expert_directory(dht) as directory:
        began = trio.current_time()
        async with trio.open_nursery() as prefetching:
            for layer in range(layers):
                prefetching.start_soon(directory.prefetch, layer_prefix(layer), side)
        prefetch_s = trio.current_time() - began
        waits = list[float]()
        for number in range(seconds + 1):
            began = trio.current_time()
            for layer in range(layers):
                assert await _chosen(directory, layer_prefix(layer), side, 32, numbers)
            waits.append(trio.current_time() - began)
            if number == 0:
                before = world.traffic("trainer")
            await trio.sleep_until(began + 1.0)
        calls, received = ((world.traffic("trainer") - before) / seconds).tolist()
    return {
        "experts": len(uids),
        "prefetch_s": prefetch_s,
        "calls_per_s": calls,
        "down_bytes_per_s": received,
        "steps_that_wait": sum(wait > 0 for wait in waits[1:]) / seconds,
    }


async def announcing(world: World, nodes: int) -> Figures:
    """Calls a second of a node that announces itself as a member and one expert, and of one with an expert in each of
    16 layers, while all others announce one, the background included."""
    spread = [all_uids(layer_prefix(layer), square(nodes))[layer] for layer in range(16)]
    hosts, announced = await world.grow(nodes), one_each(nodes)

    async def listed(dht: DhtNode) -> None:
        async with listed_member(dht, "dmoe", contact_of(dht), lambda: {"role": "node"}):
            await trio.sleep_forever()

    world.keep_announced(await world.announcers(announced), [announced[0], spread, *announced[2:]], world.nursery)
    for host in hosts:
        world.nursery.start_soon(listed, world.nodes[host])
    await trio.sleep(60.0)
    before = [world.traffic(host)[0] for host in hosts]
    await trio.sleep(60.0)
    rates = [float(world.traffic(host)[0] - then) / 60.0 for host, then in zip(hosts, before, strict=True)]
    return {"one_calls_per_s": statistics.mean([rates[0], *rates[2:]]), "sixteen_calls_per_s": rates[1]}


async def churn(world: World, hosts: int, experts: int, minutes: float) -> Figures:
    """Share of the experts alive for 15 s that each look finds, and of dead ones among what it lists, where hosts stay
    for a session of exponential length, ten minutes in the mean, and are replaced."""
    grid = square(experts)
    blocks = dealt(all_uids("layer0", grid)[:experts], hosts)
    alive_since: dict[tuple[int, ...], float] = {}
    serving: dict[tuple[int, ...], str] = {}
    replaced = 0
    draws = random.Random(f"{world.seed}/sessions")

    async def live(number: int, life: int) -> None:
        """One host after another serves a block of experts; each goes silent."""
        nonlocal replaced
        while True:
            host = f"host{number}-{life}"
            with trio.move_on_after(draws.expovariate(1 / 600.0)):
                async with world.opened(host) as dht:
                    announcer = Announcer(dht, contact_of(dht), life_s=30.0)
                    for uid in blocks[number]:
                        alive_since[uid.coordinates], serving[uid.coordinates] = trio.current_time(), host
                    await keep_announced(announcer, blocks[number], 0.0)
            world.light.apply(HostDown(host, silent=True))
            for uid in blocks[number]:
                if serving.get(uid.coordinates) == host:
                    alive_since.pop(uid.coordinates, None)
            replaced += 1
            life += 1

    reader = await world.stack.enter_async_context(world.opened("reader"))
    for number in range(hosts):
        world.nursery.start_soon(live, number, 0)
        await trio.sleep(0.05)
    await trio.sleep(60.0)
    replaced = 0
    found_share, dead_share = list[float](), list[float]()
    async with open_expert_directory(reader) as directory:
        for _ in range(int(minutes * 20)):
            listed = await directory.living("layer0", grid)
            now = trio.current_time()
            settled = [each for each, since in alive_since.items() if since <= now - 15.0]
            found_share.append(sum(each in listed for each in settled) / max(1, len(settled)))
            dead = [
                each
                for each, contact in listed.items()
                if contact.address.host != serving.get(each) or each not in alive_since
            ]
            dead_share.append(len(dead) / max(1, len(listed)))
            await trio.sleep(3.0)
    return {
        "experts": experts,
        "replaced": replaced,
        "recall_worst": min(found_share),
        "dead_listed": statistics.mean(dead_share),
    }


async def _gets(world: World, nodes: list[DhtNode], count: int) -> tuple[float, float]:
    """Mean time of gets from nodes drawn at random, and the share that found something."""
    took, found = list[float](), 0
    for _ in range(count):
        node, key = world.rng.choice(nodes), f"key{world.rng.randrange(100)}"
        node._reading.holders.forget(key_id(key))  # a walk each time: what is remembered would hide what is measured
        began = trio.current_time()
        found += bool(await node.get(key))
        took.append(trio.current_time() - began)
    return statistics.mean(took), found / count


async def vanish(world: World, nodes: int, gets: int) -> Figures:
    """Time of gets before 30 % of the nodes go silent, at once after it, and a minute later."""
    hosts, figures = await world.grow(nodes), Figures()
    dead = set(world.rng.sample(hosts, round(0.3 * nodes)))
    living = [world.nodes[host] for host in hosts if host not in dead]

    async def hold(number: int) -> None:
        """Keep a record alive."""
        while True:
            await living[number % len(living)].store(f"key{number}", number, life_s=60.0)
            await trio.sleep(20.0)

    for number in range(100):
        world.nursery.start_soon(hold, number)
    await trio.sleep(65.0)
    figures["before_mean_s"], _ = await _gets(world, living, gets)
    for host in dead:
        world.light.apply(HostDown(host, silent=True))
    began, succeeded = trio.current_time(), list[float]()
    for name, after_s in (("at_once", 0.0), ("minute", 60.0), ("three_minutes", 180.0)):
        await trio.sleep_until(began + after_s)
        figures[f"{name}_mean_s"], share = await _gets(world, living, gets)
        succeeded.append(share)
    figures["succeeded"] = min(succeeded)
    figures["minute_ratio"] = figures["minute_mean_s"] / figures["before_mean_s"]
    return figures


async def clocks(world: World, nodes: int) -> Figures:
    """Share of the experts found where machines' clocks are up to five minutes off either way, and seconds until all
    are gone once their nodes are silent."""
    grid = square(nodes)
    draws = random.Random(f"{world.seed}/clocks")
    hosts = await world.grow(nodes, ahead_s=lambda: draws.uniform(-300, 300))
    announcers, found = await world.announcers(one_each(nodes)), list[float]()
    async with trio.open_nursery() as announcing:
        world.keep_announced(announcers, one_each(nodes), announcing)
        await trio.sleep(60.0)
        for number in range(5):
            reader = world.opened(f"reader{number}", listens=False, ahead_s=draws.uniform(-300, 300))
            async with reader as dht, open_expert_directory(dht) as directory:
                found.append(len(await directory.living("layer0", grid)) / nodes)
        announcing.cancel_scope.cancel()  # nobody announces any more
    async with open_expert_directory(world.nodes[hosts[-1]]) as directory:
        for host in hosts[: nodes // 2]:
            world.light.apply(HostDown(host, silent=True))
        began = trio.current_time()
        with trio.move_on_after(600.0):
            while await directory.living("layer0", grid):  # noqa: ASYNC110 (nobody could set an event)
                await trio.sleep(1.0)
        return {"found": min(found), "gone_s": trio.current_time() - began}


async def partition(world: World, nodes: int, minutes: float) -> Figures:
    """Seconds after a partition has healed until everybody finds what either half stores."""
    hosts = await world.grow(nodes)
    world.light.apply(Partition((frozenset(hosts[::2]),)))

    async def work(host: str) -> None:
        node = world.nodes[host]
        while True:
            await node.store(f"of/{host}", host, life_s=60.0)
            await node.get(f"of/{world.rng.choice(hosts)}")
            await trio.sleep(10.0)

    for host in hosts:
        world.nursery.start_soon(work, host)
    await trio.sleep(60.0 * minutes)
    world.light.apply(Heal())
    began, share = trio.current_time(), 0.0
    healed_s = float("inf")
    while trio.current_time() < began + 180.0:
        asked = world.rng.sample(hosts, 40)
        others = [hosts[(hosts.index(host) + 1 + 2 * world.rng.randrange(5)) % nodes] for host in asked]
        found = 0
        for host, other in zip(asked, others, strict=True):
            found += bool(await world.nodes[host].get(f"of/{other}"))
        share = found / len(asked)
        if share == 1.0:
            healed_s = trio.current_time() - began
            break
        await trio.sleep(5.0)
    return {"found": share, "healed_s": healed_s}


async def bootstraps(world: World, nodes: int) -> Figures:
    """Seconds until a swarm whose three bootstraps died, and that newcomers cannot reach, is one again with bootstraps
    that come at new addresses and remember some of its peers on disk."""
    hosts = await world.grow(nodes)
    remembered = world.nodes[hosts[0]].contacts()
    for host in hosts[:3]:
        world.light.apply(HostDown(host))
    await trio.sleep(300.0)
    began = trio.current_time()
    first = await world.stack.enter_async_context(world.opened("fresh0", initial=(), remembered=remembered))
    newcomer = await world.stack.enter_async_context(world.opened("newcomer", initial=[contact_of(first)]))
    old = world.nodes[hosts[-1]]
    one_s = float("inf")
    while trio.current_time() < began + 600.0:
        await old.store("old", 1, life_s=60.0)
        await newcomer.store("new", 1, life_s=60.0)
        if await newcomer.get("old") and await old.get("new"):
            one_s = trio.current_time() - began
            break
        await trio.sleep(5.0)
    return {"one_swarm_s": one_s}


async def joins(world: World, nodes: int, selections: int) -> Figures:
    """CPU seconds and memory of so many joins and selections."""
    began = time.process_time()
    await world.grow(nodes)
    joined_s = time.process_time() - began
    await world.announcers(one_each(nodes), life_s=300.0)
    numbers = np.random.default_rng(world.seed)

    async def select(number: int) -> None:
        async with world.opened(f"reader{number}", listens=False) as dht, open_expert_directory(dht) as directory:
            await _chosen(directory, "layer0", square(nodes), 1, numbers)

    for start in range(0, selections, 50):
        async with trio.open_nursery() as nursery:
            for number in range(start, min(selections, start + 50)):
                nursery.start_soon(select, number)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"joins_cpu_s": joined_s, "cpu_s": time.process_time() - began, "peak_rss_mb": peak_mb}


async def memory(world: World, nodes: int) -> Figures:
    """Memory of a node, after it has joined and after its first refresh."""

    def held_kb() -> float:
        gc.collect()
        held = memory_bytes()
        assert held is not None  # on Linux there is a figure
        return held[0] / 1024

    before = held_kb()
    await world.grow(nodes)
    joined = (held_kb() - before) / nodes
    await trio.sleep(1300.0)
    return {"joined_kb": joined, "refreshed_kb": (held_kb() - before) / nodes}
