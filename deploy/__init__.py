"""calib8: calibrate a trained CNN once, on any machine, and deploy it in int8 anywhere.

>>> from deploy import build, calibrate, bench
>>> report = build("model.onnx", "photos/", targets=["onnxruntime"], out="build/")

Every name is imported when first used, so that `import deploy` stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from deploy.version import __version__

if TYPE_CHECKING:
    from deploy.analysis.benchmark import bench as bench
    from deploy.analysis.inspection import inspect as inspect
    from deploy.calibration.cluster_jobs import Cluster as Cluster
    from deploy.calibration.reuse import CachePolicy as CachePolicy
    from deploy.errors import BackendError as BackendError
    from deploy.errors import CacheError as CacheError
    from deploy.errors import Calib8Error as Calib8Error
    from deploy.errors import CalibrationError as CalibrationError
    from deploy.errors import ConfigError as ConfigError
    from deploy.errors import ExportError as ExportError
    from deploy.errors import FeedError as FeedError
    from deploy.errors import ModelError as ModelError
    from deploy.errors import QuantizedError as QuantizedError
    from deploy.errors import SdkMissingError as SdkMissingError
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

__all__ = [  # noqa: RUF022 (in the order of a user's work)
    "__version__",
    # what is done with a model
    "load",
    "inspect",
    "calibrate",
    "merge",
    "build",
    "bench",
    # how
    "Preprocess",
    "RawFiles",
    "Choice",
    "Method",
    "CachePolicy",
    "Cluster",
    "Tuning",
    "Gates",
    # for what
    "TARGETS",
    "OnnxRuntime",
    "TensorRT",
    "Ascend",
    # what comes of it
    "Report",
    # what can go wrong: `deploy.errors` draws the tree
    "Calib8Error",
    "CalibrationError",
    "ModelError",
    "QuantizedError",
    "FeedError",
    "CacheError",
    "ConfigError",
    "ExportError",
    "BackendError",
    "SdkMissingError",
]

_HOMES = {
    "deploy.analysis.benchmark": ("bench",),
    "deploy.calibration.reuse": ("CachePolicy",),
    "deploy.method": ("Method",),
    "deploy.calibration.cluster_jobs": ("Cluster",),
    "deploy.errors": tuple(name for name in __all__ if name.endswith("Error")),
    "deploy.feed.sampling": ("Choice",),
    "deploy.feed.preprocess": ("Preprocess",),
    "deploy.feed.paths": ("RawFiles",),
    "deploy.frontends": ("load",),
    "deploy.analysis.inspection": ("inspect",),
    "deploy.pipeline": ("build", "calibrate", "merge"),
    "deploy.report": ("Report",),
    "deploy.report.verdict": ("Gates",),
    "deploy.targets": ("TARGETS", "Ascend", "OnnxRuntime", "TensorRT"),
    "deploy.tuning.tune": ("Tuning",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


if not TYPE_CHECKING:  # or every misspelt name would pass a type checker

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module 'deploy' has no attribute {name!r}")
        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:  # what a prompt completes: the names above, and no import's
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})
