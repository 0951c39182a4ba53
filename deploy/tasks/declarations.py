"""What a model's file declares about its outputs: read before the values, which only confirm it.

Declared are, in this order: Ultralytics' metadata, Hugging Face's `config.json` beside the model,
the names that exporters give to outputs, and the operators at the end of the graph.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from deploy.graph.index import all_nodes, subgraphs

if TYPE_CHECKING:
    import onnx

# `task` in Ultralytics' metadata -> task (ultralytics/engine/exporter.py)
ULTRALYTICS_TASKS = {
    "detect": "boxes",
    "segment": "boxes",
    "pose": "boxes",
    "obb": "boxes",
    "classify": "classes",
}

# end of a class name in `architectures` of config.json -> task (transformers, models/auto)
ARCHITECTURES = {
    "ForImageClassification": "classes",
    "ForAudioClassification": "classes",
    "ForVideoClassification": "classes",
    "ForSequenceClassification": "classes",
    "ForTokenClassification": "steps",
    "ForAudioFrameClassification": "steps",
    "ForCTC": "text",
    "ForObjectDetection": "boxes",
    "ForSemanticSegmentation": "segmentation",
    "ForXVector": "embeddings",
    "WithProjection": "embeddings",
    "ForDepthEstimation": "none",
    "ForImageSuperResolution": "none",
    "ForMaskedImageModeling": "none",
}


class NamedOutputs(NamedTuple):
    """Names that an exporter gives to its outputs, and the task that they have.

    `names`: all of them must be outputs; further outputs do not matter.
    """

    names: Collection[str]
    task: str
    exporter: str


OUTPUT_NAMES = (
    NamedOutputs(("logits", "pred_boxes"), "boxes", "DETR"),
    NamedOutputs(("pred_logits", "pred_boxes"), "boxes", "DETR"),
    NamedOutputs(("dets", "labels"), "boxes", "MMDeploy and RF-DETR"),
    NamedOutputs(("boxes", "scores"), "boxes", "torchvision and RetinaNet"),
    NamedOutputs(("num_dets", "det_boxes", "det_scores"), "boxes", "TensorRT's EfficientNMS"),
    NamedOutputs(("detection_boxes", "detection_scores"), "boxes", "TensorFlow's object detection"),
    NamedOutputs(("simcc_x", "simcc_y"), "keypoints", "RTMPose (SimCC)"),
    NamedOutputs(("sentence_embedding",), "embeddings", "sentence-transformers"),
    NamedOutputs(("image_embeds",), "embeddings", "CLIP"),
    NamedOutputs(("text_embeds",), "embeddings", "CLIP"),
)

# operator that makes the values of an output -> what they are
ENDS = {
    "Softmax": "softmax",
    "LogSoftmax": "softmax",
    "Sigmoid": "sigmoid",
    "HardSigmoid": "sigmoid",
    "ArgMax": "classes",
    "TopK": "ranked",
    "NonMaxSuppression": "selected",
    "MatMul": "raw",
    "Gemm": "raw",
    "Conv": "raw",
}
# operators whose output has the values of their input
_RESHAPING_OPERATORS = frozenset(
    {"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
)
# operators that move values, choose them, average them or add a bias: what their input is, their
# output is too
_MOVING_OPERATORS = _RESHAPING_OPERATORS | {"Add", "Concat", "If", "ReduceMean", "Slice", "Split"}
# operators that give scores in another shape, activated, or as their best class
_SCORE_OPERATORS = _RESHAPING_OPERATORS | {
    "Softmax",
    "LogSoftmax",
    "Sigmoid",
    "HardSigmoid",
    "ArgMax",
}
_PROBABILITY_ENDS = "softmax", "sigmoid"  # ends of probabilities
_DERIVED_ENDS = *_PROBABILITY_ENDS, "classes"  # ends of outputs that are computed from raw scores
Makers = Mapping[str, "onnx.NodeProto"]  # tensor -> the node that computes it


@dataclass(frozen=True, slots=True)
class Declaration:
    """What a model's file declares about its outputs.

    Attributes:
        task: name of a task (`deploy.tasks.TASKS`), or "none" for outputs without one; "" if
            nothing is declared.
        source: who declares the task, as text.
        classes: number of classes; 0 if unknown.
        ends: output -> what its values are by the operator at its end, as in `ENDS`.
        probabilities: output of raw scores -> the output that is their Softmax or Sigmoid.
        best_classes: outputs of an ArgMax of scores that are an output too.
        states: inputs of a recurrent model -> the outputs of the call before that they take.
        batch_inputs: inputs each of whose rows is one sample; None if that is unknown, and then
            the first input is taken.
    """

    task: str = ""
    source: str = ""
    classes: int = 0
    ends: Mapping[str, str] = field(default_factory=dict)
    probabilities: Mapping[str, str] = field(default_factory=dict)
    best_classes: Collection[str] = ()
    states: Mapping[str, str] = field(default_factory=dict)
    batch_inputs: Collection[str] | None = None


def declare(
    model: "onnx.ModelProto", config: Mapping[str, Any], class_count: int = 0
) -> Declaration:
    """Return what a model's file declares about its outputs: the task, and how they are computed.

    Args:
        model: with the metadata of the user's file.
        config: the `config.json` beside it; empty without one.
        class_count: number of class names in the metadata; 0 without.
    """
    properties = {entry.key: entry.value for entry in model.metadata_props}
    outputs = [output.name for output in model.graph.output]
    labels = config.get("id2label")
    if not class_count and isinstance(labels, Mapping):
        class_count = len(labels)
    task, source = next(_declared_tasks(properties, config, outputs), ("", ""))
    # tensor -> the node that computes it
    makers = {name: node for node in all_nodes(model.graph) for name in node.output}
    ends = _find_ends(outputs, makers)
    probabilities, best_classes = _find_repeats(outputs, makers, ends)
    return Declaration(
        task=task,
        source=source,
        classes=class_count,
        ends=ends,
        probabilities=probabilities,
        best_classes=best_classes,
    )


def _declared_tasks(
    properties: Mapping[str, str], config: Mapping[str, Any], outputs: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield (task, who declares it), the most certain first.

    Args:
        properties: the model's metadata.
        config: the `config.json` beside it, whose architectures are such as "Wav2Vec2ForCTC".
        outputs: names of the outputs.
    """
    task = ULTRALYTICS_TASKS.get(properties.get("task", ""))
    if task is not None and properties.get("author") == "Ultralytics":
        yield task, "Ultralytics' metadata"

    architectures = config.get("architectures")
    if not isinstance(architectures, list):  # a user's file may hold anything
        architectures = []
    for architecture in architectures:
        for ending, task in ARCHITECTURES.items():
            if not str(architecture).endswith(ending):
                continue
            if config.get("problem_type") == "multi_label_classification":
                task = "labels"
            yield task, "config.json beside the model"

    # the least certain: a user may give any name to an output
    for row in OUTPUT_NAMES:
        if all(name in outputs for name in row.names):
            yield row.task, f"{row.exporter}'s output names"


def _find_ends(outputs: Collection[str], makers: Makers) -> dict[str, str]:
    """Return output -> what its values are by the operator at its end (`ENDS`).

    Outputs are left out if another operator, or several, make their values.
    """
    ends = {}
    for output in outputs:
        sources = _find_sources(output, makers, _MOVING_OPERATORS)
        # inputs and constants have no operator
        operators = {makers[source].op_type for source in sources if source in makers}
        if len(operators) == 1 and operators <= ENDS.keys():
            ends[output] = ENDS[operators.pop()]
    return ends


def _find_repeats(
    outputs: Collection[str], makers: Makers, ends: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Find the outputs of raw scores and of ArgMax that say the same as another output.

    Classifiers often give raw scores, their probabilities (the Softmax or Sigmoid of the scores)
    and their best class (the ArgMax) as three outputs.

    Args:
        outputs: names of the outputs.
        makers: tensor -> the node that computes it.
        ends: output -> what its values are, as in `ENDS`.

    Returns:
        (output of raw scores -> output of their probabilities, outputs of an ArgMax of scores that
        are an output too).
    """
    outputs_by_scores: defaultdict[frozenset[str], list[str]] = defaultdict(list)
    for output in outputs:
        outputs_by_scores[_find_sources(output, makers, _SCORE_OPERATORS)].append(output)
    probabilities: dict[str, str] = {}
    best_classes: list[str] = []
    for group in outputs_by_scores.values():  # outputs that are computed from the same scores
        class_outputs = [output for output in group if ends.get(output) == "classes"]
        activated_outputs = [output for output in group if ends.get(output) in _PROBABILITY_ENDS]
        if activated_outputs:
            raw_outputs = [output for output in group if ends.get(output) not in _DERIVED_ENDS]
            probabilities |= dict.fromkeys(raw_outputs, activated_outputs[0])
        if len(class_outputs) < len(group):  # beside the scores, or their probabilities
            best_classes += class_outputs
    return probabilities, best_classes


def _find_sources(tensor: str, makers: Makers, passed_operators: Collection[str]) -> frozenset[str]:
    """Return the tensors upstream of these operators from which a tensor is computed.

    Both branches of an If are followed, all inputs of a Concat, and both of an Add: either may be
    the bias, a constant. Of other operators, only the first input holds values.

    Args:
        tensor: where the search begins.
        makers: tensor -> the node that computes it.
        passed_operators: operators that the search follows upstream.
    """
    sources = set()
    tensors = [tensor]
    visited = set[str]()
    while tensors:
        name = tensors.pop()
        if name in visited:
            continue
        visited.add(name)
        node = makers.get(name)
        if node is None or node.op_type not in passed_operators:
            sources.add(name)
        elif node.op_type in ("Concat", "Add"):
            tensors += node.input
        elif node.op_type == "If":
            index = list(node.output).index(name)
            tensors += [branch.output[index].name for branch in subgraphs(node)]
        else:
            tensors.append(node.input[0])
    return frozenset(sources)
