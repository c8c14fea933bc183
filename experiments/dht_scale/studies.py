"""The studies: each builds a swarm, lets something happen to it, and returns figures."""

import gc
import random
import resource
import statistics
import time
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import trio

from dmoe_jax.directory.directory import Announcer, ExpertDirectory, open_expert_directory
from dmoe_jax.directory.grid import ExpertUid, all_uids, layer_prefix
from dmoe_jax.directory.members import listed_member
from dmoe_net.dht.node import DhtNode
from dmoe_net.transport.sim import Heal, HostDown, Partition
from experiments.dht_scale.world import (
    Kind,
    World,
    announce_all,
    calls_and_bytes,
    contact_of,
    dealt,
    keep_announced,
    open_world,
    square,
)

Figures = dict[str, Any]


async def cold(kind: Kind, nodes: int, *, trials: int, seed: int) -> Figures:
    """Time of a newcomer's first choice of four experts, one sample and 64, in a swarm with an expert a node."""
    grid = square(nodes)
    uids = [[uid] for uid in all_uids("layer0", grid)[:nodes]]
    took: dict[int, list[float]] = {1: [], 64: []}
    queries, is_whole = list[int](), True
    numbers = np.random.default_rng(seed)
    async with open_world(kind, seed=seed) as world, AsyncExitStack() as stack:
        await world.grow(nodes, stack)
        announcers = world.announcers(life_s=300.0)
        await announce_all(announcers, uids)
        announced_at = trio.current_time()
        for trial in range(trials):
            for batch, seconds in took.items():
                if trio.current_time() > announced_at + 200.0:
                    await announce_all(announcers, uids)
                    announced_at = trio.current_time()
                async with world.opened(f"reader{trial}-{batch}", listens=False) as dht:
                    before = dht.statistics().queries
                    async with open_expert_directory(dht) as directory:
                        began = trio.current_time()
                        scores = [numbers.normal(size=(batch, side)) for side in grid]
                        chosen, _ = await directory.beam_search("layer0", scores, 4)
                        seconds.append(trio.current_time() - began)
                    queries.append(dht.statistics().queries - before)
                    is_whole &= bool((chosen >= 0).all())
    return {
        "network": kind,
        "nodes": nodes,
        "mean_s": statistics.mean(took[1]),
        "standard_error_s": statistics.stdev(took[1]) / len(took[1]) ** 0.5,
        "p95_s": sorted(took[1])[int(0.95 * len(took[1]))],
        "batch64_mean_s": statistics.mean(took[64]),
        "queries": statistics.mean(queries),
        "recall": float(is_whole),
    }


async def trainer(nodes: int, experts: int, layers: int, *, seconds: int, seed: int) -> Figures:
    """Measure the directory's cost to a trainer with a step a second, 32 samples and four experts in each layer."""
    side = square(experts // layers)
    uids = [uid for layer in range(layers) for uid in all_uids(layer_prefix(layer), side)]
    numbers = np.random.default_rng(seed)
    async with open_world("light", seed=seed, counts_bytes=True) as world, AsyncExitStack() as stack:
        await world.grow(nodes, stack)
        announcers, blocks = world.announcers(), dealt(uids, nodes)
        await announce_all(announcers, blocks)
        nursery = await stack.enter_async_context(trio.open_nursery())
        stack.callback(nursery.cancel_scope.cancel)
        for announcer, own in zip(announcers, blocks, strict=True):
            nursery.start_soon(_keep, announcer, own, world.rng.uniform(0, 10))
        async with world.opened("trainer", listens=False) as dht, open_expert_directory(dht) as directory:
            began = trio.current_time()
            async with trio.open_nursery() as prefetching:
                for layer in range(layers):
                    prefetching.start_soon(directory.prefetch, layer_prefix(layer), side)
            prefetch_s = trio.current_time() - began
            waits = list[float]()
            placed = calls_and_bytes(world, ["trainer"])
            for number in range(seconds + 1):
                began = trio.current_time()
                for layer in range(layers):
                    scores = [numbers.normal(size=(32, size)) for size in side]
                    chosen, _ = await directory.beam_search(layer_prefix(layer), scores, 4)
                    assert (chosen >= 0).all()
                waits.append(trio.current_time() - began)
                if number == 0:
                    placed = calls_and_bytes(world, ["trainer"])
                await trio.sleep_until(began + 1.0)
            calls, sent, received = (
                (after - before) / seconds
                for after, before in zip(calls_and_bytes(world, ["trainer"]), placed, strict=True)
            )
    return {
        "network": "light",
        "nodes": nodes,
        "experts": len(uids),
        "prefetch_s": prefetch_s,
        "first_step_s": waits[0],
        "calls_per_s": calls,
        "down_bytes_per_s": received,
        "up_bytes_per_s": sent,
        "steps_that_wait": sum(wait > 0 for wait in waits[1:]) / seconds,
    }


async def _keep(announcer: Announcer, uids: list[ExpertUid], offset_s: float) -> None:
    await keep_announced(announcer, uids, period_s=10.0, offset_s=offset_s)


async def announcing(nodes: int, *, seconds: float, seed: int) -> Figures:
    """Calls a second of a node that announces itself as a member and one expert, and of one with an expert in each of
    16 layers, while all others announce one, the background included."""
    side = square(nodes)
    uids = [[uid] for uid in all_uids("layer0", side)[:nodes]]
    spread = [all_uids(layer_prefix(layer), side)[layer] for layer in range(16)]
    async with open_world("light", seed=seed) as world, AsyncExitStack() as stack:
        await world.grow(nodes, stack)
        announcers = world.announcers()
        await announce_all(announcers, uids)
        nursery = await stack.enter_async_context(trio.open_nursery())
        stack.callback(nursery.cancel_scope.cancel)
        hosts = list(world.nodes)
        for index, (announcer, own) in enumerate(zip(announcers, uids, strict=True)):
            experts = spread if index == 1 else own
            nursery.start_soon(_keep, announcer, experts, world.rng.uniform(0, 10))
            dht = world.nodes[hosts[index]]
            await stack.enter_async_context(listed_member(dht, "dmoe", contact_of(dht), lambda: {"role": "node"}))
        await trio.sleep(60.0)
        before = {host: calls_and_bytes(world, [host])[0] for host in hosts}
        await trio.sleep(seconds)
        rates = [(calls_and_bytes(world, [host])[0] - before[host]) / seconds for host in hosts]
    return {
        "network": "light",
        "nodes": nodes,
        "one_calls_per_s": statistics.mean([rates[0], *rates[2:]]),
        "one_p99_calls_per_s": sorted(rates[2:])[int(0.99 * len(rates[2:]))],
        "sixteen_calls_per_s": rates[1],
    }


async def churn(hosts: int, experts: int, *, minutes: float, session_s: float, seed: int) -> Figures:
    """Share of the experts alive for 15 s that each look finds, and of dead ones among what it lists, where hosts stay
    for a session of exponential length and are replaced."""
    grid = square(experts)
    blocks = dealt(all_uids("layer0", grid)[:experts], hosts)
    alive_since: dict[tuple[int, ...], float] = {}
    serving: dict[tuple[int, ...], str] = {}
    replaced = 0
    async with open_world("light", seed=seed) as world, AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())
        stack.callback(nursery.cancel_scope.cancel)
        draws = random.Random(f"{seed}/sessions")

        async def live(number: int, life: int) -> None:
            """One host after another serves a block of experts; each goes silent."""
            nonlocal replaced
            while True:
                host = f"host{number}-{life}"
                with trio.move_on_after(draws.expovariate(1 / session_s)):
                    async with world.opened(host) as dht:
                        announcer = Announcer(dht, contact_of(dht), life_s=30.0)
                        for uid in blocks[number]:
                            alive_since[uid.coordinates], serving[uid.coordinates] = trio.current_time(), host
                        while True:
                            await announcer.announce(blocks[number])
                            await trio.sleep(10.0)
                world.light.apply(HostDown(host, silent=True))
                for uid in blocks[number]:
                    if serving.get(uid.coordinates) == host:
                        alive_since.pop(uid.coordinates, None)
                replaced += 1
                life += 1

        reader = await stack.enter_async_context(world.opened("reader"))
        for number in range(hosts):
            nursery.start_soon(live, number, 0)
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
        "network": "light",
        "hosts": hosts,
        "experts": experts,
        "replaced": replaced,
        "recall_mean": statistics.mean(found_share),
        "recall_worst": min(found_share),
        "dead_listed": statistics.mean(dead_share),
    }


async def _gets(world: World, nodes: list[DhtNode], count: int) -> tuple[float, float, float]:
    """Mean and 99th percentile of the time of gets from nodes drawn at random, and the share that found something."""
    took, found = list[float](), 0
    for _ in range(count):
        node, key = world.rng.choice(nodes), f"key{world.rng.randrange(100)}"
        node._read_from.forget(_key(key))  # a walk each time: what is remembered would hide what is measured
        began = trio.current_time()
        found += bool(await node.get(key))
        took.append(trio.current_time() - began)
    return statistics.mean(took), sorted(took)[int(0.99 * len(took))], found / count


def _key(key: str) -> int:
    from dmoe_net.dht.routing_table import key_id

    return key_id(key)


async def _hold_keys(world: World, nodes: list[DhtNode], stack: AsyncExitStack) -> None:
    """Let nodes keep a hundred records alive."""
    nursery = await stack.enter_async_context(trio.open_nursery())
    stack.callback(nursery.cancel_scope.cancel)

    async def keep(number: int) -> None:
        while True:
            await nodes[number % len(nodes)].store(f"key{number}", number, life_s=60.0)
            await trio.sleep(20.0)

    for number in range(100):
        nursery.start_soon(keep, number)
    await trio.sleep(5.0)


async def vanish(nodes: int, *, gets: int, seed: int) -> Figures:
    """Time of gets before 30 % of the nodes go silent, at once after it, and a minute later."""
    figures: Figures = {"network": "light", "nodes": nodes}
    async with open_world("light", seed=seed) as world, AsyncExitStack() as stack:
        await world.grow(nodes, stack)
        hosts = list(world.nodes)
        dead = set(world.rng.sample(hosts, round(0.3 * nodes)))
        living = [world.nodes[host] for host in hosts if host not in dead]
        await _hold_keys(world, living, stack)
        await trio.sleep(60.0)
        figures["before_mean_s"], figures["before_p99_s"], _ = await _gets(world, living, gets)
        for host in dead:
            world.light.apply(HostDown(host, silent=True))
        began, succeeded = trio.current_time(), list[float]()
        for name, after_s in (("at_once", 0.0), ("minute", 60.0), ("three_minutes", 180.0)):
            await trio.sleep_until(began + after_s)
            mean, p99, share = await _gets(world, living, gets)
            figures |= {f"{name}_mean_s": mean, f"{name}_p99_s": p99}
            succeeded.append(share)
        gone = {world.nodes[host].peer_id for host in dead}
        known = [contact.peer_id for node in living for contact in node.contacts()]
        figures["dead_in_tables"] = sum(peer_id in gone for peer_id in known) / len(known)
        figures["succeeded"] = min(succeeded)
        figures["minute_ratio"] = figures["minute_mean_s"] / figures["before_mean_s"]
    return figures


async def unreachable(*, nodes: int, hidden: int, gets: int, seed: int) -> Figures:
    """Entries of tables that name nodes which nobody can dial, a minute after these came, and the time of gets with
    and without them."""
    figures: Figures = {"network": "light", "nodes": nodes, "hidden": hidden}
    async with open_world("light", seed=seed) as world, AsyncExitStack() as stack:
        world.light.may_dial = lambda source, destination: not destination.startswith("hidden")
        await world.grow(nodes, stack)
        seen = list(world.nodes.values())
        await _hold_keys(world, seen, stack)
        figures["without_mean_s"], _, _ = await _gets(world, seen, gets)
        strangers = []
        for number in range(hidden):
            entrances = [contact_of(node) for node in world.rng.sample(seen, 3)]
            strangers.append(await stack.enter_async_context(world.opened(f"hidden{number}", initial=entrances)))
        began = trio.current_time()
        while trio.current_time() < began + 60.0:
            for stranger in strangers:
                await stranger.get(f"key{world.rng.randrange(100)}")
            await trio.sleep(5.0)
        ids = {stranger.peer_id for stranger in strangers}
        figures["entries"] = sum(contact.peer_id in ids for node in seen for contact in node.contacts())
        figures["with_mean_s"], _, figures["succeeded"] = await _gets(world, seen, gets)
    return figures


async def clocks(nodes: int, *, seed: int) -> Figures:
    """Share of the experts found where machines' clocks are up to five minutes off either way, and seconds until all
    are gone once their nodes are silent."""
    grid = square(nodes)
    draws = random.Random(f"{seed}/clocks")
    async with open_world("light", seed=seed) as world, AsyncExitStack() as stack:
        await world.grow(nodes, stack, ahead_s=lambda: draws.uniform(-300, 300))
        hosts, announcers = list(world.nodes), world.announcers()
        uids = [[uid] for uid in all_uids("layer0", grid)[:nodes]]
        await announce_all(announcers, uids)
        nursery = await stack.enter_async_context(trio.open_nursery())
        stack.callback(nursery.cancel_scope.cancel)
        scopes = list[trio.CancelScope]()

        async def keep(announcer: Announcer, own: list[ExpertUid], offset_s: float) -> None:
            with trio.CancelScope() as scope:
                scopes.append(scope)
                await _keep(announcer, own, offset_s)

        for announcer, own in zip(announcers, uids, strict=True):
            nursery.start_soon(keep, announcer, own, world.rng.uniform(0, 10))
        await trio.sleep(60.0)
        off = [abs(node.clock.now() - trio.current_time() - 1e9) for node in world.nodes.values()]
        found = []
        for number in range(5):
            reader = world.opened(f"reader{number}", listens=False, ahead_s=draws.uniform(-300, 300))
            async with reader as dht, open_expert_directory(dht) as directory:
                found.append(len(await directory.living("layer0", grid)) / nodes)
        dying, stays = hosts[: nodes // 2], world.nodes[hosts[-1]]
        async with open_expert_directory(stays) as directory:
            for scope in scopes:  # nobody announces any more
                scope.cancel()
            for host in dying:
                world.light.apply(HostDown(host, silent=True))
            began = trio.current_time()
            with trio.move_on_after(600.0):
                while await directory.living("layer0", grid):  # noqa: ASYNC110 (nobody could set an event)
                    await trio.sleep(1.0)
            gone_s = trio.current_time() - began
    middle = statistics.median(off)
    return {
        "network": "light",
        "nodes": nodes,
        "found": min(found),
        "gone_s": gone_s,
        "clock_spread_s": max(off) - min(off),
        "clock_median_s": middle,
    }


async def partition(nodes: int, *, minutes: float, seed: int) -> Figures:
    """Seconds after a partition has healed until everybody finds what either half stores."""
    async with open_world("light", seed=seed) as world, AsyncExitStack() as stack:
        await world.grow(nodes, stack)
        hosts = list(world.nodes)
        world.light.apply(Partition((frozenset(hosts[::2]),)))
        nursery = await stack.enter_async_context(trio.open_nursery())
        stack.callback(nursery.cancel_scope.cancel)

        async def work(host: str) -> None:
            node = world.nodes[host]
            while True:
                await node.store(f"of/{host}", host, life_s=60.0)
                await node.get(f"of/{world.rng.choice(hosts)}")
                await trio.sleep(10.0)

        for host in hosts:
            nursery.start_soon(work, host)
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
    return {"network": "light", "nodes": nodes, "found": share, "healed_s": healed_s}


async def bootstraps(nodes: int, *, seed: int) -> Figures:
    """Seconds until a swarm whose three bootstraps died, and that newcomers cannot reach, is one again with bootstraps
    that come at new addresses and remember some of its peers on disk."""
    async with open_world("light", seed=seed) as world, AsyncExitStack() as stack:
        await world.grow(nodes, stack)
        hosts = list(world.nodes)
        remembered = world.nodes[hosts[0]].contacts()
        for host in hosts[:3]:
            world.light.apply(HostDown(host))
        await trio.sleep(300.0)
        began = trio.current_time()
        first = await stack.enter_async_context(world.opened("fresh0", initial=(), remembered=remembered))
        newcomer = await stack.enter_async_context(world.opened("newcomer", initial=[contact_of(first)]))
        old = world.nodes[hosts[-1]]
        one_s = float("inf")
        while trio.current_time() < began + 600.0:
            await old.store("old", 1, life_s=60.0)
            await newcomer.store("new", 1, life_s=60.0)
            if await newcomer.get("old") and await old.get("new"):
                one_s = trio.current_time() - began
                break
            await trio.sleep(5.0)
    return {"network": "light", "nodes": nodes, "one_swarm_s": one_s}


async def joins(nodes: int, *, selections: int, seed: int) -> Figures:
    """CPU seconds and memory of so many joins and selections on the light network."""
    gc.collect()
    began = time.process_time()
    grid = square(nodes)
    async with open_world("light", seed=seed) as world, AsyncExitStack() as stack:
        await world.grow(nodes, stack)
        joined_s = time.process_time() - began
        announcers = world.announcers(life_s=300.0)
        await announce_all(announcers, [[uid] for uid in all_uids("layer0", grid)[:nodes]])
        numbers = np.random.default_rng(seed)
        for start in range(0, selections, 20):
            async with trio.open_nursery() as nursery:
                for number in range(start, min(selections, start + 20)):
                    nursery.start_soon(_select, world, number, grid, [numbers.normal(size=(1, s)) for s in grid])
        all_s = time.process_time() - began
    return {
        "network": "light",
        "nodes": nodes,
        "selections": selections,
        "joins_cpu_s": joined_s,
        "cpu_s": all_s,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


async def _select(world: World, number: int, grid: tuple[int, int], scores: list[np.ndarray]) -> None:
    async with world.opened(f"reader{number}", listens=False) as dht, open_expert_directory(dht) as directory:
        await _chosen(directory, grid, scores)


async def _chosen(directory: ExpertDirectory, grid: tuple[int, int], scores: list[np.ndarray]) -> None:
    chosen, _ = await directory.beam_search("layer0", scores, 4)
    assert chosen.shape == (1, 4, len(grid))


async def memory(nodes: int, *, seed: int) -> Figures:
    """Memory of a node of the full simulator, after it has joined and after its first refresh."""

    def rss_kb() -> float:
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize() / 1024

    before = rss_kb()
    async with open_world("full", seed=seed) as world, AsyncExitStack() as stack:
        await world.grow(nodes, stack)
        joined = (rss_kb() - before) / nodes
        await trio.sleep(1300.0)
        refreshed = (rss_kb() - before) / nodes
    return {"network": "full", "nodes": nodes, "joined_kb": joined, "refreshed_kb": refreshed}
