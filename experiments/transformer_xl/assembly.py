"""Putting a model in training together: from a preset, a text and a place to train."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dmoe_jax.data.corpora import Corpus
from dmoe_jax.recipe import make_optimizer
from dmoe_jax.routing.base import Router
from experiments.transformer_xl.driver import Plan
from experiments.transformer_xl.engine import Engine
from experiments.transformer_xl.local import local_dense, local_dmoe
from experiments.transformer_xl.names import Place
from experiments.transformer_xl.presets import (
    Preset,
    count_parameters,
    expert_recipe,
    model_config,
    trunk_recipe,
)
from experiments.transformer_xl.simulated import SimulatedDmoe
from experiments.transformer_xl.simulated_dense import SimulatedDense
from experiments.transformer_xl.stretches import Setting


def make_engine(
    preset: Preset,
    corpus: Corpus,
    *,
    where: Place,
    steps: int,
    seed: int,
    name: str | None = None,
    router: Router | None = None,
    batch_size: int | None = None,
    compute_dtype: str = "float32",
    setting: Setting | None = None,
) -> Engine:
    """An engine at its beginning.

    Args:
      preset: the model.
      corpus: the text.
      where: see `Place`.
      steps: updates of the whole run, for the schedules.
      seed: of everything.
      name: what figures call it; None: the model.
      router: of a mixture.
      batch_size: sequences of a step; None: the preset's on one device, the setting's for each simulated trainer.
      compute_dtype: of the layers' matrix products, "float32" or "bfloat16".
      setting: of the simulated swarm; None: the paper's.

    Raises:
      ValueError: a mixture without a router, a router that does not keep to its contract, or sizes that do not fit each
        other or the text.
    """
    config = model_config(preset, len(corpus.vocabulary), compute_dtype=compute_dtype)
    counts = np.bincount(corpus.train, minlength=config.vocab_size) if preset.unigram_biases else None
    setting = _setting(setting, batch_size)
    rows = (batch_size or preset.batch_size) if where == "local" else setting.batch_size
    common: dict[str, Any] = {
        "name": preset.model if name is None else name,
        "ids": corpus.train,
        "word_counts": counts,
        "optimizer": make_optimizer(trunk_recipe(preset, steps)),
        "evaluation": preset.evaluation,
        "seed": seed,
        **({"batch_size": rows} if where == "local" else {"setting": setting}),
    }
    if not config.is_mixture:
        return (local_dense if where == "local" else SimulatedDense)(config=config, **common)
    if router is None:
        raise ValueError(f"model {preset.model!r} is a mixture of experts and needs a router")
    common["expert_optimizer"] = make_optimizer(expert_recipe(preset, steps))
    return (local_dmoe if where == "local" else SimulatedDmoe)(config=config, router=router, **common)


def make_plan(
    preset: Preset, *, steps: int, eval_every: int | None = None, eval_tokens: int, final_eval_tokens: int = 0
) -> Plan:
    """The plan of a run of the preset.

    Args:
      preset: the model.
      steps: updates of the whole run.
      eval_every: updates between two pauses; None: as often as the preset says.
      eval_tokens, final_eval_tokens: see `Plan`.
    """
    return Plan(
        steps=steps,
        eval_every=math.ceil(steps / preset.pauses) if eval_every is None else eval_every,
        eval_tokens=eval_tokens,
        final_eval_tokens=final_eval_tokens,
        eval_batch_tokens=preset.evaluation.batch_size * (preset.evaluation.seq_len or preset.seq_len),
        num_layers=preset.num_layers,
        grid_size=preset.grid_size,
    )


def headline_facts(preset: Preset, corpus: Corpus, *, where: Place, seed: int, router: Router | None) -> dict[str, Any]:
    """What the headline of a run opens with."""
    config = model_config(preset, len(corpus.vocabulary))
    return {
        "model": preset.model,
        "where": where,
        **({"router": router.name} if router is not None and preset.grid_size else {}),
        "seed": seed,
        "parameters": count_parameters(config, router),
    }


def run_settings(
    preset: Preset,
    corpus: Corpus,
    plan: Plan,
    *,
    where: Place,
    seed: int,
    router: str | None = None,
    batch_size: int | None = None,
    compute_dtype: str = "float32",
    setting: Setting | None = None,
) -> Mapping[str, object]:
    """All that decides what a run computes, for its folder; see `resuming.open_run`.

    Args: as of `make_engine`; router: how it was asked for.
    """
    fields = dataclasses.asdict(preset)
    if not preset.grid_size:
        # What would train experts decides nothing in a model without any.
        fields = {name: value for name, value in fields.items() if not name.startswith("expert_")}
    settings: dict[str, object] = {
        **fields,
        "where": where,
        "corpus": corpus.name,
        "vocab_size": len(corpus.vocabulary),
        "steps": plan.steps,
        "eval_every": plan.eval_every,
        "eval_tokens": plan.eval_tokens,
        "final_eval_tokens": plan.final_eval_tokens,
        "seed": seed,
        "compute_dtype": compute_dtype,
    }
    if preset.grid_size:
        settings["router"] = router
    if where == "simulated":
        settings |= dataclasses.asdict(_setting(setting, batch_size))
    else:
        settings["batch_size"] = batch_size or preset.batch_size
    return settings


def _setting(setting: Setting | None, batch_size: int | None) -> Setting:
    setting = Setting() if setting is None else setting
    return setting if batch_size is None else dataclasses.replace(setting, batch_size=batch_size)
