"""PyTorch: trace, fuse, profile, quantize, train and export a module in memory.

>>> model = calib8.torch.export(net, [x])  # float; calib8.build(net, loader) makes it int8
>>> prepared = calib8.torch.prepare(net, [x], target="tensorrt")
>>> calib8.torch.calibrate(prepared, batches)
>>> model = calib8.torch.export(calib8.torch.convert(prepared), [x])  # with Q/DQ pairs

`qat` trains a `Task`. `export_float`, `export_quantized` and `export_trained` also measure what
they export, as the commands `calib8 export` and `calib8 qat` do. Everything is imported when it is
first used, and needs torch.
"""

from typing import TYPE_CHECKING

from calib8.lazy_imports import lazy_names

if TYPE_CHECKING:
    from deploy.fx.checked_export import export_float as export_float
    from deploy.fx.checked_export import export_quantized as export_quantized
    from deploy.fx.checked_export import export_trained as export_trained
    from deploy.fx.convert import calibrate as calibrate
    from deploy.fx.convert import convert as convert
    from deploy.fx.fuse import fuse as fuse
    from deploy.fx.open_model import export as export
    from deploy.fx.prepare import prepare as prepare
    from deploy.fx.profile import profile as profile
    from deploy.fx.qat import train
    from deploy.fx.task import Task as Task
    from deploy.fx.trace import trace as trace

    qat = train

_IMPORT_PATHS = {
    "trace": "deploy.fx.trace:trace",
    "fuse": "deploy.fx.fuse:fuse",
    "profile": "deploy.fx.profile:profile",
    "prepare": "deploy.fx.prepare:prepare",
    "calibrate": "deploy.fx.convert:calibrate",
    "convert": "deploy.fx.convert:convert",
    "Task": "deploy.fx.task:Task",
    "qat": "deploy.fx.qat:train",
    "export": "deploy.fx.open_model:export",
    "export_float": "deploy.fx.checked_export:export_float",
    "export_quantized": "deploy.fx.checked_export:export_quantized",
    "export_trained": "deploy.fx.checked_export:export_trained",
}

if not TYPE_CHECKING:  # or every misspelt name would pass a type checker
    __getattr__, __dir__ = lazy_names(__name__, _IMPORT_PATHS)
