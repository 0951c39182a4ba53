"""The part of a trial model behind what differs from the float model; what is before it is known.

::

    float model    x -> a -> b -> c -> d -> y      values of b kept, from one run of it
    c alone int8   x -> a -> b -> Q -> DQ -> c' -> Q -> DQ -> d -> y
    run of it                b -> Q -> DQ -> c' -> Q -> DQ -> d -> y

A node is the same where it says the same and all that it reads is the same, its constants too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from deploy.graph.edit import part, with_outputs
from deploy.graph.index import reads
from deploy.runtimes.ort import OrtSession

if TYPE_CHECKING:
    import onnx

    from deploy.tensors import Array

_MOST_BYTES = 1 << 28  # of values that are kept, over all samples; the rest is computed again

Values = Mapping[str, "Array"]


class Kept:
    """Inner tensors of the float model in a few samples, from which trials can begin.

    Attributes:
        heard: the samples, each with the float model's outputs.
        values: of each sample, tensor -> array.
    """

    def __init__(
        self,
        reference: onnx.ModelProto,
        heard: Sequence[tuple[Values, Values]],
        values: Sequence[Values],
    ) -> None:
        graph = reference.graph
        self._nodes = {name: node for node in graph.node for name in node.output}
        self._constants = {tensor.name: tensor for tensor in graph.initializer}
        self.heard, self.values = heard, values

    @classmethod
    def of(
        cls,
        reference: onnx.ModelProto,
        changed: Iterable[Collection[str]],
        heard: Sequence[tuple[Values, Values]],
    ) -> Kept:
        """Run the float model once a sample, and keep what goes into what will change.

        Args:
            reference: the float model.
            changed: sets of its nodes; with each it is what they and all behind them read.
            heard: a few samples.

        Raises:
            BackendError: ONNX Runtime refused the model or a sample.
        """
        wanted = dict.fromkeys(name for nodes in changed for name in border(reference, nodes))
        session = OrtSession.open(with_outputs(reference, wanted), threads=1, spin=False, keep=True)
        values: list[dict[str, Array]] = []
        for sample, _ in heard:
            made = session.run(sample)
            if not values:
                wanted = _that_fit({name: made[name] for name in wanted}, len(heard))
            values.append({name: made[name] for name in wanted})
        return cls(reference, heard, values)

    def same(self, model: onnx.ModelProto) -> frozenset[str]:
        """Tensors that hold in a model what they hold in the float one, its inputs included."""
        graph, known = model.graph, self._constants
        constants = {tensor.name: tensor for tensor in graph.initializer}
        found = {value.name for value in graph.input}
        differ = constants.keys() - known.keys()
        for node in graph.node:
            read = set(reads(node))
            own = read & constants.keys()
            if not read <= found | own or any(self._nodes.get(o) != node for o in node.output):
                continue
            differ |= {name for name in own - found - differ if constants[name] != known[name]}
            if not differ & own:
                found |= {*own, *node.output}
        return frozenset(found)


def border(model: onnx.ModelProto, nodes: Collection[str]) -> list[str]:
    """Tensors made by nodes of a model that are read by some nodes, or behind them, and not behind.

    Constants and the model's own inputs are left out.
    """
    changed: set[str] = set()
    made: set[str] = set()
    found: dict[str, None] = {}
    for node in model.graph.node:
        read = list(reads(node))
        if node.name in nodes or changed.intersection(read):
            changed.update(node.output)
            found |= dict.fromkeys(name for name in read if name in made)
        else:
            made.update(node.output)
    return list(found)


def _that_fit(values: Mapping[str, Array], samples: int) -> dict[str, None]:
    """The tensors that are kept, in their order, until there is no room."""
    found: dict[str, None] = {}
    held = 0
    for name, value in values.items():
        held += value.nbytes * samples
        if held <= _MOST_BYTES:
            found[name] = None
    return found


def behind(
    model: onnx.ModelProto, same: Collection[str], known: Sequence[Values]
) -> onnx.ModelProto:
    """The model fed with tensors whose values are known, without the nodes before them.

    Args:
        model: a trial model; what is not needed any more is taken out of a copy.
        same: tensors that hold the same in the float model.
        known: of each sample, tensor -> its value. The input gets its type, and the sizes that it
            has in all of them: lines of text are as long as each of them is.
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
            needed.update(reads(node))
            nodes.append(node)
    own = [value for value in graph.input if value.name in needed]
    instead = [_as_input(name, [values[name] for values in known]) for name in fed]
    inputs = [*own, *instead]
    return part(model, reversed(nodes), needed, inputs=inputs, outputs=graph.output)


def _as_input(name: str, values: Sequence[Array]) -> onnx.ValueInfoProto:
    """An input that takes every one of these values."""
    from onnx import helper

    sizes = zip(*(value.shape for value in values), strict=True)
    shape = [size if len({size, *others}) == 1 else None for size, *others in sizes]
    return helper.make_tensor_value_info(
        name, helper.np_dtype_to_tensor_dtype(values[0].dtype), shape
    )
