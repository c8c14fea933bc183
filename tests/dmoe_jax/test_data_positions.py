"""Batches with a position: whichever way they say it, who goes on from it reads the very next record."""

import json
from collections.abc import Iterator
from typing import Any

import datasets
import grain
import numpy as np
import optax
import pytest
import trio

from dmoe_jax.data.batches import SegmentStream
from dmoe_jax.data.positions import Positioned, positioned
from dmoe_jax.machine.device import InlineDevice
from dmoe_jax.machine.disk import CheckpointError
from dmoe_jax.mixture.statistics import CallStatistics
from dmoe_jax.model import Model, Outcome
from dmoe_jax.trainer import Trainer, Trainers
from dmoe_jax.training.swarm_engine import SwarmEngine
from dmoe_jax.trunk import SharedTrunk
from dmoe_net.errors import NetError

RECORDS = [{"x": number} for number in range(20)]


class Counting:
    """Numbers from 0, with a state as PyTorch's data loaders have one."""

    def __init__(self) -> None:
        self.state: Any = {"next": np.int64(0)}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.state["next"] += 1
        return int(self.state["next"]) - 1


def shuffled() -> Any:
    """A Grain pipeline in which the order of records is part of the state."""
    return grain.MapDataset.source(RECORDS).shuffle(seed=3).repeat().batch(2).to_iter_dataset()


class Source(list[Any]):
    """A source of records that Grain knows again."""

    def __repr__(self) -> str:
        return "Source"


def loader() -> Any:
    """Grain's data loader, whose state is bytes."""
    source = Source(RECORDS)
    sampler = grain.samplers.IndexSampler(len(RECORDS), shuffle=True, seed=1, shard_options=grain.sharding.NoSharding())
    return grain.DataLoader(data_source=source, sampler=sampler, operations=[grain.transforms.Batch(2)])


def table() -> Any:
    """An iterable data set, whose state is not its iterator's."""
    return datasets.Dataset.from_list(RECORDS).to_iterable_dataset(num_shards=3).batch(2)


def stream() -> Any:
    return SegmentStream(np.arange(100, dtype=np.int32), batch_size=2, seq_len=4)


def generator() -> Any:
    return (2 * number for number in range(50))


SOURCES = [Counting, shuffled, loader, table, stream, generator]


@pytest.mark.parametrize("make", SOURCES)
@pytest.mark.parametrize("read", [0, 1, 7])
def test_reading_goes_on_at_the_very_record(make: Any, read: int) -> None:
    """The position goes through JSON, as in a checkpoint; the number of the batch goes on, too."""
    old, new = positioned(make()), positioned(make())
    for _ in range(read):
        next(old)
    new.seek(json.loads(json.dumps(old.position)))
    assert (new.number, new.position) == (read, old.position)
    for _ in range(3):
        np.testing.assert_equal(next(new), next(old))
    assert new.number == read + 3


def test_a_position_stays_as_it_was() -> None:
    """Also of batches whose state is one object that changes."""
    batches = positioned(Counting())
    before = batches.position
    next(batches)
    assert (before, batches.position) == (
        {"read": 0, "state": {"next": 0}},
        {"read": 1, "state": {"next": 1}},
    )


def test_batches_that_have_a_position_are_taken_as_they_are() -> None:
    batches = positioned(generator())
    assert positioned(batches) is batches


def test_a_position_from_before_the_batches_had_a_state_is_read_up_to() -> None:
    """The number of batches is all that an earlier run knew."""
    batches = positioned(Counting())
    batches.seek(5)
    assert next(batches) == 5


@pytest.mark.parametrize(
    ("make", "position", "message"),
    [
        (generator, {"read": 3, "state": {}}, "state of other batches than these, which are of type generator"),
        (stream, {"read": 3, "state": {}}, "of type SegmentStream"),
        (Counting, {"read": -1.5, "state": {}}, "of type Counting"),
        (Counting, {"read": 3}, "of type Counting"),
        (Counting, {"read": 3, "state": {}, "bytes": ""}, "of type Counting"),
        (loader, {"read": 3, "bytes": "no base64!"}, "base64"),
        (generator, 51, "there are only 50 batches, asked for number 51"),
    ],
)
def test_positions_of_others_are_refused(make: Any, position: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        positioned(make()).seek(position)


def test_what_was_read_is_gone() -> None:
    """Batches without a state cannot go back."""
    batches = positioned(generator())
    batches.seek(3)
    with pytest.raises(ValueError, match="cannot go back: 3 are read, asked for 1"):
        batches.seek(1)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"at": (1, 2)}, r"the state of Counting cannot be saved: JSON gives \{'at': \[1, 2\]\} back for"),
        ({1: 2}, "JSON gives"),
        ({"at": {1}}, "set is nothing that JSON can say"),
        ({"at": np.zeros(2)}, "ndarray is nothing that JSON can say"),
    ],
)
def test_a_state_that_would_not_come_back_is_refused_at_once(state: Any, message: str) -> None:
    """And not after hours, by the run that is to go on with it."""
    batches = Counting()
    batches.state = state
    with pytest.raises(ValueError, match=message):
        Positioned(batches)


class Failing(Model[int, Any]):
    """A model whose steps wait, or are lost, as the batch says."""

    def init(self, key: Any) -> Any:
        return np.zeros(1, np.float32)

    async def forward(self, run: Any, params: Any, batch: int, state: Any, keys: Any) -> Outcome:
        if batch == 1:
            raise NetError("lost")
        if batch == 2:
            await trio.sleep_forever()
        return Outcome(loss=run(_zero, params))


def _zero(params: Any) -> Any:
    return params.sum() * 0.0


def test_a_checkpoint_of_other_batches_is_refused() -> None:
    """As one of another model is."""

    def engine(batches: Any) -> SwarmEngine:
        trunk = SharedTrunk(np.zeros(1, np.float32), optax.sgd(0.1), device=InlineDevice())
        trainers = Trainers(Failing(), trunk, [batches], seed=0)
        return SwarmEngine(trainers, CallStatistics(), lambda split, items: ((), None), layers={})

    old, new = engine(Counting()), engine(generator())
    with pytest.raises(CheckpointError, match="batches of trainer 0 cannot go on: the position is the state of other"):
        new.load(0, old.state(), old.facts())
    engine(Counting()).load(0, old.state(), old.facts())


async def test_a_batch_counts_when_its_step_has_ended(autojump_clock: trio.testing.MockClock) -> None:
    """Made or lost; one that a step is at work on is read again by whoever goes on."""
    model = Failing()
    trunk = SharedTrunk(model.init(None), optax.sgd(0.1), device=InlineDevice())
    trainer = Trainer(0, model, trunk, Counting())
    lost: list[Exception] = []
    with trio.move_on_after(100):
        await trainer.run(10, on_lost=lambda _, error: lost.append(error))
    assert (trunk.step, len(lost)) == (1, 1)
    assert trainer.position == {"read": 2, "state": {"next": 2}}
    trainer.seek({"read": 7, "state": {"next": 7}})
    assert (await trainer.step()).step == 2
    assert trainer.position == {"read": 8, "state": {"next": 8}}
