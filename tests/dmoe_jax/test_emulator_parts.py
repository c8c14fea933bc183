"""Parts of the emulator: events in waves, and gradients of what a stage reads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmoe_jax.emulator import draw_order, exponential_delays
from dmoe_jax.emulator.events import cut_into_waves
from dmoe_jax.emulator.order import STAGE
from dmoe_jax.emulator.trainer_side import used_leaves, vjp_of_used

CELLS = 5


@pytest.mark.parametrize("num_trainers", [1, 7])
@pytest.mark.parametrize("failure_rate", [0.0, 0.3])
def test_waves_keep_every_order_that_matters(num_trainers: int, failure_rate: float) -> None:
    """Each layer's calls, all stages, and all that one trainer does stay in order; and nothing is lost or doubled."""
    order = draw_order(
        num_updates=12,
        num_trainers=num_trainers,
        num_layers=3,
        num_pairs=4,
        delay=exponential_delays(0.1),
        failure_rate=failure_rate,
    )
    first, last = 5, len(order.kind) - 3
    # Each event is told by its place in the order, written where an expert's name would be.
    named = np.arange(len(order.kind))
    order = type(order)(**{**{name: getattr(order, name) for name in order.__slots__}, "expert": named})
    waves, count = cut_into_waves(order, first, last, num_cells=CELLS, length=len(order.kind))
    queues = [np.asarray(events.expert) + CELLS * i for i, events in enumerate((*waves.calls, waves.stages))]

    handled, begins = [], np.zeros(4, int)
    for ends in waves.ends[:count]:
        for queue, begin, end in zip(queues, begins, ends, strict=True):
            handled.extend(queue[begin:end].tolist())
        begins = ends
    assert sorted(handled) == list(range(first, last))
    place = np.array(handled)
    lanes = np.where(order.kind >= STAGE, -1, order.layer)
    for same in (lanes[place] == lane for lane in (-1, 0, 1, 2)):
        assert (np.diff(place[same]) > 0).all()
    for trainer in range(num_trainers):
        own = place[order.trainer[place] == trainer]
        stages = np.flatnonzero(order.kind[own] >= STAGE)
        # Calls between two stages may change places.
        for before, after in zip([0, *stages], [*stages, len(own)], strict=True):
            assert set(own[before:after]) == set(np.sort(own)[before:after])
    if num_trainers > 1:
        assert count < (last - first) / 4


def test_an_empty_piece_has_no_waves() -> None:
    order = draw_order(num_updates=1, num_trainers=1, num_layers=1, num_pairs=1, delay=exponential_delays(0.1))
    assert cut_into_waves(order, 2, 2, num_cells=1, length=4)[1] == 0


def test_gradients_of_what_is_read() -> None:
    """They are those of `jax.vjp`, and what is not read has none, even behind a function compiled by itself."""

    def function(scale: jax.Array, read: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        unread = jnp.sum(read["c"])  # computed, but nothing that is returned
        del unread
        return scale * jax.jit(jnp.sin)(read["a"]) + read["d"], read["a"][0]

    read = {name: jnp.arange(3.0) + i for i, name in enumerate("abcd")}
    used = used_leaves(function, read, jnp.float32(2))
    assert used == [True, False, False, True]
    output, pull, aux = vjp_of_used(lambda read: function(jnp.float32(2), read), read, used)
    expected, full = jax.vjp(lambda read: function(jnp.float32(2), read)[0], read)
    np.testing.assert_allclose(output, expected)
    assert aux == read["a"][0]
    grads = full(jnp.ones(3))[0]
    for ours, name in zip(pull(jnp.ones(3)), "ad", strict=True):
        np.testing.assert_allclose(ours, grads[name])
