"""The demonstration's model with all its experts in one process, a helper of the measurement: what a swarm is compared
with.

Its step is one jitted program (`experiments.transformer_xl.local`): the trunk's forward and backward, those of the
chosen experts, and an update of the trunk and of each of these. Told {"steps": ...} it makes so many and says how many
a second.
"""

import time

from dmoe_jax.data import load_corpus
from dmoe_jax.layer_config import Route
from dmoe_jax.models import TransformerXLConfig
from dmoe_jax.routing import make_router
from dmoe_jax.runs.setting_up import set_up_jax
from experiments.processes import orders, run_helper, say
from experiments.transformer_xl.local import LocalEngine
from experiments.transformer_xl.presets import Preset
from experiments.transformer_xl.settings import TrainingSettings
from experiments.transformer_xl.setup import Setup


async def serve(*, route: Route, router: str, seed: int) -> None:
    """Make steps whenever that is ordered, until standard input closes; routes are as of `dmoe train`."""
    set_up_jax()
    corpus = load_corpus()
    config = TransformerXLConfig(
        vocab_size=len(corpus.vocabulary),
        num_layers=2,
        grid_size=(4, 4),
        k_best=4,
        cutoffs=tuple(cutoff for cutoff in (2000, 10_000) if cutoff < len(corpus.vocabulary)),
    )
    setup = Setup(
        preset=Preset(model="dmoe", config=config, batch_size=4),
        corpus=corpus,
        steps=10_000,  # for schedules, which do not change what a step costs
        seed=seed,
        router=make_router(router, config.grid_size),
        settings=TrainingSettings(where="local", route=route),
    )
    engine = LocalEngine(setup)

    async def steps_per_s(steps: int) -> float:
        """Each step waits for its loss, as a trainer does that reports it."""
        began = time.perf_counter()
        await engine.advance(steps, lambda record: None, lambda trainer, error: None)
        return steps / (time.perf_counter() - began)

    await steps_per_s(1)  # compiles
    say(ready=True)
    async for order in orders():
        say(steps_per_s=await steps_per_s(order["steps"]))


if __name__ == "__main__":
    run_helper(serve)
