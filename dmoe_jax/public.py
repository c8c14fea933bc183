"""The names that the package promises; each is an attribute of `dmoe_jax` itself, which loads this module when asked.

Not imported by any other module of the package: those import one another, and `dmoe --help` need not load JAX.
"""

from dmoe_jax.autodiff import Recording, value_and_grad
from dmoe_jax.averaging import Speeds, TreeAverager, TreeAveragerConfig
from dmoe_jax.claims.claiming import ClaimConfig
from dmoe_jax.collaboration import Collaboration, CollaborationConfig, GlobalStep
from dmoe_jax.collaboration.trainers import CollaborativeTrainers
from dmoe_jax.data.mnist import load_mnist, read_mnist
from dmoe_jax.directory.directory import DirectoryConfig
from dmoe_jax.experts import (
    Expert,
    TensorSpec,
    as_expert,
    expert_from_functions,
    expert_from_linen,
    expert_from_nnx,
    feedforward,
    make_expert,
    transformer_xl_layer,
)
from dmoe_jax.layer_config import LayerConfig, Recipe
from dmoe_jax.machine.device import CostModel, InlineDevice, ThreadDevice
from dmoe_jax.mixture.flax_layers import BlockingMixture, LinenMixture, NnxMixture
from dmoe_jax.mixture.remote import RemoteMixture
from dmoe_jax.mixture.statistics import CallStatistics, TooFewExperts
from dmoe_jax.model import Evaluation, Model, Outcome
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.optim import (
    ErrorFeedback,
    apply_average,
    averaging_due,
    compensate_delay,
    moshpit_average,
    moshpit_round,
    moshpit_rounds,
    noloco,
    scale_by_stale_adam,
    scale_by_staleness,
    streaming_diloco,
    what_to_send,
    with_average,
)
from dmoe_jax.optim.collaborative import LossScale, collaborative
from dmoe_jax.optim.recipe import make_optimizer
from dmoe_jax.peers.security import Plain, Tls
from dmoe_jax.replicas import ReplicaConfig
from dmoe_jax.routing import Router, RouterError, Scores, chain, from_linen, from_nnx, make_router, product_key, score
from dmoe_jax.swarm.blocking import BlockingSwarm, connect
from dmoe_jax.swarm.opening import open_swarm
from dmoe_jax.swarm.serving import Served, ServedExpert
from dmoe_jax.swarm.swarm import Swarm
from dmoe_jax.trainer import StepRecord, Trainer, Trainers
from dmoe_jax.trunk import SharedTrunk

__all__ = [
    "BlockingMixture",
    "BlockingSwarm",
    "CallStatistics",
    "ClaimConfig",
    "Collaboration",
    "CollaborationConfig",
    "CollaborativeTrainers",
    "CostModel",
    "DirectoryConfig",
    "ErrorFeedback",
    "Evaluation",
    "Expert",
    "GlobalStep",
    "InlineDevice",
    "LayerConfig",
    "LinenMixture",
    "LossScale",
    "Model",
    "NnxMixture",
    "NodeConfig",
    "Outcome",
    "Plain",
    "Recipe",
    "Recording",
    "RemoteMixture",
    "ReplicaConfig",
    "Router",
    "RouterError",
    "Scores",
    "Served",
    "ServedExpert",
    "SharedTrunk",
    "Speeds",
    "StepRecord",
    "Swarm",
    "TensorSpec",
    "ThreadDevice",
    "Tls",
    "TooFewExperts",
    "Trainer",
    "Trainers",
    "TreeAverager",
    "TreeAveragerConfig",
    "apply_average",
    "as_expert",
    "averaging_due",
    "chain",
    "collaborative",
    "compensate_delay",
    "connect",
    "expert_from_functions",
    "expert_from_linen",
    "expert_from_nnx",
    "feedforward",
    "from_linen",
    "from_nnx",
    "load_mnist",
    "make_expert",
    "make_optimizer",
    "make_router",
    "moshpit_average",
    "moshpit_round",
    "moshpit_rounds",
    "noloco",
    "open_swarm",
    "product_key",
    "read_mnist",
    "scale_by_stale_adam",
    "scale_by_staleness",
    "score",
    "streaming_diloco",
    "transformer_xl_layer",
    "value_and_grad",
    "what_to_send",
    "with_average",
]
