"""What quantization moves the mean of a channel by, as far as a few samples tell.

Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction"
(ICCV 2019), section 4.2; the shrinking is calib8's own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def trusted_mean(differences: NDArray[np.float64]) -> NDArray[np.float64]:
    """Differences [samples, C] -> their mean [C], shrunk where the samples do not agree.

    The mean m is multiplied by m^2 / (m^2 + variance / samples); of one sample it is taken whole.
    """
    mean = differences.mean(axis=0)
    if len(differences) < 2:
        return np.asarray(mean, np.float64)
    doubt = differences.var(axis=0, ddof=1) / len(differences)
    square = mean * mean
    with np.errstate(invalid="ignore"):
        share = np.where(square > 0, square / (square + doubt), 0.0)
    return np.asarray(mean * share, np.float64)
