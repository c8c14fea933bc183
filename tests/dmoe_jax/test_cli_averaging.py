"""The flags of `dmoe train` for averaging: what they set up, and what they refuse."""

from typing import Any

import jax.numpy as jnp
import optax
import pytest
import tyro

from dmoe_jax.cli.averaging import AveragingOptions
from dmoe_jax.cli.common import UsageError
from dmoe_jax.optim import apply_average, averaged_kind, what_to_send, with_average
from net.averaging.speeds import Speeds
from net.wire.compression import Compression


def test_averaging_options_that_pass_the_check_can_be_used() -> None:
    """Short windows, too; what the averager would refuse is refused with the command line."""
    for window_s in (0.5, 2.0, 3.0, 30.0):
        options = AveragingOptions(average_every=10, average_window_s=window_s)
        options.check()
        assert options.config().averager().assembly.window_s == window_s
    for wishes in (
        {"average_window_s": 1e9},
        {"average_timeout_s": 1e9},
        {"average_side": 1},
        {"average_name": "a.b"},
        {"average_up": -1.0},
        {"average_down": 1e9},
        {"outer_momentum": 1.0},
        {"outer_learning_rate": 0.0},
    ):
        with pytest.raises(UsageError, match=r"average|outer"):
            AveragingOptions(average_every=10, **wishes).check()


def test_a_collaboration_may_compress() -> None:
    """The same flag as for averaging."""
    options = tyro.cli(AveragingOptions, args=["--target-batch-size", "64", "--average-compression", "blockwise8"])
    options.check()
    assert options.collaboration().rounds().all_reduce.compression is Compression.BLOCKWISE_8BIT


def test_a_collaboration_may_average_in_groups() -> None:
    """Not a single averager, which has a grid of its own."""
    assert AveragingOptions(target_batch_size=64).collaboration().group_size is None
    options = tyro.cli(AveragingOptions, args=["--target-batch-size", "64", "--average-group-size", "8"])
    options.check()
    assert options.collaboration().group_size == 8
    for group_size in (1, -4, 257):
        with pytest.raises(UsageError, match="group_size must be at least 2 peers and at most side"):
            AveragingOptions(target_batch_size=64, average_group_size=group_size).check()
    with pytest.raises(UsageError, match="--average-group-size is for --target-batch-size"):
        AveragingOptions(average_every=10, average_group_size=8).check()


@pytest.mark.parametrize("what", ["parameters", "gradients", "pseudo-gradients"])
def test_the_optimiser_averages_what_the_flags_say(what: Any) -> None:
    """Weighted by samples unless told otherwise; 0 updates between averages: the optimiser as it was."""
    options = tyro.cli(AveragingOptions, args=["--average-every", "5", "--average", what, "--average-up", "100"])
    options.check()
    assert options.config().speeds == Speeds(up=12.5e6)
    state = options.wrap(optax.sgd(1.0)).init(jnp.zeros(2))
    assert averaged_kind(state) == what.replace("-", "_")
    assert state.samples is not None
    equal = AveragingOptions(average_every=5, average=what, average_by_samples=False)
    assert equal.wrap(optax.sgd(1.0)).init(jnp.zeros(2)).samples is None
    inner = optax.sgd(1.0)
    assert AveragingOptions().wrap(inner) is inner


def test_the_outer_optimiser_is_that_of_the_flags() -> None:
    """At rate 1 without momentum a lone peer's outer step leads just where it is; at 0.5 half of the way."""
    for rate, expected in ((1.0, -2.0), (0.5, -1.0)):
        flags = ["--average-every", "1", "--average", "pseudo-gradients", "--no-average-by-samples"]
        flags += ["--outer-learning-rate", str(rate), "--outer-momentum", "0"]
        optimizer = tyro.cli(AveragingOptions, args=flags).wrap(optax.sgd(1.0))
        params = jnp.zeros(1)
        updates, state = optimizer.update(jnp.full(1, 2.0), optimizer.init(params), params)
        params = optax.apply_updates(params, updates)
        sent = what_to_send(state, params)
        params, _ = apply_average(optimizer, with_average(state, sent, sent.tree), params)
        assert params.tolist() == [expected]
