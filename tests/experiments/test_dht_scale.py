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
    "clocks": (12,),
    "partition": (42, 0.5),
    "bootstraps": (12,),
    "joins": (12, 2),
    "memory": (4,),
}
"""Study of the quick run -> its smallest sizes."""
QUICK = [study for study in STUDIES if study.quick is not None]


def test_every_bar_is_of_some_study() -> None:
    """It is called after a study and one of its figures."""
    assert all(any(bar.name.startswith(f"{study.name}_") for study in STUDIES) for bar in BARS)


@pytest.mark.slow
@pytest.mark.parametrize("study", QUICK, ids=lambda study: study.name)
def test_study_has_its_figures(study: Study) -> None:
    """All figures that have a bar are there."""
    found = run(figures_of, study, SIZES[study.name], 1, seed=1)
    barred = {bar.name.removeprefix(f"{study.name}_") for bar in BARS if bar.name.startswith(f"{study.name}_")}
    assert {"network", *barred} <= found.keys()
