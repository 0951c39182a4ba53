"""`LoadedModel`: the result of every frontend, a clean, checked float32 ONNX model with a digest.

`QdqCalibration` holds what a Q/DQ model says in addition to its float model::

    Q/DQ model --.--> float model, without pairs            --.
                 |--> range of each pair                      +--> LoadedModel, as from a float file
                 '--> scales of weights; nodes left in float --'

The ranges restore every 8-bit grid exactly (`calibrators.grids`). A target with other grids uses
the range that both have in common.

A model's file may be read again (`read_model_file`, `read_uncleaned_model`); a run ends if it
changed meanwhile.

`model_digest` identifies a model: one sha256 over what it computes, however the file stores it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from operator import attrgetter
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from calibrators.scales import Scales
from deploy.errors import ModelError
from deploy.feed.batch_axis import batch_inputs
from deploy.feed.feed import Dataset
from deploy.feed.model_preprocess import MetadataPreprocess
from deploy.feed.samples import Feed
from deploy.feed.states import Recurrence, find_states
from deploy.files.manifest import sha256
from deploy.frontends.checks import to_array
from deploy.frontends.onnx_reader import (
    FileDigests,
    model_bytes,
    parse_model,
    read_model_and_digests,
)
from deploy.frontends.pairs import PairGrid, PairGrids
from deploy.frontends.plugins import CutOffNodes
from deploy.graph.edit import copy_message
from deploy.graph.index import PROTOBUF, runtime_inputs
from deploy.runtimes.ort import OrtSession
from deploy.tasks.declarations import Declaration
from deploy.tensors import TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QdqCalibration:
    """The data of a Q/DQ model's pairs, whichever tool trained or calibrated it.

    Attributes:
        model: the Q/DQ model, functions inlined, weights inside, nodes named.
        name: path of its file; of a model in memory, the name of its graph.
        scales: tensor of the float model -> its range, also for tensors that only pass values on.
        weight_scales: node -> float32 scales of its symmetric weight, [C_out] or [1].
        float_reasons: node of the float model -> why it computes in float; all others run in int8.
        nodes_with_output_pair: nodes whose output (after a following Relu) goes through a pair.
        grids: of the pairs on activations, by tensor of the float model.
        constant_grids: of the pairs on constants.
    """

    model: onnx.ModelProto
    name: str
    scales: Scales
    weight_scales: Mapping[str, NDArray[np.float32]]
    float_reasons: Mapping[str, str]
    nodes_with_output_pair: frozenset[str]
    grids: PairGrids
    constant_grids: tuple[PairGrid, ...]

    @property
    def grid_text(self) -> str:
        """The grids of the activations as text: "int8 with zero point 0"."""
        return " and ".join(sorted(set(map(_describe_grid, self._activation_grids))))

    @property
    def _activation_grids(self) -> Iterator[PairGrid]:
        """The grids of all pairs on activations."""
        return chain.from_iterable(self.grids.values())

    def all_pairs_are(self, dtype: str, *, symmetric: bool = False) -> bool:
        """Return whether all activation pairs have this dtype (and zero point 0 if `symmetric`)."""
        return all(
            grid.dtype == dtype and not (symmetric and grid.zero.any())
            for grid in self._activation_grids
        )


def _describe_grid(grid: PairGrid) -> str:
    """Return the integer type of a grid, with the zero point of symmetric int8."""
    if grid.dtype == "int8" and not grid.zero.any():
        return "int8 with zero point 0"
    return grid.dtype


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for graph analysis; created by `deploy.frontends.load`.

    Attributes:
        model: the cleaned model, with all weights inside and shapes inferred. Its activation
            tensors have the names of the original; its node names are unique.
        source: the file it was read from, None for a model in memory.
        name: the file's stem, or the graph's name.
        digest: sha256 (hex) of the original graph and its weights. It does not depend on how a
            file stores them (external data, raw or typed fields, order of initializers, names of
            nodes, documentation, metadata).
        notes: one sentence per change, or per part left as it was.
        inputs: specs of the inputs of `model`, each with what its first dimension is.
        outputs: specs of its outputs.
        was_float16: whether the original computes in float16 what `model` computes in float32.
        has_shared_names: whether nodes of the original share names, which ONNX Runtime does not
            load.
        fed_weights: number of weights of the original that are inputs too: ONNX Runtime skips
            optimizations of layers whose weights may be fed.
        file_digests: of the bytes that were read; None for a model in memory.
        cut_off: nodes that ONNX Runtime does not know and all nodes downstream of them, which are
            not part of `model`; None without any.
        metadata_preprocess: preprocessing from the metadata in the file, or in a file next to it.
        classes: class -> name from the metadata in the file.
        declaration: what the file declares of its outputs.
        qdq: data of a Q/DQ model's pairs, which were removed from `model`; None for a float
            model.
        had_integer_weights: whether the original stores weights as integers that are float in
            `model`.
        was_training: whether the original normalizes by the statistics of each batch, as in
            training, where `model` uses stored ones.
        training_notes: on norms of the original that are in training mode.
        was_newer: whether the original is of an opset whose Q/DQ pairs ONNX Runtime does not run.
        exported: the original, if it was exported here from a PyTorch model, or the file with other
            shapes; else None.
        resized_file: the file whose inputs have other shapes here; None without any.
        given_shapes: these shapes as text, such as "x=1x3x256x256".
    """

    model: onnx.ModelProto
    source: Path | None
    name: str
    digest: str
    notes: tuple[str, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    was_float16: bool = False
    has_shared_names: bool = False
    fed_weights: int = 0
    file_digests: FileDigests | None = None
    cut_off: CutOffNodes | None = None
    metadata_preprocess: MetadataPreprocess | None = None
    classes: Mapping[int, str] = field(default_factory=dict)
    declaration: Declaration = field(default_factory=Declaration)
    qdq: QdqCalibration | None = None
    had_integer_weights: bool = False
    was_training: bool = False
    training_notes: tuple[str, ...] = ()
    was_newer: bool = False
    exported: onnx.ModelProto | None = None
    resized_file: Path | None = None
    given_shapes: tuple[str, ...] = ()

    @property
    def identities(self) -> dict[str, str]:
        """Digests of the original: of its "graph", and of its "file" and external "weights"."""
        identities = {"graph": self.digest}
        if self.file_digests is not None:
            identities["file"] = self.file_digests.file
            if self.file_digests.weights:
                identities["weights"] = self.file_digests.weights
        return identities

    @property
    def alerts(self) -> tuple[str, ...]:
        """Notes on norms in training mode, and on the nodes that are not part of `model`."""
        if self.cut_off is None:
            return self.training_notes
        return (self.cut_off.note(spec.name for spec in self.outputs), *self.training_notes)

    def open_samples(self, dataset: Dataset, *, labels_by_folder: bool = False) -> Feed:
        """Open samples in the form of this model's inputs.

        Some inputs of a recurrent model, its states, are outputs of its previous step. So the model
        is run while samples are read; its session is opened at the first step.

        Args:
            dataset: the user's images or arrays.
            labels_by_folder: whether the subfolder of an image is its class. The subfolders are
                numbered from 0 in the order of their names.

        Raises:
            FeedError, ConfigError: as `Dataset.open`.
        """

        @cache
        def open_session() -> OrtSession:
            with PROTOBUF:  # worker threads hold this lock while they touch a protobuf message
                return OrtSession.open(self.model, threads=1, spin=False)

        return dataset.open(
            self.inputs,
            metadata_preprocess=self.metadata_preprocess,
            labels_by_folder=labels_by_folder,
            recurrence=Recurrence(
                inputs=self.inputs,
                outputs=tuple(spec.name for spec in self.outputs),
                states=find_states(self.inputs, self.outputs),
                run=lambda sample: open_session().run(sample),
            ),
        )

    def with_inputs(self, inputs: Iterable[TensorSpec]) -> LoadedModel:
        """Return the model with other decisions on what the first dimension of its inputs is."""
        inputs = tuple(inputs)
        declaration = replace(self.declaration, batch_inputs=batch_inputs(inputs))
        return replace(self, inputs=inputs, declaration=declaration)

    def with_cut_off(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """Return a model derived from `self.model` with the cut-off nodes put back.

        Raises:
            ExportError: they mean something else in the opset of `model`.
        """
        return model if self.cut_off is None else self.cut_off.append_to(model)


# (path, or "path.py:factory", or a model in memory; fold_batchnorm) -> LoadedModel
Loader = Callable[["str | Path | onnx.ModelProto", bool], LoadedModel]


def read_model_file(loaded: LoadedModel) -> bytes:
    """Return the file as loaded, with external data inside; a model in memory is serialized.

    Raises:
        ModelError: the file or its external data changed since it was loaded.
    """
    if loaded.source is None or loaded.file_digests is None:
        return bytes(loaded.model.SerializeToString())
    if loaded.file_digests.weights:  # it has external data
        model, file_digests = read_model_and_digests(loaded.source)
        refuse_changed_model(loaded, has_changed=file_digests != loaded.file_digests)
        return bytes(model.SerializeToString())
    data = model_bytes(loaded.source)
    refuse_changed_model(loaded, has_changed=FileDigests(sha256(data)) != loaded.file_digests)
    return data


def read_uncleaned_model(
    model: str | Path | onnx.ModelProto | None, loaded: LoadedModel
) -> onnx.ModelProto | None:
    """Return the user's model before it is cleaned; one in memory is returned as it is.

    A file is parsed without its external data, so only the graph may be used.

    Args:
        model: the model from the user: a path, or a model in memory; None if only the cleaned model
            is available.
        loaded: the same model, cleaned.

    Returns:
        The model; None without one, or for a path of another kind of file, such as a PyTorch model.

    Raises:
        ModelError: the file changed since it was loaded.
    """
    if not isinstance(model, str | Path):
        return model
    path = Path(model)
    if path.suffix.lower() != ".onnx":
        return None
    data = model_bytes(path)
    has_changed = loaded.file_digests is not None and sha256(data) != loaded.file_digests.file
    refuse_changed_model(loaded, has_changed=has_changed)
    return parse_model(data, str(path))


def refuse_changed_model(loaded: LoadedModel, *, has_changed: bool) -> None:
    """End the run if the model's file is not the one that was loaded any more.

    Raises:
        ModelError: it has changed.
    """
    if has_changed:
        raise ModelError(
            f"{loaded.source} changed while calib8 ran, so not all of the run used the same model;"
            " do not change the file during a run, and run again"
        )


def model_digest(model: onnx.ModelProto) -> str:
    """Return the sha256 (hex) of operator sets, graph, functions and weights.

    External data must have been read. These do not count: names of nodes, documentation, metadata,
    producer, inferred shapes, the order of initializers, and whether a tensor is stored as raw
    bytes or as numbers.

    Raises:
        ModelError: a tensor's bytes do not fit its shape and type.
    """
    opsets = [f"{entry.domain}={entry.version}".encode() for entry in model.opset_import]
    # what counts, as nested lists of text and bytes
    tree: list[object] = [sorted(opsets), _graph_tree(model.graph)]
    for function in model.functions:
        tree.append([function.domain, function.name, list(function.input), list(function.output)])
        tree.append(list(map(_node_tree, function.node)))
        if function.attribute_proto:  # default values, for attributes that a call leaves out
            tree.append(_attribute_trees(function.attribute_proto))
    sha256_state = hashlib.sha256()
    _hash_tree(sha256_state, tree)
    return sha256_state.hexdigest()


def _hash_tree(state: hashlib._Hash, item: object) -> None:
    """Hash a tree of lists, strings and bytes so that no two trees give the same stream."""
    if isinstance(item, list):
        state.update(b"[%d]" % len(item))
        for part in item:
            _hash_tree(state, part)
        return
    data = item if isinstance(item, bytes) else str(item).encode()
    state.update(b"<%d>" % len(data))
    state.update(data)


def _graph_tree(graph: onnx.GraphProto) -> list[object]:
    """Return what `_hash_tree` hashes of a graph: lists, strings and bytes."""
    weights = sorted(graph.initializer, key=attrgetter("name"))
    return [
        list(map(_value_tree, runtime_inputs(graph))),
        list(map(_value_tree, graph.output)),
        list(map(_node_tree, graph.node)),
        list(map(_tensor_tree, weights)),
        [tensor.SerializeToString(deterministic=True) for tensor in graph.sparse_initializer],
    ]


def _value_tree(value: onnx.ValueInfoProto) -> list[object]:
    """Return the name and type of an input or output."""
    return [value.name, value.type.SerializeToString(deterministic=True)]


def _node_tree(node: onnx.NodeProto) -> list[object]:
    """Return the operator, tensors and attributes of a node, whatever its name."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    return [
        node.op_type,
        domain,
        list(node.input),
        list(node.output),
        _attribute_trees(node.attribute),
    ]


def _attribute_trees(attributes: Iterable[onnx.AttributeProto]) -> list[object]:
    """Return the names and values of attributes, in turn, sorted by name."""
    items: list[object] = []
    for attribute in sorted(attributes, key=attrgetter("name")):
        items += [attribute.name, _attribute_tree(attribute)]
    return items


def _attribute_tree(attribute: onnx.AttributeProto) -> object:
    """Return the value of an attribute."""
    if attribute.HasField("t"):
        return _tensor_tree(attribute.t)
    if attribute.tensors:
        return list(map(_tensor_tree, attribute.tensors))
    if attribute.HasField("g"):
        return _graph_tree(attribute.g)
    if attribute.graphs:
        return list(map(_graph_tree, attribute.graphs))
    undocumented = copy_message(attribute)
    undocumented.doc_string = ""  # documentation does not count
    return undocumented.SerializeToString(deterministic=True)


def _tensor_tree(tensor: onnx.TensorProto) -> list[object]:
    """Return the name, type, sizes and values of a tensor."""
    array = to_array(tensor)
    data = array.tobytes()
    if array.dtype == object:  # text, whose array holds addresses
        data = repr(array.tolist()).encode()
    return [tensor.name, tensor.data_type, list(tensor.dims), data]
