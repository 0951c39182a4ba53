"""The table of searches that turn the streamed statistics of a tensor into its clip range.

A new algorithm is one file beside this one, and one row here.
"""

from collections.abc import Callable

from calibrators.entropy import entropy
from calibrators.histogram import Histogram
from calibrators.minmax import minmax
from calibrators.mse import mse
from calibrators.percentile import percentile
from calibrators.scales import Scale

ACTIVATION: dict[str, Callable[[Histogram], Scale]] = {
    "minmax": minmax,
    "entropy": entropy,
    "percentile": percentile,
    "mse": mse,
}
