"""Placeholder replaced by the wire helper."""
from typing import Any
import numpy as np
Tensor = np.ndarray[Any, np.dtype[Any]]
