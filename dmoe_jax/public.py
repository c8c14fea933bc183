"""The names that the package promises beside six modules; each is an attribute of `dmoe_jax`, which loads this module
when asked.

Not imported by any other module of the package: those import one another, and `dmoe --help` need not load JAX.
"""

from dmoe_jax.autodiff import value_and_grad
from dmoe_jax.averaging import Speeds, TreeAverager, TreeAveragerConfig
from dmoe_jax.collaboration import Collaboration, CollaborationConfig
from dmoe_jax.data import load_mnist
from dmoe_jax.directory.directory import DirectoryConfig
from dmoe_jax.experts import Expert, expert_from_functions, expert_from_linen, expert_from_nnx, feedforward
from dmoe_jax.live.recording import record_swarm
from dmoe_jax.mixture.flax_layers import LinenMixture, NnxMixture
from dmoe_jax.mixture.remote import RemoteMixture
from dmoe_jax.mixture.statistics import CallStatistics, TooFewExperts
from dmoe_jax.model import Evaluation, Model, Outcome
from dmoe_jax.node.config import NodeConfig
from dmoe_jax.optim import moshpit_average
from dmoe_jax.peers.security import Plain, Tls
from dmoe_jax.placement.config import PlacementConfig
from dmoe_jax.routing import Router, chain_routers, product_key, score
from dmoe_jax.runs.tables import read_run
from dmoe_jax.swarm.blocking import BlockingSwarm, connect
from dmoe_jax.swarm.opening import open_swarm
from dmoe_jax.swarm.swarm import Swarm
from dmoe_jax.trained.language_model import TrainedModel
from dmoe_jax.trained.loading import load_run
from dmoe_jax.trainer import Trainers

__all__ = [
    "BlockingSwarm",
    "CallStatistics",
    "Collaboration",
    "CollaborationConfig",
    "DirectoryConfig",
    "Evaluation",
    "Expert",
    "LinenMixture",
    "Model",
    "NnxMixture",
    "NodeConfig",
    "Outcome",
    "PlacementConfig",
    "Plain",
    "RemoteMixture",
    "Router",
    "Speeds",
    "Swarm",
    "Tls",
    "TooFewExperts",
    "TrainedModel",
    "Trainers",
    "TreeAverager",
    "TreeAveragerConfig",
    "chain_routers",
    "connect",
    "expert_from_functions",
    "expert_from_linen",
    "expert_from_nnx",
    "feedforward",
    "load_mnist",
    "load_run",
    "moshpit_average",
    "open_swarm",
    "product_key",
    "read_run",
    "record_swarm",
    "score",
    "value_and_grad",
]
