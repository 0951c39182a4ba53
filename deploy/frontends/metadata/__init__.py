"""Read the preprocessing that a model's metadata, or a file next to it, contains, and its classes.

Metadata may come from anybody. Malformed, too large or partly unknown metadata is not used; a note
says so, and the run continues.
"""

import ast
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import onnx

from deploy.errors import ConfigError
from deploy.feed.model_preprocess import MetadataPreprocess
from deploy.feed.states import find_states
from deploy.frontends.metadata import exporters, huggingface
from deploy.frontends.metadata.values import (
    LONGEST,
    ModelMetadata,
    StoredPreprocess,
    parse_object,
)
from deploy.frontends.shapes import make_spec
from deploy.tasks.declarations import Declaration, declare

_MODEL_METADATA = "the model's metadata"
_NAMES_KEY = "names"  # of Ultralytics and YOLOv5: the text of a Python dict or list
_LONGEST_NAMES = 1 << 16  # characters; Python parses longer texts slowly, with much memory

# (location, writer, reader); the first reader that finds its own data is used.
READERS: tuple[tuple[str, str, Callable[[ModelMetadata], StoredPreprocess | None]], ...] = (
    (_MODEL_METADATA, "Ultralytics", exporters.read_ultralytics),
    (_MODEL_METADATA, "OpenVINO's model_info", exporters.read_openvino),
    (_MODEL_METADATA, "timm", huggingface.read_timm),
    (_MODEL_METADATA, "PaddleOCR's characters", exporters.read_characters),
    (f"the {huggingface.FILE} beside the model", "Hugging Face", huggingface.read_huggingface),
    (f"the {huggingface.TIMM_FILE} beside the model", "timm", huggingface.read_timm_config),
    (f"the {exporters.FILE} beside the model", "PaddleDetection", exporters.read_paddle),
)


def read_metadata_preprocess(
    model: onnx.ModelProto, path: Path | None
) -> MetadataPreprocess | None:
    """Return the preprocessing stored in the model or in files in the folder of `path`; or None.

    `path`: of the model; None for a model in memory.
    """
    metadata = ModelMetadata(
        # one character more than allowed, so that a reader finds that the value is too long
        properties={entry.key: entry.value[: LONGEST + 1] for entry in model.metadata_props},
        folder=path and path.parent,
        shape=_first_shape(model.graph.input),
        is_classifier=_is_classifier(model),
    )
    for location, writer, read in READERS:
        try:
            stored = read(metadata)
        except ConfigError as error:
            return MetadataPreprocess(f"{location} ({writer})", reason=str(error))
        if stored is not None:
            source = f"{location} ({writer}{stored.detail})"
            return MetadataPreprocess(source, preprocess=stored.preprocess)
    return None


def read_class_names(model: onnx.ModelProto) -> dict[int, str]:
    """Return class -> name from the model's metadata; empty if it has no such names.

    Ultralytics writes the names as Python prints them: "{0: 'person', 1: 'bicycle'}".
    """
    text = next((entry.value for entry in model.metadata_props if entry.key == _NAMES_KEY), "")
    if len(text) > _LONGEST_NAMES:
        return {}
    try:
        names = ast.literal_eval(text)
    # as of a malicious text: a TypeError is that of a list as a key
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return {}
    if isinstance(names, list):
        names = dict(enumerate(names))
    if not isinstance(names, dict):
        return {}
    name_by_class = {}
    for index, name in names.items():
        if isinstance(index, int) and isinstance(name, str) and name:
            name_by_class[index] = name
    return name_by_class


def read_declaration(model: onnx.ModelProto, path: Path | None) -> Declaration:
    """Return what the model, and a `config.json` in the folder of `path`, declare of the outputs.

    States of a recurrent model are declared by the names of its inputs and outputs. A file that
    cannot be read declares nothing: the outputs are then recognised by their form.

    `path`: of the model; None for a model in memory.
    """
    metadata = ModelMetadata(properties={}, folder=path and path.parent)
    config = {}
    with suppress(ConfigError):
        text = metadata.read_exported(huggingface.TIMM_FILE)
        if text is not None:
            config = parse_object(text, huggingface.TIMM_FILE)
    declaration = declare(model, config, len(read_class_names(model)))
    inputs = [*map(make_spec, model.graph.input)]
    outputs = [*map(make_spec, model.graph.output)]
    return replace(declaration, states=find_states(inputs, outputs))


def _is_classifier(model: onnx.ModelProto) -> bool:
    """Return whether the only output is [N, C], with a score for each of C class names."""
    class_count = len(read_class_names(model))
    output_shape = _first_shape(model.graph.output)
    return len(model.graph.output) == 1 and output_shape[1:] == (class_count,)


def _first_shape(values: Sequence[onnx.ValueInfoProto]) -> tuple[int | None, ...]:
    """Return the shape of the first of a model's inputs or outputs; None for open dimensions."""
    shape: list[int | None] = []
    for value in values[:1]:
        for dim in value.type.tensor_type.shape.dim:
            shape.append(dim.dim_value if dim.dim_value > 0 else None)
    return tuple(shape)
