"""What a build keeps in float by itself, for every target, and the plan file that it leaves.

`spoiled` has one layer, /bad/Conv, that int8 ruins: one channel of its input is a thousand times
the others, and its weights make up for that. Who makes that input runs in float anyway.
"""

import contextlib
import io
import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from deploy.cli import main
from deploy.errors import BackendError
from deploy.metrics.latency import Latency, Timing
from deploy.runtimes.ort import OrtSession
from deploy.tuning import probe
from deploy.tuning.plan_file import read_plan
from tests.models import as_float32, built_files, make_model, make_node, save_fixed_batch, save_net

FASHION = Path(__file__).parent.parent / "datasets" / "fashion"
ALL = "onnxruntime,tensorrt,ascend"
SAME = {"pads": [1, 1, 1, 1]}
RUNS = {  # target -> the model that ONNX Runtime runs in its place
    "onnxruntime": "spoiled.int8.onnx",
    "tensorrt": "spoiled.tensorrt.qdq.onnx",
    "ascend": "spoiled_fake_quant_model.onnx",
}


def saved(folder, name, nodes, constants, sides=(12, 12)):
    """A model x -> y of (op, inputs, output, attributes); nodes are named /output/op."""
    nodes = [make_node(op, i, [o], name=f"/{o}/{op}", **a) for op, i, o, a in nodes]
    inputs = {"x": ["batch", 3, *sides]}
    model = make_model(nodes, inputs, {"y": None}, as_float32(constants), opset=17)
    return save_net(model, folder / f"{name}.onnx")


def spoiled(folder, *, late=False):
    """With `late` two layers come before all others, and height and width are open."""
    rng = np.random.default_rng(1)
    size = np.where(np.arange(8) == 0, 1000.0, 1.0).reshape(1, 8, 1, 1)
    constants = {
        "w1": rng.normal(0, 0.3, (8, 3, 3, 3)),
        "size": size,
        "w2": rng.normal(0, 0.3, (8, 8, 1, 1)) / size,
        "w3": rng.normal(0, 0.2, (16, 8, 3, 3)),
        "w4": rng.normal(0, 0.1, (8, 16, 3, 3)),
    }
    nodes = [
        ("Conv", "x w1", "stem", SAME),
        ("Tanh", "stem", "t", {}),
        ("Mul", "t size", "m", {}),
        ("Conv", "m w2", "bad", {}),
        ("Relu", "bad", "r2", {}),
        ("Conv", "r2 w3", "mid", SAME),
        ("Relu", "mid", "r3", {}),
        ("Conv", "r3 w4", "y", SAME),
    ]
    if not late:
        return saved(folder, "spoiled", nodes, constants)
    constants |= {"v": rng.normal(0, 0.2, (8, 3, 3, 3)), "w": rng.normal(0, 0.2, (3, 8, 3, 3))}
    late_nodes = [("Conv", "x v", "a", SAME), ("Relu", "a", "ra", {}), ("Conv", "ra w", "b", SAME)]
    nodes = [*late_nodes, ("Conv", "b w1", "stem", SAME), *nodes[1:]]
    return saved(folder, "late", nodes, constants, ["height", "width"])


def save_robust_model(folder):
    """Three layers that int8 does not hurt."""
    rng = np.random.default_rng(2)
    constants = {
        "w1": rng.normal(0, 0.3, (8, 3, 4, 4)),
        "w2": rng.normal(0, 0.2, (8, 8, 3, 3)),
        "w3": rng.normal(0, 0.2, (8, 8, 3, 3)),
    }
    nodes = [
        ("Conv", "x w1", "a", {}),
        ("Relu", "a", "ra", {}),
        ("Conv", "ra w2", "b", SAME),
        ("Relu", "b", "rb", {}),
        ("Conv", "rb w3", "y", SAME),
    ]
    return saved(folder, "sound", nodes, constants)


@dataclass
class Ran:
    """`calib8 build`, once it has ended."""

    code: int
    output: str
    error: str
    out: Path

    @property
    def report(self):
        return json.loads((self.out / "report.json").read_text())

    @property
    def plan(self):
        (path,) = self.out.glob("calib8/*.plan.toml")
        return read_plan(path)

    def float_of(self, target):
        return set(self.plan.targets[target].choices.float_nodes)

    def precision(self, target):
        (row,) = (row for row in self.report["targets"] if row["name"] == target)
        return {node["name"]: node["precision"] for node in row["nodes"]}

    @property
    def files(self):
        return built_files(self.out)


def ran(*arguments, out):
    output, error, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(error):
        try:
            main([str(word) for word in ("build", *arguments, "--out", out)])
        except SystemExit as stop:
            code = stop.code or 0
    assert "Traceback" not in error.getvalue()
    return Ran(code, output.getvalue(), error.getvalue(), out)


def save_feed(folder, count=8):
    values = np.random.default_rng(0).normal(size=(count, 3, 12, 12)).astype(np.float32)
    np.save(folder / "feed.npy", values)
    return folder / "feed.npy"


@pytest.fixture(scope="module")
def feed(tmp_path_factory):
    return save_feed(tmp_path_factory.mktemp("feed"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return spoiled(tmp_path_factory.mktemp("spoiled"))


@pytest.fixture(scope="module")
def default(model, feed, tmp_path_factory):
    """All three targets with nothing but the defaults; time is left out."""
    arguments = ("--images", feed, "--target", ALL, "--duration", 0)
    return ran(model, *arguments, out=tmp_path_factory.mktemp("default") / "o")


@pytest.fixture(scope="module")
def plain(model, feed, tmp_path_factory):
    """The same with nothing searched."""
    arguments = ("--images", feed, "--target", ALL, "--duration", 0, "--effort", 0)
    return ran(model, *arguments, out=tmp_path_factory.mktemp("plain") / "o")


@pytest.fixture
def build(feed, tmp_path):
    """`calib8 build` of a model, on one target and without time where nothing else is said."""
    feed_arguments = ("--images", feed, "--duration", 0)
    return lambda model, *arguments, out="o": ran(
        model, *feed_arguments, *arguments, out=tmp_path / out
    )


def sqnr(model, path, feed):
    """Of the output, by running both models in ONNX Runtime."""
    samples = [{"x": item[None]} for item in np.load(feed)]
    float_session, int8_session = (OrtSession.open(item, threads=1) for item in (model, path))
    expected = np.stack([float_session.run(sample)["y"] for sample in samples])
    outputs = np.stack([int8_session.run(sample)["y"] for sample in samples])
    return 10 * np.log10((expected**2).sum() / ((expected - outputs) ** 2).sum())


@pytest.mark.parametrize("target", RUNS)
def test_only_the_spoiling_layer_is_float(target, default):
    assert default.code == 0
    assert {name for name in default.float_of(target) if name.endswith("/Conv")} == {"/bad/Conv"}
    reason = default.plan.targets[target].choices.float_nodes["/bad/Conv"]
    assert reason.startswith("alone in int8 it leaves")
    assert reason.endswith("dB of y")
    assert " -0.0 dB" not in reason
    (row,) = (row for row in default.report["targets"] if row["name"] == target)
    (output,) = (node["reason"] for node in row["nodes"] if node["name"] == "/bad/Conv")
    assert row["search"]["probes"] > 0
    assert output.startswith("alone in int8")
    assert row["search"]["settled"].startswith("1 of ")


def test_spoiling_layer_is_found_across_sizes(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "feed").mkdir()
    for number in range(8):
        values = rng.normal(size=(1, 3, 12, 12 + number)).astype(np.float32)
        np.save(tmp_path / "feed" / f"{number}.npy", values)
    arguments = (spoiled(tmp_path, late=True), "--images", tmp_path / "feed", "--duration", 0)
    done = ran(*arguments, out=tmp_path / "o")
    assert done.code == 0
    assert {"/bad/Conv"} <= done.float_of("onnxruntime")
    message = done.plan.targets["onnxruntime"].choices.float_nodes.values()
    assert not [reason for reason in message if reason.endswith("dB of ")]


@pytest.mark.parametrize("target", RUNS)
def test_search_improves_the_files(target, default, plain, model, feed):
    assert plain.code == 3  # unusable
    plain_sqnr, searched_sqnr = (
        sqnr(model, build.out / RUNS[target], feed) for build in (plain, default)
    )
    assert searched_sqnr > 25
    assert searched_sqnr > plain_sqnr + 15


@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt"])
def test_the_qdq_models_follow_the_plan(target, default, plain):
    for build, is_float in ((default, True), (plain, False)):
        graph = onnx.load(build.out / RUNS[target]).graph
        nodes = {node.name: node for node in graph.node}
        op_by_tensor = {output: node.op_type for node in graph.node for output in node.output}
        for name in ("/bad/Conv", "/mid/Conv"):
            sources = {op_by_tensor.get(tensor) for tensor in nodes[name].input}
            floats = name == "/bad/Conv" and is_float
            assert ("DequantizeLinear" not in sources) == floats, name


def test_trtexec_line_names_the_layer(default, plain):
    for build, is_named in ((default, True), (plain, False)):
        (row,) = (row for row in build.report["targets"] if row["name"] == "tensorrt")
        (line,) = (note for note in row["notes"] if "--calib=" in note)
        assert ("--layerPrecisions=/bad/Conv:fp16" in line) == is_named
        assert "/mid/Conv" not in line


def test_ascend_files_omit_the_float_layer(default, plain):
    for build, is_float in ((default, True), (plain, False)):
        record = (build.out / "spoiled_record.txt").read_text()
        assert ('"/bad/Conv"' not in record) == is_float
        assert '"/mid/Conv"' in record
        deployed = onnx.load(build.out / "spoiled_deploy_model.onnx").graph
        weights = {t.name: t.data_type for t in deployed.initializer}
        (layer,) = (node for node in deployed.node if node.name == "/bad/Conv")
        assert (weights[layer.input[1]] == TensorProto.FLOAT) == is_float


@pytest.fixture
def no_trials(monkeypatch):
    monkeypatch.setattr(probe.Prober, "noises", lambda *_: pytest.fail("a trial"))


def test_rebuild_obeys_plan_without_trials(default, model, feed, no_trials, tmp_path):
    original_files = default.files
    arguments = ("--images", feed, "--target", ALL, "--duration", 0)
    rebuilt = ran(model, *arguments, out=shutil.copytree(default.out, tmp_path / "o"))
    assert rebuilt.code == 0, rebuilt.error
    assert rebuilt.files == original_files
    assert "spoiled.plan.toml" in original_files
    assert all(row["search"]["reused"] for row in rebuilt.report["targets"])


def test_failing_search_keeps_the_earlier_plan(model, build, monkeypatch):
    earlier_plan = (build(model).out / "calib8/spoiled.plan.toml").read_bytes()

    def fails(*_):
        raise BackendError("it cannot be tried")

    monkeypatch.setattr(probe.Prober, "noises", fails)
    rebuilt = build(model, "--limit", 4, "--accept")
    assert rebuilt.code == 0, rebuilt.error
    (row,) = rebuilt.report["targets"]
    assert "nothing was searched for onnxruntime: it cannot be tried" in row["notes"]
    assert (rebuilt.out / "calib8/spoiled.plan.toml").read_bytes() == earlier_plan


@pytest.mark.parametrize("failing", [1, 6, 7, 11, 13])
def test_one_failing_trial_does_not_end_a_search(failing, build, model, monkeypatch):
    count = 0

    def noises(prober, choices, run=probe.Prober.noises):
        nonlocal count
        kept = []
        for noise in run(prober, choices):
            count += 1
            kept.append(None if count == failing else noise)
        return kept

    monkeypatch.setattr(probe.Prober, "noises", noises)
    built = build(model, "--accept")
    assert built.code == 0, built.error
    assert "/bad/Conv" in built.float_of("onnxruntime")


@pytest.mark.parametrize("arguments", [("--target", ALL), ("--target", "ascend", "--limit", 4)])
def test_named_plan_applies_to_other_images(arguments, default, model, build, no_trials):
    built = build(model, *arguments, "--plan", default.out / "calib8/spoiled.plan.toml")
    assert built.code == 0
    assert built.float_of("ascend") == {"/bad/Conv"}
    assert "--limit" in arguments or built.files == default.files


@pytest.mark.slow
@pytest.mark.parametrize("is_configured", [False, True])
def test_plan_figures_do_not_count_added_float_layers(
    is_configured, default, model, build, tmp_path
):
    config, plan = tmp_path / "a.cfg", default.out / "calib8/spoiled.plan.toml"
    config.write_text('skip_layers: "/mid/Conv"')
    options = ("--plan", plan, "--keep-float", "/mid/Conv")
    if is_configured:
        options = ("--effort", 1, "--ascend-config", config)
    built = build(model, "--target", "ascend", *options)
    (row,) = built.report["targets"]
    is_tried = any(split.get("taken") for split in row["search"]["front"])
    assert is_tried == is_configured  # a search counts what its configuration leaves in float
    if not is_tried:
        assert row["search"]["settled"] == "a split that the search did not try"
        assert "In int8       " in built.output and " nodes " in built.output


def test_foreign_plan_is_refused_when_named(default, build, tmp_path):
    plan, robust_model = default.out / "calib8/spoiled.plan.toml", save_robust_model(tmp_path)
    refused = build(robust_model, "--plan", plan)
    assert refused.code == 1
    assert "a plan must be the model's" in refused.error
    assert refused.error.count("\n") == 1
    (tmp_path / "o/calib8").mkdir(parents=True)
    (tmp_path / "o/calib8/sound.plan.toml").write_bytes(plan.read_bytes())
    built = build(robust_model)
    assert built.code == 0
    assert "spoiled" not in str(built.plan.targets)
    assert built.plan.model != read_plan(plan).model
    assert not built.report["targets"][0]["search"]["reused"]


def edited(default, folder, old, new):
    """The plan with one thing changed."""
    text = (default.out / "calib8/spoiled.plan.toml").read_text()
    assert old in text
    path = folder / "calib8/spoiled.plan.toml"
    path.parent.mkdir(parents=True)
    path.write_text(text.replace(old, new, 1))
    return path


@pytest.mark.slow
def test_plan_without_target_is_reported(default, model, build, tmp_path):
    text = (default.out / "calib8/spoiled.plan.toml").read_text()
    path = tmp_path / "typo.plan.toml"
    path.write_text(text.replace("[onnxruntime", "[onnxruntimes"))
    built = build(model, "--target", ALL, "--plan", path, "--accept")
    notes = {row["name"]: " ".join(row["notes"]) for row in built.report["targets"]}
    assert "typo.plan.toml has no [onnxruntime]" in notes["onnxruntime"]
    assert "so nothing was chosen" not in notes["tensorrt"] + notes["ascend"]
    for search_option in (("--effort", 2), ("--prefer", "size")):
        refused = build(model, "--plan", path, *search_option)
        assert refused.code == 1
        assert "--plan is built without a search" in refused.error


@pytest.mark.slow
@pytest.mark.parametrize("named", [True, False])
def test_plan_nodes_are_float_everywhere(named, default, model, build, tmp_path):
    path = edited(default, tmp_path / "o", "float = []", 'float = ["/mid/*"]')
    arguments = ("--plan", path) if named else ()
    built = build(model, "--target", ALL, *arguments)
    assert built.code == 0
    assert all(row["search"]["reused"] for row in built.report["targets"])
    for target in RUNS:
        precision = built.precision(target)
        assert precision["/mid/Conv"] == precision["/bad/Conv"] == "float32", target
        assert precision["/y/Conv"] != "float32", target
    assert built.plan.float_nodes == ("/mid/*",)  # the file keeps what the user wrote
    assert '"/mid/Conv"' not in (built.out / "spoiled_record.txt").read_text()


def test_layer_removed_from_plan_is_int8(default, model, build, tmp_path):
    path = edited(default, tmp_path / "p", '"/bad/Conv" =', '"/stem/Conv" =')
    built = build(model, "--target", "tensorrt", "--plan", path, "--accept")
    # the first table is ONNX Runtime's, so TensorRT's own is as it was
    assert built.precision("tensorrt")["/bad/Conv"] == "float32"
    built = build(model, "--plan", path, "--accept", out="again")
    assert built.precision("onnxruntime")["/bad/Conv"] != "float32"
    assert_no_split_is_built(built)


def assert_no_split_is_built(built):
    """The figures of the front are of other splits than what the report is of."""
    search = built.report["targets"][0]["search"]
    assert not any(split.get("taken") for split in search["front"])
    assert "layers in float" not in search["settled"]


def test_nodes_in_float_beside_the_plan_leave_its_splits(default, model, build):
    plan = default.out / "calib8/spoiled.plan.toml"
    built = build(model, "--plan", plan, "--keep-float", "/mid/*")
    assert built.precision("onnxruntime")["/mid/Conv"] == "float32"
    assert_no_split_is_built(built)
    rebuilt = build(model, "--split", 1, "--keep-float", "/mid/*", "--accept")
    assert_no_split_is_built(rebuilt)


@pytest.mark.parametrize("split", [(), ("--split", 1)])
def test_method_of_plan_and_user_are_refused(split, default, model, build):
    plan = default.out / "calib8/spoiled.plan.toml"
    refused = build(model, "--plan", plan, *split, "--method", "entropy")
    assert refused.code == 1
    assert "--method" in refused.error
    assert not refused.out.exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("float = []", 'float = ["/nowhere/*"]', "must be in the model, got '/nowhere/*'"),
        ('"/bad/Conv" =', '"/nowhere/Conv" =', "got '/nowhere/Conv'"),
        ('"/bad/Conv" =', '"/bad\\nConv" =', "a plan must name nodes of the model"),
        ("[onnxruntime.methods]", '[onnxruntime.methods]\nr9 = "mse"', "name tensors of the model"),
        ("settled =", "setled =", "unknown field `setled`"),
        ("[onnxruntime]", "[onnxruntime", "must be a TOML file"),
    ],
)
def test_invalid_plan_edit_is_refused(old, new, message, default, model, build, tmp_path):
    refused = build(model, "--plan", edited(default, tmp_path / "p", old, new))
    assert refused.code == 1
    assert message in refused.error
    assert not refused.out.exists()  # before anything is calibrated
    assert refused.error.startswith("calib8: error: ")
    assert refused.error.count("\n") == 1


@pytest.mark.parametrize(
    ("old", "new", "method"),
    [
        ("\n[tensorrt.float]", 'method = "minmax"\n[tensorrt.float]', "minmax"),
        ("[tensorrt.methods]", '[tensorrt.methods]\nr2 = "minmax"', "mse (minmax for 1 tensor)"),
    ],
)
def test_plan_methods_determine_ranges(old, new, method, default, model, build, tmp_path):
    text = (default.out / "calib8/spoiled.plan.toml").read_text()
    plan = tmp_path / "one.plan.toml"
    plan.write_text("".join(line for line in text.splitlines(True) if "method = " not in line))
    original = build(model, "--target", "tensorrt", "--plan", plan).report["targets"][0]
    plan.write_text(plan.read_text().replace(old, new, 1))
    edited_build = build(model, "--target", "tensorrt", "--plan", plan, out="other").report[
        "targets"
    ][0]
    assert (original["method"], edited_build["method"]) == ("mse", method)
    original_ends = {row["name"]: row["hi"] for row in original["tensors"]}
    edited_ends = {row["name"]: row["hi"] for row in edited_build["tensors"]}
    assert original_ends["r2"] < edited_ends["r2"]


@pytest.mark.parametrize("value", ["inf", "nan"])
def test_report_tolerates_strange_plan_values(value, default, model, build, tmp_path):
    path = edited(default, tmp_path / "p", "sqnr_db = ", f"sqnr_db = {value} # ")
    assert build(model, "--plan", path).code == 0


@pytest.mark.parametrize("target", RUNS)
def test_another_split_of_the_front_is_built_without_trials(
    target, default, model, build, no_trials, tmp_path
):
    (tmp_path / "o/calib8").mkdir(parents=True)
    shutil.copy(default.out / "calib8/spoiled.plan.toml", tmp_path / "o/calib8")
    front = default.plan.targets[target].front
    split = next(split for split in front if not split.row.taken)
    built = build(model, "--target", target, "--split", split.row.number, "--accept")
    assert built.float_of(target) == set(split.choices.float_nodes)
    (row,) = built.report["targets"]
    assert [entry["number"] for entry in row["search"]["front"] if entry.get("taken")] == [
        split.row.number
    ]
    rebuilt = build(model, "--target", target, "--accept")  # the plan keeps what was built
    assert rebuilt.files == built.files


def test_unknown_split_is_refused(default, model, build, tmp_path, wording):
    plan = default.out / "calib8/spoiled.plan.toml"
    for arguments in (("--split", 1), ("--split", 99, "--plan", plan)):
        refused = build(model, *arguments)
        assert refused.code == 1
        assert refused.error.startswith("calib8: error: ")
        wording.check(refused.error.partition("error: ")[2].strip())
    both = build(model, "--split", 1, "--effort", 2)
    assert both.code == 1
    assert "--effort" in both.error


@pytest.mark.slow
def test_refresh_searches_again(model, build, tmp_path):
    first_build = build(model, "--target", "ascend")
    files, path = first_build.files, first_build.out / "calib8/spoiled.plan.toml"
    path.write_text(path.read_text().replace('"/bad/Conv" =', '"/mid/Conv" ='))
    assert build(model, "--target", "ascend", "--accept").float_of("ascend") == {"/mid/Conv"}
    rebuilt = build(model, "--target", "ascend", "--refresh")
    assert rebuilt.float_of("ascend") == {"/bad/Conv"}
    assert rebuilt.files == files
    assert not rebuilt.report["targets"][0]["search"]["reused"]


@pytest.mark.slow
def test_other_images_are_searched_again(model, build):
    first_digest = build(model, "--target", "ascend").plan.targets["ascend"].made_from
    second_build = build(model, "--target", "ascend", "--limit", 4)
    assert not second_build.report["targets"][0]["search"]["reused"]
    assert second_build.plan.targets["ascend"].made_from != first_digest


@pytest.mark.slow
def test_plan_keeps_entries_of_other_targets(model, build):
    build(model, "--target", "tensorrt")
    assert set(build(model, "--target", "ascend").plan.targets) == {"tensorrt", "ascend"}


def test_zero_effort_is_int8_without_plan(plain):
    assert not list(plain.out.glob("calib8/*.plan.toml"))
    assert all("search" not in row for row in plain.report["targets"])
    assert all(plain.precision(target)["/bad/Conv"] != "float32" for target in RUNS)


@pytest.mark.slow
def test_plan_is_equal_for_any_threads(default, model, build):
    single_thread = build(model, "--target", ALL, "--threads", 1)
    three_threads = build(model, "--target", ALL, "--threads", 3, out="three")
    assert single_thread.files == three_threads.files == default.files


@pytest.mark.slow
def test_requested_method_is_kept(default, model, build):
    built = build(model, "--target", "tensorrt", "--method", "mse")
    target_plan = built.plan.targets["tensorrt"]
    assert built.float_of("tensorrt") == default.float_of("tensorrt")
    assert not target_plan.choices.methods
    assert built.report["targets"][0]["method"] == "mse"
    # the plan says so: a build of it without --method has these ranges too
    choices = [target_plan.choices, *(split.choices for split in target_plan.front)]
    assert {each.method.label for each in choices} == {"mse"}
    rebuilt = build(model, "--target", "tensorrt", "--split", 1)
    assert rebuilt.report["targets"][0]["method"] == "mse"
    rebuilt = build(model, "--target", "tensorrt", "--split", 1, "--method", "mse")
    assert rebuilt.report["targets"][0]["method"] == "mse"


# Decisions by time: what engines take is put in their place, nothing reads a clock.


def latency(ms):
    timing = Timing.of([ms] * 4)
    return Latency(
        queries=4,
        warmup_queries=1,
        total_host_walltime_s=1,
        throughput_qps=1,
        latency=timing,
        host=timing,
    )


def fake_clock(ms_of):
    """In place of `deploy.metrics.latency.measure`: label of an engine -> its ms."""
    return lambda sessions, *_, **__: {label: latency(ms_of(label)) for label in sessions}


MODELS = {"FP32": 10.0, "onnxruntime": 4.0}


@pytest.fixture
def timed(monkeypatch, build, tmp_path):
    """A build of `sound` whose engines take so many ms; one of FP32 takes 10."""

    def run(*arguments, models=MODELS, split_ms=4.0, min_price=0.0, duration=0.01):
        splits = fake_clock(lambda label: 10.0 if label == "float" else split_ms)
        monkeypatch.setattr("deploy.tuning.target_search._MIN_TIMED_PRICE", min_price)
        monkeypatch.setattr("deploy.tuning.timing.measure_latencies", splits)
        monkeypatch.setattr("deploy.pipeline.measure.measure", fake_clock(models.get))
        built = build(save_robust_model(tmp_path), "--duration", duration, *arguments)
        assert built.code == 0, built.error
        return built

    return run


@pytest.mark.parametrize("arguments", [(), ("--min-speedup", 2, "--accept")])
def test_slower_int8_is_built_with_advice(timed, arguments):
    slow = {"FP32": 10.0, "onnxruntime": 10.6}
    built = timed(*arguments, models=slow, split_ms=10.6)
    assert (built.out / "sound.int8.onnx").exists()
    assert not built.float_of("onnxruntime")
    verdict = (
        "unusable: " if arguments else "keep FP32: int8 has 0.94x (0.94 to 0.94) the speed of FP32"
    )
    assert verdict in " ".join(built.output.split())


@pytest.mark.slow
def test_plan_of_another_cpu_is_ignored(timed, monkeypatch):
    assert timed().plan.targets["onnxruntime"].timed_on
    monkeypatch.setattr("deploy.tuning.tune.cpu_name", lambda: "another")
    rebuilt = timed()
    assert "timed on another CPU" in (rebuilt.out / "report.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        *((("--for", cpu), {}) for cpu in ("any", "vnni", "avx2", "arm")),
        ((), {"duration": 0}),
        ((), {"min_price": math.inf}),
    ],
    ids=str,
)
def test_small_model_or_another_cpu_is_not_timed(arguments, options, timed):
    assert not timed(*arguments, **options).plan.targets["onnxruntime"].timed_on


@pytest.mark.slow
def test_timed_decisions_are_kept_on_rebuild(timed):
    assert timed().files == timed(split_ms=30.0).files


def test_ctrl_c_builds_the_best_split(build, tmp_path, monkeypatch):
    def interrupted(prober, choices, noises=probe.Prober.noises):
        if prober.trial_count > 3:
            raise KeyboardInterrupt
        return noises(prober, choices)

    model = save_robust_model(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(probe.Prober, "noises", interrupted)
        interrupted_build = build(model)
    assert interrupted_build.code == 0
    assert (interrupted_build.out / "sound.int8.onnx").exists()
    assert "the search was interrupted" in (interrupted_build.out / "report.md").read_text()
    second_build = build(model)
    assert second_build.plan.targets["onnxruntime"].made_from
    assert "interrupted" not in (second_build.out / "report.md").read_text()


# Gates and exit codes.


@pytest.mark.slow
def test_disallowed_loss_or_speed_fails_build(build, tmp_path, monkeypatch):
    model = save_robust_model(tmp_path)
    arguments = ("--effort", 0)
    assert build(model, *arguments).code == 0
    lost = build(model, *arguments, "--max-loss", 0)
    assert lost.code == 3
    assert "unusable" in lost.output
    assert build(model, *arguments, "--max-loss", 0.5).code == 0
    assert build(model, *arguments, "--max-loss", 0, "--accept").code == 0
    clock = fake_clock({"FP32": 10.0, "onnxruntime": 5.0}.get)
    monkeypatch.setattr("deploy.pipeline.measure.measure", clock)
    arguments = (*arguments, "--duration", 0.01)
    assert build(model, *arguments, "--min-speedup", 2.0).code == 0
    slow = build(model, *arguments, "--min-speedup", 2.1)
    assert slow.code == 3
    assert "2.00x (2.00 to 2.00) the speed of FP32" in slow.output
    assert build(model, *arguments, "--min-speedup", 2.1, "--accept").code == 0


@pytest.mark.slow
def test_stricter_max_loss_keeps_more_float(build, tmp_path):
    model = save_robust_model(tmp_path)
    assert not build(model).float_of("onnxruntime")
    strict = build(model, "--max-loss", 0.0001, out="strict")
    assert strict.float_of("onnxruntime")
    assert strict.code == 0


OWN = """
import numpy as np

def blind(fp32, int8, label):
    return 1.0

def delicate(fp32, int8, label, otherwise="bad"):
    return 1.0 if all(np.array_equal(fp32[name], int8[name]) for name in fp32) else otherwise

def strict(*words):
    return delicate(*words, otherwise=0.0)

def broken(fp32, int8, label):
    raise ValueError(f"no such column in {fp32['y'].shape}")

def noisy(fp32, int8, label):
    if np.square(fp32["y"] - int8["y"]).sum() > 0.1 * np.square(fp32["y"]).sum():
        raise ValueError("no peak is left")
    return 1.0
"""


@pytest.fixture
def user_metric(tmp_path):
    """Name of a function -> a figure of one's own."""
    (tmp_path / "own.py").write_text(OWN)
    return lambda name: f"{tmp_path / 'own.py'}:{name}"


@pytest.mark.slow
def test_max_loss_applies_to_user_metric(build, tmp_path, user_metric):
    """By the outputs' form this limit keeps layers in float, see the test before."""
    arguments = (save_robust_model(tmp_path), "--max-loss", 0.0001, "--metric")
    blind = build(*arguments, user_metric("blind"), out="blind")
    assert blind.code == 0
    assert not blind.float_of("onnxruntime")
    strict = build(*arguments, user_metric("strict"), out="strict")
    assert strict.code == 3
    front = strict.plan.targets["onnxruntime"].front
    (split,) = [split.row for split in front if split.row.taken]
    assert split.level == "unusable"  # no split holds it, so the cheapest one is built


def test_failing_metric_is_refused_before_trials(build, tmp_path, user_metric, feed, no_trials):
    """With labels too, of which the search knows none, and for a model of a fixed batch."""
    (tmp_path / "labels.txt").write_text("1\n" * 8)
    labelled = ("--eval-images", feed, "--labels", tmp_path / "labels.txt")
    model = save_fixed_batch(save_robust_model(tmp_path), tmp_path / "four.onnx")
    for arguments in ((), labelled, ("--max-loss", 0.1)):
        broken = build(model, *arguments, "--metric", user_metric("broken"), out="broken")
        assert broken.code == 1
        assert "no such column" in broken.error
        assert "(1, " in broken.error


def test_metric_failing_on_int8_is_refused(build, tmp_path, user_metric):
    built = build(
        save_robust_model(tmp_path), "--max-loss", 0.1, "--metric", user_metric("delicate"), out="o"
    )
    assert built.code == 1
    assert "a metric must return a finite number, got 'bad'" in built.error


def test_metric_failing_on_noise_continues_search(model, build, user_metric):
    built = build(model, "--max-loss", 0.1, "--metric", user_metric("noisy"))
    assert built.code == 0, built.error
    assert "/bad/Conv" in built.float_of("onnxruntime")


@pytest.mark.slow
def test_wrong_preprocessing_makes_the_demo_unusable(tmp_path):
    model, arguments = FASHION / "fashion.onnx", ["--duration", 0]
    for flag, name, count in (("--images", "calib", 24), ("--eval-images", "eval", 120)):
        lines = (FASHION / f"{name}.txt").read_text().splitlines()[:count]
        (tmp_path / f"{name}.txt").write_text("\n".join(f"{FASHION}/{line}" for line in lines))
        arguments += [flag, tmp_path / f"{name}.txt"]
    right = ran(model, *arguments, "--mean", 0.5, "--std", 0.5, out=tmp_path / "right")
    assert right.code == 0
    assert "Verdict       good" in right.output
    wrong = ran(model, *arguments, out=tmp_path / "wrong")
    assert wrong.code == 3
    assert "Verdict       unusable" in wrong.output
    text = " ".join(wrong.output.split())
    assert "The float model is no better than chance" in text
    assert "and chance is 10 % with 10 classes; check --preprocess" in text
    page = (tmp_path / "wrong" / "report.html").read_text()
    assert "chance is 10 %" in page
    assert "verdict unusable" in page
    report = (tmp_path / "wrong" / "report.json").read_text()
    assert "chance is 10 %" in report
    assert '"level": "unusable"' in report
