"""What partitions made, counted."""

import numpy as np
from numpy.typing import NDArray


def histogram(parts: list[NDArray[np.int64]], labels: np.ndarray) -> np.ndarray:
    """Examples of each client (row) and class."""
    return np.stack([np.bincount(labels[part], minlength=labels.max() + 1) for part in parts])
