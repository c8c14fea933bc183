"""Stacked experts compute what experts by themselves do, in place, and each is refused alone."""

import gc
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn

from dmoe_jax.experts import expert_from_functions, expert_from_linen, feedforward
from dmoe_jax.experts.base import Expert
from dmoe_jax.experts.transformer_xl import transformer_xl_layer
from dmoe_jax.layer_config import Recipe
from dmoe_jax.node.backend import ExpertBackend, ExpertGroup, UpdateRejected, make_backends
from dmoe_jax.node.programs import Batch, nbytes_of
from dmoe_jax.node.stacked import Form, stack_up
from dmoe_jax.optim.recipe import make_optimizer
from tests.dmoe_jax.node_rig import rows

RECIPE = make_optimizer(Recipe(total_steps=None, learning_rate=1e-2, warmup_steps=5, grad_clip=1.0))
"""Adam, a bound on the gradient's norm, a schedule, and smaller steps where an update is stale."""
ADAM = optax.adam(1e-2)
EXPERT = expert_from_linen(nn.Dense(4, name="stacked"), rows(1))
"""Small: what takes time here is the compiler."""
FORMS: tuple[Form, ...] = ("looped", "vmapped")


def stacked_backends(
    count: int, expert: Expert = EXPERT, optimizer: Any = ADAM, form: Form = "looped"
) -> tuple[list[ExpertBackend], ExpertGroup]:
    backends = list(make_backends({f"ffn.[0:{count}]": expert}, optimizer, seed=0).values())
    stack_up(backends, form)
    return backends, backends[0].group


def run(batches: Sequence[tuple[ExpertBackend, Batch]]) -> list[Any]:
    return batches[0][0].group.begin(batches)()


def drawn(rng: np.random.Generator, expert: Expert, *, backward: bool, keys: bool) -> Batch:
    """5 to 8 rows: one bucket, so that single and stacked programs sum over as many rows, in the same order."""
    count = int(rng.integers(5, 9))

    def draw(spec: Any) -> np.ndarray:
        if spec.dtype == "bool":
            return rng.integers(0, 2, (count, *spec.shape)).astype(bool)
        return rng.normal(size=(count, *spec.shape)).astype(spec.dtype)

    return Batch(
        inputs=tuple(map(draw, expert.inputs)),
        output_grads=draw(expert.output) if backward else None,
        keys=rng.integers(0, 2**32, (count, 2), dtype=np.uint32) if keys else None,
        seen=rng.integers(0, 3, count),
    )


def twenty_turns(expert: Expert, optimizer: Any, form: Form) -> tuple[list[Any], list[Any]]:
    """Results and final states, stacked and single, of turns with one to five experts drawn from six."""
    stacked, _ = stacked_backends(6, expert, optimizer, form)
    single = list(make_backends({"ffn.[0:6]": expert}, optimizer, seed=0).values())
    rng, found, expected = np.random.default_rng(0), [], []
    for turn in range(20):
        keys = expert.takes_key and turn % 2 == 0
        numbers = rng.permutation(6)[: rng.integers(1, 6)]
        batches = [drawn(rng, expert, backward=turn % 4 != 3, keys=keys) for _ in numbers]
        found += run([(stacked[i], batch) for i, batch in zip(numbers, batches, strict=True)])
        for i, batch in zip(numbers, batches, strict=True):
            expected += run([(single[i], batch)])
    for own, alone in zip(stacked, single, strict=True):
        assert (own.update_count, own.staleness_total) == (alone.update_count, alone.staleness_total)
    return [*found, *(own.state for own in stacked)], [*expected, *(alone.state for alone in single)]


def agree(found: Any, expected: Any, relative: float) -> None:
    """To so much of the largest number in each array."""

    def check(own: Any, other: Any) -> None:
        largest = np.abs(np.asarray(other)).max(initial=0)
        np.testing.assert_allclose(np.asarray(own), np.asarray(other), rtol=0, atol=relative * largest)

    jax.tree.map(check, found, expected)


def test_twenty_turns_are_those_of_single_experts() -> None:
    """Outputs, input gradients, states and counts, to float32's rounding."""
    agree(*twenty_turns(EXPERT, ADAM, "looped"), relative=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("optimizer", [RECIPE, optax.sgd(0.01), None], ids=["adam", "sgd", "frozen"])
def test_twenty_turns_of_transformers_with_dropout(form: Form, optimizer: Any) -> None:
    """Adam divides by the gradient's size: where a gradient is nothing but rounding, as a bias of attention keys has,
    other rounding gives another update. One expert after the other rounds as its own program does."""
    expert = transformer_xl_layer(d_model=8, num_heads=2, d_ff=16, seq_len=3, mem_len=2, dropout=0.2)
    amplified = form == "vmapped" and optimizer is RECIPE
    agree(*twenty_turns(expert, optimizer, form), relative=1e-3 if amplified else 1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_one_that_would_not_stay_finite_is_refused_alone(form: Form) -> None:
    """The others of the program learn, and its own state is bit by bit what it was."""
    backends, _ = stacked_backends(3, optimizer=optax.sgd(0.1), form=form)
    before = jax.tree.map(np.asarray, backends[1].state)
    grads = [rows(2, seed=1), np.full((2, 4), 3e38, np.float32), rows(2, seed=2)]
    batches = [
        Batch(inputs=(10 * rows(2),), output_grads=each, requests={b"%d" % i: 0.0}) for i, each in enumerate(grads)
    ]
    first, second, third = run(list(zip(backends, batches, strict=True)))
    assert isinstance(second, UpdateRejected)
    assert second.reason == "update"
    jax.tree.map(np.testing.assert_array_equal, backends[1].state, before)
    assert [backend.update_count for backend in backends] == [1, 0, 1]
    assert [list(backend.learnt_from) for backend in backends] == [[b"0"], [], [b"2"]]
    single = list(make_backends({"ffn.[0:3]": EXPERT}, optax.sgd(0.1), seed=0).values())
    for number, results in ((0, first), (2, third)):
        agree(results, single[number].backward([10 * rows(2)], grads[number]), 1e-6)
        agree(backends[number].state, single[number].state, 1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_compiled_for_batches_that_are_warm(form: Form, compilations: Any) -> None:
    """Whichever experts, how many of them, and of however many rows; nor for reading and loading a state."""
    backends, group = stacked_backends(4, form=form)
    for bucket in (1, 4):
        backends[0].warm_up_bucket(bucket)
    compiled = compilations.count
    for count in (1, 2, 3, 4):
        for size in (1, 2, 4):
            for grads in (None, rows(size)):
                batch = Batch(inputs=(rows(size),), output_grads=grads)
                run([(backend, batch) for backend in backends[-count:]])
    assert group.programs.most_together(4) == 4
    state = jax.tree.map(np.asarray, backends[1].state)
    assert compilations.count == compiled
    backends[2].load(state, update_count=7)
    agree(backends[2].state, state, 0)


@pytest.mark.parametrize("form", FORMS)
def test_states_are_held_once_and_changed_in_place(form: Form) -> None:
    """The single states are gone; an update's arrays lie where the old ones did, and XLA needs less room than a second
    copy of the stack takes."""
    gc.collect()  # what earlier tests left behind is not freed meanwhile
    held = sum(leaf.nbytes for leaf in jax.live_arrays())
    backends, group = stacked_backends(32, form=form)
    one = nbytes_of(group.read(0))
    assert sum(leaf.nbytes for leaf in jax.live_arrays()) - held == 32 * one == 32 * backends[0].nbytes
    leaves = jax.tree.leaves(group._state)
    pointers = {leaf.unsafe_buffer_pointer() for leaf in leaves}
    run([(backend, Batch(inputs=(rows(2),), output_grads=rows(2))) for backend in backends[:2]])
    assert all(leaf.is_deleted() for leaf in leaves)
    assert {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(group._state)} == pointers
    (program,) = group.programs.backward.values()  # type: ignore[attr-defined]
    # Vmapped, the states of its 16, their gradients and what becomes of them; looped, those of one.
    most = 16 * one if form == "looped" else 5 * 16 * one
    assert program.memory_analysis().temp_size_in_bytes < most  # type: ignore[attr-defined]


def test_few_batches_are_not_computed_as_many() -> None:
    """At once, there are programs for 16 experts and for 64, and of large experts one for a single batch."""
    small, _ = stacked_backends(4, form="vmapped")
    many, _ = stacked_backends(40, form="vmapped")
    large, _ = stacked_backends(4, expert_from_linen(nn.Dense(1200, name="large"), rows(1, 1200)), form="vmapped")
    for backends, expected in ((small, [4]), (many, [16, 64]), (large, [1, 4])):
        for count in (1, 2, 4, len(backends)):
            batch = Batch(inputs=(np.zeros((2, *backends[0].expert.inputs[0].shape), np.float32),))
            run([(each, batch) for each in backends[:count]])
        assert sorted(count for _, count, _ in backends[0].programs.forward) == expected


def test_loading_one_leaves_the_others_alone() -> None:
    """Random keys among its state are saved as their data and come back."""
    noisy = optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(3)), optax.sgd(0.1))
    backends, _ = stacked_backends(3, optimizer=noisy)
    alone = next(iter(make_backends({"ffn.0": EXPERT}, noisy, seed=5).values()))
    alone.backward([rows(2)], rows(2))
    others = [jax.tree.map(np.asarray, backend.state) for backend in (backends[0], backends[2])]
    backends[1].load(alone.state, update_count=1, learnt_from=[b"a"])
    agree(backends[1].state, alone.state, 0)
    agree([backends[0].state, backends[2].state], others, 0)
    agree(backends[1].backward([rows(3)], rows(3)), alone.backward([rows(3)], rows(3)), 1e-6)
    agree(backends[1].state, alone.state, 1e-6)


def test_states_are_read_from_another_thread_while_experts_learn() -> None:
    """An update takes the arrays of the whole stack; whoever reads one expert never finds them gone."""
    backends, _ = stacked_backends(4)
    done, errors = threading.Event(), []

    def read() -> None:
        try:
            while not done.is_set():
                jax.block_until_ready(backends[3].state)
        except RuntimeError as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(100):
        run([(each, Batch(inputs=(rows(2),), output_grads=rows(2))) for each in backends[:3]])
    done.set()
    reader.join()
    assert errors == []


def test_what_cannot_be_stacked() -> None:
    """Experts without a state, and those whose states differ, which may be where a checkpoint has another type."""
    add = expert_from_functions(lambda key: {}, lambda params, x: x, rows(1))
    with pytest.raises(ValueError, match="cannot be stacked: they have no state"):
        stack_up(list(make_backends({"add.[0:2]": add}, None, seed=0).values()))
    backends, _ = stacked_backends(2)
    (narrow,) = make_backends({"ffn.0": feedforward(d_model=4, expansion=1)}, ADAM, seed=0).values()
    (alone,) = make_backends({"ffn.0": EXPERT}, ADAM, seed=0).values()
    with pytest.raises(ValueError, match="cannot be stacked: their states differ in shape or type"):
        stack_up([alone, narrow])
    with pytest.raises(ValueError, match="experts that share a program must lie in one stack"):
        run([(each, Batch(inputs=(rows(1),))) for each in (backends[0], narrow)])
