"""The papers' numbers: where each is from, how sure it is, and which figure of ours stands beside it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

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

_LAH = "mryab/learning-at-home"
_NOTEBOOKS = f"{_LAH}, its MNIST notebooks, one stored run"
_REVIEWS = "reviews and reproducibility extracts of arXiv 2002.04013"
_SLIDES = "Gorbunov's slides of December 2021 on Moshpit SGD"
_MOSHPIT = "yandex-research/moshpit-sgd, averaging experiments"


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperFigure:
    """A quantity, ours and a paper's."""

    quantity: str
    """Description of the quantity."""
    key: str
    """Key of our figure in the headline; see `look_up`."""
    paper: float | str | None = None
    """The paper's; None: there is none, or it was not found."""
    source: str = ""
    """Source in which the paper's figure was seen."""
    tag: str = ""
    """Certainty of the paper's figure, one of `TAGS`."""


def look_up(headline: object, key: str) -> object:
    """The value at a key such as `models/dmoe/steps` or `table/peers=512,failure=0.001/methods`, or None.

    A step is the name of an entry, or for a list the values that its first matching entry has.
    """
    for step in key.split("/"):
        if isinstance(headline, list):
            wanted = dict(pair.split("=") for pair in step.split(","))
            matching = (
                item for item in headline if all(f"{item.get(name)}" == value for name, value in wanted.items())
            )
            headline = next(matching, None)
        elif isinstance(headline, Mapping):
            headline = headline.get(step)
        else:
            return None
    return headline


_STORED_RUNS = {
    "dense_1000_ms": ("dense, 1000 ms", {1024: 0.10, 5120: 0.28, 10240: 0.73, 20480: 0.926}),
    "256_experts_frozen_gate_fresh_experts_1000_ms": (
        "256 experts, frozen gate, fresh experts, 1000 ms",
        {1024: 0.52, 5120: 0.89, 10240: 0.93, 20480: 0.942},
    ),
    "4096_experts_frozen_gate_fresh_experts_1000_ms_10_failures": (
        "4096 experts, frozen gate, fresh experts, 1000 ms, 10 % failures",
        {1024: 0.47, 5120: 0.89, 10240: 0.94, 20480: 0.953},
    ),
}
"""Curve -> its name, and updates -> validation accuracy. The router of the authors' program is never trained, and its
experts feel no delay."""


def _mnist() -> Iterator[PaperFigure]:
    for curve, (title, accuracies) in _STORED_RUNS.items():
        yield PaperFigure(
            quantity=f"final accuracy, {title} (theirs: of 1,024 or 512 wide, after as many updates)",
            key=f"accuracy_{curve}",
            paper=", ".join(f"{accuracy:g} at {updates:,}" for updates, accuracy in accuracies.items()),
            source=_NOTEBOOKS,
            tag="FIG",
        )
    yield PaperFigure(
        quantity="final accuracy, 256 experts, trained gate, 1000 ms (theirs: more, of which model is not said)",
        key="accuracy_256_experts_1000_ms",
        paper=0.95,
        source=_REVIEWS,
        tag="S",
    )
    yield PaperFigure(
        quantity="256 experts above the dense model at 1000 ms, beyond both standard deviations, least over the run",
        key="least_margin",
    )
    for rest, variant in (
        ("were experts never stale", "fresh_experts"),
        ("and the gate that of the authors' program", "frozen_gate_fresh_experts"),
        ("both models with our remedies for staleness", "remedies"),
        ("the mixture alone with them", "remedies_over_plain_dense"),
    ):
        yield PaperFigure(quantity=f"the same, {rest}", key=f"least_margin_{variant}")
    yield PaperFigure(quantity="what 10 % failures cost of the final accuracy of 256 experts", key="failures_cost")
    yield PaperFigure(quantity="what they cost in the authors' program", key="failures_cost_frozen_gate_fresh_experts")


def _averaging() -> Iterator[PaperFigure]:
    methods: tuple[MethodName, ...] = ("moshpit", "random_groups", "push_sum", "all_reduce")
    for setting in TABLE:
        theirs = paper_rounds(setting)
        rule = setting.failure_rule.replace("_", "-")
        entry = f"table/peers={setting.num_peers},failure={setting.failure},failure_rule={rule}"
        is_stored = setting.grid == SQUARE and setting.num_peers < SQUARE.num_cells
        for method in methods:
            if method in theirs:
                yield PaperFigure(
                    quantity=f"{TITLES[method]}, {setting}: rounds to 1e-9",
                    key=f"{entry}/methods/{method}/rounds_to_1e-9",
                    paper=theirs[method][0],
                    source=_MOSHPIT + (", stored output" if is_stored else ""),
                    tag="S" if is_stored else "RUN",
                )


_FULL_BASE = PaperFigure(
    quantity="test perplexity of the large dense model (theirs: 16 layers of 400/900, 125,000 updates)",
    key="models/base/test_perplexity",
    paper=63.36,
    source="TimDettmers/transformer-xl, branch wikitext2, replicate_wt2.sh",
    tag="S",
)
_CURVES_NOT_FOUND = {"source": f"values of the paper's curves, in {_REVIEWS}", "tag": "NF"}

PAPER_FIGURES: Mapping[str, tuple[PaperFigure, ...]] = {
    "mnist_convergence": tuple(_mnist()),
    "throughput_vs_latency": (
        PaperFigure(
            quantity="asynchronous over model parallel, three regions, feed-forward",
            key="ratio_ffn",
            paper="41 (300.8 ± 15.9 against 7.23 ± 0.06 vectors/s)",
            source="the paper's cloud table",
            tag="M~",
        ),
        PaperFigure(
            quantity="asynchronous over model parallel, three regions, Transformer",
            key="ratio_transformer",
            paper="68 (0.68 ± 0.01 against 0.01 ± 0.001 sequences/s)",
            source="the paper's cloud table",
            tag="M~",
        ),
        PaperFigure(quantity="least share of the zero-delay throughput", key="kept", **_CURVES_NOT_FOUND),
        PaperFigure(quantity="difference of virtual and real throughput", key="agreement"),
    ),
    "transformer_xl": (
        *(
            PaperFigure(
                quantity=f"final validation perplexity, {model}",
                key=f"models/{model}/validation_perplexity",
                **_CURVES_NOT_FOUND,
            )
            for model in ("dmoe", "small", "base")
        ),
        _FULL_BASE,
        PaperFigure(
            quantity="staleness of the trunk with 32 trainers",
            key="models/dmoe/mean_trunk_staleness",
            paper=31,
            source="trainers - 1",
            tag="C",
        ),
        PaperFigure(
            quantity="share of failed expert calls",
            key="models/dmoe/failed_call_share",
            paper=0.1,
            source=_REVIEWS,
            tag="S",
        ),
    ),
    "staleness": (
        PaperFigure(
            quantity="loss that the default loses over what plain asynchrony loses, MNIST",
            key="mnist_default_lost_share",
        ),
        PaperFigure(quantity="the same, Transformer-XL", key="transformer_xl_default_lost_share"),
        PaperFigure(quantity="what the default changes with one trainer", key="mnist_one_trainer_difference"),
    ),
    "emulation": (
        PaperFigure(quantity="largest difference to the swarm over 50 updates, float32", key="emulator_max_difference"),
        PaperFigure(quantity="the same of MNIST's parameters, float64", key="float64_parameter_difference"),
        PaperFigure(
            quantity="largest difference of the emulator to itself with another last bit, MNIST, float32",
            key="last_bit_difference_mnist",
        ),
        PaperFigure(quantity="updates per second over the simulated swarm's", key="emulator_speedup"),
        PaperFigure(
            quantity="Transformer-XL: updates per second over one jit without asynchrony", key="emulator_over_one_jit"
        ),
    ),
    "moshpit_averaging": (
        *_averaging(),
        PaperFigure(
            quantity="what a round of random groups leaves of the variance, over the formula",
            key="mixing_ratio",
            paper=1,
            source=f"{_SLIDES}: (r - 1)/N + r/N^2",
            tag="S",
        ),
    ),
    "moshpit_sgd": (
        PaperFigure(
            quantity="time of PushSum (SGP) over Moshpit's, 64 unequal peers, MNIST (theirs: ResNet-50, 81 GPUs)",
            key="mnist_64_pushsum_over_moshpit",
            paper="1.31 (12.8 against 9.8 h)",
            source=_SLIDES,
            tag="C",
        ),
        PaperFigure(
            quantity="time of All-Reduce over Moshpit's, 16 peers, MNIST (theirs: ResNet-50, 16 equal servers)",
            key="mnist_16_all_reduce_over_moshpit",
            paper="1.57 (26.8 against 17.1 h)",
            source=_SLIDES,
            tag="C",
        ),
        PaperFigure(
            quantity="time of All-Reduce over Moshpit's, 64 peers, Transformer-XL (theirs: ALBERT-large, 66 GPUs)",
            key="transformer_xl_64_all_reduce_over_moshpit",
            paper=1.5,
            source="reproducibility extracts of arXiv 2103.03239",
            tag="S",
        ),
    ),
}
"""By experiment. A figure whose key the experiment's headline does not have is named as not measured."""
