"""Stacked experts compute what experts by themselves do, in place, and each is refused alone; and what is stacked."""

import functools
import gc
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trio
from flax import linen as nn

from dmoe_jax.experts import expert_from_functions, expert_from_linen, feedforward
from dmoe_jax.experts.base import Expert
from dmoe_jax.experts.transformer_xl import transformer_xl_layer
from dmoe_jax.layer_config import Recipe
from dmoe_jax.machine.device import ThreadDevice
from dmoe_jax.node.backend import ExpertBackend, ExpertGroup, UpdateRejected, make_backends
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.node.programs import Batch, nbytes_of
from dmoe_jax.node.saving import ExpertSaver, saved_uids
from dmoe_jax.node.sharding import Place, PlacedDevice, placed
from dmoe_jax.node.stacked import MOST_STACKED_BYTES, Form, Strategies, stack_up
from dmoe_jax.optim.recipe import make_optimizer
from dmoe_jax.placement.averager import add_average
from dmoe_jax.placement.copies import CopyLayout
from tests.dmoe_jax.node_rig import SGD, open_rig, rows
from tests.dmoe_jax.test_node_overload import UIDS, TurnDevice, ask_all, backends, check_as_alone
from tests.dmoe_jax.training_rig import outcome

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
    """Adam amplifies rounding where a gradient is nothing else; looped programs round as single ones do."""
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
    """Single states are gone, an update reuses the arrays' memory, and XLA needs no second copy of the stack."""
    gc.collect()  # what earlier tests left behind is not freed meanwhile
    held = sum(leaf.nbytes for leaf in jax.live_arrays())
    count = 37  # no other array of this process has as many rows
    backends, group = stacked_backends(count, form=form)
    one = nbytes_of(group.read(0))
    assert sum(leaf.nbytes for leaf in jax.live_arrays()) - held == count * one == count * backends[0].nbytes

    def stack() -> list[Any]:
        return [leaf for leaf in jax.live_arrays() if leaf.shape[:1] == (count,)]

    leaves = stack()
    assert sum(leaf.nbytes for leaf in leaves) == count * one
    pointers = {leaf.unsafe_buffer_pointer() for leaf in leaves}
    run([(backend, Batch(inputs=(rows(2),), output_grads=rows(2))) for backend in backends[:2]])
    assert all(leaf.is_deleted() for leaf in leaves)
    assert {leaf.unsafe_buffer_pointer() for leaf in stack()} == pointers
    (program,) = group.programs.backward.values()  # type: ignore[attr-defined]
    # Vmapped, the states of its 16, their gradients and what becomes of them; looped, those of one.
    most = 16 * one if form == "looped" else 5 * 16 * one
    assert program.memory_analysis().temp_size_in_bytes < most  # type: ignore[attr-defined]


def test_few_batches_are_not_computed_as_many() -> None:
    """At once, there are programs for 16 experts and for 64, and of large experts one for a single batch."""
    large = expert_from_linen(nn.Dense(1200, name="large"), rows(1, 1200))
    for number, expert, expected in ((4, EXPERT, [4]), (40, EXPERT, [16, 64]), (4, large, [1, 4])):
        backends, _ = stacked_backends(number, expert, form="vmapped")
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
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            jax.block_until_ready(backends[3].state)

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        for _ in range(100):
            run([(each, Batch(inputs=(rows(2),), output_grads=rows(2))) for each in backends[:3]])
        done.set()
        reading.result()


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


def dense(count: int, optimizer: Any = SGD) -> dict[str, ExpertBackend]:
    return make_backends({f"ffn.[0:{count}]": EXPERT}, optimizer, seed=0)


@pytest.mark.slow
async def test_a_turn_of_stacked_experts_is_one_program(autojump_clock: trio.testing.MockClock) -> None:
    """Answers, updates and refusals are those of experts alone, and metrics count each batch by itself."""
    device, alone, rounds = TurnDevice(), backends(), []
    async with open_rig(device=device, backends=backends(), config=NodeConfig(strategy="stacked")) as rig:
        assert all(backend.programs.size == 4 for backend in rig.backends.values())
        (settled,) = rig.node.status()["strategies"]
        assert (settled["strategy"], settled["experts"], settled["why"]) == ("stacked", 4, "it was asked for")
        for number in range(3):
            device.turns.clear()
            rounds.append(await ask_all(rig, number))
            assert number == 0 or device.turns == ["forward", "turn"]
        assert rounds[0][3].endswith("its gradient would make expert ffn.3 not finite")
        check_as_alone(rig, alone, rounds, rtol=1e-5, atol=1e-6)
        # Each time 1 forward and 4 backward batches, of 1 and 2 rows; the one that was refused is none.
        assert rig.node.status()["batches"] == 3 * 5 - 1
        assert rig.node.recorder.experts[UIDS[0], "backward"].rows == 6


async def test_in_virtual_time_experts_are_single(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig(backends=dense(2)) as rig:
        (settled,) = rig.node.status()["strategies"]
        assert settled["strategy"] == "single"
        assert settled["why"] == "in virtual time starting a program costs nothing"
        assert rig.backends["ffn.0"].programs.size == 1


@pytest.mark.parametrize(("more", "strategy"), [(1, "single"), (0, "stacked")])
async def test_small_experts_are_stacked(more: int, strategy: str, compilations: Any) -> None:
    """Up to a bound on their parameters. Then nothing is compiled but what is warmed up."""
    size = MOST_STACKED_BYTES["looped"] // 4 + more

    def apply(params: Any, x: Any) -> Any:
        return x * params["w"][:4]

    expert = expert_from_functions(lambda key: {"w": jnp.ones(size)}, apply, rows(1), name="bounded")
    said: list[str] = []
    experts = make_backends({"ffn.[0:3]": expert}, SGD, seed=0)
    strategies = Strategies(experts, placed(ThreadDevice()), NodeConfig(strategy="auto"), may_adopt=False)
    await strategies.settle(said.append)
    (settled,) = strategies.status()
    assert settled["strategy"] == strategy
    assert {backend.programs.size for backend in experts.values()} == {3 if strategy == "stacked" else 1}
    expected = f"3 experts bounded in place 0: stacked, since parameters of {4 * size} bytes are at most {4 * size},"
    assert [text.startswith(expected) for text in said] == ([True] if strategy == "stacked" else [])
    experts["ffn.0"].warm_up(2)
    compiled = compilations.count
    experts["ffn.1"].backward([rows(2)], rows(2))
    assert compilations.count == compiled


@pytest.mark.parametrize("strategy", ["auto", "stacked"])
async def test_what_cannot_be_stacked_is_single_or_refused(strategy: Any, autojump_clock: Any) -> None:
    """A lone expert, experts that come and go, and a node of several processes."""
    told = PlacedDevice(place=Place(led=lambda uid, programs: programs), device=TurnDevice())
    cases = [
        (dense(1), placed(TurnDevice()), False, "there is only one of them here"),
        (dense(2), placed(TurnDevice()), True, "a stack cannot grow"),
        (make_backends({"ffn.[0:2]": EXPERT}, SGD, seed=0, places=[told.place]), (told,), False, "several processes"),
    ]
    for experts, devices, may_adopt, why in cases:
        make = functools.partial(Strategies, experts, devices, NodeConfig(strategy=strategy), may_adopt=may_adopt)
        if strategy == "stacked":
            with pytest.raises(ValueError, match=f"the strategy stacked does not do for .*{why}"):
                make()
        else:
            strategies = make()
            await strategies.settle(lambda text: None)
            (settled,) = strategies.status()
            assert settled["strategy"] == "single"
            assert why in settled["why"]


def test_strategies_have_names(capsys: pytest.CaptureFixture[str]) -> None:
    config = NodeConfig()
    object.__setattr__(config, "strategy", "fast")  # the tests' check of types refuses it before the config does
    with pytest.raises(ValueError, match="strategy must be one of auto, single, stacked, got 'fast'"):
        config.__post_init__()
    for flags in (["--mesh", "model=2"], ["--claim", "4", "--of", "ffn.[0:8]"]):
        _, error = outcome(["node", "--strategy", "stacked", *flags], capsys)
        assert f"--strategy stacked does not go together with {flags[0]}" in error


@pytest.mark.slow
async def test_stacked_experts_are_saved_one_by_one(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    """And taken up by nodes of either strategy, each expert with its own state and count."""
    adam = optax.adam(0.1)
    states: dict[str, Any] = {}
    for number, strategy in enumerate(("stacked", "single", "stacked"), start=1):
        experts = dense(3, adam)
        saver = ExpertSaver(tmp_path, experts, TurnDevice())
        await saver.restore()
        async with open_rig(device=TurnDevice(), backends=experts, config=NodeConfig(strategy=strategy)) as rig:
            for uid, state in states.items():
                jax.tree.map(np.testing.assert_array_equal, rig.backends[uid].state, state)
            await rig.backward("ffn.1", b"%d" % number, rows(2), rows(2))
            await saver.save()
            states = {uid: jax.tree.map(np.asarray, backend.state) for uid, backend in experts.items()}
        assert experts["ffn.1"].update_count == number
    assert saved_uids(tmp_path) == ("ffn.1",)  # the others have learnt nothing


def test_replicas_average_a_stacked_expert() -> None:
    """As they do a single one: what came back less what was sent is added, and the others keep their states."""
    stacked, single = dense(2), dense(2)
    stack_up(list(stacked.values()))
    for experts in (stacked, single):
        backend = experts["ffn.1"]
        backend.backward([rows(2)], rows(2))
        layout = CopyLayout(backend.state)
        sent = layout.vector(backend.state)
        assert add_average(backend, layout, sent, sent + 1)
        assert backend.update_count == 1
    for uid in stacked:
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), stacked[uid].state, single[uid].state)
