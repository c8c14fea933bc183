"""A large swarm that is none: states for the page of `dmoe watch`, which a process of its own can serve."""

import itertools
import math
import random
from typing import Any

import trio

from dmoe_jax.live.events import State, about, changes, line_of
from dmoe_jax.live.feeds import Send
from dmoe_jax.live.server import serve_page
from dmoe_net.identity import Address


class Crowd:
    """Nodes with four experts each, and trainers, whose figures all move with each step."""

    def __init__(self, num_nodes: int, num_trainers: int) -> None:
        self.rng = random.Random(0)
        self.num_nodes, self.num_trainers = num_nodes, num_trainers
        self.popularity = [self.rng.lognormvariate(0, 0.7) for _ in range(4 * num_nodes)]
        self.updates = [0.0] * (4 * num_nodes)

    def state(self, step: int) -> State:
        loss = self.loss(step)
        peers = dict(map(self.node, range(self.num_nodes)))
        for index in range(self.num_trainers):
            facts = {"step": step, "loss": round(loss + index / 50, 3), "items_per_s": 1900 + 90 * self.rng.random()}
            name = f"{index * 7 + 0xA0000000:08x}"
            peers[f"{name}/trainer"] = {"role": "trainer", "name": name, "state": "training", "facts": facts}
        groups = {"group 5e1f09aa": {"peers": 4, "seen": "a0000007 a000000e a0000015 a000001c", "averages": step // 10}}
        groups["collaboration large"] = {"peers": "12 node", "gathered": 37 * step % 4096, "target": 4096}
        news = [[12.5, "2 nodes joined"], [31.0, "node 00001fa4 left"]]
        return {"totals": self.totals(step), "peers": peers, "groups": groups, "news": news}

    def totals(self, step: int) -> dict[str, float]:
        """Figures of the whole swarm."""
        num_peers = self.num_nodes + self.num_trainers
        return {
            **{"peers": num_peers, "nodes": self.num_nodes, "experts": 4 * self.num_nodes, "step": step},
            **{"loss": round(self.loss(step), 4), "failed_calls": step // 9, "sent_mb": 31 * step},
            **{"items_per_s": round(self.num_trainers * (1900 + 90 * self.rng.random()))},
            **{"calls_per_s": round(40 * self.num_nodes + 400 * self.rng.random())},
            **{"staleness": round(2 + math.sin(step / 30) / 2 + self.rng.random() / 4, 2)},
        }

    def loss(self, step: int) -> float:
        return 4.2 + 3.6 * math.exp(-step / 120) + 0.05 * self.rng.random()

    def node(self, index: int) -> tuple[str, dict[str, Any]]:
        name, experts = f"{index * 4049:08x}", {}
        for number in range(4 * index, 4 * index + 4):
            rate = self.popularity[number] * (0.8 + 0.4 * self.rng.random())
            self.updates[number] += rate
            experts[f"layer{number % 2}.{number // 64}.{number % 64}"] = [int(self.updates[number]), round(rate, 2)]
        facts = {"calls_per_s": round(40 * sum(load for _, load in experts.values())), "waiting_rows": index % 5}
        node = {"role": "node", "name": name, "address": f"10.0.{index // 250}.{index % 250}:4000", "state": "serving"}
        return f"{name}/node", {**node, "facts": facts, "experts": experts}


class PreparedFeed:
    """Events of a live swarm, 50 a second, that were written beforehand: the page is to be measured, not Python."""

    def __init__(self, crowd: Crowd, num_states: int) -> None:
        states = [crowd.state(step) for step in range(1, num_states + 1)]
        self._first = [about("swarm 'thousand'", "live"), line_of("all", 0.0, state=states[0])]
        self._patches = [changes(*pair) for pair in itertools.pairwise([*states, states[0]])]

    async def follow(self, send: Send) -> None:
        """Go through the states again and again."""
        for line in self._first:
            await send(f"data: {line}\n\n".encode())
        began = trio.current_time()
        lines = [line_of("changes", 0.0, state=patch).removeprefix('{"time":0.0,') for patch in self._patches]
        for number in itertools.count():
            await trio.sleep_until(began + number / 50)
            await send(f'data: {{"time":{number / 50},{lines[number % len(lines)]}\n\n'.encode())


async def serve_crowd() -> None:
    """Serve a thousand peers that move 50 times a second, at an address that is printed."""
    async with serve_page(Address("127.0.0.1", 0), PreparedFeed(Crowd(960, 40), 60)) as address:
        print(f"http://{address}/", flush=True)
        await trio.sleep_forever()


if __name__ == "__main__":
    trio.run(serve_crowd)
