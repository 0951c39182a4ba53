"""compare, explain and report: builds beside each other, and what loses what where."""

import json
import math
import re
import shutil
import sys

import cv2
import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto

from deploy.analysis.build_reader import read_stored_build
from deploy.analysis.comparison import compare
from deploy.analysis.explain_build import ChannelSums, explain
from deploy.cli import cli
from deploy.errors import Calib8Error
from deploy.graph.edit import extract_output
from deploy.method import NO_CHOICES
from deploy.report import to_json
from deploy.tuning import plan_file
from tests.models import make_model, parse_nodes, run_command, save_fixed_batch, save_net


def explained(*words):
    return CliRunner().invoke(cli, ["explain", *map(str, words)])


def said(*words):
    result = explained(*words)
    assert result.exit_code == 0, result.exception
    return result.stdout


def told(*words):
    """The targets of an explanation."""
    return json.loads(said(*words, "--json", "-"))["targets"]


def refused(*words, by=explained):
    """The one sentence of a command that refuses."""
    result = by(*words)
    assert result.exit_code == 1, result.exception
    assert isinstance(result.exception, Calib8Error), result.exception
    sentence = str(result.exception)
    assert sentence
    assert "\n" not in sentence
    return sentence


def build(model, images, out, *words):
    words = ("--images", images, "--out", out, "--duration", 0, "--accept", *words)
    return run_command("build", model, *words)


BOTH = ("--target", "onnxruntime,tensorrt", "--mean", 0.5, "--std", 0.25)


@pytest.fixture(scope="module")
def built(small_cnn, pictures, tmp_path_factory):
    """A build for two targets; their plans were searched."""
    out = tmp_path_factory.mktemp("explained") / "build"
    build(small_cnn, pictures, out, *BOTH)
    return out


def report_of(folder):
    return json.loads((folder / "report.json").read_text())


def store_report(folder, report):
    (folder / "report.json").write_text(json.dumps(report))
    return folder


@pytest.fixture
def copied(built, tmp_path):
    """The same with its report changed, each time from what was built."""
    shutil.copytree(built, out := tmp_path / "copy")

    def change(edit):
        report = report_of(built)
        edit(report)
        return store_report(out, report)

    return change


def of(report, name="onnxruntime"):
    return next(target for target in report["targets"] if target["name"] == name)


@pytest.mark.slow
def test_a_build_is_explained_from_its_verdict_to_its_ranges(built):
    text = said(built)
    report = report_of(built)
    for name in ("onnxruntime", "tensorrt"):
        engine = next(e for e in report["engines"] if e["target"] == name and not e["reference"])
        block = text[text.index(f"\n{name}: {engine['verdict']['level']}") :]
        places = [block.index(f"\n{label} ") for label in ("Why", "Parts", "Float", "Tried")]
        assert places == sorted(places)
        assert all(trial["what"] in block for trial in of(report, name)["search"]["tried"])
    assert "small_cnn.plan.toml" in text
    assert "Images " not in text


def test_json_is_what_the_report_says(built, tmp_path):
    assert "onnxruntime:" in said(built, "--json", tmp_path / "why.json")
    found = json.loads((tmp_path / "why.json").read_text())
    assert found == json.loads(said(built, "--json", "-"))
    report = report_of(built)
    assert found["schema"] == "calib8-explanation/1"
    assert len(found["targets"]) == 2
    assert found["targets"][0]["name"] == "onnxruntime"
    for target in found["targets"]:
        own = of(report, target["name"])
        floats = [node["name"] for node in own["nodes"] if node["precision"] == "float32"]
        assert sorted(n for group in target["kept"] for n in group["nodes"]) == sorted(floats)
        assert target["nodes"] == len(own["nodes"])
        layers = [layer["sqnr_db"] for layer in target["layers"]]
        assert layers == sorted(layers)
        assert len(layers) == len(own.get("layers", []))
        assert target["settled"] == own["search"]["settled"]
        clipped = [row["share"] for row in target["clipped"]]
        assert clipped == sorted(clipped, reverse=True)
        assert all(0 < share <= 1 for share in clipped)


def test_one_target_alone_is_told_of(built, wording):
    text = said(built, "--target", "tensorrt")
    assert "\ntensorrt: " in text
    assert "\nonnxruntime: " not in text
    wording.check(refused(built, "--target", "tensorr"))


def rows(label, count):
    figures = {"cosine_mean": 0.9, "cosine_min": 0.8, "max_abs_error": 0.1}
    return [{"name": f"{label}{i:02d}", "sqnr_db": 40.0 - i, **figures} for i in range(count)]


def test_ten_rows_are_told_and_all_where_asked(copied):
    out = copied(lambda report: of(report).update(layers=rows("layer", 14)))
    text = said(out, "--target", "onnxruntime")
    assert "layer13" in text
    assert "layer04" in text
    assert "layer03" not in text
    assert "4 more; --all" in text
    everything = said(out, "--target", "onnxruntime", "--all")
    assert "--all" not in everything
    assert everything.index("layer13") < everything.index("layer03") < everything.index("layer00")


def test_what_cannot_be_told_is_worst(copied):
    layers = rows("layer", 3)
    layers[0]["sqnr_db"], layers[1]["sqnr_db"] = "nan", "inf"
    (target, _) = told(copied(lambda report: of(report).update(layers=layers)))
    assert [row["name"] for row in target["layers"]] == ["layer00", "layer02", "layer01"]


FLOATS = (
    ("r", "Relu", "the node before it is float", plan_file.RULE),
    ("m", "Mul", "to and fro would cost more than it wins", plan_file.CONSEQUENCE),
    ("s", "Conv", "slower in int8: 9 us, 4 us in float", plan_file.TIME),
    ("b", "Conv", "alone in int8 its group of 2 layers leaves 12.5 dB of y[0:4]", plan_file.NOISE),
    ("a", "Conv", "alone in int8 it leaves 4.4 dB of y[4:22]", plan_file.NOISE),
)


def test_noise_is_told_before_time_and_time_before_what_follows(copied):
    keys = ("name", "op", "reason", "precision")
    nodes = [dict(zip(keys, (*row[:3], "float32"), strict=True)) for row in FLOATS]
    text = said(copied(lambda report: of(report).update(nodes=nodes)), "--target", "onnxruntime")
    assert "5 of 5 nodes" in text
    labels = [
        "by noise    Conv a",
        "Conv b",
        "by time     Conv s",
        "in between  Mul m",
        "by rule     Relu r",
    ]
    places = [text.index(label) for label in labels]
    assert places == sorted(places)


@pytest.mark.parametrize(("reason", "expected"), [row[2:] for row in FLOATS])
def test_reasons_are_known_by_the_words_of_the_search(reason, expected):
    assert plan_file.reason_kind(reason) == expected
    assert math.isfinite(plan_file.reason_sqnr_db(reason)) == (expected == plan_file.NOISE)


def test_what_was_taken_is_marked_in_what_was_tried(built):
    plan = plan_file.read_plan(built / "calib8/small_cnn.plan.toml")
    for target in report_of(built)["targets"]:
        tried = target["search"]["tried"]
        settled = target["search"]["settled"]
        (row,) = (row for row in tried if row["taken"])
        own = plan.targets[target["name"]]
        assert own.tried[own.taken]["what"] == row["what"]
        assert row["what"] in settled


TRIED = (
    {"what": "all in int8, mse", "sqnr_db": 20.04, "time": 0.9},
    {"what": "3 of 9 layers in float", "sqnr_db": 30.0, "time": 0.8},
    {"what": "3 of 9 layers in float", "sqnr_db": 35.0, "time": 0.7},
    {"what": "timed: 3 of 9 layers in float", "sqnr_db": 34.96, "time": 0.75},
)


@pytest.mark.parametrize(
    ("settled", "place"),
    [
        ("all in int8, mse: 20.0 dB in y[0:4]", 0),
        ("3 of 9 layers in float: 30.0 dB", 1),  # equal words, another method
        ("3 of 9 layers in float: 35.0 dB in y", 3),  # timed, so not the predicted one
        ("all in int8: 20.0 dB", None),
        ("float", None),
        ("", None),
        ("all in int8, mse: ?", None),
    ],
)
def test_what_was_taken_is_found_by_words_and_figure(settled, place):
    plan = plan_file.TargetPlan(choices=NO_CHOICES, settled=settled, tried=TRIED)
    assert plan.taken == place


def test_what_was_tried_is_in_the_plan_where_the_report_lacks_it(copied):
    (target, _) = told(copied(lambda report: of(report).pop("search")))
    assert target["tried"]
    assert target["settled"]


# what images tell
@pytest.fixture(scope="module")
def held(tmp_path_factory):
    """Pictures of which one is unlike all that calibrated: far brighter in one corner."""
    folder = tmp_path_factory.mktemp("held")
    made = np.random.default_rng(3)
    for i in range(6):
        cv2.imwrite(str(folder / f"{i}.png"), made.integers(100, 150, (16, 16, 3), np.uint8))
    return folder


def test_images_tell_which_of_them_and_which_channels_lose_most(built, held):
    text = said(built, "--images", held)
    assert "image, the worst of 6" in text
    assert "channel" in text
    for target in told(built, "--images", held):
        one = target["held"]
        assert one["samples"] == 6
        assert len(one["images"]) == 5
        figures = [image["sqnr_db"] for image in one["images"]]
        assert figures == sorted(figures)
        assert {image["name"] for image in one["images"]} <= {f"{i}.png" for i in range(6)}
        tensors = list(dict.fromkeys(c["tensor"] for c in one["channels"]))
        worst = [layer["name"] for layer in target["layers"]]
        assert tensors == worst[: len(tensors)]
        assert 1 <= len(tensors) <= 5


def test_the_number_of_threads_changes_nothing(built, held):
    one = explain(built, images=str(held), threads=1)
    assert explain(built, images=str(held), threads=3) == one


def test_what_fills_a_fixed_batch_up_is_no_image(small_cnn, held, pictures, tmp_path):
    model = save_fixed_batch(small_cnn, tmp_path / "four.onnx")
    build(model, pictures, tmp_path / "o", "--effort", 0)
    (target,) = told(tmp_path / "o", "--images", held)
    assert target["held"]["samples"] == 6
    assert len(set([image["name"] for image in target["held"]["images"]])) == 5


def test_images_become_inputs_as_those_of_the_build_did(built, held):
    own = said(built, "--images", held)
    assert said(built, "--images", held, "--mean", "0.5", "--std", "0.25") == own
    assert said(built, "--images", held, "--mean", "0.1") != own


def test_the_number_of_images_is_the_users_and_bad_ones_can_be_left_out(built, held, tmp_path):
    assert "the worst of 2" in said(built, "--images", held, "--limit", "2")
    folder = tmp_path / "held"
    shutil.copytree(held, folder)
    (folder / "0.png").write_bytes(b"no picture")
    assert "0.png" in refused(built, "--images", folder)
    text = said(built, "--images", folder, "--skip-bad")
    assert "the worst of 5" in text
    assert "0.png" not in text
    assert "5.png" in text


def test_files_are_found_in_a_folder_that_was_moved(copied, held, small_cnn):
    def edit(report):
        for target in report["targets"]:
            target["runnable"] = f"elsewhere/{target['runnable'].rpartition('/')[2]}"

    assert "the worst of 6" in said(copied(edit), "--images", held)
    out = copied(lambda report: report["model"].update(path="gone/net.onnx"))
    assert "--model" in refused(out, "--images", held)
    assert "the worst of 6" in said(out, "--images", held, "--model", small_cnn)


def test_a_moved_build_is_not_another_one_in_its_place_now(small_cnn, pictures, held, tmp_path):
    """`mv build kept`, and another build into build/."""
    here, kept = tmp_path / "build", tmp_path / "kept"
    build(small_cnn, pictures, here, "--method", "minmax")
    before = told(here, "--images", held)
    here.rename(kept)
    build(small_cnn, pictures, here, "--effort", 0, "--method", "percentile", "--percent", 60)
    after = json.loads(said(kept, "--images", held, "--json", "-"))
    assert after["targets"] == before
    assert after["plan"] == str(kept / "calib8/small_cnn.plan.toml")
    next(kept.glob("*.int8.onnx")).unlink()
    assert "kept" in refused(kept, "--images", held)


def test_another_float_model_than_was_built_from_is_told(built, held, small_cnn, tmp_path):
    other = onnx.load(small_cnn)
    weight = other.graph.initializer[0]
    weight.CopyFrom(onnx.numpy_helper.from_array(-onnx.numpy_helper.to_array(weight), weight.name))
    words = (built, "--images", held, "--model")
    path = save_net(other, tmp_path / "other.onnx")
    assert "other.onnx" in " ".join(said(*words, path).split())
    assert "that was built from" not in said(*words, small_cnn)


def test_a_target_whose_model_is_not_there_says_so(copied, held):
    out = copied(lambda report: of(report).pop("runnable"))
    assert "no file of it can be run in ONNX Runtime" in said(out, "--images", held)
    out = copied(lambda report: of(report).update(runnable="gone.onnx"))
    assert "gone.onnx" in refused(out, "--images", held)


@pytest.mark.parametrize(("word", "found"), [("kept", False), ("not kept", True)])
def test_of_a_model_that_was_equalized_no_channels_are_told(copied, held, word, found):
    note = f"cross-layer equalization: worst part 20.0 -> 30.0 dB, {word}"
    targets = told(copied(lambda report: report.update(notes=[note])), "--images", held)
    assert [bool(one["held"]["channels"]) for one in targets] == [found, found]


def test_channels_that_are_silent_lose_nothing():
    sums = ChannelSums()
    reference = np.ones((1, 4, 3), np.float32)
    reference[0, 1] = 0
    sums.add(reference, reference + np.float32([0, 0.5, 0.1, 0.2]).reshape(1, 4, 1))
    assert [one.channel for one in sums.worst("t")] == [3, 2, 0]
    assert [round(one.sqnr_db, 1) for one in sums.worst("t")][:2] == [14.0, 20.0]
    sums.add(reference, np.full_like(reference, np.nan))
    assert all(math.isnan(one.sqnr_db) for one in sums.worst("t"))


@pytest.mark.parametrize(
    ("flags", "missing"),
    [
        (["--limit", "2"], "--images"),
        (["--mean", "0.5"], "--images"),
        (["--skip-bad"], "--images"),
        (["--threads", "1"], "--images"),
        (["--model", "m.onnx"], "--images"),
        (["--all", "--json", "-"], "the text"),
    ],
)
def test_options_of_what_is_not_asked_for_are_refused(built, flags, missing):
    sentence = refused(built, *flags)
    assert flags[0] in sentence
    assert missing in sentence


# what anybody may have written
def test_a_folder_without_a_report_is_refused(tmp_path, wording):
    assert "without a report.json" in refused(tmp_path)
    wording.check(refused(tmp_path / "none"))
    refused("x" * 5000)


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b"[]",
        b"3",
        b'{"schema": "calib8-report/1"}',
        b'{"schema": ["calib8-report/2"]}',
        b"\x00" * 99,
        b"1" * 5000,
    ],
)
def test_a_broken_report_is_one_sentence(tmp_path, junk):
    (tmp_path / "report.json").write_bytes(junk)
    refused(tmp_path)


@pytest.mark.parametrize("how", [{"mean": [10**400]}, {"mean": "x"}, {"hue": "rgb"}, {"std": {}}])
def test_preprocessing_that_is_none_is_one_sentence(copied, held, how):
    refused(copied(lambda report: report["feed"].update(preprocess=how)), "--images", held)


@pytest.mark.parametrize("path", ["x" * 5000, "a\x00b", "/", "."])
def test_no_path_gives_a_traceback(copied, held, path):
    def edit(report):
        of(report).update(runnable=path)
        report["model"]["path"] = path

    refused(copied(edit), "--images", held)
    refused(copied(lambda report: of(report).update(runnable=path)), "--images", held)


def test_a_model_of_another_build_is_one_sentence(copied, held):
    out = copied(lambda report: of(report).update(runnable="o.onnx"))
    shape = [1, 3, 16, 16]
    model = make_model([("Relu", "x", "other")], {"x": shape}, {"other": shape})
    save_net(model, out / "o.onnx")
    assert "same outputs" in refused(out, "--images", held)


# what the report says of the search
def test_values_that_no_reader_looks_at_are_not_clipped(small_cnn, pictures, tmp_path):
    """What lies below 0 before a Relu needs no room in the range, which loses nothing by it."""
    words = ("--target", "tensorrt", "--effort", 0, "--method", "minmax")
    build(small_cnn, pictures, tmp_path, *words)
    rows = of(report_of(tmp_path), "tensorrt")["tensors"]
    assert all(t["lo"] == -t["amax"] and t["hi"] == t["amax"] for t in rows)
    cut = [t for t in rows if t["lo"] > t["observed_min"]]
    assert cut
    assert all(tensor["clipped"] == 0 for tensor in cut)
    text = said(tmp_path)  # nor was anything searched
    assert "Clipped" not in text
    assert "Tried" not in text
    assert "Plan          none" in text


def test_the_report_has_what_was_tried_and_where_it_is_kept(built):
    report = report_of(built)
    (plan,) = [file for file in report["files"] if file["role"] == "plan"]
    assert plan["size_bytes"] == (built / "calib8/small_cnn.plan.toml").stat().st_size
    page = (built / "report.html").read_text()
    text = (built / "report.md").read_text()
    assert '<a href="calib8/small_cnn.plan.toml">calib8/small_cnn.plan.toml</a>' in page
    assert "[calib8/small\\_cnn.plan.toml](calib8/small_cnn.plan.toml)" in text
    page = re.sub(r' data-head="[^"]*"|<wbr>', "", page)
    for name in ("onnxruntime", "tensorrt"):
        assert f">Search for {name} (" in page
        assert f"## Search for {name}" in text
        for trial in of(report, name)["search"]["tried"]:
            assert f"<td>{trial['what']}</td>" in page
            assert f"| {trial['what']} |" in text
    assert page.count("<td>yes</td>") == text.count("| yes |") >= 1


@pytest.mark.slow
def test_verbose_tells_what_was_tried(small_cnn, pictures, built, tmp_path):
    out = shutil.copytree(built, tmp_path / "again")
    for flags, shown in ([], False), (["--verbose"], True):
        screen = build(small_cnn, pictures, out, *BOTH, *flags)
        assert ("## Search for tensorrt" in screen and "| tried whole |" in screen) == shown


CHAIN = "a = Relu (x) b = Mul (a, factor) c = Add (b, one) y = Neg (c)"


def save(path, nodes=CHAIN, *, factor=1.0, out="y", x="x", **weights):
    weights |= {"factor": np.float32(factor), "one": np.float32(1)}
    return save_net(make_model(nodes, {x: ["n", 4]}, {out: ["n", 4]}, weights), path)


@pytest.fixture
def a(tmp_path):
    return save(tmp_path / "a.onnx")


@pytest.fixture
def images(tmp_path):
    path = tmp_path / "held.npz"
    np.savez(path, x=np.random.default_rng(0).normal(0, 1, (6, 4)).astype(np.float32))
    return path


def run_compare(*words):
    return CliRunner().invoke(cli, ["compare", *map(str, words)])


def screen_of(*words):
    result = run_compare(*words)
    assert result.exit_code == 0, result.exception
    return result.stdout


@pytest.fixture
def found(images):
    """(words of compare) -> what it finds on the images."""
    return lambda *words: json.loads(screen_of(*words, "--images", images, "--json", "-"))


@pytest.fixture
def refusal(images):
    return lambda *words: refused(*words, "--images", images, by=run_compare)


IN_OPENVINO = ("--runtime", "openvino")


def test_the_first_tensor_that_parts_is_told_by_its_node(tmp_path, a, images, found):
    b = save(tmp_path / "b.onnx", factor=2)
    said = screen_of(a, b, "--images", images, "--json", tmp_path / "found.json")
    assert "They part at 'b', made by Mul 'Mul_b': 0.0 dB" in said
    assert said.index("outputs") < said.index("  y  (Neg Neg_y)")
    told = found(a, b)
    assert [row["tensor"] for row in told["layers"]] == ["a", "b", "c"]
    assert json.loads((tmp_path / "found.json").read_text()) == told
    assert told["looked"] == [4, 4]


def test_models_that_agree_are_said_not_to_part(tmp_path, a, images, found):
    b = save(tmp_path / "b.onnx")
    told = found(a, b)
    assert told["parts_at"] is None
    assert told["samples"] == 6
    assert all(row["sqnr_db"] == "inf" for row in told["layers"] + told["outputs"])
    assert "do not part" in screen_of(a, b, "--images", images)


@pytest.mark.parametrize(
    ("made", "read"), [("a", "a_dq"), ("a/float", "a")], ids=["pair behind", "pair before"]
)
def test_of_a_quantized_tensor_the_value_counts_that_is_read(tmp_path, a, found, made, read):
    nodes = [
        ("Relu", "x", made),
        ("QuantizeLinear", f"{made} s z", "q"),
        ("DequantizeLinear", "q s z", read),
        *parse_nodes(f"b = Mul ({read}, one) c = Add (b, one) y = Neg (c)"),
    ]
    b = save(tmp_path / "b.onnx", nodes, s=np.float32(0.1), z=np.uint8(128))
    first = found(a, b)["layers"][0]
    assert first["tensor"] == "a"
    assert 15 < first["sqnr_db"] < 60
    back = found(b, a)["layers"][0]
    assert (back["operator"], back["node"]) == ("Relu", f"Relu_{made}")


def test_the_limit_and_the_number_of_images_are_the_users(tmp_path, a, found):
    b = save(tmp_path / "b.onnx", factor=1.01)
    assert found(a, b)["parts_at"] is None
    told = found(a, b, "--min-sqnr", 50, "--limit", 2)
    assert told["parts_at"] == "b"
    assert told["samples"] == 2
    assert told["min_sqnr_db"] == 50
    assert found(a, save(b, factor=np.nan))["parts_at"] == "b"


def test_what_holds_no_value_or_is_a_constant_does_not_part(tmp_path, found):
    none = {"from": np.array([0]), "to": np.array([0])}
    models = []
    for number in range(2):
        nodes = f"{CHAIN} nothing = Slice (a, from, to) k = Constant <value_float = {number}.0> ()"
        models.append(save(tmp_path / f"{number}.onnx", nodes, **none))
    told = found(*models)
    assert told["parts_at"] is None
    assert [row["tensor"] for row in told["layers"]] == ["a", "b", "c"]
    model = onnx.load(models[0])
    model.graph.output.append(model.graph.input[0])  # an output that is an input is a row
    onnx.save(model, models[0])
    assert [row["tensor"] for row in found(models[0], models[0])["outputs"]] == ["y", "x"]


def test_outputs_that_one_model_gives_alone_are_told(tmp_path, a, images):
    """Without them nobody knows whether the models part."""
    b = save(tmp_path / "b.onnx", CHAIN.replace("y = Neg", "z = Abs"), out="z")
    said = screen_of(a, b, "--images", images)
    assert "not compared: 'y'" in said
    assert "not compared: 'z'" in said
    assert "not compared" not in screen_of(a, a, "--images", images)


def test_what_cannot_be_compared_is_refused_in_a_sentence(tmp_path, a, refusal):
    other = save(tmp_path / "o.onnx", "z = Relu (x)", out="z")
    fed = save(tmp_path / "f.onnx", "y = Relu (w)", x="w")
    (tmp_path / "no.onnx").write_text("text")
    doubled = onnx.load(save(tmp_path / "d.onnx", "y = Relu (x)"))
    for value in (doubled.graph.input[0], doubled.graph.output[0]):
        value.type.tensor_type.elem_type = TensorProto.DOUBLE
    onnx.save(doubled, tmp_path / "d.onnx")
    for words, said in [
        ((a,), "two models or two runtimes"),
        ((a, other), "tensors of the same names"),
        ((a, fed), "got x (float32) and w (float32)"),
        ((a, tmp_path / "d.onnx"), "got x (float32) and x (float64)"),
        ((a, tmp_path / "no.onnx"), "must be an ONNX"),
        ((tmp_path / "gone.onnx", a), "must be an ONNX"),
        ((a, a, "--every"), "goes with --runtime openvino"),
    ]:
        assert said in refusal(*words)


@pytest.mark.slow
def test_the_node_is_found_where_another_runtime_parts(tmp_path, a, images, found, openvino):
    told = found(a, *IN_OPENVINO)
    assert told["parts_at"] == "c"
    assert told["cut"]
    assert told["looked"][0] < told["looked"][1] == 4
    words = (a, "--images", images, *IN_OPENVINO, "--every")
    assert "4 of 4" in screen_of(*words, "--json", tmp_path / "found.json")
    every = json.loads((tmp_path / "found.json").read_text())
    assert every["looked"] == [4, 4]
    assert every["layers"][1]["sqnr_db"] == "inf"


@pytest.mark.slow
def test_what_closed_dimensions_change_is_told(a, found, openvino):
    (note,) = found(a, *IN_OPENVINO)["notes"]
    assert "open dimensions closed" in note
    assert found(save_fixed_batch(a, a, 1), *IN_OPENVINO)["notes"] == []


def test_runtimes_whose_outputs_agree_are_not_cut(tmp_path, found, openvino):
    for name in ("x", "file"):  # a name that numpy's savez takes for its own
        model = save(tmp_path / f"{name}.onnx", f"a = Relu ({name}) y = Neg (a)", x=name)
        told = found(model, *IN_OPENVINO)
        assert told["parts_at"] is None
        assert told["looked"] == [1, 2]


@pytest.mark.slow
def test_a_runtime_that_crashes_on_a_cut_is_a_note(tmp_path, found, openvino):
    model = save(tmp_path / "a.onnx", "a = Erf (x) b = Add (a, a) y = Neg (b)")
    told = found(model, *IN_OPENVINO, "--every")
    assert told["parts_at"] == "b"
    _, note = told["notes"]
    assert "'a' could not be compared" in note
    assert "status 11" in note


def test_a_runtime_that_refuses_the_model_says_why(tmp_path, refusal, openvino):
    said = refusal(save(tmp_path / "a.onnx", "y = Cosh (x)"), *IN_OPENVINO)
    assert "got: Operation Cosh is not supported" in said


def test_a_missing_runtime_says_how_to_get_it(a, refusal, monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    assert "calib8[openvino]" in refusal(a, *IN_OPENVINO)


def test_the_real_openvino_agrees_on_a_plain_model(a, images):
    pytest.importorskip("openvino", reason="OpenVINO is not installed")
    assert compare(a, None, images, runtime="openvino", every=True).first_difference is None


def test_a_cut_holds_what_its_tensor_needs_and_no_more(a):
    model = onnx.load(a)
    short = extract_output(model, "b")
    assert [node.op_type for node in short.graph.node] == ["Relu", "Mul"]
    assert [value.name for value in short.graph.output] == ["b"]
    assert len(model.graph.node) == 4


SCHEMA = "calib8-report/2"


@pytest.fixture(scope="module")
def built_builds(small_cnn, pictures, tmp_path_factory):
    """Two builds of one model by two methods, through the command; folder -> its screen."""
    made = tmp_path_factory.mktemp("builds")
    return {
        made / name: build(small_cnn, pictures, made / name, "--method", method, "--effort", 0)
        for name, method in (("a", "minmax"), ("b", "mse"))
    }


@pytest.fixture
def changed(built_builds, tmp_path):
    """(key, ..., value) -> a folder with the report of a build in which one value is another."""

    def call(*place):
        folder = tmp_path / "changed"
        shutil.copytree(next(iter(built_builds)), folder, dirs_exist_ok=True)
        held = at = report_of(folder)
        *keys, last, value = place
        for key in keys:
            at = at[key]
        at[last] = value
        return store_report(folder, held)

    return call


def latency(p50):
    names = ("min", "max", "mean", "median", "p50", "p90", "p95", "p99")
    timing = {name: p50 for name in names} | {"cv_percent": 1.0}
    return {
        "queries": 9,
        "warmup_queries": 1,
        "total_host_walltime_s": 1.0,
        "throughput_qps": 9.0,
        "latency": timing,
        "host": timing,
    }


def test_one_build_shows_its_screen_again_and_is_read_back_as_written(run, built_builds):
    for folder, screen in built_builds.items():
        assert run("report", folder) == (0, screen, "")
        assert run("report", folder / "report.json")[1] == screen
        assert to_json(read_stored_build(folder).report) == report_of(folder)


def test_builds_stand_side_by_side(run, built_builds, changed):
    a, b = built_builds
    held = report_of(fast := changed("title", "x"))
    for engine, ms in zip(held["engines"], (3.0, 1.5), strict=True):
        engine["latency"] = latency(ms)
    store_report(fast, held)
    out = run.ok("report", a, b, fast)
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line.startswith("/")}
    assert lines[str(a)][1:3] == ["onnxruntime", "doubtful"]
    assert lines[str(a)][-2:] == ["minmax", "0"]
    assert lines[str(b)][-2:] == ["mse", "0"]
    assert lines[str(b)][-5:-2] == ["10", "of", "10"]
    assert lines[str(fast)][3:6] == ["2.00x", "1.50", "ms"]
    assert f"{b}, onnxruntime: doubtful: " in " ".join(out.split())
    assert "3 builds compared" in out
    assert "They differ" not in out.replace("They differ   repair", "")


def test_what_builds_differ_in_is_told(run, built_builds, changed):
    a, _ = built_builds
    other = changed("machine", "cpu", "Z80")
    settings = (other / "calib8.toml").read_text().replace("accept", "skip-bad")
    (other / "calib8.toml").write_text(settings + 'mean = "0.5"\n')
    code, out, _ = run("report", a, other)
    said = " ".join(out.split())
    assert code == 0
    assert f"mean: - ({a}); 0.5 ({other})" in said
    assert f"accept: True ({a}); - ({other})" in said
    assert "method:" not in said
    assert f"machine: {read_stored_build(a).report.machine.cpu}" in said
    assert "Z80, " in said
    assert "measured on different machines: compare speed-ups, not milliseconds" in said
    (other / "calib8.toml").unlink()  # as of a build from Python
    assert f"accept: True ({a}); - ({other})" in " ".join(run("report", a, other)[1].split())


def test_a_comparison_is_a_page_and_json_too(run, built_builds, tmp_path):
    a, b = built_builds
    page, file = tmp_path / "both.html", tmp_path / "both.json"
    run.ok("report", a, b, "--html", page, "--json", file)
    text = page.read_text()
    held = json.loads(file.read_text())
    assert text.count('class="verdict doubtful"') == 2
    assert text.count("<script>") == 1
    assert str(a) in text.replace("<wbr>", "")
    assert held["schema"] == "calib8-builds/1"
    assert held["names"] == [str(a), str(b)]
    assert [one["method"] for one in held["engines"]] == ["minmax", "mse"]
    first = held["engines"][0]
    assert first["verdict"]["level"] == "doubtful"
    assert first["effort"] == "0"
    assert json.loads(run.ok("report", a, b, "--json", "-")) == held
    said = run.fails("report", a, "--html", page)
    assert "--html goes with a second folder, which was not given" in said


def test_a_target_that_failed_is_a_line(run, built_builds, changed):
    a, _ = built_builds
    other = changed("targets", 0, "error", "a chip must be there, got none")
    out = run.ok("report", a, other)
    assert "failed" in out
    assert "a chip must be there, got none" in " ".join(out.split())
    held = report_of(other)
    held["engines"] = held["engines"][:1]
    said = " ".join(run.ok("report", a, store_report(other, held)).split())
    assert f"{other}, onnxruntime: a chip must be there, got none" in said


WRONG = [
    (("schema", "calib8-report/1"), f"a report must be of schema {SCHEMA}, got 'calib8-report/1'"),
    (("title", 3), "Expected `str`, got `int` - at `$.title`"),
    (("engines", 5), "Expected `array`, got `int` - at `$.engines`"),
    (("engines", 0, None), "Expected `object`, got `null` - at `$.engines[0]`"),
    (("engines", 1, "reference", "no"), "Expected `bool`, got `str` - at `$.engines[1].reference`"),
    (("engines", 1, "size_bytes", 1 << 70), "size_bytes of a report must be a number of 64 bits"),
    (("targets", 0, "files", 0, "size_bytes", -(10**400)), "of 64 bits, got -1000"),
    (("engines", 1, "verdict", {"level": "x", "reasons": []}), "a verdict must be one of good,"),
    (("engines", 1, "verdict", {"level": "good"}), "required field `reasons` - at `$.engines[1].v"),
    (("engines", 1, "latency", latency(0.0)), "latencies must be over 0, got 0.0"),
    (("engines", 1, "latency", latency("nan")), "latencies must be over 0, got nan"),
    (("engines", 1, "latency", latency("fast")), "`str` - at `$.engines[1].latency.latency.min`"),
    (("engines", 1, "latency", latency("\ud800")), "surrogates not allowed"),
    (("targets", 0, "tensors", 0, "lo", 10**400), "out of range - at `$.targets[0].tensors[0].lo`"),
    (("targets", 0, "layers", 0, "not_finite", [1]), "got 1 - at `$.targets[0].layers[0].n"),
    (("machine", "versions", {"x": 1}), "Expected `str`, got `int` - at `$.machine.versions[...]`"),
]


@pytest.mark.parametrize(("place", "said"), WRONG)
def test_a_damaged_report_is_refused_in_a_sentence(run, built_builds, changed, place, said):
    code, out, err = run("report", next(iter(built_builds)), changed(*place))
    assert code == 1
    assert out == ""
    assert said in err
    assert "build again" in err


def test_what_is_no_build_is_refused(run, built_builds, tmp_path, wording):
    a, _ = built_builds
    assert f"got {tmp_path} without a report.json" in run.fails("report", a, tmp_path)
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    assert "got invalid JSON" in run("report", a, broken)[2]
    broken.write_text("[]")
    assert "got None" in run("report", a, broken)[2]
    shutil.copy(a / "report.json", broken)
    (tmp_path / "calib8.toml").write_text("[")
    wording.check(run.fails("report", a, broken))
    assert run("report")[0] == 2


def test_names_of_a_report_do_not_steer_the_terminal(run, built_builds, changed, tmp_path):
    folder = changed("targets", 0, "method", "\x1b[31m<script>bad\n")
    out = run.ok("report", next(iter(built_builds)), folder, "--html", tmp_path / "x.html")
    assert "\x1b" not in out
    assert "\\x1b[31m<script>bad\\n" in out
    assert (tmp_path / "x.html").read_text().count("<script>") == 1
