"""State that aliases parameters, keys of their own type, narrow types, large numbers: trunk, collaboration, nodes."""

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dmoe_jax.arrays import PyTree, all_finite, as_params, bytes_of, kept_like, sent, wide
from dmoe_jax.averaging.settings import TreeAveragerConfig
from dmoe_jax.averaging.wire_form import wire_forms
from dmoe_jax.checkpoints import Checkpoints
from dmoe_jax.collaboration.peer_state import PeerState
from dmoe_jax.experts.adapters import expert_from_functions
from dmoe_jax.machine.device import InlineDevice
from dmoe_jax.machine.remembered import RECENT, remembered
from dmoe_jax.node.backend import ExpertBackend
from dmoe_jax.optim import moshpit_average, noloco, streaming_diloco, what_to_send, with_average
from dmoe_jax.optim.collaborative import collaborative
from dmoe_jax.optim.recipe import clip_and_decay
from dmoe_jax.trainer import iterators_of
from dmoe_jax.trunk import SharedTrunk
from dmoe_net.averaging.collaboration.progress import CHAIN_BYTES

NOISY = optax.chain(optax.add_noise(0.01, 0.5, 3), optax.sgd(0.1))
# Their states hold the initial parameters, or one array twice.
ALIASING = {
    "prodigy": optax.contrib.prodigy(1.0),
    "cocob": optax.contrib.cocob(),
    "dowg": optax.contrib.dowg(),
    "mechanize": optax.contrib.mechanize(optax.sgd(0.1)),
    "noisy": NOISY,
}


def start() -> PyTree:
    return {"w": jnp.full((3, 2), 0.1), "b": jnp.zeros(2)}


def gradient(params: PyTree) -> PyTree:
    return jax.grad(lambda p: jnp.sum((p["w"] - 1) ** 2) + jnp.sum((p["b"] + 1) ** 2))(params)


def plain(optimizer: optax.GradientTransformation, steps: int) -> PyTree:
    params = start()
    state = optimizer.init(params)
    for _ in range(steps):
        updates, state = optimizer.update(gradient(params), state, params)
        params = optax.apply_updates(params, updates)
    return params


def close(found: PyTree, expected: PyTree) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


@pytest.mark.parametrize("name", ALIASING)
async def test_a_trunk_steps_as_plain_optax(name: str) -> None:
    """A caller's parameters stay; a trunk that takes up a snapshot goes on as the one that it is of."""
    optimizer, params = ALIASING[name], start()
    trunk, later = (SharedTrunk(params, optimizer, InlineDevice()) for _ in range(2))
    for _ in range(2):
        await trunk.apply(gradient(trunk.params))
    step, saved = await trunk.snapshot()
    for _ in range(2):  # into the memory of what was saved
        await trunk.apply(gradient(trunk.params))
    later.restore(step, saved)
    for each in (later, later):
        await each.apply(gradient(each.params))
    close(trunk.params, plain(optimizer, 4))
    close(later.params, trunk.params)
    close(params, start())


@pytest.mark.parametrize("name", ALIASING)
async def test_a_collaboration_steps_as_plain_optax(name: str) -> None:
    """A newcomer takes the state as it travels, and then has the same."""
    optimizer, params = ALIASING[name], start()
    peer, newcomer = (PeerState(collaborative(optimizer), params, InlineDevice()) for _ in range(2))

    async def step(state: PeerState) -> None:
        await state.gather(gradient(state.now.params), 4)
        await state.step(await state.contribution())

    await step(peer)
    await newcomer.take([sent(leaf) for leaf in jax.tree.leaves(await peer.snapshot())])
    await step(peer)
    await step(newcomer)
    close(peer.now.params, plain(optimizer, 2))
    assert peer.digest() == newcomer.digest()
    restored = PeerState(collaborative(optimizer), params, InlineDevice())
    restored.restore(await peer.snapshot())
    await step(restored)
    close(restored.now.params, plain(optimizer, 3))
    close(params, start())


async def test_a_key_of_its_own_type_is_saved(tmp_path: Any) -> None:
    """A trunk whose optimiser draws noise goes on from the disk."""
    trunk, checkpoints = SharedTrunk(start(), NOISY, InlineDevice()), Checkpoints(tmp_path)
    checkpoints.save(*await trunk.snapshot(), {})
    trunk.restore(*checkpoints.restore_latest(trunk.state)[:2])
    await trunk.apply(gradient(trunk.params))
    close(trunk.params, plain(NOISY, 1))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn])
async def test_a_collaboration_of_few_bits(dtype: Any) -> None:
    """0.5 - 0.5 * 0.5 is exact in all of them."""
    peer = PeerState(collaborative(optax.sgd(0.5)), {"w": jnp.full(3, 0.5, dtype)}, InlineDevice())
    assert len(peer.digest()) == CHAIN_BYTES
    await peer.gather({"w": jnp.full(3, 0.5, dtype)}, 4)
    await peer.step(await peer.contribution())
    assert peer.now.params["w"].dtype == dtype
    np.testing.assert_array_equal(np.asarray(peer.now.params["w"], np.float32), 0.25)


async def test_float64_stays_exact_alone() -> None:
    """A third of a third has no float32; what others brought travels in it, and the layout says so."""
    with jax.enable_x64(True):
        third = np.float64(1) / 3
        peer = PeerState(collaborative(optax.sgd(third)), {"w": jnp.full(2, third)}, InlineDevice())
        assert "float64" in peer.layout.rounding
        await peer.gather({"w": jnp.full(2, third)}, 1)
        own = await peer.contribution()
        assert peer.is_exact(own.mean)
        await peer.step(own)
        np.testing.assert_allclose(peer.now.params["w"], third - third * third, rtol=1e-15)
        assert not peer.is_exact(own.mean.copy())
    assert PeerState(collaborative(optax.sgd(0.1)), start(), InlineDevice()).layout.rounding == ""


def test_each_array_keeps_its_kind() -> None:
    """As it travels and comes back: arrays of narrow types, keys, NumPy's arrays and Python's numbers."""
    few, empty = jnp.array([0.5, -2.0], jnp.float8_e4m3fn), jnp.ones((0, 2), jnp.bfloat16)
    for own in (jnp.ones((), jnp.int4), empty, few, jax.random.key(1), np.ones(2), 3, 0.5, True):
        back = kept_like(own, np.asarray(sent(own)))
        assert type(back) is type(own)
        assert np.asarray(sent(back)).tolist() == np.asarray(sent(own)).tolist()
    assert bytes_of(jnp.ones(2, jnp.bfloat16)).tobytes() == b"\x80\x3f\x80\x3f"  # 1.0 is 0x3f80
    assert wide(jnp.ones(1, jnp.float8_e5m2)).dtype == jnp.float32
    with pytest.raises(ValueError, match=r"\['name'\] is 'x'"):
        as_params({"w": 1.0, "name": "x"})


@pytest.mark.parametrize(("dtype", "size"), [(np.float16, 3e4), (np.float32, 1e20), (np.float32, 3e30)])
def test_a_norm_beyond_its_type(dtype: Any, size: float) -> None:
    """Finite gradients are finite, and are clipped to their direction: 4096 numbers of 1/64 have the norm 1."""
    grads = {"w": jnp.full(4096, size, dtype)}
    assert all_finite(grads)
    assert all_finite({})
    assert not all_finite({"w": grads["w"].at[3].set(np.inf)})
    clipped, _ = clip_and_decay(1.0, 0.0).update(grads, optax.EmptyState(), None)
    np.testing.assert_allclose(np.asarray(clipped["w"], np.float32), 1 / 64, rtol=1e-3)


def test_an_integer_among_an_experts_parameters() -> None:
    """It stays as it is; what is beside it learns: the loss's gradient of w is x^T g, with x and g of ones 2."""
    expert = expert_from_functions(
        lambda key: {"w": jnp.zeros((2, 2)), "order": jnp.array([1, 0])},
        lambda p, x: (x @ p["w"])[:, p["order"]],
        np.zeros((1, 2), np.float32),
    )
    backend = ExpertBackend(expert, optax.sgd(0.5), expert.init(jax.random.key(0)))
    backend.backward([np.ones((2, 2), np.float32)], np.ones((2, 2), np.float32))
    np.testing.assert_array_equal(backend.params["order"], [1, 0])
    np.testing.assert_array_equal(backend.params["w"], -1.0)


@pytest.mark.parametrize("what", ["parameters", "gradients", "pseudo_gradients", "noloco", "streaming"])
@pytest.mark.parametrize("around", ["masked", "multi_transform"])
def test_a_part_of_a_model_is_averaged(what: Any, around: str) -> None:
    """The body alone is offered, and an average of it moves nothing else."""
    sgd = optax.sgd(0.5)
    others = {"noloco": noloco(sgd, every=1), "streaming": streaming_diloco(sgd, every=1, fragments=1)}
    average = others[what] if what in others else moshpit_average(sgd, what=what)
    if around == "masked":
        optimizer = optax.masked(average, {"a_head": False, "body": True})
    else:
        kinds = {"own": optax.set_to_zero(), "shared": average}
        optimizer = optax.multi_transform(kinds, {"a_head": "own", "body": "shared"})
    params = {"a_head": jnp.zeros(2), "body": jnp.ones(3)}
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for _ in range(3):
        _, state = update(params, state, params)
        offered = what_to_send(state, params)
        assert [leaf.shape for leaf in jax.tree.leaves(offered.tree)] in ([(3,)], [(3,), (3,)])
        _, (form,) = wire_forms(optimizer, params, TreeAveragerConfig())
        form.layout.check(offered.tree)
        state = with_average(state, offered, offered.tree)
    updates, _ = update({"a_head": jnp.zeros(2), "body": jnp.zeros(3)}, state, params)
    np.testing.assert_array_equal(updates["a_head"], 0.0)


def test_batches_are_iterators() -> None:
    """A list of them, or one alone; what is none is refused with its kind."""
    rows = [np.zeros(2), np.ones(2)]
    assert len(iterators_of([iter(rows), iter(rows)])) == len(iterators_of(row for row in rows)) + 1
    for wrong, sentence in (([], "at least one"), (rows, "ndarray for trainer 0"), ([rows], "list for trainer 0")):
        with pytest.raises(ValueError, match=sentence):
            iterators_of(wrong)


def test_what_nobody_uses_is_forgotten() -> None:
    """But for the newest of it."""
    living = weakref.WeakSet[Any]()

    class Thing: ...

    @remembered()
    def thing(number: int) -> Thing:
        living.add(found := Thing())
        return found

    kept = thing(0)
    for number in range(60):
        assert thing(number) is thing(number)
    gc.collect()
    assert thing(0) is kept
    assert len(living) <= RECENT + 1
