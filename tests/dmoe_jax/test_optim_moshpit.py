"""Moshpit averaging as an Optax transformation: what it applies, when, and what is left of a lost average."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

from dmoe_jax import optim
from dmoe_jax.checkpoints import Checkpoints
from dmoe_jax.optim import apply_average, averaging_due, moshpit_average, what_to_send, with_average
from dmoe_net.averaging.grouping.group_key import MoshpitGrid

RNG = np.random.default_rng(0)
EVERYTHING = ("parameters", "gradients", "pseudo_gradients")


def pmean(tree: Any, round_number: Any) -> Any:
    """The exact mean over the peers of a vmap."""
    return jax.lax.pmean(tree, "peers")


def train_peers(optimizer: optax.GradientTransformation, params: Any, grads: Any, **extra: Any) -> Any:
    """Parameters and state [peers, ...] after grads [steps, peers, ...]; an extra argument has [steps, peers]."""

    @jax.jit
    @functools.partial(jax.vmap, axis_name="peers")
    def step(params: Any, state: Any, grad: Any, extra: Any) -> Any:
        updates, state = optimizer.update(grad, state, params, **extra)
        return optax.apply_updates(params, updates), state

    state = jax.vmap(optimizer.init)(params)
    for number in range(len(jax.tree.leaves(grads)[0])):
        params, state = step(params, state, *jax.tree.map(lambda leaf, now=number: leaf[now], (grads, extra)))
    return params, state


def begin(optimizer: Any, *values: float) -> Any:
    """Parameters of these values, and the optimiser's state."""
    params = jnp.array(values)
    return params, optimizer.init(params)


def update(optimizer: Any, params: Any, state: Any, grad: float, **extra: Any) -> Any:
    grads = jax.tree.map(lambda leaf: jnp.full_like(leaf, grad), params)
    updates, state = optimizer.update(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state


def test_moshpit_sgd_is_algorithm_2() -> None:
    """x <- mean over the group of (x - g) when (k + 1) mod tau = 0, else x - g, on a 3 x 3 grid, by hand in NumPy."""
    grid, rate, tau = MoshpitGrid(side=3, dims=2), 0.1, 2

    def average(tree: Any, round_number: Any) -> Any:
        everybody, cells = jax.lax.all_gather(tree, "peers"), jnp.arange(9)
        mixed = optim.moshpit_round(everybody, grid=grid, cells=cells, round_number=round_number)
        return jax.tree.map(lambda leaf: leaf[jax.lax.axis_index("peers")], mixed)

    grads = RNG.normal(size=(6, 9, 2)).astype(np.float32)
    start = RNG.normal(size=(9, 2)).astype(np.float32)
    params, _ = train_peers(moshpit_average(optax.sgd(rate), every=tau, average=average), jnp.asarray(start), grads)
    by_hand = start.astype(np.float64)
    for step, grad in enumerate(grads):
        by_hand = by_hand - rate * grad
        if (step + 1) % tau == 0:
            # Round 0 goes along the last digit (three in a row), round 1 along the first, and so on.
            square = by_hand.reshape(3, 3, 2)
            axis = 1 if (step + 1) // tau % 2 else 0
            by_hand = np.broadcast_to(square.mean(axis=axis, keepdims=True), (3, 3, 2)).reshape(9, 2)
    np.testing.assert_allclose(params, by_hand, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("what", EVERYTHING)
def test_under_shard_map(what: Any) -> None:
    """The transformation traces with peers on the devices of a mesh; one device has nobody to differ from."""
    outer = optax.sgd(1.0) if what == "pseudo_gradients" else None  # its step goes all the way
    optimizer = moshpit_average(optax.sgd(0.1), every=2, what=what, outer=outer, average=pmean)

    def train(params: Any) -> Any:
        state = optimizer.init(params)
        for _ in range(4):
            updates, state = optimizer.update(jnp.ones((1, 3)), state, params)
            params = optax.apply_updates(params, updates)
        return params

    mesh, spec = Mesh(np.array(jax.devices()[:1]), ("peers",)), PartitionSpec("peers")
    params = jax.jit(jax.shard_map(train, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(jnp.ones((1, 3)))
    # Four steps of 0.1, or two with the mean gradient of two.
    np.testing.assert_allclose(params, 0.8 if what == "gradients" else 0.6, rtol=1e-6)


def test_delayed_average_keeps_local_progress() -> None:
    """1 - 0.5 - 0.5 = 0 is sent; one more step; the average 2 of it adds 2: -0.5 + (-0.5) + 2 = 1, not 2."""
    optimizer = moshpit_average(optax.sgd(1.0), every=2)
    params, state = begin(optimizer, 1.0)
    for _ in range(2):
        assert not averaging_due(state)
        params, state = update(optimizer, params, state, 0.5)
    assert averaging_due(state)
    sent = what_to_send(state, params)
    assert sent.tree.tolist() == [0.0]
    assert float(sent.weight) == 1
    params, state = update(optimizer, params, state, 0.5)
    assert params.tolist() == [-0.5]
    state = with_average(state, sent, jnp.array([2.0]))
    assert not averaging_due(state)
    assert params.tolist() == [-0.5]
    params, state = update(optimizer, params, state, 0.5)
    assert params.tolist() == [1.0]
    assert averaging_due(state)  # two updates since what was sent
    assert update(optimizer, params, state, 0.5)[0].tolist() == [0.5]  # it is applied once


def test_delayed_gradients_are_not_lost_and_not_counted_twice() -> None:
    """Gradients 1, 3 are sent as 2; 5 comes meanwhile and is for the next averaging, with 7 at the arrival."""
    optimizer = moshpit_average(optax.sgd(1.0), every=2, what="gradients")
    params, state = begin(optimizer, 0.0)
    for grad in (1.0, 3.0):
        params, state = update(optimizer, params, state, grad)
    sent = what_to_send(state, params)
    assert sent.tree.tolist() == [2.0]
    params, state = update(optimizer, params, state, 5.0)
    state = with_average(state, sent, np.array([4.0]))
    assert params.tolist() == [0.0]
    params, state = update(optimizer, params, state, 7.0)
    assert params.tolist() == [-4.0]
    assert averaging_due(state)
    assert what_to_send(state, params).tree.tolist() == [6.0]


def test_apply_average_waits_for_no_gradient() -> None:
    """Synchronous training: the average is there before the next gradient, and no step is counted for it."""
    optimizer = optax.chain(optax.clip(10.0), moshpit_average(optax.adam(1.0), every=1))
    params, state = update(optimizer, *begin(optimizer, 1.0), 0.5)
    state = with_average(state, what_to_send(state, params), jnp.array([3.0]))
    params, state = apply_average(optimizer, state, params)
    assert params.tolist() == [3.0]
    assert optax.tree.get(state, "count") == 1
    assert not averaging_due(state)


@pytest.mark.parametrize("averaged", [None, jnp.array([jnp.nan, 1.0])])
@pytest.mark.parametrize("what", EVERYTHING)
def test_lost_average_leaves_local_progress(what: Any, averaged: Any) -> None:
    """Nothing came, or no numbers: the peer is where the inner optimiser alone would be, and the loss is counted."""
    optimizer = moshpit_average(optax.sgd(1.0), every=1, what=what)
    params, state = update(optimizer, *begin(optimizer, 1.0, 2.0), 0.5)
    state = with_average(state, what_to_send(state, params), averaged)
    params, state = apply_average(optimizer, state, params)
    assert params.tolist() == [0.5, 1.5]
    assert (int(state.rounds), int(state.lost)) == (1, 1)


def test_lost_average_under_jit_is_counted_for_its_peer_alone() -> None:
    """A round that gives one peer no numbers leaves that peer its own step."""

    def average(tree: Any, round_number: Any) -> Any:
        is_bad = (jax.lax.axis_index("peers") == 1) & (round_number == 0)
        return jnp.where(is_bad, jnp.nan, jax.lax.pmean(tree, "peers"))

    params, state = train_peers(
        moshpit_average(optax.sgd(1.0), average=average), jnp.array([[1.0], [3.0]]), np.zeros((1, 2, 1), np.float32)
    )
    assert params.tolist() == [[2.0], [3.0]]
    assert state.lost.tolist() == [0, 1]


@pytest.mark.parametrize("averaged", [None, 2.0])
def test_gradients_that_are_no_numbers_end_with_their_averaging(averaged: float | None) -> None:
    """Others' mean is a step, a lost average is none; what came while the bad ones were under way is gone with them."""
    optimizer = moshpit_average(optax.adam(1.0), what="gradients")
    params, state = update(optimizer, *begin(optimizer, 0.0), jnp.nan)
    sent = what_to_send(state, params)
    params, state = update(optimizer, params, state, 1.0)
    state = with_average(state, sent, None if averaged is None else jnp.array([averaged]))
    params, state = update(optimizer, params, state, 3.0)
    assert what_to_send(state, params).tree.tolist() == [3.0]
    if averaged is None:
        assert params.tolist() == [0.0]
        assert int(state.lost) == 1
        jax.tree.map(np.testing.assert_array_equal, state.inner, optimizer.init(params).inner)
    else:
        np.testing.assert_allclose(params, -1.0, rtol=1e-5)  # Adam's first step is its rate


def test_diloco_against_numpy() -> None:
    """Inner SGD, outer Nesterov momentum 0.9 at rate 0.7 on the mean of anchor - parameters, written out."""
    grads = RNG.normal(size=(6, 4, 3)).astype(np.float32)
    optimizer = moshpit_average(optax.sgd(0.1), every=2, what="pseudo_gradients", average=pmean)
    params, _ = train_peers(optimizer, jnp.ones((4, 3)), grads)
    anchor, momentum = np.ones(3), np.zeros(3)
    for pair in grads.reshape(3, 2, 4, 3):
        way = (anchor - (anchor - 0.1 * pair.sum(axis=0))).mean(axis=0)
        momentum = 0.9 * momentum + way
        anchor = anchor - 0.7 * (way + 0.9 * momentum)
    np.testing.assert_allclose(params, np.broadcast_to(anchor, (4, 3)), rtol=1e-5)


def test_delayed_diloco_keeps_local_progress() -> None:
    """Anchor 1, sent 0.5; plain outer rate 1 with average 2 moves the anchor to -1; the step meanwhile stays."""
    optimizer = moshpit_average(optax.sgd(1.0), what="pseudo_gradients", outer=optax.sgd(1.0))
    params, state = update(optimizer, *begin(optimizer, 1.0), 0.5)
    sent = what_to_send(state, params)
    assert sent.tree.tolist() == [0.5]
    params, state = update(optimizer, params, state, 0.25)
    state = with_average(state, sent, jnp.array([2.0]))
    params, state = update(optimizer, params, state, 0.0)
    assert state.anchor.tolist() == [-1.0]
    assert params.tolist() == [-1.25]
    # What comes next counts from the new anchor, with the step that was kept.
    assert what_to_send(state, params).tree.tolist() == [0.25]


def test_weighted_by_samples() -> None:
    """Gradients 1 and 4 of 1 and 2 samples are 3 together; of the other peer 9 of 3 samples: the mean of six is 6."""

    def average(tree: Any, round_number: Any, weight: Any) -> Any:
        return jax.lax.psum(tree * weight, "peers") / jax.lax.psum(weight, "peers")

    optimizer = moshpit_average(optax.sgd(1.0), every=2, what="gradients", weighted=True, average=average)
    grads = np.array([[[1.0], [9.0]], [[4.0], [9.0]]], np.float32)
    samples = np.array([[1.0, 1.0], [2.0, 2.0]], np.float32)
    params, state = train_peers(optimizer, jnp.zeros((2, 1)), grads, samples=samples)
    assert params.tolist() == [[-6.0], [-6.0]]
    assert state.samples.tolist() == [0, 0]
    host = moshpit_average(optax.sgd(1.0), weighted=True)
    own, own_state = update(host, jnp.zeros(1), host.init(jnp.zeros(1)), 1.0, samples=24)
    assert float(what_to_send(own_state, own).weight) == 24


@pytest.mark.parametrize(("what", "expected"), [("parameters", 3), ("gradients", 2), ("pseudo_gradients", 3)])
def test_a_lost_average_is_not_forgotten_by_the_next(what: Any, expected: int) -> None:
    """1 sample, its average lost, then 2 more: these parameters have learnt from 3, gradients are spent with each."""
    optimizer = moshpit_average(optax.sgd(1.0), what=what, weighted=True)
    params, state = update(optimizer, *begin(optimizer, 0.0), 1.0, samples=1)
    state = with_average(state, what_to_send(state, params), None)
    params, state = apply_average(optimizer, state, params)
    params, state = update(optimizer, params, state, 1.0, samples=2)
    assert float(what_to_send(state, params).weight) == expected
    state = with_average(state, what_to_send(state, params), params)
    assert float(state.samples) == 0


@pytest.mark.parametrize("what", EVERYTHING)
def test_composes(what: Any) -> None:
    """In a chain, MultiSteps and inject_hyperparams, over a schedule, the host finds the state and its average acts."""

    @optax.inject_hyperparams
    def make(learning_rate: float) -> optax.GradientTransformation:
        return moshpit_average(optax.sgd(learning_rate), every=2, what=what)

    chain = optax.chain(optax.clip_by_global_norm(1e3), make(optax.linear_schedule(1.0, 0.0, 100)))
    optimizer, dues = optax.MultiSteps(chain, every_k_schedule=2), []
    step = jax.jit(functools.partial(update, optimizer))
    params, state = begin(optimizer, 1.0, 1.0)
    for _ in range(4):
        params, state = step(params, state, 0.1)
        dues.append(averaging_due(state))
    assert dues == [False, False, False, True]
    assert optim.host_state(state).kind == what
    sent = what_to_send(state, params)
    state = with_average(state, sent, sent.tree + 0.5)
    before = params
    for _ in range(2):
        params, state = step(params, state, 0.0)
    change = float((params - before)[0])
    # Parameters move by the difference; a gradient of 0.1 + 0.5 is one step at rate 0.98 (the third of the schedule).
    assert change > 0.4 if what == "parameters" else change < -0.4
    if what == "gradients":
        assert change == pytest.approx(-0.6 * 0.98)


@pytest.mark.parametrize("what", EVERYTHING)
def test_donation(what: Any) -> None:
    """Parameters and state may be donated at once, and what was sent outlives the next step."""
    optimizer = moshpit_average(optax.sgd(1.0, momentum=0.9), what=what)
    step = jax.jit(functools.partial(update, optimizer), donate_argnums=(0, 1))
    params, state = step(*begin(optimizer, 1.0, 1.0, 1.0), 1.0)
    sent, averaged = what_to_send(state, params), jnp.zeros(3)
    params, state = step(params, state, 1.0)
    step(params, with_average(state, sent, averaged), 1.0)
    assert np.isfinite(np.asarray(sent.tree)).all()
    assert averaged.tolist() == [0, 0, 0]


@pytest.mark.parametrize("by_host", [True, False])
@pytest.mark.parametrize("what", EVERYTHING)
def test_types_stay(what: Any, by_host: bool) -> None:
    """bfloat16 beside float32: updates and parameters keep their types, also when a float16 average arrives."""
    average = None if by_host else lambda tree, _: tree
    optimizer = moshpit_average(optax.adam(0.1), what=what, average=average)
    params = {"a": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(2)}
    state = optimizer.init(params)
    types = jax.tree.map(lambda leaf: leaf.dtype, state)
    for _ in range(2):
        updates, state = jax.jit(optimizer.update)(params, state, params)
        assert jax.tree.map(lambda leaf: leaf.dtype, updates) == {"a": jnp.bfloat16, "b": jnp.float32}
        assert jax.tree.map(lambda leaf: leaf.dtype, state) == types
        if by_host:
            sent = what_to_send(state, params)
            assert jax.tree.map(lambda leaf: leaf.dtype, sent.tree) == {"a": jnp.bfloat16, "b": jnp.float32}
            averaged = jax.tree.map(lambda leaf: np.asarray(leaf, np.float16), sent.tree)
            state = with_average(state, sent, averaged)
            assert jax.tree.map(lambda leaf: leaf.dtype, state) == types


@pytest.mark.parametrize("what", EVERYTHING)
def test_checkpoint_with_an_average_on_its_way(what: Any, tmp_path: Path) -> None:
    """A restored state goes on as the saved one: the average that had arrived is applied."""
    optimizer = moshpit_average(optax.adam(0.1), what=what)
    params, state = update(optimizer, *begin(optimizer, 1.0), 1.0)
    sent = what_to_send(state, params)
    state = with_average(state, sent, sent.tree + 1)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state, {})
    _, restored, _ = checkpoints.restore_latest(optimizer.init(params))
    assert isinstance(restored, optim.MoshpitState)
    expected, got = (apply_average(optimizer, each, params)[0] for each in (state, restored))
    assert got.tolist() == expected.tolist() != params.tolist()


def test_compiles_once(compilations: Any) -> None:
    """Arrivals and averagings are data: no step after the first compiles anything."""
    optimizer = moshpit_average(optax.sgd(1.0), every=2)
    step, params = jax.jit(optimizer.update), np.ones(3, np.float32)
    _, state = step(params, optimizer.init(params), params)
    for _ in range(2):
        _, state = step(params, state, params)
    state = with_average(state, what_to_send(state, params), params)
    before = compilations.count
    for _ in range(3):
        _, state = step(params, state, params)
    assert compilations.count == before
    assert not bool(state.arrived)


def test_wrong_arguments_are_named() -> None:
    sgd, params = optax.sgd(1.0), {"w": jnp.ones(2)}
    optimizer = moshpit_average(sgd)
    state = optimizer.init(params)
    sent = what_to_send(state, params)
    attempts: dict[str, Callable[[], Any]] = {
        "every must be at least 1, got 0": lambda: moshpit_average(sgd, every=0),
        "'weights'": lambda: moshpit_average(sgd, what="weights"),  # whoever looks first, we or the types
        "is for pseudo_gradients, not for gradients": lambda: moshpit_average(sgd, what="gradients", outer=sgd),
        "wants the parameters": lambda: optimizer.update(params, state),
        "wants the number of samples": lambda: moshpit_average(sgd, weighted=True).update(params, state, params),
        r"\['w'\] has the shape \(3,\), what was sent \(2,\)": lambda: with_average(state, sent, {"w": jnp.ones(3)}),
        "expected an average of the structure": lambda: with_average(state, sent, [jnp.ones(2)]),
        "averages by itself": lambda: with_average(moshpit_average(sgd, average=pmean).init(params), sent, params),
        "or streaming_diloco in it, found 0": lambda: averaging_due(sgd.init(params)),
        "has arrived and not been applied": lambda: what_to_send(with_average(state, sent, params), params),
    }
    for message, attempt in attempts.items():
        with pytest.raises((ValueError, TypeError), match=message):
            attempt()
