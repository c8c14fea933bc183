"""A process that trains with others over a real network, and writes down what it did: `processes` starts several.

Settings come as one JSON object in the first argument; each step goes to the file `log` as a line of JSON. It ends when
its standard input does.
"""

import functools
import json
import random
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
import trio

from dmoe_jax.collaboration import Collaboration, GlobalStep, open_collaboration
from dmoe_jax.peers.peer import PeerConfig, SwarmPeer, open_peer
from dmoe_jax.peers.security import Tls
from dmoe_jax.runs.setting_up import set_up_jax
from dmoe_net.averaging.collaboration.assisting import assist_collaboration
from experiments.collaborative.real_settings import config_of
from experiments.collaborative.regression import regression


async def _live(settings: dict[str, Any]) -> None:
    role, join = settings["role"], settings["join"]
    log = functools.partial(_write, Path(settings["log"]))
    listen = None if role == "client" else "127.0.0.1:0"
    config = PeerConfig(listen=listen, security=Tls(secret=Path(settings["secret"])))
    async with open_peer(join, config) as place:
        if role != "client":
            print(json.dumps({"contact": place.contact}), flush=True)
        if role == "auxiliary":
            await assist_collaboration(
                place.rpc,
                place.dht,
                prefix="run",
                rng=random.SystemRandom(),
                config=config_of(settings).rounds(),
                on_step=lambda done: log(peers=len(done.members), samples=done.weight),
            )
        await _train(place, settings, log)


async def _train(place: SwarmPeer, settings: dict[str, Any], log: Callable[..., None]) -> None:
    problem = regression()
    steps: list[GlobalStep] = []
    async with open_collaboration(
        place,
        problem.params,
        together=problem.together,
        name="run",
        config=config_of(settings),
        on_step=steps.append,
    ) as peer:
        log(began=True, step=peer.step)
        await _gather(peer, settings, steps, log)


async def _gather(
    peer: Collaboration, settings: dict[str, Any], steps: list[GlobalStep], log: Callable[..., None]
) -> None:
    problem, count, number = regression(), settings["micro_batch"], 0
    batches: dict[int, list[int]] = {}
    while True:
        step, began = peer.step + 1, trio.current_time()
        grads = problem.gradient(peer.params, settings["name"], number, count)
        await trio.sleep(settings["sample_s"] * count)
        batches.setdefault(step, []).append(number)
        log(step=step, batch=number)
        number += 1
        if await peer.add(grads, samples=count, took_s=trio.current_time() - began):
            params = [np.asarray(leaf).ravel().tolist() for leaf in jax.tree.leaves(peer.params)]
            done = [asdict(each) for each in steps]
            facts = {**peer.totals.headline(), **peer.facts()}
            log(now=peer.step, chain=peer.standing.chain.hex(), params=params, steps=done, facts=facts)
            steps.clear()


def _write(path: Path, **fields: object) -> None:
    with path.open("a") as file:
        print(json.dumps(fields), file=file)


async def _until_stdin_ends(scope: trio.CancelScope) -> None:
    async with trio.lowlevel.FdStream(0) as stream:
        while await stream.receive_some():
            pass
    scope.cancel()


async def _main(settings: dict[str, Any]) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_until_stdin_ends, nursery.cancel_scope)
        await _live(settings)


if __name__ == "__main__":
    set_up_jax()
    trio.run(_main, json.loads(sys.argv[1]))
