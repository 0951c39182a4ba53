"""Calibration: observe tensor statistics in one pass, store them, search clip ranges in them.

From outside, use `observation` (what to observe), `ranges` (clip ranges and their search), `reuse`
(the cache policy), `trt_cache` (TensorRT's format) and `shards`. The pass itself (`one_pass`,
`taps`) and the files of the store are internal; no module here knows a target.
"""

DEFAULT_TRT_VERSION = "10.3.0"  # in a cache's first line, unless another version is known
