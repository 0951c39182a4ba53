"""The models of a build in the operator set that the TensorRT in question reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from deploy.calibration.trt_cache import version_label
from deploy.errors import ExportError
from deploy.frontends.checks import opset_of
from deploy.graph.lowering import lowered
from deploy.targets.tensorrt import sdk
from deploy.targets.tensorrt.float_types import OPSETS
from deploy.targets.tensorrt.trt_options import Asked
from deploy.targets.tensorrt.versions import Needs, row, unread
from deploy.targets.tensorrt.words import FP8, TYPED

if TYPE_CHECKING:
    import onnx


def readable(model: onnx.ModelProto, version: str) -> tuple[onnx.ModelProto, str]:
    """The model as TensorRT X.Y.Z reads it, and a sentence on what that took; "" for nothing.

    One that cannot be brought there is given as it is, and the sentence says why.
    """
    opset = opset_of(model)
    try:
        got = lowered(model, opset=row(version).opset, without=unread(version))
    except ExportError as error:
        return model, f"TensorRT {version} does not read a model of opset {opset}: {error}"
    if got.model is model:
        return model, ""
    forms = ", ".join(f"{count} {name}" for name, count in got.rewritten.items())
    if opset_of(got.model) == opset:
        return got.model, f"for TensorRT {version} {forms} is written in operators that it reads"
    return got.model, (
        f"for TensorRT {version} the model is written in opset {opset_of(got.model)}, got {opset}"
        f"{f': {forms} in another form' if forms else ''}"
    )


def of_files(asked: str, here: str | None) -> str:
    """The older of the TensorRT that is asked for and the one that builds here."""
    return asked if here is None else min(asked, here, key=version_label)


def of_typed(version: str, rest: str, *, fp8: bool = False) -> str:
    """The first TensorRT from this one on that has networks of this type."""
    first = Needs(OPSETS.get(rest, 0)).first_reading(typed=True, fp8=fp8)
    return version if first is None else max(version, first, key=version_label)


def all_readable(
    asked: Asked, models: Mapping[str, onnx.ModelProto], version: str
) -> tuple[dict[str, onnx.ModelProto], tuple[str, ...]]:
    """(role -> the model as its TensorRT reads it, sentences on what that took)."""
    oldest = of_files(version, sdk.cache_reader())
    made, said = {}, []
    for role, model in models.items():
        fp8 = asked.precision == FP8
        strong = role == TYPED or fp8
        wanted = of_typed(oldest, asked.rest, fp8=fp8) if strong else oldest
        made[role], sentence = readable(model, wanted)
        said.append(sentence)
    return made, tuple(dict.fromkeys(filter(None, said)))
