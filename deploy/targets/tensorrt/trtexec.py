"""The `trtexec` command lines that build an engine on a GPU machine from the files of a build."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.calibration.trt_cache import version_label
from deploy.frontends.checks import opset_of
from deploy.targets.tensorrt.rest import OPSETS
from deploy.targets.tensorrt.versions import first_reading, row
from deploy.targets.tensorrt.words import BF16, CACHE, FLOAT, FP16, FP32, QDQ, TYPED

if TYPE_CHECKING:
    from deploy.targets.base import BuildRequest

_LAST = "11.0.0"  # no flag of its trtexec chooses types any more
_OLDEST = {FP16: "8.5.0", FP32: "8.5.0", BF16: "9.0.0"}  # that knows the type, and is meant here


def commands(
    request: BuildRequest, files: Mapping[str, Path], version: str, *, rest: str = FP16
) -> tuple[str, ...]:
    """The command lines that build the engine on a GPU machine with these files.

    A line that a TensorRT could not follow is not given, but why it cannot.
    """
    here = row(version)
    opset = opset_of(request.model)
    strong = _strong(request, files, max(opset, OPSETS.get(rest, 0)) if TYPED in files else opset)
    if not here.calibrators:
        return strong
    lines = []
    if opset > here.opset:
        lines.append(
            f"TensorRT {version} reads opset {here.opset} at most, got {opset}: export the model"
            " with an older opset"
        )
    else:
        lines.append(f"on a GPU machine with TensorRT {version}: {_implicit(request, files, rest)}")
    since = first_reading(opset)
    if since is not None and version_label(since) < version_label(_LAST):
        words = shlex.join(_explicit(request, files[QDQ], ["--int8", *_float_types(rest)]))
        oldest = max(since, _OLDEST[rest], key=version_label)
        lines.append(f"with any TensorRT from {_short(oldest)} to 10: {words}")
    return (*lines, *strong)


def _implicit(request: BuildRequest, files: Mapping[str, Path], rest: str) -> str:
    """The line of the cache; shlex, since names of files and tensors must not run as commands."""
    types = ["--int8", *_float_types(rest), f"--calib={files[CACHE].name}"]
    layers = _precision_words(request, rest)
    return shlex.join(_explicit(request, files[FLOAT], [*types, *layers]))


def _strong(request: BuildRequest, files: Mapping[str, Path], opset: int) -> tuple[str, ...]:
    """The lines of strongly typed networks, for a model of this opset."""
    path = files.get(TYPED, files[QDQ])
    since = first_reading(opset, typed=True)
    if since is None:
        return (f"no TensorRT reads opset {opset} of {path.name}: export with an older opset",)
    typed = shlex.join(_explicit(request, path, ["--stronglyTyped"]))
    plain = shlex.join(_explicit(request, path, []))
    last = f"with TensorRT 11: {plain}"
    if version_label(since) >= version_label(_LAST):
        return (last,)
    return f"with TensorRT from {_short(since)} to 10: {typed}", last


def _explicit(request: BuildRequest, model: Path, words: Sequence[str]) -> list[str]:
    shapes, save = _shape_words(request), f"--saveEngine={request.name}.engine"
    return ["trtexec", f"--onnx={model.name}", *words, *shapes, save]


def _float_types(rest: str) -> list[str]:
    return [] if rest == FP32 else [f"--{rest}"]


def _short(version: str) -> str:
    return ".".join(version.split(".")[:2])


def float_layers(request: BuildRequest) -> dict[str, str]:
    """Nodes to keep in float that could run in int8 otherwise -> the first tensor that each gives.

    A node of whole numbers, or one that has no int8 form, needs no word to stay as it is.
    """
    from deploy.graph.index import Graph

    graph = Graph(request.model)
    kept = set(request.float_nodes)
    return {
        node.name: node.output[0]
        for node in graph.nodes
        if node.name in kept and node.op_type != "Constant" and graph.is_float(node.output[0])
    }


def _precision_words(request: BuildRequest, precision: str) -> list[str]:
    """`--layerPrecisions=...` for the nodes to keep in float; none where there are none."""
    names = float_layers(request)
    if not names:
        return []
    words = ",".join(f"{name}:{precision}" for name in names)
    return [f"--layerPrecisions={words}", "--precisionConstraints=obey"]


def _shape_words(request: BuildRequest) -> list[str]:
    """`--shapes=...` where an input is dynamic; none where none is."""
    from deploy.graph.index import dims, fed_inputs

    dynamic = [
        value.name
        for value in fed_inputs(request.model.graph)
        if not all(isinstance(size, int) for size in dims(value) or ())
    ]
    if not dynamic:
        return []
    (sample,) = request.feed.first(1)
    words = (f"{name}:{'x'.join(map(str, sample[name].shape))}" for name in dynamic)
    return [f"--shapes={','.join(words)}"]
