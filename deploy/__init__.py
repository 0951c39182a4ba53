"""calib8: calibrate a trained CNN once, on any machine, and deploy it in int8 anywhere.

>>> from deploy import build, calibrate, bench
>>> report = build("model.onnx", "photos/", targets=["onnxruntime"], out="build/")

Every name is imported when first used, so that `import deploy` stays light.
"""

import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from deploy import errors
from deploy.version import __version__ as __version__

if TYPE_CHECKING:
    from deploy.analysis.benchmark import bench as bench
    from deploy.analysis.inspection import inspect as inspect
    from deploy.calibration.cluster_jobs import Cluster as Cluster
    from deploy.calibration.reuse import CachePolicy as CachePolicy
    from deploy.errors import *  # noqa: F403
    from deploy.feed.paths import RawFiles as RawFiles
    from deploy.feed.preprocess import Preprocess as Preprocess
    from deploy.feed.sampling import Choice as Choice
    from deploy.frontends import load as load
    from deploy.method import Method as Method
    from deploy.pipeline import build as build
    from deploy.pipeline import calibrate as calibrate
    from deploy.pipeline import merge as merge
    from deploy.report import Report as Report
    from deploy.report.verdict import Gates as Gates
    from deploy.targets import TARGETS as TARGETS
    from deploy.targets import Ascend as Ascend
    from deploy.targets import OnnxRuntime as OnnxRuntime
    from deploy.targets import TensorRT as TensorRT
    from deploy.tuning.search_options import Tuning as Tuning

# else the packages of ONNX Runtime send what they run to Microsoft, and store an identifier
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

_HOMES = {  # in the order of a user's work
    "__version__": "deploy.version",
    "load": "deploy.frontends",
    "inspect": "deploy.analysis.inspection",
    "calibrate": "deploy.pipeline",
    "merge": "deploy.pipeline",
    "build": "deploy.pipeline",
    "bench": "deploy.analysis.benchmark",
    "Preprocess": "deploy.feed.preprocess",
    "RawFiles": "deploy.feed.paths",
    "Choice": "deploy.feed.sampling",
    "Method": "deploy.method",
    "CachePolicy": "deploy.calibration.reuse",
    "Cluster": "deploy.calibration.cluster_jobs",
    "Tuning": "deploy.tuning.search_options",
    "Gates": "deploy.report.verdict",
    "TARGETS": "deploy.targets",
    "OnnxRuntime": "deploy.targets",
    "TensorRT": "deploy.targets",
    "Ascend": "deploy.targets",
    "Report": "deploy.report",
    **dict.fromkeys(errors.__all__, "deploy.errors"),
}


def lazy_names(
    module: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a module whose names are imported when first used.

    `homes`: name -> "module:attribute", or "module" for the module itself.
    """

    def get(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, _, attribute = homes[name].partition(":")
        value = import_module(home)
        value = getattr(value, attribute) if attribute else value
        setattr(sys.modules[module], name, value)
        return value

    def names() -> list[str]:  # what a prompt completes: these names, and no import's
        own = (name for name in vars(sys.modules[module]) if name.startswith("__"))
        return sorted({*own, *homes})

    return get, names


if not TYPE_CHECKING:  # a checker takes the imports above; it would let every misspelt name pass
    __all__ = list(_HOMES)
    __getattr__, __dir__ = lazy_names(
        __name__, {name: f"{home}:{name}" for name, home in _HOMES.items()}
    )
