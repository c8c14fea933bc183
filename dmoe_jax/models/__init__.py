"""Models cut where the network cuts them: segments for the trainer, and the same model in one jit.

The modules `mlp` and `transformer_xl` hold both forms, and what makes their parameters. Batches are `mlp.Batch`es of
the one, and `dmoe_jax.data.Batch`es of the other.
"""

from dmoe_jax.layer_config import LayerConfig
from dmoe_jax.models import mlp, transformer_xl
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.mlp import MLP, MLPConfig
from dmoe_jax.models.transformer_xl import TransformerXL

__all__ = ["MLP", "LayerConfig", "MLPConfig", "TransformerXL", "TransformerXLConfig", "mlp", "transformer_xl"]
