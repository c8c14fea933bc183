"""The strategy by which a node runs its experts: its rule, what it refuses, and that callers see no difference."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import trio
from flax import linen as nn

from dmoe_jax.cli import main
from dmoe_jax.experts import expert_from_linen
from dmoe_jax.machine.device import ThreadDevice
from dmoe_jax.node import stacked as stacked_module
from dmoe_jax.node.backend import ExpertBackend, make_backends
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.node.saving import ExpertSaver, saved_uids
from dmoe_jax.node.sharding import Place, PlacedDevice, placed
from dmoe_jax.node.stacked import Strategies, stack_up
from dmoe_jax.placement.averager import add_average
from dmoe_jax.placement.copies import CopyLayout
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
        assert all(backend.programs.size == 4 for backend in rig.backends.values())
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


async def test_in_virtual_time_experts_are_single(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig(backends=dense(2)) as rig:
        (settled,) = rig.node.status()["strategies"]
        assert settled["strategy"] == "single"
        assert settled["why"] == "in virtual time starting a program costs nothing"
        assert rig.backends["ffn.0"].programs.size == 1


@pytest.mark.parametrize(("most", "strategy"), [(79, "single"), (80, "stacked")])
async def test_small_experts_are_stacked(
    most: int, strategy: str, monkeypatch: pytest.MonkeyPatch, compilations: Any
) -> None:
    """A kernel of 4 by 4 numbers and a bias of 4 have 80 bytes. Then nothing is compiled but what is warmed up."""
    monkeypatch.setattr(stacked_module, "MOST_STACKED_BYTES", {"looped": most, "vmapped": most})
    said: list[str] = []
    experts = dense(3)
    strategies = Strategies(experts, placed(ThreadDevice()), NodeConfig(strategy="auto"), may_adopt=False)
    await strategies.settle(said.append)
    (settled,) = strategies.status()
    assert settled["strategy"] == strategy
    assert {backend.programs.size for backend in experts.values()} == {3 if strategy == "stacked" else 1}
    expected = f"3 experts {DENSE.name} in place 0: stacked, since parameters of 80 bytes are at most 80, the bound on"
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
    config = NodeConfig()
    object.__setattr__(config, "strategy", "fast")  # the tests' check of types refuses it before the config does
    with pytest.raises(ValueError, match="strategy must be one of auto, single, stacked, got 'fast'"):
        config.__post_init__()
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
