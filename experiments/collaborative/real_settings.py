"""Settings of the processes of the real swarm. Imports no JAX."""

from collections.abc import Mapping
from typing import Any

from dmoe_jax.collaboration.settings import CollaborationConfig


def config_of(settings: Mapping[str, Any]) -> CollaborationConfig:
    """Their settings: JSON carries the target."""
    return CollaborationConfig(target_batch_size=settings["target"], lead_s=2.0, timeout_s=30.0, silence_s=2.0)
