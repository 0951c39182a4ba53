"""Seconds of AMCT's searches here, beside what AMCT itself took (one thread, a shared machine).

`python benchmarks/ascend_searches.py` prints a Markdown table. AMCT's figures are of hicann/amct
at 2be20da with torch 2.13 on a CPU; they cannot be measured again here, so only ratios well above
the noise of two machines mean something.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"  # read when numpy is imported
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np  # noqa: E402

from calibrators.amct.hfmg import HfmgHistogram, hfmg  # noqa: E402
from calibrators.amct.ifmr import IfmrHistogram, ifmr, ifmr_streaming  # noqa: E402

AMCT_IFMR = {100_000: (0.015, 0.021), 1_000_000: (0.15, 0.21), 4_000_000: (1.76, 2.0)}
AMCT_HFMG = {1024: (0.04, 0.10), 4096: (1.2, 2.8)}


def best(run: Callable[[], object], times: int = 5) -> float:
    """Shortest of a few runs, in seconds."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> None:
    """Time every search on Laplace activations."""
    rng = np.random.default_rng(0)
    print("| search | values | seconds | AMCT's seconds |\n|---|---|---|---|")
    for size, (low, high) in AMCT_IFMR.items():
        x = rng.laplace(0, 1, size).astype(np.float32)
        print(f"| IFMR, exact | {size} | {best(lambda x=x: ifmr(x)):.4f} | {low} - {high} |")
        histogram = IfmrHistogram()
        observed = best(lambda x=x, h=histogram: h.observe(x), 1)
        found = best(lambda h=histogram: ifmr_streaming(h))
        print(f"| IFMR, streaming | {size} | {observed:.4f} + {found:.4f} | - |")
    for nbins, (low, high) in AMCT_HFMG.items():
        counts = HfmgHistogram(nbins)
        counts.observe(rng.laplace(0, 1, 1_000_000).astype(np.float32))
        seconds = best(lambda c=counts: hfmg(c))
        print(f"| HFMG, {nbins} bins | search | {seconds:.4f} | {low} - {high} |")


if __name__ == "__main__":
    main()
