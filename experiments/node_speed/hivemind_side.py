"""hivemind's side of the comparison: run by an interpreter that has hivemind and torch, and nothing of ours.

One process starts a server with the experts of a case and a process for each caller, as hivemind's own
`benchmark_throughput.py` does, and then takes turns: it reads orders, one JSON object a line, and answers each with one
(`experiments.processes` has the other end). Nothing leaves loopback: hivemind's search for a way through routers and
its relays are off. It ends with its standard input, and all that it started with it.
"""

import json
import multiprocessing as mp
import os
import random
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("HIVEMIND_LOGLEVEL", "WARNING")  # else a line for each of a hundred processes

import torch
from hivemind.dht import DHT
from hivemind.moe.client.expert import RemoteExpert
from hivemind.moe.client.remote_expert_worker import RemoteExpertWorker
from hivemind.moe.expert_uid import ExpertInfo
from hivemind.moe.server import ModuleBackend, Server
from hivemind.moe.server.layers import name_to_block
from hivemind.p2p import P2P
from hivemind.utils.tensor_descr import BatchTensorDescriptor

_LOOPBACK = {"auto_nat": False, "nat_port_map": False, "use_relay": False}
_HANDLERS = 2
"""Processes of the server that hold connections, as in the measurements that the bars come from."""


def call(pipe: Connection, place: tuple[Any, Any], case: dict[str, Any], seed: int) -> None:
    """A caller: forward and backward through autograd, `at_once` experts side by side, whenever that is ordered.

    Args:
      pipe: brings (begin, end) of a slice, by `time.perf_counter`; gets the samples that ended in it.
      place: addresses and id of the server's peer.
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    rng, (addresses, peer_id) = random.Random(seed), place
    p2p = RemoteExpertWorker.run_coroutine(P2P.create(initial_peers=addresses, **_LOOPBACK))
    infos = [ExpertInfo(uid=f"expert.{index}", peer_id=peer_id) for index in range(case["experts"])]
    experts = [RemoteExpert(expert_info=info, p2p=p2p) for info in infos]
    x = torch.randn(case["rows"], case["d_model"])

    def ask(expert: RemoteExpert) -> float:
        expert(x).sum().backward()
        return time.perf_counter()

    with ThreadPoolExecutor(case["at_once"]) as threads:

        def layer_call() -> list[float]:
            """When each of its experts was done."""
            return list(threads.map(ask, rng.sample(experts, case["at_once"])))

        for _ in range(3):  # warms up
            layer_call()
        pipe.send("ready")
        while True:
            begin, end = pipe.recv()
            samples = 0
            while time.perf_counter() < end:
                # Each by itself: all together seldom end in a short slice.
                samples += case["rows"] * sum(begin <= done < end for done in layer_call())
            pipe.send(samples)


def main(case: dict[str, Any], *, seed: int, sockets: str) -> None:
    """Serve the experts, each hivemind's `ffn` with Adam, and have the callers call whenever that is ordered.

    Args:
      sockets: folder for the sockets of hivemind's daemons, which stay behind where they are killed.
    """
    # What others print must not come between our lines.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    P2P._UNIX_SOCKET_PREFIX = f"/unix{Path(sockets).absolute()}/"
    dht = DHT(start=True, **_LOOPBACK)
    place = dht.get_visible_maddrs(), dht.peer_id
    backends, schema = {}, BatchTensorDescriptor(case["d_model"])
    for name in (f"expert.{index}" for index in range(case["experts"])):
        module = torch.jit.script(name_to_block["ffn"](case["d_model"]))
        backends[name] = ModuleBackend(
            name=name,
            module=module,
            optimizer=torch.optim.Adam(module.parameters()),
            args_schema=(schema,),
            outputs_schema=schema,
            max_batch_size=case["max_batch_rows"],
        )
    # It is kept: its processes end with it.
    server = Server(dht=dht, module_backends=backends, num_connection_handlers=_HANDLERS, device="cpu")
    server.start()
    server.ready.wait()
    pipes = []
    for number in range(case["callers"]):
        ours, theirs = mp.Pipe()
        mp.Process(target=call, args=(theirs, place, case, seed + number), daemon=True).start()
        theirs.close()  # so that a caller that has ended is noticed
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()
    print(json.dumps({"served": server.is_alive()}), file=answers, flush=True)
    for order in map(json.loads, sys.stdin):
        for pipe in pipes:
            pipe.send((order["begin"], order["end"]))
        print(json.dumps({"samples": sum(pipe.recv() for pipe in pipes)}), file=answers, flush=True)


if __name__ == "__main__":
    try:
        main(**json.loads(sys.argv[1]))
    except EOFError:
        print("node_speed: one of hivemind's processes has ended", file=sys.stderr)
    finally:
        # This process leads a session of its own (`experiments.processes`): the server, its daemons and the callers
        # end here, also those that would wait for one another.
        os.killpg(os.getpgrp(), signal.SIGKILL)
