"""The TensorRT target: cache contents and names, cache tools without a GPU, engines.

`target.TensorRT` is what other rooms use, and `cache_tools` for `calib8 cache`. Everything but
`engines`, `builder`, `session`, `sdk`, `log` and `cuda` works without TensorRT and a GPU; these
import the SDK inside their functions.
"""
