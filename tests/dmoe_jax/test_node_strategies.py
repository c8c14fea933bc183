"""By which strategy a node runs its experts: what it measures, what it refuses, and that callers see no difference."""

from itertools import count
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trio
from flax import linen as nn

from dmoe_jax.cli import main
from dmoe_jax.device import ThreadDevice
from dmoe_jax.experts import expert_from_functions, expert_from_linen
from dmoe_jax.node.backend import ExpertBackend, make_backends, stack_of
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.node.devices import PlacedDevice, placed
from dmoe_jax.node.placement import Place
from dmoe_jax.node.saving import ExpertSaver, saved_uids
from dmoe_jax.node.strategies import choosing
from dmoe_jax.node.strategies.choosing import Measured, chosen_by, measure, stack_up
from dmoe_jax.node.strategies.settling import Strategies
from dmoe_jax.replicas.averaging import add_average
from dmoe_jax.replicas.copies import CopyLayout
from tests.dmoe_jax.node_rig import SGD, open_rig, rows
from tests.dmoe_jax.test_node_turns import UIDS, TurnDevice, ask_all, backends

STACKED = NodeConfig(strategy="stacked")
DENSE = expert_from_linen(nn.Dense(4, name="strategies"), rows(1))


def dense(count: int, optimizer: Any = SGD) -> dict[str, ExpertBackend]:
    return make_backends({f"ffn.[0:{count}]": DENSE}, optimizer, seed=0)


async def test_a_turn_of_stacked_experts_is_one_program(autojump_clock: trio.testing.MockClock) -> None:
    """Answers, updates and refusals are those of experts alone, and metrics count each batch by itself."""
    device, alone = TurnDevice(), backends()
    async with open_rig(device=device, backends=backends(), config=STACKED) as rig:
        assert all(stack_of(backend) is not None for backend in rig.backends.values())
        (settled,) = rig.node.status()["strategies"]
        assert (settled["strategy"], settled["experts"], settled["why"]) == ("stacked", 4, "it was asked for")
        for number in range(3):
            device.turns.clear()
            answers = await ask_all(rig, number)
            assert number == 0 or device.turns == ["forward", "turn"]
            for index in range(4 if number else 3):
                (expected,) = alone[UIDS[index]].backward([10 * rows(2, seed=9)], rows(2, seed=index))
                np.testing.assert_allclose(answers[index], expected, rtol=1e-5, atol=1e-6)
            assert number or answers[3].endswith("its gradient would make expert ffn.3 not finite")
        assert rig.node.status()["updates"] == dict.fromkeys(UIDS[:3], 3) | {UIDS[3]: 2}
        # Each time 1 forward and 4 backward batches, of 1 and 2 rows; the one that was refused is none.
        assert rig.node.status()["batches"] == 3 * 5 - 1
        assert rig.node.recorder.experts[UIDS[0], "backward"].rows == 6
        for uid in UIDS:
            jax.tree.map(
                lambda own, other: np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-6),
                rig.backends[uid].params,
                alone[uid].params,
            )


async def test_in_virtual_time_nothing_is_measured(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig(backends=dense(2)) as rig:
        (settled,) = rig.node.status()["strategies"]
        assert (settled["strategy"], settled["measured"]) == ("single", None)
        assert settled["why"] == "in virtual time there is nothing to measure"
        assert stack_of(rig.backends["ffn.0"]) is None


async def test_a_node_does_what_it_measured(compilations: Any) -> None:
    """Whichever was faster; and then nothing is compiled any more."""
    said: list[str] = []
    experts = dense(3, optax.adam(0.1))
    strategies = Strategies(
        experts, placed(ThreadDevice()), NodeConfig(strategy="auto", warm_up_rows=2), may_adopt=False
    )
    await strategies.settle(said.append)
    (settled,) = strategies.status()
    measured = settled["measured"]
    assert (measured["experts"], measured["rows"]) == (3, 2)
    # None, where the machine is so busy that it is not tried.
    is_faster = measured["stacked_s"] is not None and measured["stacked_s"] < 0.9 * measured["single_s"]
    assert settled["strategy"] == ("stacked" if is_faster else "single")
    assert all((stack_of(backend) is not None) == is_faster for backend in experts.values())
    assert said[0].startswith(f"3 experts {DENSE.name} in place 0: {settled['strategy']}, since 3 experts with 2 rows")
    experts["ffn.0"].warm_up(2)
    compiled = compilations.count
    experts["ffn.1"].backward([rows(2)], rows(2))
    assert compilations.count == compiled


def test_what_is_measured_are_turns_of_both() -> None:
    """By a clock that ticks each time it is read a turn takes one tick, of either strategy."""
    (backend,) = dense(1).values()

    def measured(tick_s: float, rows: int = 2) -> Measured | None:
        return measure(backend, experts=3, rows=rows, clock=lambda: tick_s * next(ticks))

    ticks = count()
    assert measured(2**-10) == Measured(experts=3, rows=2, single_s=2**-10, stacked_s=2**-10)
    # An expert's third of a tick is 5.2 ms: beyond 5 ms nothing is tried.
    assert measured(2**-6) == Measured(experts=3, rows=2, single_s=2**-6, stacked_s=None)
    # 1,024 rows of one expert are more than the 512 that share a program.
    assert measured(2**-10, rows=1024) is None


@pytest.mark.parametrize(
    ("stacked_s", "strategy", "why"),
    [
        (0.8, "stacked", ", 800 ms by one program"),
        (0.95, "single", ", 950 ms by one program"),
        (None, "single", ", beside which starting these is little"),
    ],
)
def test_the_faster_one_is_chosen(stacked_s: float | None, strategy: str, why: str) -> None:
    """If it is so by a tenth."""
    choice = chosen_by(Measured(experts=8, rows=16, single_s=0.999, stacked_s=stacked_s))
    assert choice.strategy == strategy
    assert choice.why == "8 experts with 16 rows each take 999 ms by programs of their own" + why


@pytest.mark.parametrize("strategy", ["auto", "stacked"])
async def test_what_cannot_be_stacked_is_single_or_refused(strategy: Any, autojump_clock: Any) -> None:
    """A lone expert, experts that come and go, and a node of several processes."""
    told = PlacedDevice(place=Place(tell=lambda order: None), device=TurnDevice())
    cases = [
        (dense(1), placed(TurnDevice()), False, "there is only one of them here"),
        (dense(2), placed(TurnDevice()), True, "a stack cannot grow"),
        (make_backends({"ffn.[0:2]": DENSE}, SGD, seed=0, places=[told.place]), (told,), False, "several processes"),
    ]
    for experts, devices, may_adopt, why in cases:
        if strategy == "stacked":
            with pytest.raises(ValueError, match=f"the strategy stacked does not do for .*{why}"):
                Strategies(experts, devices, NodeConfig(strategy=strategy, warm_up_rows=2), may_adopt=may_adopt)
        else:
            strategies = Strategies(
                experts, devices, NodeConfig(strategy=strategy, warm_up_rows=2), may_adopt=may_adopt
            )
            await strategies.settle(lambda text: None)
            assert strategies.status()[0]["strategy"] == "single"
            assert why in strategies.status()[0]["why"]


def test_strategies_have_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="strategy must be one of auto, single, stacked, got 'fast'"):
        NodeConfig(strategy="fast")
    for flags in (["--mesh", "model=2"], ["--claim", "4", "--of", "ffn.[0:8]"]):
        with pytest.raises(SystemExit):
            main(["node", "--strategy", "stacked", *flags])
        assert f"--strategy stacked does not go together with {flags[0]}" in capsys.readouterr().err


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


async def test_what_fails_when_it_is_tried_is_single(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node serves; its log says why."""
    monkeypatch.setattr(choosing, "_WORTH_S", 1e9)  # tried even on a machine that is busy
    first: list[int] = []

    def apply(params: Any, x: Any) -> Any:
        if len(first) == 2:
            raise RuntimeError("not like this")
        return params["w"] * x

    expert = expert_from_functions(lambda key: {"w": jnp.ones(4)}, apply, rows(1))
    experts = make_backends({"odd.[0:2]": expert}, SGD, seed=0)
    experts["odd.0"].warm_up_bucket(1)
    first += [1, 2]
    strategies = Strategies(
        experts, placed(ThreadDevice()), NodeConfig(strategy="auto", warm_up_rows=1), may_adopt=False
    )
    await strategies.settle(lambda text: None)
    (settled,) = strategies.status()
    assert (settled["strategy"], settled["why"]) == ("single", "trying the other one raised RuntimeError")
    assert "was tried and failed" in caplog.text
    assert experts["odd.0"].backward([rows(1)], rows(1))[0].shape == (1, 4)


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
        jax.tree.map(
            lambda own, other: np.testing.assert_allclose(own, other, rtol=1e-6), stacked[uid].state, single[uid].state
        )
