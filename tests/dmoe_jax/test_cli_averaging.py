"""The flags of `dmoe train` for averaging: what they set up, and what they refuse."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
import tyro

from dmoe_jax.cli.averaging_options import AveragingOptions, OuterOptions
from dmoe_jax.cli.train_options import TrainOptions
from dmoe_jax.optim import apply_average, host_state, what_to_send, with_average
from dmoe_jax.runs.endings import UsageError
from dmoe_jax.runs.flags import flags_of
from dmoe_net.averaging.speeds import Speeds
from dmoe_net.wire.compression import Compression
from tests.dmoe_jax.training_rig import parsed


def test_averaging_options_that_pass_the_check_can_be_used() -> None:
    """Short windows, too; what the averager would refuse is refused with the command line."""
    for window_s in (0.5, 2.0, 3.0, 30.0):
        options = parsed(AveragingOptions, average_every=10, average_window_s=window_s)
        options.check()
        assert options.config().averager().assembly.window_s == window_s
    for wishes in (
        {"average_window_s": 1e9},
        {"average_timeout_s": 1e9},
        {"average_side": 1},
        {"average_name": "a.b"},
        {"average_up": -1.0},
        {"average_down": 1e9},
    ):
        with pytest.raises(UsageError, match="average"):
            parsed(AveragingOptions, average_every=10, **wishes).check()
    for outer in ({"momentum": 1.0}, {"learning_rate": 0.0}):
        with pytest.raises(ValueError, match=r"--outer-\S+ must be .*, got"):
            OuterOptions(**outer)


def test_a_collaboration_may_compress() -> None:
    """The same flag as for averaging."""
    options = tyro.cli(AveragingOptions, args=["--target-batch-size", "64", "--average-compression", "blockwise8"])
    options.check()
    assert options.collaboration().rounds().all_reduce.compression is Compression.BLOCKWISE_8BIT


def test_top_k_has_its_settings_and_an_outer_optimiser_without_momentum() -> None:
    """The residual, kept in the optimiser's state, takes the place of momentum; flags that are given count."""
    words = ["--average-every", "50", "--average", "pseudo-gradients", "--average-compression", "top-k"]
    options = tyro.cli(AveragingOptions, args=[*words, "--average-kept", "32", "--average-value-bits", "4"])
    options.check()
    state = options.wrap(optax.sgd(1.0)).init(jnp.zeros(3))
    sparse = host_state(state).feedback
    assert sparse is not None
    assert (sparse.coding.kept, sparse.coding.bits, sparse.coding.block_size, sparse.decay) == (32, 4, 4096, 0.95)
    assert options.config().compression == "none"
    assert state.residual.tolist() == [0.0] * 3
    # The outer step at rate 1 without momentum; the dense one has the parameters' size of momentum.
    for flags, num_arrays in ([], 0), (["--outer-momentum", "0.5"], 1):
        outer = tyro.cli(AveragingOptions, args=[*words, *flags]).outer_optimizer()
        assert outer is not None
        outer_state = outer.init(jnp.zeros(3))
        updates, _ = outer.update(jnp.ones(3), outer_state)
        assert len(jax.tree.leaves(outer_state)) == num_arrays
        # Nesterov's first step goes 1 + momentum times as far.
        assert updates.tolist() == [-1.0 - 0.5 * num_arrays] * 3
    assert host_state(AveragingOptions(average_every=5).wrap(optax.sgd(1.0)).init(jnp.zeros(3))).feedback is None


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"average_every": 5}, "top-k is for --average gradients or pseudo-gradients"),
        ({"target_batch_size": 64}, "top-k is for --average-every: a batch of --target-batch-size is reduced"),
        ({"average_every": 5, "average": "gradients", "average_kept": 0}, "kept must be from 1 to the block size 4096"),
        ({"average_every": 5, "average": "gradients", "average_kept": 4097}, "kept must be from 1"),
        ({"average_every": 5, "average": "gradients", "average_residual_decay": 1.5}, "decay must be from 0 to 1"),
    ],
)
def test_top_k_where_it_is_of_no_use_is_refused(wishes: dict[str, Any], message: str) -> None:
    """With a sentence that names what is wrong."""
    with pytest.raises(UsageError, match=message):
        parsed(AveragingOptions, average_compression="top-k", **wishes).check()


@pytest.mark.parametrize("what", ["parameters", "gradients", "pseudo-gradients"])
def test_the_optimiser_averages_what_the_flags_say(what: Any) -> None:
    """Weighted by samples unless told otherwise; 0 updates between averages: the optimiser as it was."""
    options = tyro.cli(AveragingOptions, args=["--average-every", "5", "--average", what, "--average-up", "100"])
    options.check()
    assert options.config().speeds == Speeds(up=12.5e6)
    state = options.wrap(optax.sgd(1.0)).init(jnp.zeros(2))
    assert host_state(state).kind == what.replace("-", "_")
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


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"average_share": 0.0}, "--average-share must be above 0 and at most 1, got 0.0"),
        ({"average_share": 0.1, "average": "gradients"}, "--average-share is for --average parameters"),
        ({"average_share": 0.1, "average_every": 0, "target_batch_size": 64}, "--average-share is for --average para"),
        ({"average_fragments": 0}, "--average-fragments must be at least 1"),
        ({"average_fragments": 2}, "--average-fragments is for --average pseudo-gradients"),
        ({"average_fragments": 6, "average": "pseudo-gradients"}, "cannot each have a turn within --average-every 5"),
        ({"average": "noloco", "average_every": 0, "target_batch_size": 64}, "noloco is for --average-every"),
        ({"average": "noloco", "average_compression": "top-k"}, "top-k is for gradients or pseudo-gradients"),
    ],
)
def test_methods_that_do_not_fit_are_refused(wishes: dict[str, Any], message: str) -> None:
    """Naming the flag, before anything is set up."""
    with pytest.raises(UsageError, match=message):
        AveragingOptions(**{"average_every": 5, **wishes}).check()


def test_methods_become_their_optimisers() -> None:
    """The trunk's optimiser says what it averages, and in how many parts."""
    params = {"a": jnp.zeros(3), "b": jnp.zeros(2)}
    for wishes, kind, fragments in (
        ({"average": "noloco"}, "noloco", 1),
        ({"average": "pseudo-gradients", "average_fragments": 2}, "streaming", 2),
        ({"average_share": 0.1}, "parameters", 1),
    ):
        options = AveragingOptions(average_every=5, **wishes)  # type: ignore[arg-type]
        options.check()
        state = options.wrap(optax.adam(1e-3)).init(params)
        assert (host_state(state).kind, host_state(state).due.size) == (kind, fragments)
        assert options.config().share == wishes.get("average_share", 1.0)


@pytest.mark.parametrize(
    ("flags", "needed"),
    [
        ("--average noloco", "--average is for --average-every or --target-batch-size: without, 'noloco' would"),
        ("--average-compression top-k", "--average-compression is for --average-every or --target-batch-size"),
        ("--average-name mine", "--average-name is for --average-every"),
        ("--average-client", "--average-client is for --average-every"),
        ("--average-share 0.5", "--average-share is for --average-every"),
        ("--average pseudo-gradients --average-fragments 2 --target-batch-size 64", "--average-fragments is for"),
        ("--average-dims 2 --target-batch-size 64", "--average-dims is for --average-every"),
        ("--no-average-by-samples --target-batch-size 64", "--no-average-by-samples is for --average-every"),
        ("--average-kept 32 --average-every 5", "--average-kept is for --average-compression top-k"),
        ("--average-value-bits 4 --average-every 5", "--average-value-bits is for --average-compression top-k"),
        ("--outer-momentum 0.5 --average-every 5", "--outer-momentum is for --average pseudo-gradients"),
        ("--outer-learning-rate 0.5 --target-batch-size 64", "--outer-learning-rate is for --average pseudo-gradients"),
        ("--listen 127.0.0.1:7000", "--listen is for --average-every or --target-batch-size without --average-client"),
        ("--listen 127.0.0.1:7000 --average-every 5 --average-client", "--listen is for --average-every"),
    ],
)
def test_a_flag_that_does_nothing_without_another_is_refused(flags: str, needed: str) -> None:
    with pytest.raises(UsageError, match=needed):
        tyro.cli(TrainOptions, args=["--join", "127.0.0.1:1", *flags.split()]).check()


def test_every_averaging_flag_is_for_some_other_one() -> None:
    """But for the two that turn averaging on."""
    named = {flag.word for _, _, flags in AveragingOptions()._needs() for flag in flags}
    assert {flag.word for flag in flags_of(AveragingOptions)} - named == {"--average-every", "--target-batch-size"}
