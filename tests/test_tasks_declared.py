"""What a model's file declares about its outputs, and that it decides the task."""

import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, parser

from deploy.frontends import load
from deploy.metrics.output_form import derive_form
from deploy.tasks import TASKS, Metric, thresholds
from deploy.tasks.declarations import ARCHITECTURES, OUTPUT_NAMES, Declaration, declare
from scripts import forms
from tests.outputs import CELLS, fed, split_yolo

ROWS = (1, 6, 8)


def network(*ends, names=("y",)):
    """A MatMul, and for each output the operators at its end."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"])]
    for name, operators in zip(names, ends or [()] * len(names), strict=True):
        tensors = ["m", *(f"{name}_{k}" for k in range(len(operators) - 1)), name]
        if not operators:
            nodes.append(helper.make_node("Identity", ["m"], [name]))
        for k, operator in enumerate(operators):
            nodes.append(helper.make_node(operator, [tensors[k]], [tensors[k + 1]]))
    weight = helper.make_tensor("w", TensorProto.FLOAT, [8, 8], np.eye(8).ravel().tolist())
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ROWS)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names],
        [weight],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize(
    ("operators", "end"),
    [
        ((), "raw"),
        (("Softmax",), "softmax"),
        (("Sigmoid", "Transpose"), "sigmoid"),
        (("Sigmoid", "ReduceMean", "Unsqueeze"), "sigmoid"),
        (("LogSoftmax", "Identity"), "softmax"),
        (("ArgMax",), "classes"),
        (("Tanh",), None),
    ],
)
def test_operator_at_the_end_is_read(operators, end):
    assert declare(network(operators), {}).ends.get("y") == end


@pytest.mark.parametrize(("operator", "end"), [("Sigmoid", "sigmoid"), ("Tanh", None)])
def test_operators_at_the_end_of_both_branches_are_read(operator, end):
    model = parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        net (float[1, 8] x, bool is_loud) => (float[1, 8] y) {{
            probabilities = Sigmoid (x)
            y = If (is_loud) <
                then_branch = loud () => (float[1, 8] a) {{ a = Identity (probabilities) }},
                else_branch = quiet () => (float[1, 8] b) {{ b = {operator} (x) }}
            >
        }}"""
    )
    assert declare(model, {}).ends.get("y") == end


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_config_beside_the_model_declares_task(architecture, tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(network(()), path)
    config = {"architectures": [f"Bert{architecture}"], "id2label": {"0": "a", "1": "b"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    declaration = load(path).declaration
    assert declaration.task == ARCHITECTURES[architecture]
    assert declaration.classes == 2 and "config.json" in declaration.source


def test_config_above_a_folder_onnx_declares_task(tmp_path):
    (tmp_path / "onnx").mkdir()
    onnx.save(network(()), tmp_path / "onnx" / "model.onnx")
    config = {"architectures": ["XForImageClassification"]}
    config["problem_type"] = "multi_label_classification"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load(tmp_path / "onnx" / "model.onnx").declaration.task == "labels"


@pytest.mark.parametrize("text", ["{", "[]", '{"architectures": 7}', '{"architectures": [null]}'])
def test_config_that_cannot_be_read_declares_nothing(text, tmp_path):
    onnx.save(network(()), tmp_path / "model.onnx")
    (tmp_path / "config.json").write_text(text)
    assert load(tmp_path / "model.onnx").declaration.task == ""


def test_ultralytics_metadata_declares_task_and_classes(tmp_path):
    model = network(())
    helper.set_model_props(
        model, {"author": "Ultralytics", "task": "pose", "names": "{0: 'a', 1: 'b'}"}
    )
    onnx.save(model, tmp_path / "model.onnx")
    declaration = load(tmp_path / "model.onnx").declaration
    assert (declaration.task, declaration.classes) == ("boxes", 2)


@pytest.mark.parametrize("row", OUTPUT_NAMES)
def test_output_names_of_exporters_declare_task(row):
    assert declare(network(names=tuple(row.names)), {}).task == row.task


def test_declared_values_have_no_task():
    outputs = [{"y": np.eye(4, dtype=np.float32)[k % 4][None]} for k in range(8)]
    metric = Metric(None, declared=Declaration("none", "config.json beside the model"))
    assert derive_form(outputs, inputs=[fed()] * 8).task.name == "classes"
    assert derive_form(outputs, inputs=[fed()] * 8, metric=metric).task is None


def test_declared_task_that_does_not_fit_leaves_it_to_the_form():
    outputs = [{"y": np.eye(4, dtype=np.float32)[k % 4][None]} for k in range(8)]
    metric = Metric(None, declared=Declaration("boxes", "config.json beside the model"))
    assert derive_form(outputs, inputs=[fed()] * 8, metric=metric).task.name == "classes"


def task_of(outputs, ends, inputs=None):
    metric = Metric(None, declared=Declaration(ends=ends))
    form = derive_form(outputs, inputs=inputs or [fed()] * len(outputs), metric=metric)
    return None if form.task is None else form.task.name


@pytest.mark.parametrize("peak", [0.95, 0.8])
def test_sigmoid_at_the_end_makes_labels_of_one_class_a_sample(peak):
    outputs = [{"y": np.float32(peak * np.eye(8)[k % 8][None] + 0.01)} for k in range(16)]
    assert task_of(outputs, {"y": "sigmoid"}) == "labels"


def test_page_of_forms_is_current():
    """`python scripts/forms.py` renews it."""
    page = forms.PAGE.read_text("utf-8")
    assert forms.renew_page(page) == page
    for name in TASKS:
        assert f"\n| `{name}` | " in page
    assert forms.renew_page(page.replace("SimCC", "SimXX")) == page


def test_thresholds_are_few_and_have_reasons():
    file = Path(thresholds.__file__)
    rows = re.findall(r"^([A-Z].*?) = .*?(?:  # (.+))?$", file.read_text(), re.MULTILINE)
    names = [name for row, _ in rows for name in row.split(", ")]
    assert len(names) <= 90
    assert all(reason for _, reason in rows)
    code = "".join(path.read_text() for path in file.parent.glob("*.py") if path != file)
    assert not [name for name in names if len(re.findall(rf"\b{name}\b", code)) < 2]


@pytest.mark.parametrize(("columns", "activation"), [(5, "sigmoid"), (6, "softmax")])
def test_class_count_decides_what_raw_scores_lack(columns, activation):
    """A third of the rows detects something: of a Softmax the values alone do not tell it."""
    outputs = split_yolo(0)
    scores = np.full((1, len(CELLS), columns), -6, np.float32)
    scores[:, :, 5:] = 0  # the background, if there is one
    scores[:, ::3, 1] = 4
    samples = [{"boxes": outputs["boxes"], "scores": scores}] * 4
    declared_form = f"scores: {activation} of 5 classes, boxes by centre"
    form_by_values = declared_form if activation == "sigmoid" else None
    for class_count, form in ((5, declared_form), (0, form_by_values)):
        metric = Metric(None, declared=Declaration(classes=class_count))
        task = derive_form(samples, inputs=[fed()] * 4, metric=metric).task
        assert (task and task.form) == form
