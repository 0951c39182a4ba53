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
from deploy.graph.index import by_name, iter_reads, map_producers, names_of
from deploy.runtimes.ort import OrtSession
from deploy.tensors import Array

_MAX_BYTES = 1 << 28  # of stored values, over all samples; the others are recomputed

Values = Mapping[str, "Array"]


class FloatActivations:
    """Stored inner tensors of the float model on a few samples, from which trials start.

    Attributes:
        values_by_sample: tensor -> array, for each sample.
    """

    def __init__(
        self,
        reference: onnx.ModelProto,
        int8_nodes_by_trial: Iterable[Collection[str]],
        samples: Sequence[Values],
    ) -> None:
        """Run the float model once per sample and store the tensors from which trials can start.

        Args:
            reference: the float model.
            int8_nodes_by_trial: for each trial, the names of the nodes that it has in int8. A trial
                computes these nodes and all nodes downstream again; the tensors that enter this
                part from outside are stored, as far as memory allows.
            samples: input -> array.

        Raises:
            BackendError: ONNX Runtime refused the model or a sample.
        """
        self._node_by_output = map_producers(reference.graph.node)
        self._constants = by_name(reference.graph.initializer)
        self.values_by_sample: list[Values] = []
        border_tensors: dict[str, None] = {}
        for int8_nodes in int8_nodes_by_trial:
            border_tensors |= dict.fromkeys(find_border_tensors(reference, int8_nodes))
        session = OrtSession.open(
            copy_with_outputs(reference, border_tensors), threads=1, spin=False, reuse_memory=True
        )
        stored_tensors: dict[str, None] = {}
        for sample in samples:
            values = session.run(sample)
            if not self.values_by_sample:  # the first sample shows the size of each tensor
                stored_tensors = _limit_memory(border_tensors, values, len(samples))
            self.values_by_sample.append({name: values[name] for name in stored_tensors})

    def unchanged_tensors(self, model: onnx.ModelProto) -> set[str]:
        """Return the tensors of a trial model with the same values as in the float model.

        They are its inputs, and the outputs of nodes that are the same and read only such tensors.
        """
        constants = by_name(model.graph.initializer)
        is_equal_by_constant: dict[str, bool] = {}
        unchanged_names = names_of(model.graph.input)
        for node in model.graph.node:
            # "" is an output that is left out
            if any(self._node_by_output.get(name) != node for name in filter(None, node.output)):
                continue
            reads = set(iter_reads(node))
            read_constants = reads & constants.keys()
            if not unchanged_names.issuperset(reads - read_constants):
                continue
            # a comparison reads all values of a constant, so only now, and once
            for name in read_constants - is_equal_by_constant.keys():
                is_equal_by_constant[name] = constants[name] == self._constants.get(name)
            if all(is_equal_by_constant[name] for name in read_constants):
                unchanged_names.update(node.output)
        return unchanged_names

    def shorten(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """Return a trial model that has stored tensors as inputs, without the nodes upstream.

        Stored are values of the float model, so only tensors that the trial does not change become
        inputs. A dimension that varies over the samples, such as the length of a text line, is left
        open.
        """
        graph = model.graph
        needed_tensors = names_of(graph.output)
        stored_tensors = (
            self.unchanged_tensors(model).intersection(self.values_by_sample[0]) - needed_tensors
        )
        nodes = []
        new_inputs = []
        # from the outputs upstream: a node without an output that is needed is left out
        for node in reversed(graph.node):
            needed_outputs = [name for name in node.output if name in needed_tensors]
            if needed_outputs and stored_tensors.issuperset(needed_outputs):
                new_inputs += needed_outputs
            elif needed_outputs:
                needed_tensors.update(iter_reads(node))
                nodes.append(node)
        inputs = [value for value in graph.input if value.name in needed_tensors]
        inputs += map(self._make_input, new_inputs)
        return extract_nodes(
            model, reversed(nodes), needed_tensors, inputs=inputs, outputs=graph.output
        )

    def _make_input(self, name: str) -> onnx.ValueInfoProto:
        """Return a graph input that takes a stored tensor of each sample."""
        arrays = [values[name] for values in self.values_by_sample]
        shape = []
        for sizes in zip(*(array.shape for array in arrays), strict=True):
            shape.append(sizes[0] if len(set(sizes)) == 1 else None)
        dtype = helper.np_dtype_to_tensor_dtype(arrays[0].dtype)
        return helper.make_tensor_value_info(name, dtype, shape)


def find_border_tensors(model: onnx.ModelProto, nodes: Collection[str]) -> list[str]:
    """Return the tensors that pass from upstream nodes into `nodes` or their downstream.

    Constants and the model's own inputs are left out. Nodes are in topological order.
    """
    recomputed_tensors: set[str] = set()  # of `nodes` and all downstream
    upstream_tensors: set[str] = set()
    tensors: dict[str, None] = {}
    for node in model.graph.node:
        reads = list(iter_reads(node))
        if node.name in nodes or recomputed_tensors.intersection(reads):
            recomputed_tensors.update(node.output)
            tensors |= dict.fromkeys(name for name in reads if name in upstream_tensors)
        else:
            upstream_tensors.update(node.output)
    return list(tensors)


def _limit_memory(tensors: Iterable[str], values: Values, sample_count: int) -> dict[str, None]:
    """Return the first tensors that fit into the memory limit, in order."""
    fitting_tensors: dict[str, None] = {}
    total = 0
    for name in tensors:
        total += values[name].nbytes * sample_count
        if total > _MAX_BYTES:
            break
        fitting_tensors[name] = None
    return fitting_tensors
