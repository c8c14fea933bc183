"""The flags of `dmoe train` for averaging: what they set up, and what they refuse."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
import tyro

from dmoe_jax.cli.averaging_options import AveragingOptions, OuterOptions
from dmoe_jax.cli.train_options import TrainOptions
from dmoe_jax.optim import ErrorFeedback, apply_average, host_state, what_to_send, with_average
from dmoe_jax.runs.endings import UsageError
from dmoe_jax.runs.flags import flags_of
from dmoe_net.averaging.speeds import Speeds
from dmoe_net.wire.compression import Compression
from dmoe_net.wire.sparse import SparseCoding
from tests.dmoe_jax.training_rig import parsed


def test_what_passes_the_check_can_be_used() -> None:
    """Short windows, too; and the same flag compresses averages and collaborations."""
    for window_s in (0.5, 2.0, 3.0, 30.0):
        options = parsed(AveragingOptions, average_every=10, average_window_s=window_s)
        options.check()
        assert options.config().averager().assembly.window_s == window_s
    options = tyro.cli(AveragingOptions, args=["--target-batch-size", "64", "--average-compression", "blockwise8"])
    options.check()
    assert options.collaboration().rounds().all_reduce.compression is Compression.BLOCKWISE_8BIT


def test_top_k_has_its_settings_and_an_outer_optimiser_without_momentum() -> None:
    """The residual, kept in the optimiser's state, takes the place of momentum; flags that are given count."""
    words = ["--average-every", "50", "--average", "pseudo-gradients", "--average-compression", "top-k"]
    options = tyro.cli(AveragingOptions, args=[*words, "--average-kept", "32", "--average-value-bits", "4"])
    options.check()
    state = host_state(options.wrap(optax.sgd(1.0)).init(jnp.zeros(3)))
    assert state.feedback == ErrorFeedback(coding=SparseCoding(kept=32, bits=4, block_size=4096), decay=0.95)
    assert options.config().compression == "none"
    assert state.residual.tolist() == [0.0] * 3
    # The outer step at rate 1 without momentum; the dense one has the parameters' size of momentum.
    for flags, num_arrays in ([], 0), (["--outer-momentum", "0.5"], 1):
        outer = tyro.cli(AveragingOptions, args=[*words, *flags]).outer_optimizer()
        outer_state = outer.init(jnp.zeros(3))
        updates, _ = outer.update(jnp.ones(3), outer_state)
        assert len(jax.tree.leaves(outer_state)) == num_arrays
        # Nesterov's first step goes 1 + momentum times as far.
        assert updates.tolist() == [-1.0 - 0.5 * num_arrays] * 3
    assert host_state(AveragingOptions(average_every=5).wrap(optax.sgd(1.0)).init(jnp.zeros(3))).feedback is None


@pytest.mark.parametrize(
    ("flags", "kind", "fragments"),
    [
        ("--average parameters", "parameters", 1),
        ("--average gradients", "gradients", 1),
        ("--average pseudo-gradients", "pseudo_gradients", 1),
        ("--average noloco", "noloco", 1),
        ("--average pseudo-gradients --average-fragments 2", "streaming", 2),
        ("--average-share 0.1", "parameters", 1),
    ],
)
def test_methods_become_their_optimisers(flags: str, kind: str, fragments: int) -> None:
    """The trunk's optimiser says what it averages, and in how many parts."""
    options = tyro.cli(AveragingOptions, args=["--average-every", "5", "--average-up", "100", *flags.split()])
    options.check()
    state = host_state(options.wrap(optax.adam(1e-3)).init({"a": jnp.zeros(3), "b": jnp.zeros(2)}))
    assert (state.kind, state.due.size) == (kind, fragments)
    config = options.config()
    assert (config.speeds, config.share) == (Speeds(up=12.5e6), 0.1 if "share" in flags else 1.0)


def test_averages_are_weighted_by_samples_unless_told_otherwise() -> None:
    """With 0 updates between averages the optimiser is as it was."""
    inner = optax.sgd(1.0)
    for options, is_weighted in (({}, True), ({"average_by_samples": False}, False)):
        state = AveragingOptions(average_every=5, **options).wrap(inner).init(jnp.zeros(2))
        assert (state.samples is not None) == is_weighted
    assert AveragingOptions().wrap(inner) is inner


def test_the_outer_optimiser_is_that_of_the_flags() -> None:
    """At rate 1 without momentum a lone peer's outer step leads just where it is; at 0.5 half of the way."""
    flags = "--average-every 1 --average pseudo-gradients --no-average-by-samples --outer-momentum 0"
    for rate, expected in (("1", -2.0), ("0.5", -1.0)):
        words = [*flags.split(), "--outer-learning-rate", rate]
        optimizer = tyro.cli(AveragingOptions, args=words).wrap(optax.sgd(1.0))
        params = jnp.zeros(1)
        updates, state = optimizer.update(jnp.full(1, 2.0), optimizer.init(params), params)
        params = optax.apply_updates(params, updates)
        sent = what_to_send(state, params)
        params, _ = apply_average(optimizer, with_average(state, sent, sent.tree), params)
        assert params.tolist() == [expected]


NEEDS = {
    "--average-every or --target-batch-size": [
        *("--average noloco", "--average-compression top-k", "--average-name mine", "--average-client"),
        *("--average-window-s 3", "--average-timeout-s 9", "--average-up 8", "--average-down 8", "--average-side 2"),
        *("--listen 127.0.0.1:7000", "--listen 127.0.0.1:7000 --average-every 5 --average-client"),
    ],
    "--average-every": [
        *("--average-share 0.5", "--average-dims 2 --target-batch-size 64"),
        "--no-average-by-samples --target-batch-size 64",
    ],
    "--average-compression top-k": [
        *("--average-kept 32 --average-every 5", "--average-value-bits 4 --average-every 5"),
        "--average-residual-decay 0.5 --average-every 5",
    ],
    "--average pseudo-gradients": [
        *("--outer-momentum 0.5 --average-every 5", "--outer-learning-rate 0.5 --target-batch-size 64"),
        *("--average-fragments 2 --average-every 5", "--average-fragments 2 --target-batch-size 64"),
    ],
}
"""Flags that do nothing without another one, each at the head of a command line."""


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        *((flags, f"{flags.split()[0]} is for {other}") for other, several in NEEDS.items() for flags in several),
        ("--average noloco", "--average-every or --target-batch-size: without, 'noloco' would"),
        *((f"--average-every 5 --average-{each}-s 1e9", "--average-...: ") for each in ("window", "timeout")),
        ("--average-every 5 --average-window-s 0", "--average-...: window_s must be a positive number of seconds"),
        ("--average-every 5 --average-timeout-s 0", "--average-...: timeout_s must be a positive number of seconds"),
        ("--average-every 5 --average-side 1", "--average-...: side must be at least 2, got 1"),
        ("--average-every 5 --average-dims 0", "--average-...: .*dims"),
        ("--average-every 5 --average-name a.b", "--average-...: "),
        ("--average-every 5 --average-up=-1", "--average-...: bandwidth up"),
        ("--average-every 5 --average-down 1e9", "--average-...: bandwidth down"),
        ("--average-every 5 --average-share 0", "--average-share must be above 0 and at most 1, got 0.0"),
        ("--average-every 5 --average-share 0.1 --average gradients", "--average-share is for --average parameters"),
        ("--target-batch-size 64 --average-share 0.1", "--average-share is for --average para"),
        ("--average-every 5 --average-fragments 0", "--average-fragments must be at least 1"),
        ("--target-batch-size 64 --average pseudo-gradients --average-fragments 2", "gradients with --average-every"),
        ("--average-every 5 --average pseudo-gradients --average-fragments 6", "cannot each have a turn within"),
        ("--target-batch-size 64 --average noloco", "noloco is for --average-every"),
        ("--average-every 5 --average noloco TOP", "top-k is for gradients or pseudo-gradients"),
        ("--average-every 5 TOP", "top-k is for --average gradients or pseudo-gradients"),
        ("--target-batch-size 64 TOP", "top-k is for --average-every: a batch of --target-batch-size is reduced"),
        ("--average-every 5 --average gradients TOP --average-kept 0", "kept must be from 1 to the block size 4096"),
        ("--average-every 5 --average gradients TOP --average-kept 4097", "kept must be from 1"),
        ("--average-every 5 --average gradients TOP --average-residual-decay 1.5", "decay must be from 0 to 1"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags: str, line: str) -> None:
    """With a sentence that names what is wrong, before anything is set up."""
    words = ["--join", "127.0.0.1:1", *flags.replace("TOP", "--average-compression top-k").split()]
    with pytest.raises(UsageError, match=line):
        tyro.cli(TrainOptions, args=words).check()


def test_every_averaging_flag_is_for_some_other_one() -> None:
    """But for the two that turn averaging on; the table above has all others."""
    named = {flags.split()[0].replace("--no-", "--") for several in NEEDS.values() for flags in several}
    assert {flag.word for flag in flags_of(AveragingOptions)} - named == {"--average-every", "--target-batch-size"}


@pytest.mark.parametrize("outer", [{"momentum": 1.0}, {"learning_rate": 0.0}])
def test_settings_of_the_outer_optimiser_have_their_range(outer: Any) -> None:
    """The message names the flag."""
    with pytest.raises(ValueError, match=r"--outer-\S+ must be .*, got"):
        OuterOptions(**outer)
