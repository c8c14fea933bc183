"""An asynchronous swarm as one compiled program: the same protocol, without the network and the waiting.

See `dmoe_jax.emulator.emulator` for the theory of operation.
"""

from dmoe_jax.emulator.data import Data, stack_seeds, take_batches
from dmoe_jax.emulator.dense import DenseEmulator, DenseState, draw_turns
from dmoe_jax.emulator.emulator import Emulator
from dmoe_jax.emulator.order import EventOrder, draw_order, exponential_delays, with_fresh_experts
from dmoe_jax.emulator.recording import OrderRecorder
from dmoe_jax.emulator.state import SwarmState

__all__ = [
    "Data",
    "DenseEmulator",
    "DenseState",
    "Emulator",
    "EventOrder",
    "OrderRecorder",
    "SwarmState",
    "draw_order",
    "draw_turns",
    "exponential_delays",
    "stack_seeds",
    "take_batches",
    "with_fresh_experts",
]
