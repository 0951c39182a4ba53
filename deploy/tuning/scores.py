"""What a model says before it ranks: the scores that ArgMax or TopK reads at its end.

Numbers of classes hardly change with noise, until they do: of a few samples they tell no layers
apart. So a search hears the scores, of the float model and of every trial, in their place::

    ... -> Gemm -> logits -> ArgMax -> Cast -> class        heard: logits
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from deploy.graph.edit import with_outputs
from deploy.runtimes.ort import OrtSession

if TYPE_CHECKING:
    import onnx

    from deploy.tuning.probe import Heard

_RANKING = ("ArgMax", "TopK")
_BEHIND = ("Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")


def ranked(model: onnx.ModelProto) -> dict[str, str]:
    """Output of numbers of classes or of the best scores -> the scores that it comes from.

    None where other outputs stand beside them: boxes are in the order of their scores.
    """
    makers = {name: node for node in model.graph.node for name in node.output}
    found = {}
    for output in model.graph.output:
        node = makers.get(output.name)
        while node is not None and node.op_type in _BEHIND:
            node = makers.get(node.input[0])
        if node is not None and node.op_type in _RANKING:
            found[output.name] = node.input[0]
    return found if len(found) == len(model.graph.output) else {}


def with_scores(
    model: onnx.ModelProto, heard: Sequence[Heard], *, every: bool, threads: int
) -> list[Heard]:
    """Samples with the scores that the float model ranks, in the place of what it makes of them.

    Args:
        model: the float model.
        heard: samples, each with the outputs of the model.
        every: whether these outputs are kept beside the scores.
        threads: of one inference.

    Raises:
        BackendError: ONNX Runtime refused the model or a sample.
    """
    ends = ranked(model)
    scores = list(dict.fromkeys(ends.values()))
    session = OrtSession.open(with_outputs(model, scores), threads=threads, spin=False)
    found: list[Heard] = []
    for sample, said in heard:
        left = {name: value for name, value in said.items() if every or name not in ends}
        made = session.run(sample)
        found.append((sample, {**left, **{name: made[name] for name in scores}}))
    return found


def telling_scores(model: onnx.ModelProto, ends: Mapping[str, str]) -> onnx.ModelProto:
    """A trial model that gives the scores too, under the float model's names.

    Args:
        model: of a trial.
        ends: as `ranked` found them in the float model.
    """
    from onnx import helper

    told = with_outputs(model, ends.values())
    graph = told.graph
    made = {name for node in graph.node for name in node.output}
    for output, own in ranked(model).items():
        name = ends.get(output, own)
        if name not in made:  # the trial has it under another name
            graph.node.append(helper.make_node("Identity", [own], [name], name=f"{name}/told"))
            made.add(name)
    return told
