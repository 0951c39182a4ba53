"""Calibrate a trained CNN once, on any machine, and deploy it in int8: the commands as functions.

>>> import calib8
>>> report = calib8.build("model.onnx", "photos/", out="build")
>>> print(report)

A model is a file, an `onnx.ModelProto`, or a PyTorch module with a DataLoader as its images.

    build(model, images)      calibrate, build int8 engines, measure; returns a Report
    calibrate(model, images)  calibrate only; `cache=` names the file that keeps it
    check(folder, images)     the verdict on the files of a build as they are, on other images
    merge(model, shards)      one calibration of its shards
    bench(engine)             latency, `against=` a second model
    compare(first, second, images)    tensors in which two models differ
    explain(folder)           which layers of a build lose accuracy, and why
    report(folder, ...)       the report of a build, or several builds side by side
    verify(folder)            whether the files of a build are complete and unchanged
    inspect(model)            what a target would quantize, and why not the rest
    load(model)               a model that is read and cleaned once, for the functions above
    doctor()                  what is installed here, and what is missing
    quantize(values)          scale, zero point, integers and error of an array

    calib8.torch     trace, fuse, profile, prepare, calibrate, convert, qat, export,
                     export_float, export_quantized, export_trained
    calib8.ascend    deploy, convert, check: Ascend's own files
    calib8.cache     read, dump, diff, merge, relabel, check, to_qdq, from_qdq: TensorRT's caches

Images      Preprocess, RawFiles, Choice
Options     Method, CachePolicy, Cluster, Tuning, Gates
Targets     TARGETS: OnnxRuntime, TensorRT, TensorRTForRTX, Ascend
Result      Report
Errors      Calib8Error, and one class for each kind of failure

`help(calib8.build)` describes the arguments of one function.
"""

from typing import TYPE_CHECKING

from calib8.lazy_imports import lazy_names
from deploy import errors

if TYPE_CHECKING:
    from calib8 import ascend as ascend
    from calib8 import cache as cache
    from calib8 import torch as torch
    from deploy.analysis.benchmark import bench as bench
    from deploy.analysis.build_check import check as check
    from deploy.analysis.build_comparison import report as report
    from deploy.analysis.build_reader import verify as verify
    from deploy.analysis.comparison import compare as compare
    from deploy.analysis.environment import doctor as doctor
    from deploy.analysis.experiment import quantize as quantize
    from deploy.analysis.explain_build import explain as explain
    from deploy.analysis.inspection import inspect as inspect
    from deploy.calibration.cluster_jobs import Cluster as Cluster
    from deploy.calibration.reuse import CachePolicy as CachePolicy
    from deploy.errors import *  # noqa: F403
    from deploy.feed.paths import RawFiles as RawFiles
    from deploy.feed.preprocess import Preprocess as Preprocess
    from deploy.feed.sampling import Choice as Choice
    from deploy.frontends import load as load
    from deploy.method import Method as Method
    from deploy.pipeline.build import build as build
    from deploy.pipeline.calibration_setup import calibrate as calibrate
    from deploy.pipeline.calibration_setup import merge as merge
    from deploy.report import Report as Report
    from deploy.report.verdict import Gates as Gates
    from deploy.targets import TARGETS as TARGETS
    from deploy.targets import Ascend as Ascend
    from deploy.targets import OnnxRuntime as OnnxRuntime
    from deploy.targets import TensorRT as TensorRT
    from deploy.targets import TensorRTForRTX as TensorRTForRTX
    from deploy.tuning.search_options import Tuning as Tuning
    from deploy.version import __version__ as __version__

# no `__all__`: with it `help(calib8)` prints every class and function in full
_IMPORT_PATHS = {  # in the order of a user's work
    "__version__": "deploy.version:__version__",
    "load": "deploy.frontends:load",
    "inspect": "deploy.analysis.inspection:inspect",
    "calibrate": "deploy.pipeline.calibration_setup:calibrate",
    "merge": "deploy.pipeline.calibration_setup:merge",
    "build": "deploy.pipeline.build:build",
    "check": "deploy.analysis.build_check:check",
    "bench": "deploy.analysis.benchmark:bench",
    "Preprocess": "deploy.feed.preprocess:Preprocess",
    "RawFiles": "deploy.feed.paths:RawFiles",
    "Choice": "deploy.feed.sampling:Choice",
    "Method": "deploy.method:Method",
    "CachePolicy": "deploy.calibration.reuse:CachePolicy",
    "Cluster": "deploy.calibration.cluster_jobs:Cluster",
    "Tuning": "deploy.tuning.search_options:Tuning",
    "Gates": "deploy.report.verdict:Gates",
    "TARGETS": "deploy.targets:TARGETS",
    "OnnxRuntime": "deploy.targets:OnnxRuntime",
    "TensorRT": "deploy.targets:TensorRT",
    "TensorRTForRTX": "deploy.targets:TensorRTForRTX",
    "Ascend": "deploy.targets:Ascend",
    "Report": "deploy.report:Report",
    **{name: f"deploy.errors:{name}" for name in errors.__all__},
    "report": "deploy.analysis.build_comparison:report",
    "verify": "deploy.analysis.build_reader:verify",
    "compare": "deploy.analysis.comparison:compare",
    "doctor": "deploy.analysis.environment:doctor",
    "quantize": "deploy.analysis.experiment:quantize",
    "explain": "deploy.analysis.explain_build:explain",
    "ascend": "calib8.ascend",
    "cache": "calib8.cache",
    "torch": "calib8.torch",
}

if not TYPE_CHECKING:  # or every misspelt name would pass a type checker
    __getattr__, __dir__ = lazy_names(__name__, _IMPORT_PATHS)
