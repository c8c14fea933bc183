"""MNIST: a trunk and experts of one's own (`own_model.py`) on two node processes; one of them is killed half way."""

import subprocess
import sys

from own_model import BATCH, EXPERTS, STEPS, Classifier, images, optimizer

from dmoe_jax import connect

if len(sys.argv) > 1:  # a node process: python mnist_remote.py PEER ROW
    with connect(sys.argv[1]) as swarm:
        mine = {f"{kind}.{sys.argv[2]}.[0:2]": expert for kind, expert in EXPERTS.items()}
        swarm.serve(mine, optimizer=optimizer, warm_up_rows=BATCH)
        print("serving", flush=True)
        sys.exit(sys.stdin.read())  # serve until our parent is gone

print(f"MNIST from {images().origin}")  # before anything is compiled
with connect() as swarm:
    nodes = [subprocess.Popen([sys.executable, __file__, swarm.contact, row], stdin=-1, stdout=-1) for row in "01"]
    assert all(node.stdout.readline() for node in nodes)
    model = Classifier(swarm.swarm)
    trainers = swarm.trainer(model, optimizer, [model.batches(shard, 2, seed=0) for shard in range(2)])
    trainers.run(STEPS // 2)
    nodes[0].kill()
    trainers.run(STEPS // 2)
    accuracy = trainers.evaluate(model.validation()).metrics["accuracy"]
    print(f"accuracy {accuracy:.4f}, failed calls {swarm.statistics.failures}")
