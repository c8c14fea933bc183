"""Types that many modules share."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
"""An array on the host, of any shape and type."""
