"""Which of the CUDA libraries that TensorRT 8 computes with are empty stand-ins.

TensorRT 8 takes tactics (kernels to choose from) out of cuBLAS, cuBLASLt and cuDNN too, 2 GB of
libraries that `scripts/trt_env.sh` puts empty ones in the place of. A call into one of those ends
the process, so a build leaves their tactics out. With the real libraries TensorRT's own choice
stands.
"""

from __future__ import annotations

import ctypes
import os

MARK = "calib8_stand_in"  # exported by the stand-ins alone
_LIBRARIES = {
    "CUBLAS": "libcublas.so.11",
    "CUBLAS_LT": "libcublasLt.so.11",
    "CUDNN": "libcudnn.so.8",
}


def stand_ins() -> tuple[str, ...]:
    """Names in `trt.TacticSource` whose library, as this process has loaded it, is a stand-in."""
    return tuple(source for source, name in _LIBRARIES.items() if _is_stand_in(name))


def _is_stand_in(name: str) -> bool:
    if not hasattr(os, "RTLD_NOLOAD"):  # Windows, for which no stand-ins are made
        return False
    try:
        library = ctypes.CDLL(name, mode=os.RTLD_LAZY | os.RTLD_NOLOAD)
    except OSError:  # not loaded
        return False
    return hasattr(library, MARK)
