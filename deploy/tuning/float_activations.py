"""Runs only the part of a trial model downstream of its first difference from the float model.

::

    float model    x -> a -> b -> c -> d -> y      values of b stored, from one run of it
    c alone int8   x -> a -> b -> Q -> DQ -> c' -> Q -> DQ -> d -> y
    run of it                b -> Q -> DQ -> c' -> Q -> DQ -> d -> y

A node is the same if its attributes and everything that it reads are the same, constants too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import onnx
from onnx import helper

from deploy.graph.edit import copy_with_outputs, extract_nodes
from deploy.graph.index import iter_reads
from deploy.runtimes.ort import OrtSession
from deploy.tensors import Array

_MAX_BYTES = 1 << 28  # of stored values, over all samples; the others are recomputed

Values = Mapping[str, "Array"]


class FloatActivations:
    """Stored inner tensors of the float model on a few samples, from which trials start.

    Attributes:
        values: tensor -> array, for each sample.
    """

    def __init__(
        self,
        reference: onnx.ModelProto,
        changed: Iterable[Collection[str]],
        samples: Sequence[Values],
    ) -> None:
        """Run the float model once per sample and store the tensors that enter changed parts.

        `changed`: sets of its nodes; for each, the tensors that enter these nodes and all
        downstream are stored.

        Raises:
            BackendError: ONNX Runtime refused the model or a sample.
        """
        self._maker_by_tensor = {
            name: node for node in reference.graph.node for name in node.output
        }
        self._constants = {tensor.name: tensor for tensor in reference.graph.initializer}
        self.values: list[Values] = []
        names: dict[str, None] = {}
        for nodes in changed:
            names |= dict.fromkeys(border_tensors(reference, nodes))
        session = OrtSession.open(
            copy_with_outputs(reference, names), threads=1, spin=False, reuse_memory=True
        )
        for sample in samples:
            values = session.run(sample)
            if not self.values:
                names = _limit_memory(names, values, len(samples))
            self.values.append({name: values[name] for name in names})

    def unchanged_tensors(self, model: onnx.ModelProto) -> frozenset[str]:
        """Return the tensors with the same values as in the float model, inputs included."""
        constants = {tensor.name: tensor for tensor in model.graph.initializer}
        unchanged = {value.name for value in model.graph.input}
        changed: set[str] = set()  # constants
        for node in model.graph.node:
            reads = set(iter_reads(node))
            own_constants = reads & constants.keys()
            if not reads - own_constants <= unchanged:
                continue
            if any(self._maker_by_tensor.get(name) != node for name in node.output):
                continue
            # compared only now, as that reads all values
            for name in own_constants - unchanged - changed:
                is_equal = constants[name] == self._constants.get(name)
                (unchanged if is_equal else changed).add(name)
            if own_constants <= unchanged:
                unchanged.update(node.output)
        return frozenset(unchanged)


def border_tensors(model: onnx.ModelProto, nodes: Collection[str]) -> list[str]:
    """Return the tensors that pass from upstream nodes into `nodes` or their downstream.

    Constants and the model's own inputs are left out.
    """
    changed: set[str] = set()
    upstream: set[str] = set()
    tensors: dict[str, None] = {}
    for node in model.graph.node:
        reads = list(iter_reads(node))
        if node.name in nodes or changed.intersection(reads):
            changed.update(node.output)
            tensors |= dict.fromkeys(name for name in reads if name in upstream)
        else:
            upstream.update(node.output)
    return list(tensors)


def _limit_memory(names: Iterable[str], values: Values, samples: int) -> dict[str, None]:
    """Return the first tensors that fit into the memory limit, in order."""
    fitting: dict[str, None] = {}
    total = 0
    for name in names:
        total += values[name].nbytes * samples
        if total > _MAX_BYTES:
            break
        fitting[name] = None
    return fitting


def downstream_model(
    model: onnx.ModelProto, unchanged: Collection[str], values: Sequence[Values]
) -> onnx.ModelProto:
    """Return the model that starts from tensors of known values, without the nodes upstream.

    `model`: a trial model; it is not changed. `unchanged`: tensors that may be replaced. `values`:
    tensor -> value, for each sample. A dimension that varies over the samples, such as the length
    of a text line, is left open.
    """
    graph = model.graph
    needed = {value.name for value in graph.output}
    stored = {name for name in values[0] if name in unchanged} - needed
    nodes, replaced = [], []
    for node in reversed(graph.node):
        outputs = [name for name in node.output if name in needed]
        if outputs and stored.issuperset(outputs):
            replaced += outputs
        elif outputs:
            needed.update(iter_reads(node))
            nodes.append(node)
    inputs = [value for value in graph.input if value.name in needed]
    for name in replaced:
        inputs.append(_make_input(name, [sample_values[name] for sample_values in values]))
    return extract_nodes(model, reversed(nodes), needed, inputs=inputs, outputs=graph.output)


def _make_input(name: str, values: Sequence[Array]) -> onnx.ValueInfoProto:
    """Return an input that takes each of these values."""
    shape = []
    for sizes in zip(*(value.shape for value in values), strict=True):
        shape.append(sizes[0] if len(set(sizes)) == 1 else None)
    dtype = helper.np_dtype_to_tensor_dtype(values[0].dtype)
    return helper.make_tensor_value_info(name, dtype, shape)
