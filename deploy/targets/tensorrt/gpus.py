"""The GPUs of this machine, by the binding of CUDA that is installed and works.

cuda-python comes as wheels and is tried first; pycuda is built on the machine, and serves where it
is there already. Both work in the device's primary context, which TensorRT and torch use too.
"""

from __future__ import annotations

from collections.abc import Callable

from deploy.errors import ConfigError, SdkMissingError, first_line
from deploy.targets.tensorrt.cuda import Cuda


def gpu(number: int = 0) -> Cuda:
    """The GPU of this number, by the first binding that is there and works.

    Raises:
        SdkMissingError: neither binding can be loaded, or there is no GPU; says which and why.
        ConfigError: there is a GPU, but none of this number.
    """
    failed = []
    for name, names in (("cuda-python", _cuda_python), ("pycuda", _pycuda)):
        try:
            count, open_one = names()
        except (ImportError, OSError, SdkMissingError) as error:
            failed.append(f"{name}: {first_line(error)}")
            continue
        if number >= count:
            raise ConfigError(
                f"a device is one of the {count} GPUs of this machine, counted from 0, got {number}"
            )
        return open_one(number)
    raise SdkMissingError(
        f"an engine is built and run on an NVIDIA GPU by way of cuda-python or pycuda, and neither"
        f" works here ({'; '.join(failed)}); on a machine with a GPU and its driver: pip install"
        " cuda-python, or pycuda"
    )


def _cuda_python() -> tuple[int, Callable[[int], Cuda]]:
    from deploy.targets.tensorrt import with_cuda_python

    return with_cuda_python.count(), with_cuda_python.CudaPython


def _pycuda() -> tuple[int, Callable[[int], Cuda]]:
    from deploy.targets.tensorrt import with_pycuda

    return with_pycuda.count(), with_pycuda.Pycuda
