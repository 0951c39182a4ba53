"""TensorRT's calibration caches: read, compare, check and convert them.

>>> cache = calib8.cache.relabel(calib8.cache.read("model.cache"), version="10.3.0")
>>> Path("model-10.3.cache").write_bytes(calib8.cache.dump(cache))
"""

from deploy.calibration.trt_cache import dump, relabel
from deploy.targets.tensorrt.cache_tools import cache_to_qdq as to_qdq
from deploy.targets.tensorrt.cache_tools import check_cache as check
from deploy.targets.tensorrt.cache_tools import compare_caches as diff
from deploy.targets.tensorrt.cache_tools import qdq_to_cache as from_qdq
from deploy.targets.tensorrt.cache_tools import read_cache as read

__all__ = ["check", "diff", "dump", "from_qdq", "read", "relabel", "to_qdq"]
