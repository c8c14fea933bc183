"""The papers' numbers: where each is from, how sure it is, and which figure of ours stands beside it."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from experiments.moshpit_averaging.paper import SQUARE, TABLE, TITLES, MethodName, paper_rounds

TAGS: Mapping[str, str] = {
    "S": "seen in the source that is named",
    "FIG": "read off a figure of the source by pixel position, to about 0.01",
    "RUN": "obtained by running the authors' published simulator",
    "C": "computed from facts that were seen",
    "M~": "from memory, with medium confidence, and seen in no source: no threshold rests on it",
    "NF": "looked for, and not found",
}
"""Meanings of the tags."""


class PaperFigure(NamedTuple):
    """A quantity, ours and a paper's, with where that was seen and how sure it is."""

    quantity: str
    key: str  # of ours in the headline; see `look_up`
    paper: float | str | None = None  # None: there is none, or it was not found
    source: str = ""
    tag: str = ""  # one of `TAGS`


def look_up(headline: object, key: str) -> object:
    """The value at a key such as `models/dmoe/steps` or `table/peers=512,failure=0.001/methods`, or None.

    A step is the name of an entry, or for a list the values that its first matching entry has.
    """
    for step in key.split("/"):
        if isinstance(headline, list):
            wanted = [pair.split("=") for pair in step.split(",")]
            matching = (item for item in headline if all(f"{item.get(name)}" == value for name, value in wanted))
            headline = next(matching, None)
        elif isinstance(headline, Mapping):
            headline = headline.get(step)
        else:
            return None
    return headline


_NOTEBOOKS = "mryab/learning-at-home, its MNIST notebooks, one stored run"
_REVIEWS = "reviews and reproducibility extracts of arXiv 2002.04013"
_CURVES = f"values of the paper's curves, in {_REVIEWS}"
_SLIDES = "Gorbunov's slides of December 2021 on Moshpit SGD"
_MOSHPIT = "yandex-research/moshpit-sgd, averaging experiments"

_STORED_RUNS = {
    "dense_1000_ms": ("dense, 1000 ms", "0.1 at 1,024, 0.28 at 5,120, 0.73 at 10,240, 0.926 at 20,480"),
    "256_experts_frozen_gate_fresh_experts_1000_ms": (
        "256 experts, frozen gate, fresh experts, 1000 ms",
        "0.52 at 1,024, 0.89 at 5,120, 0.93 at 10,240, 0.942 at 20,480",
    ),
    "4096_experts_frozen_gate_fresh_experts_1000_ms_10_failures": (
        "4096 experts, frozen gate, fresh experts, 1000 ms, 10 % failures",
        "0.47 at 1,024, 0.89 at 5,120, 0.94 at 10,240, 0.953 at 20,480",
    ),
}
"""Curve -> its name, and validation accuracy after so many updates. The router of the authors' program is never
trained, and its experts feel no delay."""


def _mnist() -> Iterator[PaperFigure]:
    for curve, (title, accuracies) in _STORED_RUNS.items():
        quantity = f"final accuracy, {title} (theirs: of 1,024 or 512 wide, after as many updates)"
        yield PaperFigure(quantity, f"accuracy_{curve}", accuracies, _NOTEBOOKS, "FIG")
    quantity = "final accuracy, 256 experts, trained gate, 1000 ms (theirs: more, of which model is not said)"
    yield PaperFigure(quantity, "accuracy_256_experts_1000_ms", 0.95, _REVIEWS, "S")
    quantity = "final accuracy of 256 experts of the authors' program minus the dense model's at 1000 ms, both tuned"
    yield PaperFigure(quantity, "lead")
    yield PaperFigure("the same at the paper's step size", "lead_untuned")
    yield PaperFigure("the same, keys that are trained and experts that are stale", "lead_untuned_trained_keys")
    yield PaperFigure("stale experts with our remedies minus the tuned dense model", "lead_remedies")
    yield PaperFigure("the same, remedies on both sides", "lead_remedies_on_both_sides")
    yield PaperFigure("what 10 % failures cost of the final accuracy of 256 experts", "failures_cost_trained_keys")
    yield PaperFigure("what they cost in the authors' program", "failures_cost")


def _averaging() -> Iterator[PaperFigure]:
    methods: tuple[MethodName, ...] = ("moshpit", "random_groups", "push_sum", "all_reduce")
    for setting in TABLE:
        theirs = paper_rounds(setting)
        rule = setting.failure_rule.replace("_", "-")
        entry = f"table/peers={setting.num_peers},failure={setting.failure},failure_rule={rule}"
        is_stored = setting.grid == SQUARE and setting.num_peers < SQUARE.num_cells
        source, tag = (f"{_MOSHPIT}, stored output", "S") if is_stored else (_MOSHPIT, "RUN")
        for method in methods:
            if method in theirs:
                quantity, key = f"{TITLES[method]}, {setting}: rounds to 1e-9", f"{entry}/methods/{method}"
                yield PaperFigure(quantity, f"{key}/rounds_to_1e-9", theirs[method][0], source, tag)
    quantity = "what a round of random groups leaves of the variance, over the formula"
    yield PaperFigure(quantity, "mixing_ratio", 1, f"{_SLIDES}: (r - 1)/N + r/N^2", "S")


PAPER_FIGURES: Mapping[str, tuple[PaperFigure, ...]] = {
    "mnist_convergence": tuple(_mnist()),
    "throughput_vs_latency": (
        PaperFigure(
            "asynchronous over model parallel, three regions, feed-forward",
            "ratio_ffn",
            "41 (300.8 ± 15.9 against 7.23 ± 0.06 vectors/s)",
            "the paper's cloud table",
            "M~",
        ),
        PaperFigure(
            "asynchronous over model parallel, three regions, Transformer",
            "ratio_transformer",
            "68 (0.68 ± 0.01 against 0.01 ± 0.001 sequences/s)",
            "the paper's cloud table",
            "M~",
        ),
        PaperFigure("least share of the zero-delay throughput", "kept", None, _CURVES, "NF"),
        PaperFigure("difference of virtual and real throughput", "agreement"),
    ),
    "transformer_xl": (
        *(
            PaperFigure(
                f"final validation perplexity, {model}", f"models/{model}/validation_perplexity", None, _CURVES, "NF"
            )
            for model in ("dmoe", "small", "base")
        ),
        PaperFigure(
            "test perplexity of the large dense model (theirs: 16 layers of 400/900, 125,000 updates)",
            "models/base/test_perplexity",
            63.36,
            "TimDettmers/transformer-xl, branch wikitext2, replicate_wt2.sh",
            "S",
        ),
        PaperFigure(
            "staleness of the trunk with 32 trainers", "models/dmoe/mean_trunk_staleness", 31, "trainers - 1", "C"
        ),
        PaperFigure("share of failed expert calls", "models/dmoe/failed_call_share", 0.1, _REVIEWS, "S"),
    ),
    "staleness": (
        PaperFigure(
            "what the default loses over what plain asynchrony loses, MNIST, each tuned", "mnist_default_lost_share"
        ),
        PaperFigure("the same without first moment", "mnist_no_moment_lost_share"),
        PaperFigure("the same of the default, none tuned", "mnist_untuned_default_lost_share"),
        PaperFigure("the same, Transformer-XL, each tuned", "transformer_xl_default_lost_share"),
        PaperFigure("loss with the default minus plain asynchrony's, MNIST, each tuned", "mnist_default_minus_plain"),
        PaperFigure("what the default changes with one trainer", "mnist_one_trainer_difference"),
    ),
    "emulation": (
        PaperFigure("largest difference to the swarm over 50 updates, float32", "emulator_max_difference"),
        PaperFigure("the same of MNIST's parameters, float64", "float64_parameter_difference"),
        PaperFigure(
            "largest difference of the emulator to itself with another last bit, MNIST, float32",
            "last_bit_difference_mnist",
        ),
        PaperFigure("updates per second over the simulated swarm's", "emulator_speedup"),
        PaperFigure("Transformer-XL: updates per second over one jit without asynchrony", "emulator_over_one_jit"),
    ),
    "moshpit_averaging": tuple(_averaging()),
    "moshpit_sgd": (
        PaperFigure(
            "time of PushSum (SGP) over Moshpit's, 64 unequal peers, MNIST (theirs: ResNet-50, 81 GPUs)",
            "mnist_64_pushsum_over_moshpit",
            "1.31 (12.8 against 9.8 h)",
            _SLIDES,
            "C",
        ),
        PaperFigure(
            "time of All-Reduce over Moshpit's, 16 peers, MNIST (theirs: ResNet-50, 16 equal servers)",
            "mnist_16_all_reduce_over_moshpit",
            "1.57 (26.8 against 17.1 h)",
            _SLIDES,
            "C",
        ),
        PaperFigure(
            "time of All-Reduce over Moshpit's, 64 peers, Transformer-XL (theirs: ALBERT-large, 66 GPUs)",
            "transformer_xl_64_all_reduce_over_moshpit",
            1.5,
            "reproducibility extracts of arXiv 2103.03239",
            "S",
        ),
    ),
}
"""By experiment. A figure whose key the experiment's headline does not have is named as not measured."""
