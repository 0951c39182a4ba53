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

_MOST_BYTES = 1 << 28  # of stored values, over all samples; the others are recomputed

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
        heard: Sequence[tuple[Values, Values]],
    ) -> None:
        """Run the float model once per sample and store the tensors that enter changed parts.

        `changed`: sets of its nodes; for each, the tensors that enter these nodes and all
        downstream are stored.

        Raises:
            BackendError: ONNX Runtime refused the model or a sample.
        """
        graph = reference.graph
        self._nodes = {name: node for node in graph.node for name in node.output}
        self._constants = {tensor.name: tensor for tensor in graph.initializer}
        self.samples = heard
        self.values: list[Values] = []
        wanted = dict.fromkeys(
            name for nodes in changed for name in border_tensors(reference, nodes)
        )
        session = OrtSession.open(
            copy_with_outputs(reference, wanted), threads=1, spin=False, reuse_memory=True
        )
        for sample, _ in heard:
            made = session.run(sample)
            if not self.values:
                wanted = _that_fit({name: made[name] for name in wanted}, len(heard))
            self.values.append({name: made[name] for name in wanted})

    def unchanged_tensors(self, model: onnx.ModelProto) -> frozenset[str]:
        """Return the tensors with the same values as in the float model, inputs included."""
        graph, reference = model.graph, self._constants
        constants = {tensor.name: tensor for tensor in graph.initializer}
        same = {value.name for value in graph.input}
        differ = constants.keys() - reference.keys()
        for node in graph.node:
            read = set(iter_reads(node))
            own = read & constants.keys()
            if not read <= same | own or any(self._nodes.get(o) != node for o in node.output):
                continue
            differ |= {name for name in own - same - differ if constants[name] != reference[name]}
            if not differ & own:
                same |= {*own, *node.output}
        return frozenset(same)


def border_tensors(model: onnx.ModelProto, nodes: Collection[str]) -> list[str]:
    """Return the tensors that pass from upstream nodes into `nodes` or their downstream.

    Constants and the model's own inputs are left out.
    """
    changed: set[str] = set()
    upstream: set[str] = set()
    tensors: dict[str, None] = {}
    for node in model.graph.node:
        read = list(iter_reads(node))
        if node.name in nodes or changed.intersection(read):
            changed.update(node.output)
            tensors |= dict.fromkeys(name for name in read if name in upstream)
        else:
            upstream.update(node.output)
    return list(tensors)


def _that_fit(values: Mapping[str, Array], samples: int) -> dict[str, None]:
    """Return the first tensors that fit into the memory limit, in order."""
    fitting: dict[str, None] = {}
    total = 0
    for name, value in values.items():
        total += value.nbytes * samples
        if total <= _MOST_BYTES:
            fitting[name] = None
    return fitting


def downstream_model(
    model: onnx.ModelProto, same: Collection[str], known: Sequence[Values]
) -> onnx.ModelProto:
    """Return the model that starts from tensors of known values, without the nodes upstream.

    `model`: a trial model; it is not changed. `known`: tensor -> value, for each sample. A
    dimension that varies over the samples, such as the length of a text line, is left open.
    """
    graph = model.graph
    ends = {value.name for value in graph.output}
    stops = {name for name in known[0] if name in same and name not in ends}
    needed, nodes, fed = set(ends), [], []
    for node in reversed(graph.node):
        wanted = [name for name in node.output if name in needed]
        if wanted and stops.issuperset(wanted):
            fed += wanted
        elif wanted:
            needed.update(iter_reads(node))
            nodes.append(node)
    inputs_left = [value for value in graph.input if value.name in needed]
    new_inputs = [_as_input(name, [values[name] for values in known]) for name in fed]
    inputs = [*inputs_left, *new_inputs]
    return extract_nodes(model, reversed(nodes), needed, inputs=inputs, outputs=graph.output)


def _as_input(name: str, values: Sequence[Array]) -> onnx.ValueInfoProto:
    """Return an input that takes each of these values."""
    sizes = zip(*(value.shape for value in values), strict=True)
    shape = [size if len({size, *others}) == 1 else None for size, *others in sizes]
    return helper.make_tensor_value_info(
        name, helper.np_dtype_to_tensor_dtype(values[0].dtype), shape
    )
