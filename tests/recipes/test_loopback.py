"""The containers of the recipes, run on loopback as their engines run them."""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.recipes.containers import ALL, Container
from tests.recipes.engine import Engine, open_engine

SMALL = {
    "DMOE_D_MODEL": "16",
    "DMOE_NUM_HEADS": "2",
    "DMOE_D_FF": "32",
    "DMOE_SEQ_LEN": "8",
    "DMOE_MEM_LEN": "8",
    "DMOE_NUM_LAYERS": "1",
    "DMOE_GRID_SIZE": "2 2",
    "DMOE_K_BEST": "2",
    "DMOE_NUM_TRAINERS": "1",
    "DMOE_OF": "layer0.[0:2].[0:2]",
    "DMOE_WARM_UP_ROWS": "8",
    "DMOE_EVAL_EVERY": "1000000",
    "DMOE_EVAL_TOKENS": "64",
    "DMOE_FINAL_EVAL_TOKENS": "64",
    "DMOE_CHECKPOINT_EVERY": "20",
    "DMOE_STEPS": "1000000",
}
"""Flags of a model that trains in no time, in the place of the recipe's."""
NUM_EXPERTS = 4


def updates_of(engine: Engine, nodes: Iterable[Container]) -> dict[str, float]:
    """Steps of each expert that a node serves."""
    each = [engine.metrics(node, "dmoe_node_updates_total") for node in nodes]
    return {uid: max(found.get(uid, 0) for found in each) for uid in {uid for found in each for uid in found}}


def steps_of(engine: Engine, trainer: Container) -> float:
    """Steps of a trainer's trunk."""
    return engine.metrics(trainer, "dmoe_train_steps_total").get("", 0.0)


def going_on_from(engine: Engine, trainer: Container) -> int:
    """Step that a resumed trainer says it goes on from; 0 before it does."""
    found = re.search(r"continuing from step (\d+)", engine.log_of(trainer).read_text())
    return int(found[1]) if found else 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "claim"),
    # With room for half, nobody else takes up what a node leaves; with room for all, the others do.
    [("kubernetes", 2), ("compose", 4), ("skypilot", 4)],
)
def test_a_swarm_trains_and_experts_outlive_their_node(recipe: str, claim: int, tmp_path: Path) -> None:
    containers = ALL[recipe]()
    seeds = [each for each in containers if each.role == "seed"]
    nodes = [each for each in containers if each.role in ("node", "swarm")][:2]
    trainers = [each for each in containers if each.role == "trainer"]
    with open_engine(tmp_path, SMALL | {"DMOE_CLAIM": str(claim)}) as engine:
        for seed in seeds:  # one after the other, as a StatefulSet has it
            engine.start([seed])
            engine.wait_ready([seed])
        engine.start([*nodes, *trainers])
        engine.wait_ready([*nodes, *trainers])
        for trainer in trainers:
            engine.until(lambda trainer=trainer: steps_of(engine, trainer) >= 40, trainer)
        last = nodes[-1]
        served = engine.metrics(last, "dmoe_node_updates_total")
        assert served
        assert len(updates_of(engine, nodes)) == NUM_EXPERTS

        status, took_s = engine.stop(last)
        assert status == 130, engine.log_of(last).read_text()
        assert took_s < last.grace_s / 2
        steps = steps_of(engine, trainers[0])
        engine.until(lambda: steps_of(engine, trainers[0]) >= steps + 20, trainers[0])  # the others go on

        engine.start([last])
        engine.wait_ready([last])
        engine.until(lambda: len(updates_of(engine, nodes)) == NUM_EXPERTS, last)
        now = updates_of(engine, nodes)
        assert all(now[uid] >= served[uid] for uid in served), f"{served} before, {now} after"

        first, *others = trainers
        engine.until(lambda: steps_of(engine, first) >= 100, first)
        ahead = steps_of(engine, first)
        status, _ = engine.stop(first)
        assert status == 130, engine.log_of(first).read_text()
        for other in others:  # it goes on with the state of whoever is further
            engine.until(lambda other=other, least=ahead + 100: steps_of(engine, other) >= least, other)
            ahead = steps_of(engine, other)
        engine.start([first])
        engine.until(lambda: going_on_from(engine, first) > 0, first)
        assert going_on_from(engine, first) >= ahead


@pytest.mark.slow
def test_a_mistake_ends_with_the_status_that_is_not_started_again(tmp_path: Path) -> None:
    """A swarm that is not there is no mistake."""
    trainer = ALL["kubernetes"]()[-1]
    for number, (env, is_mistake) in enumerate([({"DMOE_STEPS": "0"}, True), ({}, False)]):
        (folder := tmp_path / str(number)).mkdir()
        with open_engine(folder, SMALL | env) as engine:
            engine.start([trainer])
            status = engine.processes[trainer.name].wait(60)
            assert status != 0
            assert (status == 2) == is_mistake, engine.log_of(trainer).read_text()
