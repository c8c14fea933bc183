"""Streaming DiLoCo and NoLoCo over a vmapped axis of peers, against plain loops in NumPy."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dmoe_jax import optim
from dmoe_jax.checkpoints import Checkpoints
from dmoe_jax.optim import averaging_due, moshpit_average, noloco, streaming_diloco, what_to_send, with_average
from tests.dmoe_jax.test_optim_moshpit import EVERYTHING, begin, pmean, train_peers, update

RNG = np.random.default_rng(0)
PEERS, RATE = 4, 0.1
NAMES, TWO = ("a", "b", "c"), {"a": jnp.ones(1), "b": jnp.ones(1)}


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
    settings = {"every": every, "fragments": fragments, "overlap": overlap, "mixing": mixing}
    optimizer = streaming_diloco(optax.sgd(RATE), average=pmean, **settings)
    params, state = train_peers(optimizer, start, grads)
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
    params, state = begin(optimizer, 0.0)
    for anchor in (0.0, -2.0):  # half of the way to -4
        for _ in range(2):
            params, state = update(optimizer, params, state, 1.0)
        assert (float(params[0]), float(state.anchor[0])) == (-2.0, anchor)


def pairs(tree: Any, number: Any) -> Any:
    """The mean of each pair, drawn anew for each number, over leaves [peers, ...]."""
    count = jax.tree.leaves(tree)[0].shape[0]
    groups = jax.random.permutation(jax.random.fold_in(jax.random.key(3), number), count) // 2
    return optim.group_mean(tree, groups, num_groups=count // 2)


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
    params, state = train_peers(optimizer, start, grads)
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
    """The distortion falls by 0.70 an outer step; beyond gamma = 2 (1 - alpha^2) it grows."""
    assert pair_moments(0.5, 0.7) == pytest.approx(0.700, abs=1e-3)
    for alpha in (0.0, 0.3, 0.5, 0.9):
        bound = 2 * (1 - alpha**2)
        assert pair_moments(alpha, bound - 1e-3) < 1 < pair_moments(alpha, bound + 1e-3)
    peers, steps = 256, 16
    start = {"w": jnp.asarray(RNG.normal(size=(peers, 64)), jnp.float32)}
    still = {"w": np.zeros((steps, peers, 64), np.float32)}
    optimizer = noloco(optax.sgd(RATE), average=in_pairs, every=1)
    early, late = (train_peers(optimizer, start, {"w": still["w"][:count]})[0] for count in (4, steps))
    factor = float(optim.distortion(late) / optim.distortion(early)) ** (1 / (steps - 4))
    assert factor == pytest.approx(0.70, abs=0.03)
    wild = noloco(optax.sgd(RATE), average=in_pairs, every=1, pull=1.9)
    assert optim.distortion(train_peers(wild, start, still)[0]) > 10 * optim.distortion(start)


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
    params, _ = train_peers(MAKERS[name](optax.sgd(0.01)), start, grads)
    assert all(leaf.dtype == jnp.bfloat16 and jnp.isfinite(leaf).all() for leaf in params.values())


@pytest.mark.parametrize("name", list(MAKERS))
def test_a_checkpoint_goes_on_as_before(name: str, tmp_path: Path) -> None:
    """State saved after five steps and restored: the next steps are the same."""
    start, grads = start_and_grads(8)
    optimizer = MAKERS[name](optax.adam(0.01))
    params, state = train_peers(optimizer, start, {name: value[:5] for name, value in grads.items()})
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"params": params, "state": state}, {})
    like = {"params": start, "state": jax.vmap(optimizer.init)(start)}
    _, restored, _ = checkpoints.restore_latest(like)

    step = jax.vmap(optimizer.update, axis_name="peers")
    for number in range(5, 8):
        grad = jax.tree.map(lambda leaf, now=number: leaf[now], grads)
        updates, state = step(grad, state, params)
        again, restored["state"] = step(grad, restored["state"], restored["params"])
        assert jax.tree.all(jax.tree.map(np.array_equal, updates, again))


def diloco(**settings: Any) -> Any:
    return streaming_diloco(optax.sgd(1.0), average=pmean, **{"every": 3, "fragments": 1, **settings})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: diloco(every=0), "every must be at least 1"),
        (lambda: diloco(fragments=4), "from 1 to every = 3, got 4"),
        (lambda: diloco(overlap=3), "overlap must be from 0 to every - 1 = 2, got 3"),
        (lambda: diloco(mixing=1.1), "mixing must be"),
        (lambda: diloco(fragments={"a": 0, "b": 2}).init(TWO), r"expected a fragment .* for 2 arrays, got \[0, 2\]"),
        (lambda: noloco(optax.sgd(1.0), average=pmean, every=0), "every must be at least 1, got 0"),
        (lambda: noloco(optax.sgd(1.0), average=pmean, every=1, momentum=1.0), "momentum must be at least 0"),
        (lambda: diloco().update(TWO, diloco().init(TWO)), "streaming_diloco wants the parameters"),
        (lambda: MAKERS["noloco"](optax.sgd(1.0)).update(TWO, None), "noloco wants the parameters"),
    ],
)
def test_what_is_refused(make: Any, message: str) -> None:
    """Also an update without the parameters, and fragments that are not those of the model."""
    with pytest.raises(ValueError, match=message):
        make()


MANY = {f"{number:02}": np.tile(RNG.normal(size=2), (PEERS, 1)).astype(np.float32) for number in range(12)}
"""So many arrays that a fragment has the places 1, 4, 7 and 10: in the order of numbers and not of text."""


def train_by_hosts(optimizer: Any, grads: dict[str, np.ndarray], *, at_once: bool) -> tuple[list[Any], list[Any]]:
    """Parameters and state of each peer; `at_once`: what came is applied before the next update, as in the paper."""
    update = jax.jit(optimizer.update)
    params = [{name: jnp.asarray(value[peer]) for name, value in MANY.items()} for peer in range(PEERS)]
    states = [optimizer.init(each) for each in params]
    for step in range(len(grads["00"])):
        for peer in range(PEERS):
            grad = {name: value[step, peer] for name, value in grads.items()}
            updates, states[peer] = update(grad, states[peer], params[peer])
            params[peer] = optax.apply_updates(params[peer], updates)
        for fragment in range(optim.host_state(states[0]).due.size):
            if averaging_due(states[0], fragment):
                offers = [what_to_send(*each, fragment=fragment) for each in zip(states, params, strict=True)]
                mean = jax.tree.map(lambda *arrays: np.mean(arrays, axis=0), *(offer.tree for offer in offers))
                for peer, offer in enumerate(offers):
                    states[peer] = with_average(states[peer], offer, mean, fragment=fragment)
                assert not averaging_due(states[0], fragment)
        for peer in range(PEERS if at_once else 0):
            params[peer], states[peer] = optim.apply_average(optimizer, states[peer], params[peer])
    return params, states


BY_HOSTS: dict[str, Any] = {"noloco": functools.partial(noloco, every=4)}
for overlap, mixing, fragments in ((0, 0.0, 3), (2, 0.5, 3), (4, 0.3, 2), (1, 1.0, 1)):
    make = functools.partial(streaming_diloco, every=6, overlap=overlap, mixing=mixing, fragments=fragments)
    BY_HOSTS[f"streaming {overlap}-{mixing}-{fragments}"] = make
for what in EVERYTHING:
    BY_HOSTS[what] = functools.partial(moshpit_average, every=2, what=what)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EVERYTHING else pytest.mark.slow) for name in BY_HOSTS]
)
def test_averages_by_hosts_are_those_of_the_axis(name: str) -> None:
    """Averages that hosts bring before tau steps are over are used after them: the numbers are the same."""
    make = BY_HOSTS[name]
    grads = {name: RNG.normal(size=(17, PEERS, 2)).astype(np.float32) for name in MANY}
    expected, expected_state = train_peers(make(optax.adam(RATE), average=pmean), MANY, grads)
    at_once = make.keywords.get("overlap", 0) == 0
    params, states = train_by_hosts(make(optax.adam(RATE)), grads, at_once=at_once)
    for peer in range(PEERS):
        close(params[peer], {name: value[peer] for name, value in expected.items()})
        assert expected_state.rounds is None or states[peer].rounds == expected_state.rounds[peer]
        for kept in {"noloco": ["slow"], "parameters": [], "gradients": []}.get(name, ["anchor"]):
            expected_kept = {name: value[peer] for name, value in getattr(expected_state, kept).items()}
            close(getattr(states[peer], kept), expected_kept)


@pytest.mark.parametrize(
    "make", [functools.partial(noloco, every=2), functools.partial(streaming_diloco, every=2, fragments=1)]
)
def test_what_is_lost_or_late_costs_nothing_that_was_learnt(make: Any) -> None:
    """Nobody else is there: a lost round leaves a peer alone, and one that comes late keeps what came after it."""
    optimizer = make(optax.sgd(1.0))

    def step(params: Any, state: Any, times: int) -> Any:
        for _ in range(times):
            params, state = update(optimizer, params, state, -1.0)
        return params, state

    params, state = step(*begin(optimizer, 0.0), 2)
    sent = what_to_send(state, params)
    for lost in (None, jax.tree.map(lambda leaf: np.full(leaf.shape, np.nan, np.float32), sent.tree)):
        assert step(params, with_average(state, sent, lost), 1)[0].tolist() == [3.0]
    assert averaging_due(state)
    with pytest.raises(ValueError, match="structure"):
        with_average(state, sent, {"w": params})
    params, state = step(params, state, 3)  # the answer takes three updates
    arrived = with_average(state, sent, sent.tree)
    with pytest.raises(ValueError, match="not been applied"):
        what_to_send(arrived, params)
    alone, _ = step(params, state, 1)
    met, after = step(params, arrived, 1)
    if isinstance(state, optim.NoLoCoState):
        # phi was 0, theta 2 when it was sent: delta = 0.7 * 2, and the four updates since stay.
        np.testing.assert_allclose(met, 1.4 + 4, rtol=1e-6)
        np.testing.assert_allclose(after.slow, 1.4, rtol=1e-6)
    else:
        # Nesterov's first step is 0.4 * (1 + 0.9) * 2 = 1.52; half of 6 and half of that.
        np.testing.assert_allclose(met, 0.5 * 6 + 0.5 * 1.52, rtol=1e-6)
    assert alone.tolist() == [6.0]


def test_a_fragment_that_waits_to_be_used_does_not_leave_again() -> None:
    """A round that began late is not over its overlap when the fragment's next turn comes: first it is used."""
    optimizer = streaming_diloco(optax.sgd(1.0), every=6, fragments=1, overlap=5)
    params, state = begin(optimizer, 0.0)
    left_at = []
    for step in range(1, 19):
        params, state = update(optimizer, params, state, -1.0)
        if step >= 10 and averaging_due(state):  # the host was busy until then
            sent = what_to_send(state, params)
            left_at.append(step)
            state = with_average(state, sent, sent.tree)
    # Due since 6; what left at 10 is used at 15, though the next turn was at 12; then at 20 what left at 15.
    assert left_at == [10, 15]
