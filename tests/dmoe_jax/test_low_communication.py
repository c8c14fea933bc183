"""Streaming DiLoCo and NoLoCo over a vmapped axis of peers, against plain loops in NumPy."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dmoe_jax.checkpoints import Checkpoints
from dmoe_jax.optim import (
    NoLoCoState,
    apply_average,
    averaging_due,
    distortion,
    group_mean,
    host_state,
    moshpit_average,
    noloco,
    streaming_diloco,
    what_to_send,
    with_average,
)

RNG = np.random.default_rng(0)
PEERS, RATE = 4, 0.1
NAMES = ("a", "b", "c")


def pmean(tree: Any, _: Any) -> Any:
    return jax.lax.pmean(tree, "peers")


def train(optimizer: Any, params: Any, grads: Any, *, steps: int) -> tuple[Any, Any]:
    """Parameters and state [peers, ...] after grads [steps, peers, ...]."""

    @jax.jit
    @functools.partial(jax.vmap, axis_name="peers")
    def step(params: Any, state: Any, grad: Any) -> Any:
        updates, state = optimizer.update(grad, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.vmap(optimizer.init)(params)
    for number in range(steps):
        params, state = step(params, state, jax.tree.map(lambda leaf, now=number: leaf[now], grads))
    return params, state


def start_and_grads(steps: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Three arrays of two numbers, the same at all peers, and gradients that differ."""
    start = {name: np.tile(RNG.normal(size=2), (PEERS, 1)).astype(np.float32) for name in NAMES}
    return start, {name: RNG.normal(size=(steps, PEERS, 2)).astype(np.float32) for name in NAMES}


def close(tree: Any, expected: Any, rtol: float = 1e-4) -> None:
    for name in expected:
        np.testing.assert_allclose(tree[name], expected[name], rtol=rtol, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("every", "overlap", "mixing", "fragments"),
    [(6, 0, 0.0, 3), (6, 2, 0.5, 3), (5, 4, 0.3, 2), (3, 1, 1.0, {"a": 1, "b": 0, "c": 1})],
)
def test_streaming_diloco_against_plain_loops(every: int, overlap: int, mixing: float, fragments: Any) -> None:
    """Algorithm 2: at each step the fragments that are due leave, and those that left tau steps ago arrive."""
    steps, rate, momentum = 19, 0.4, 0.9
    start, grads = start_and_grads(steps)
    optimizer = streaming_diloco(
        optax.sgd(RATE), average=pmean, every=every, fragments=fragments, overlap=overlap, mixing=mixing
    )
    params, state = train(optimizer, start, grads, steps=steps)

    of_array = fragments if isinstance(fragments, dict) else {name: i % fragments for i, name in enumerate(NAMES)}
    count = max(of_array.values()) + 1
    theta = {name: value.astype(np.float64) for name, value in start.items()}
    anchor = {name: value[0].copy() for name, value in theta.items()}
    speed = {name: np.zeros(2) for name in NAMES}
    flying: dict[tuple[str, int], np.ndarray] = {}
    for step in range(1, steps + 1):
        for name in NAMES:
            theta[name] = theta[name] - RATE * grads[name][step - 1]
            offset = of_array[name] * every // count
            if (step - offset) % every == 0:
                flying[name, step + overlap] = anchor[name] - theta[name].mean(axis=0)
            if (name, step) in flying:
                way = flying[name, step]
                speed[name] = momentum * speed[name] + way
                anchor[name] = anchor[name] - rate * (way + momentum * speed[name])
                theta[name] = mixing * theta[name] + (1 - mixing) * anchor[name]
    close(params, theta)
    close(state.anchor, {name: np.tile(value, (PEERS, 1)) for name, value in anchor.items()})


def test_streaming_diloco_of_one_fragment_is_diloco() -> None:
    """No overlap, no mixing: what `moshpit_average` makes of pseudo-gradients."""
    start, grads = start_and_grads(12)
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    streaming = streaming_diloco(
        optax.adam(RATE), average=pmean, every=4, fragments=1, overlap=0, mixing=0.0, outer=outer
    )
    diloco = moshpit_average(optax.adam(RATE), every=4, what="pseudo_gradients", outer=outer, average=pmean)
    close(train(streaming, start, grads, steps=12)[0], train(diloco, start, grads, steps=12)[0], rtol=1e-5)


def test_streaming_diloco_never_sends_two_fragments_at_once() -> None:
    """With H = 6 and three fragments one leaves every second step, each in its turn: the peak is a third."""
    seen = []

    def watch(tree: Any, number: Any) -> Any:
        jax.debug.callback(lambda number: seen.append(int(number)), number)
        return tree

    optimizer = streaming_diloco(optax.sgd(RATE), average=watch, every=6, fragments=3)
    params = {name: jnp.zeros(2) for name in NAMES}
    state, per_step = optimizer.init(params), []
    update = jax.jit(optimizer.update)
    for _ in range(12):
        before = len(seen)
        _, state = update(params, state, params)
        jax.effects_barrier()
        per_step.append(len(seen) - before)
    assert per_step == [0, 1, 0, 1, 0, 1] * 2
    assert seen == list(range(6)) == list(range(int(state.rounds)))


def test_a_lost_fragment_leaves_its_anchor() -> None:
    """An average that is no number changes neither anchor nor parameters; the next one does."""

    def faulty(tree: Any, number: Any) -> Any:
        return jax.tree.map(lambda leaf: jnp.where(number == 0, jnp.nan, leaf), tree)

    optimizer = streaming_diloco(optax.sgd(1.0), average=faulty, every=2, fragments=1, mixing=0.0, outer=optax.sgd(0.5))
    params: Any = jnp.zeros(1)
    state = optimizer.init(params)
    for _ in range(2):
        updates, state = optimizer.update(jnp.ones(1), state, params)
        params = optax.apply_updates(params, updates)
    assert (float(params[0]), float(state.anchor[0])) == (-2.0, 0.0)
    for _ in range(2):
        updates, state = optimizer.update(jnp.ones(1), state, params)
        params = optax.apply_updates(params, updates)
    assert (float(params[0]), float(state.anchor[0])) == (-2.0, -2.0)  # half of the way to -4


def pairs(tree: Any, number: Any) -> Any:
    """The mean of each pair, drawn anew for each number, over leaves [peers, ...]."""
    count = jax.tree.leaves(tree)[0].shape[0]
    groups = jax.random.permutation(jax.random.fold_in(jax.random.key(3), number), count) // 2
    return group_mean(tree, groups, num_groups=count // 2)


def in_pairs(tree: Any, number: Any) -> Any:
    """`pairs` along the axis "peers"."""
    means, own = pairs(jax.lax.all_gather(tree, "peers"), number), jax.lax.axis_index("peers")
    return jax.tree.map(lambda leaf: leaf[own], means)


def test_noloco_against_plain_loops() -> None:
    """delta <- alpha delta + beta mean(theta - phi) - gamma (phi - mean phi), phi <- phi + delta, theta <- phi."""
    steps, every, alpha, beta, gamma = 9, 3, 0.5, 0.7, 0.6
    start, grads = start_and_grads(steps)
    start["a"] += RNG.normal(size=(PEERS, 2)).astype(np.float32)  # apart from the beginning
    optimizer = noloco(optax.sgd(RATE), average=in_pairs, every=every, momentum=alpha, rate=beta, pull=gamma)
    params, state = train(optimizer, start, grads, steps=steps)
    phi = {name: value.astype(np.float64) for name, value in start.items()}
    delta = {name: np.zeros((PEERS, 2)) for name in NAMES}
    for number in range(steps // every):
        # Whom each peer meets: groups of two have the same mean of distinct numbers.
        met = np.asarray(pairs(2.0 ** jnp.arange(PEERS), number))
        groups = met[:, None] == met
        assert (groups.sum(axis=1) == 2).all()
        for name in NAMES:
            way = -RATE * grads[name][number * every : (number + 1) * every].sum(axis=0)
            mean_way, mean_phi = (groups @ each / 2 for each in (way, phi[name]))
            delta[name] = alpha * delta[name] + beta * mean_way - gamma * (phi[name] - mean_phi)
            phi[name] = phi[name] + delta[name]
    close(params, phi)
    close(state.slow, phi)
    close(state.momentum, delta)


def pair_moments(alpha: float, gamma: float) -> float:
    """Spectral radius of what an outer step in random pairs does to (E phi^2, E phi delta, E delta^2), derived:

    u = (phi_i - phi_j) / 2 has E u^2 = E u phi = E phi^2 / 2 and E u delta = E phi delta / 2; delta' = alpha delta -
    gamma u and phi' = phi + delta'.
    """
    squares = np.array([gamma**2 / 2, -alpha * gamma, alpha**2])
    product = np.array([-gamma / 2, alpha, 0]) + squares
    values = np.array([1 - gamma, 2 * alpha, 0]) + squares
    return float(np.abs(np.linalg.eigvals(np.stack([values, product, squares]))).max())


@pytest.mark.slow
def test_noloco_draws_peers_together_as_derived() -> None:
    """Without gradients the distortion falls by 0.70 an outer step with the defaults; beyond gamma = 2 (1 - alpha^2) it
    grows."""
    assert pair_moments(0.5, 0.7) == pytest.approx(0.700, abs=1e-3)
    for alpha in (0.0, 0.3, 0.5, 0.9):
        bound = 2 * (1 - alpha**2)
        assert pair_moments(alpha, bound - 1e-3) < 1 < pair_moments(alpha, bound + 1e-3)
    peers, steps = 256, 16
    start = {"w": jnp.asarray(RNG.normal(size=(peers, 64)), jnp.float32)}
    still = {"w": np.zeros((steps, peers, 64), np.float32)}
    optimizer = noloco(optax.sgd(RATE), average=in_pairs, every=1)
    early, _ = train(optimizer, start, still, steps=4)
    late, _ = train(optimizer, start, still, steps=steps)
    factor = float(distortion(late) / distortion(early)) ** (1 / (steps - 4))
    assert factor == pytest.approx(0.70, abs=0.03)
    wild = noloco(optax.sgd(RATE), average=in_pairs, every=1, pull=1.9)
    assert distortion(train(wild, start, still, steps=steps)[0]) > 10 * distortion(start)


def test_noloco_survives_a_pair_that_diverged() -> None:
    """An outcome that is no number leaves parameters, slow parameters and momentum."""
    optimizer = noloco(optax.sgd(1.0), average=lambda tree, _: jax.tree.map(lambda leaf: leaf * jnp.nan, tree), every=1)
    params = jnp.zeros(2)
    updates, state = optimizer.update(jnp.ones(2), optimizer.init(params), params)
    assert updates.tolist() == [-1, -1]
    assert state.slow.tolist() == state.momentum.tolist() == [0, 0]


MAKERS = {
    "streaming_diloco": lambda inner: streaming_diloco(inner, average=pmean, every=2, fragments=2, overlap=1),
    "noloco": lambda inner: noloco(inner, average=in_pairs, every=2),
}


@pytest.mark.parametrize("name", list(MAKERS))
def test_bfloat16_parameters_keep_their_type(name: str) -> None:
    """The model stays bfloat16, and all is finite after some rounds."""
    start = {key: jnp.ones((PEERS, 3), jnp.bfloat16) for key in NAMES}
    grads = {key: jnp.asarray(RNG.normal(size=(6, PEERS, 3)), jnp.bfloat16) for key in NAMES}
    params, _ = train(MAKERS[name](optax.sgd(0.01)), start, grads, steps=6)
    assert all(leaf.dtype == jnp.bfloat16 and jnp.isfinite(leaf).all() for leaf in params.values())


@pytest.mark.parametrize("name", list(MAKERS))
def test_a_checkpoint_goes_on_as_before(name: str, tmp_path: Path) -> None:
    """State saved after five steps and restored: the next steps are the same."""
    start, grads = start_and_grads(8)
    optimizer = MAKERS[name](optax.adam(0.01))
    params, state = train(optimizer, start, grads, steps=5)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"params": params, "state": state}, {})
    like = {"params": start, "state": jax.vmap(optimizer.init)(start)}
    _, restored, _ = checkpoints.restore_latest(like)

    @functools.partial(jax.vmap, axis_name="peers")
    def step(params: Any, state: Any, grad: Any) -> Any:
        return optimizer.update(grad, state, params)

    for number in range(5, 8):
        grad = jax.tree.map(lambda leaf, now=number: leaf[now], grads)
        updates, state = step(params, state, grad)
        again, restored["state"] = step(restored["params"], restored["state"], grad)
        assert jax.tree.all(jax.tree.map(np.array_equal, updates, again))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: streaming_diloco(optax.sgd(1.0), average=pmean, every=0, fragments=1), "every must be at least 1"),
        (lambda: streaming_diloco(optax.sgd(1.0), average=pmean, every=3, fragments=4), "from 1 to every = 3, got 4"),
        (
            lambda: streaming_diloco(optax.sgd(1.0), average=pmean, every=3, fragments=1, overlap=3),
            "overlap must be from 0 to every - 1 = 2, got 3",
        ),
        (lambda: streaming_diloco(optax.sgd(1.0), average=pmean, every=3, fragments=1, mixing=1.1), "mixing must be"),
        (lambda: noloco(optax.sgd(1.0), average=pmean, every=0), "every must be at least 1, got 0"),
        (lambda: noloco(optax.sgd(1.0), average=pmean, every=1, momentum=1.0), "momentum must be at least 0"),
    ],
)  # fmt: skip
def test_what_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("name", list(MAKERS))
def test_parameters_are_wanted(name: str) -> None:
    """`update(grads, state)` alone cannot know them."""
    optimizer, params = MAKERS[name](optax.sgd(1.0)), {key: jnp.ones(1) for key in NAMES}
    with pytest.raises(ValueError, match=f"{name} wants the parameters"):
        optimizer.update(params, optimizer.init(params))


def test_fragments_must_cover_the_model() -> None:
    """A tree with a number for each array, none left out."""
    optimizer = streaming_diloco(optax.sgd(1.0), average=pmean, every=3, fragments={"a": 0, "b": 2})
    with pytest.raises(ValueError, match=r"expected a fragment .* for 2 arrays, got \[0, 2\]"):
        optimizer.init({"a": jnp.ones(1), "b": jnp.ones(1)})


def train_by_hosts(
    optimizer: Any, start: dict[str, np.ndarray], grads: dict[str, np.ndarray], *, steps: int, at_once: bool
) -> tuple[list[Any], list[Any]]:
    """Parameters and state of each peer, where hosts exchange what is offered after each update.

    `at_once`: what came is applied before the next update.
    """
    update = jax.jit(optimizer.update)
    params = [{name: jnp.asarray(value[peer]) for name, value in start.items()} for peer in range(PEERS)]
    states = [optimizer.init(each) for each in params]
    for step in range(steps):
        for peer in range(PEERS):
            grad = {name: value[step, peer] for name, value in grads.items()}
            updates, states[peer] = update(grad, states[peer], params[peer])
            params[peer] = optax.apply_updates(params[peer], updates)
        for fragment in range(host_state(states[0]).due.size):
            if not averaging_due(states[0], fragment):
                continue
            offers = [what_to_send(*each, fragment=fragment) for each in zip(states, params, strict=True)]
            mean = jax.tree.map(lambda *arrays: np.mean(arrays, axis=0), *(offer.tree for offer in offers))
            states = [
                with_average(state, offer, mean, fragment=fragment) for state, offer in zip(states, offers, strict=True)
            ]
            assert not averaging_due(states[0], fragment)
        if at_once:
            for peer in range(PEERS):
                params[peer], states[peer] = apply_average(optimizer, states[peer], params[peer])
    return params, states


MANY = {f"{number:02}": np.tile(RNG.normal(size=2), (PEERS, 1)).astype(np.float32) for number in range(12)}
"""So many arrays that a fragment has the places 1, 4, 7 and 10: in the order of numbers and not of text."""


@pytest.mark.parametrize(
    ("overlap", "mixing", "fragments"),
    [pytest.param(0, 0.0, 3, marks=pytest.mark.slow), (2, 0.5, 3), (4, 0.3, 2), (1, 1.0, 1)],
)
def test_streaming_diloco_by_hosts_is_that_of_the_axis(overlap: int, mixing: float, fragments: int) -> None:
    """Averages that hosts bring before tau steps are over are used after them: the numbers are the same."""
    steps, every = 17, 6
    grads = {name: RNG.normal(size=(steps, PEERS, 2)).astype(np.float32) for name in MANY}
    settings: dict[str, Any] = {"every": every, "fragments": fragments, "overlap": overlap, "mixing": mixing}
    expected, expected_state = train(
        streaming_diloco(optax.adam(RATE), average=pmean, **settings), MANY, grads, steps=steps
    )
    by_hosts = streaming_diloco(optax.adam(RATE), **settings)
    params, states = train_by_hosts(by_hosts, MANY, grads, steps=steps, at_once=overlap == 0)
    for peer in range(PEERS):
        close(params[peer], {name: value[peer] for name, value in expected.items()})
        close(states[peer].anchor, {name: value[peer] for name, value in expected_state.anchor.items()})
        assert states[peer].rounds == expected_state.rounds[peer]


def test_noloco_by_hosts_is_that_of_the_axis() -> None:
    """With what came applied before the next update, as the paper does."""
    start, grads = start_and_grads(13)
    expected, expected_state = train(noloco(optax.adam(RATE), average=pmean, every=4), start, grads, steps=13)
    params, states = train_by_hosts(noloco(optax.adam(RATE), every=4), start, grads, steps=13, at_once=True)
    for peer in range(PEERS):
        close(params[peer], {name: value[peer] for name, value in expected.items()})
        close(states[peer].slow, {name: value[peer] for name, value in expected_state.slow.items()})


@pytest.mark.parametrize(
    "make", [functools.partial(noloco, every=2), functools.partial(streaming_diloco, every=2, fragments=1)]
)
def test_what_is_lost_or_late_costs_nothing_that_was_learnt(make: Any) -> None:
    """Nobody else is there: a lost round leaves a peer alone, and one that comes late keeps what came after it."""
    optimizer = make(optax.sgd(1.0))
    params = {"w": jnp.zeros(1)}
    state = optimizer.init(params)

    def step(params: Any, state: Any, times: int) -> Any:
        for _ in range(times):
            updates, state = optimizer.update({"w": jnp.full(1, -1.0)}, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    params, state = step(params, state, 2)
    sent = what_to_send(state, params)
    for lost in (None, jax.tree.map(lambda leaf: np.full(leaf.shape, np.nan, np.float32), sent.tree)):
        after, _ = step(params, with_average(state, sent, lost), 1)
        np.testing.assert_array_equal(after["w"], 3.0)
    assert averaging_due(state)
    with pytest.raises(ValueError, match="structure"):
        with_average(state, sent, params)
    params, state = step(params, state, 3)  # the answer takes three updates
    arrived = with_average(state, sent, sent.tree)
    with pytest.raises(ValueError, match="not been applied"):
        what_to_send(arrived, params)
    alone, _ = step(params, state, 1)
    met, after = step(params, arrived, 1)
    if isinstance(state, NoLoCoState):
        # phi was 0, theta 2 when it was sent: delta = 0.7 * 2, and the four updates since stay.
        np.testing.assert_allclose(met["w"], 1.4 + 4, rtol=1e-6)
        np.testing.assert_allclose(after.slow["w"], 1.4, rtol=1e-6)
    else:
        # Nesterov's first step is 0.4 * (1 + 0.9) * 2 = 1.52; half of 6 and half of that.
        np.testing.assert_allclose(met["w"], 0.5 * 6 + 0.5 * 1.52, rtol=1e-6)
    np.testing.assert_allclose(alone["w"], 6.0)


def test_a_fragment_that_waits_to_be_used_does_not_leave_again() -> None:
    """A round that began late is not over its overlap when the fragment's next turn comes: first it is used."""
    optimizer = streaming_diloco(optax.sgd(1.0), every=6, fragments=1, overlap=5)
    params = {"w": jnp.zeros(1)}
    state = optimizer.init(params)
    left_at = []
    for step in range(1, 19):
        updates, state = optimizer.update({"w": jnp.full(1, -1.0)}, state, params)
        params = optax.apply_updates(params, updates)
        if step >= 10 and averaging_due(state):  # the host was busy until then
            sent = what_to_send(state, params)
            left_at.append(step)
            state = with_average(state, sent, sent.tree)
    # Due since 6; what left at 10 is used at 15, though the next turn was at 12; then at 20 what left at 15.
    assert left_at == [10, 15]
