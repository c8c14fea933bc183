"""An asynchronous swarm as one compiled program: the same protocol, without the network and the waiting.

See `dmoe_jax.emulator.emulator` for the theory of operation.
"""

from dmoe_jax.emulator.emulator import Emulator
from dmoe_jax.emulator.order import EventOrder, draw_order, exponential_delays
from dmoe_jax.emulator.state import Data, SwarmState, stack_seeds, take_batches

__all__ = [
    "Data",
    "Emulator",
    "EventOrder",
    "SwarmState",
    "draw_order",
    "exponential_delays",
    "stack_seeds",
    "take_batches",
]
