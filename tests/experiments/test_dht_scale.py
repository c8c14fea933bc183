"""Studies of the DHT: each runs among a few nodes and has its figures."""

import pytest

from dmoe_net import run
from experiments.dht_scale.measurement import BARS, STUDIES, Study, figures_of

SIZES: dict[str, tuple[float, ...]] = {
    "full_100": (12, 2),
    "light_1000": (12, 2),
    "trainer_4096": (12, 32, 2, 3),
    "announcing": (12,),
    "churn": (12, 16, 1.0),
    "vanish": (12, 20),
    "unreachable": (12, 3, 20),
    "clocks": (12,),
    "partition": (42, 0.5),
    "bootstraps": (12,),
    "joins": (12, 4),
    "memory": (4,),
}
"""Study of the quick run -> its smallest sizes."""


def test_every_quick_study_is_here_and_bars_are_of_some_study() -> None:
    """A bar is called after a study and one of its figures."""
    assert SIZES.keys() == {study.name for study in STUDIES if study.quick is not None}
    assert all(any(bar.name.startswith(f"{study.name}_") for study in STUDIES) for bar in BARS)


@pytest.mark.slow
@pytest.mark.parametrize("study", [study for study in STUDIES if study.quick is not None], ids=lambda study: study.name)
def test_study_has_its_figures(study: Study) -> None:
    """All figures that have a bar are there."""
    found = run(figures_of, study, SIZES[study.name], 1, seed=1)
    barred = {bar.name.removeprefix(f"{study.name}_") for bar in BARS if bar.name.startswith(f"{study.name}_")}
    assert {"network", *barred} <= found.keys()
