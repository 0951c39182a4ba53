"""compare, explain and report: builds beside each other, and what loses what where."""

import json
import math
import re
import shutil
import sys
from pathlib import Path

import cv2
import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, numpy_helper

from deploy.analysis.build_reader import read_stored_build
from deploy.analysis.comparison import compare
from deploy.analysis.explain_build import ChannelSums, explain
from deploy.cli import cli
from deploy.errors import Calib8Error
from deploy.graph.edit import extract_output
from deploy.method import NO_CHOICES
from deploy.report import to_json
from deploy.tuning.plan_file import (
    CONSEQUENCE,
    NOISE,
    RULE,
    TIME,
    WHOLE,
    TargetPlan,
    read_plan,
    reason_kind,
    reason_sqnr_db,
)
from tests.models import make_model, make_node, make_value, save_net


# --- `calib8 explain`: what loses what where, and what was tried.
def told(*words):
    return CliRunner().invoke(cli, ["explain", *map(str, words)])


def said(*words):
    result = told(*words)
    assert result.exit_code == 0, result.exception
    return result.stdout


def refused(*words):
    """The one sentence of a command that refuses."""
    result = told(*words)
    assert result.exit_code == 1 and isinstance(result.exception, Calib8Error), result.exception
    sentence = str(result.exception)
    assert sentence and "\n" not in sentence
    return sentence


@pytest.fixture(scope="module")
def built(small_cnn, pictures, tmp_path_factory):
    """A build for two targets; their plans were searched."""
    out = tmp_path_factory.mktemp("explained") / "build"
    words = ["--images", pictures, "--out", out, "--target", "onnxruntime,tensorrt"]
    words += ["--duration", "0", "--mean", "0.5", "--std", "0.25", "--accept"]
    result = CliRunner().invoke(cli, ["build", str(small_cnn), *map(str, words)])
    assert result.exit_code == 0, result.exception
    return out


@pytest.fixture
def copied(built, tmp_path):
    """The same with its report changed, each time from what was built."""
    out = tmp_path / "copy"
    shutil.copytree(built, out)

    def change(edit):
        report = json.loads((built / "report.json").read_text())
        edit(report)
        (out / "report.json").write_text(json.dumps(report))
        return out

    return change


def of(report, name="onnxruntime"):
    return next(target for target in report["targets"] if target["name"] == name)


@pytest.mark.slow
def test_a_build_is_explained_from_its_verdict_to_its_ranges(built):
    text = said(built)
    report = json.loads((built / "report.json").read_text())
    for name in ("onnxruntime", "tensorrt"):
        engine = next(e for e in report["engines"] if e["target"] == name and not e["reference"])
        block = text[text.index(f"\n{name}: {engine['verdict']['level']}") :]
        places = [block.index(f"\n{label} ") for label in ("Why", "Parts", "Float", "Tried")]
        assert places == sorted(places)
        assert all(trial["what"] in block for trial in of(report, name)["search"]["tried"])
    assert "small_cnn.plan.toml" in text and "Images " not in text


def test_json_is_what_the_report_says(built):
    found = json.loads(said(built, "--json", "-"))
    report = json.loads((built / "report.json").read_text())
    assert found["schema"] == "calib8-explanation/1" and len(found["targets"]) == 2
    for target in found["targets"]:
        own = of(report, target["name"])
        floats = [node["name"] for node in own["nodes"] if node["precision"] == "float32"]
        assert sorted(n for group in target["kept"] for n in group["nodes"]) == sorted(floats)
        assert target["nodes"] == len(own["nodes"])
        layers = [layer["sqnr_db"] for layer in target["layers"]]
        assert layers == sorted(layers) and len(layers) == len(own.get("layers", []))
        assert target["settled"] == own["search"]["settled"]
        clipped = [row["share"] for row in target["clipped"]]
        assert clipped == sorted(clipped, reverse=True) and all(0 < share <= 1 for share in clipped)


def test_json_goes_to_a_file_beside_the_text(built, tmp_path):
    assert "onnxruntime:" in said(built, "--json", tmp_path / "why.json")
    assert json.loads((tmp_path / "why.json").read_text())["targets"][0]["name"] == "onnxruntime"


def test_one_target_alone_is_told_of(built):
    text = said(built, "--target", "tensorrt")
    assert "\ntensorrt: " in text and "\nonnxruntime: " not in text
    assert "did you mean 'tensorrt'?" in refused(built, "--target", "tensorr")


def rows(label, count):
    figures = {"cosine_mean": 0.9, "cosine_min": 0.8, "max_abs_error": 0.1}
    return [{"name": f"{label}{i:02d}", "sqnr_db": 40.0 - i, **figures} for i in range(count)]


def test_ten_rows_are_told_and_all_where_asked(copied):
    out = copied(lambda report: of(report).update(layers=rows("layer", 14)))
    text = said(out, "--target", "onnxruntime")
    assert "layer13" in text and "layer04" in text and "layer03" not in text
    assert "4 more; --all" in text
    everything = said(out, "--target", "onnxruntime", "--all")
    assert "layer03" in everything and "--all" not in everything
    assert everything.index("layer13") < everything.index("layer00")


def test_what_cannot_be_told_is_worst(copied):
    def edit(report):
        layers = rows("layer", 3)
        layers[0]["sqnr_db"] = "nan"
        layers[1]["sqnr_db"] = "inf"
        of(report)["layers"] = layers

    (target, _) = json.loads(said(copied(edit), "--json", "-"))["targets"]
    assert [row["name"] for row in target["layers"]] == ["layer00", "layer02", "layer01"]


FLOATS = (
    ("r", "Relu", "the node before it is float", RULE),
    ("w", "Gemm", "int8 as a whole is not faster, or not by enough", WHOLE),
    ("m", "Mul", "to and fro would cost more than it wins", CONSEQUENCE),
    ("s", "Conv", "slower in int8: 9 us, 4 us in float", TIME),
    ("b", "Conv", "alone in int8 its group of 2 layers leaves 12.5 dB of y[0:4]", NOISE),
    ("a", "Conv", "alone in int8 it leaves 4.4 dB of y[4:22]", NOISE),
)


def test_noise_is_told_before_time_and_time_before_what_follows(copied):
    nodes = [
        {"name": name, "op": op, "precision": "float32", "reason": reason}
        for name, op, reason, _ in FLOATS
    ]
    text = said(copied(lambda report: of(report).update(nodes=nodes)), "--target", "onnxruntime")
    assert "6 of 6 nodes" in text
    labels = ["by noise    Conv a", "Conv b", "by time     Conv s", "in between  Mul m",
              "as a whole  Gemm w", "by rule     Relu r"]  # fmt: skip
    places = [text.index(label) for label in labels]
    assert places == sorted(places)


@pytest.mark.parametrize(("reason", "expected"), [(row[2], row[3]) for row in FLOATS])
def test_reasons_are_known_by_the_words_of_the_search(reason, expected):
    assert reason_kind(reason) == expected
    assert math.isfinite(reason_sqnr_db(reason)) == (expected == NOISE)


def test_what_was_taken_is_marked_in_what_was_tried(built):
    report = json.loads((built / "report.json").read_text())
    plan = read_plan(built / "small_cnn.plan.toml")
    for target in report["targets"]:
        tried, settled = target["search"]["tried"], target["search"]["settled"]
        taken = [row for row in tried if row["taken"]]
        assert len(taken) == (settled != "float")
        own = plan.targets[target["name"]]
        for row in taken:
            assert own.tried[own.taken]["what"] == row["what"] and row["what"] in settled


TRIED = (
    {"what": "all in int8, mse", "sqnr_db": 20.04, "time": 0.9},
    {"what": "3 of 9 layers in float", "sqnr_db": 30.0, "time": 0.8},
    {"what": "3 of 9 layers in float", "sqnr_db": 35.0, "time": 0.7},
    {"what": "timed: 3 of 9 layers in float", "sqnr_db": 34.96, "time": 0.75},
)


@pytest.mark.parametrize(
    ("settled", "place"),
    [("all in int8, mse: 20.0 dB in y[0:4]", 0),
     ("3 of 9 layers in float: 30.0 dB", 1),  # equal words, another method
     ("3 of 9 layers in float: 35.0 dB in y", 3),  # timed, so not the predicted one
     ("all in int8: 20.0 dB", None), ("float", None), ("", None), ("all in int8, mse: ?", None)],
)  # fmt: skip
def test_what_was_taken_is_found_by_words_and_figure(settled, place):
    assert TargetPlan(choices=NO_CHOICES, settled=settled, tried=TRIED).taken == place


def test_a_build_without_a_search_is_explained_too(small_cnn, pictures, tmp_path):
    words = ["--images", pictures, "--out", tmp_path, "--duration", "0", "--effort", "0"]
    CliRunner().invoke(cli, ["build", str(small_cnn), *map(str, words), "--accept"])
    text = said(tmp_path)
    assert "Tried" not in text and "Plan          none" in text


def test_what_was_tried_is_in_the_plan_where_the_report_lacks_it(copied):
    out = copied(lambda report: of(report).pop("search"))
    (target, _) = json.loads(said(out, "--json", "-"))["targets"]
    assert target["tried"] and target["settled"]


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
    assert "image, the worst of 6" in text and "channel" in text
    for target in json.loads(said(built, "--images", held, "--json", "-"))["targets"]:
        one = target["held"]
        assert one["samples"] == 6 and len(one["images"]) == 5
        figures = [image["sqnr_db"] for image in one["images"]]
        assert figures == sorted(figures)
        assert {image["name"] for image in one["images"]} <= {f"{i}.png" for i in range(6)}
        tensors = list(dict.fromkeys(c["tensor"] for c in one["channels"]))
        worst = [layer["name"] for layer in target["layers"]]
        assert tensors == worst[: len(tensors)] and 1 <= len(tensors) <= 5


def test_the_number_of_threads_changes_nothing(built, held):
    one = explain(built, images=str(held), threads=1)
    assert explain(built, images=str(held), threads=3) == one


def test_what_fills_a_fixed_batch_up_is_no_image(small_cnn, held, pictures, tmp_path):
    model = onnx.load(small_cnn)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 4
    onnx.save(model, tmp_path / "four.onnx")
    words = ["--images", pictures, "--out", tmp_path / "o", "--duration", "0", "--effort", "0"]
    CliRunner().invoke(cli, ["build", *map(str, [tmp_path / "four.onnx", *words]), "--accept"])
    (target,) = json.loads(said(tmp_path / "o", "--images", held, "--json", "-"))["targets"]
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
    assert "the worst of 5" in text and "0.png" not in text and "5.png" in text


def test_the_float_model_can_be_named_where_it_was_moved(copied, held, small_cnn):
    out = copied(lambda report: report["model"].update(path="gone/net.onnx"))
    assert "--model" in refused(out, "--images", held)
    assert "the worst of 6" in said(out, "--images", held, "--model", small_cnn)


def test_files_are_found_in_a_folder_that_was_moved(copied, held):
    def edit(report):
        for target in report["targets"]:
            target["runnable"] = f"elsewhere/{target['runnable'].rpartition('/')[2]}"

    assert "the worst of 6" in said(copied(edit), "--images", held)


def test_a_moved_build_is_not_another_one_in_its_place_now(small_cnn, pictures, held, tmp_path):
    """`mv build kept`, and another build into build/."""

    def build(*words):
        line = ["build", small_cnn, "--images", pictures, "--out", tmp_path / "build"]
        line += ["--duration", "0", "--accept", *words]
        assert CliRunner().invoke(cli, [str(word) for word in line]).exit_code == 0

    build("--method", "minmax")
    before = json.loads(said(tmp_path / "build", "--images", held, "--json", "-"))
    (tmp_path / "build").rename(tmp_path / "kept")
    build("--effort", "0", "--method", "percentile", "--percent", "60")
    after = json.loads(said(tmp_path / "kept", "--images", held, "--json", "-"))
    assert after["targets"] == before["targets"]
    assert after["plan"] == str(tmp_path / "kept" / "small_cnn.plan.toml")
    next((tmp_path / "kept").glob("*.int8.onnx")).unlink()
    assert "kept" in refused(tmp_path / "kept", "--images", held)


def test_another_float_model_than_was_built_from_is_told(built, held, small_cnn, tmp_path):
    other = onnx.load(small_cnn)
    weight = other.graph.initializer[0]
    weight.CopyFrom(onnx.numpy_helper.from_array(-onnx.numpy_helper.to_array(weight), weight.name))
    onnx.save(other, tmp_path / "other.onnx")
    words = (built, "--images", held, "--model")
    assert "other.onnx" in " ".join(said(*words, tmp_path / "other.onnx").split())
    assert "that was built from" not in said(*words, small_cnn)


def test_a_target_whose_model_is_not_there_says_so(copied, held):
    out = copied(lambda report: of(report).pop("runnable"))
    assert "no file of it can be run in ONNX Runtime" in said(out, "--images", held)
    out = copied(lambda report: of(report).update(runnable="gone.onnx"))
    assert "gone.onnx" in refused(out, "--images", held)


def test_of_a_model_that_was_equalized_no_channels_are_told(copied, held):
    note = "cross-layer equalization: worst part 20.0 -> 30.0 dB, {}"
    for word, found in (("kept", False), ("not kept", True)):
        out = copied(lambda report, word=word: report.update(notes=[note.format(word)]))
        targets = json.loads(said(out, "--images", held, "--json", "-"))["targets"]
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
    "flags", [["--limit", "2"], ["--mean", "0.5"], ["--skip-bad"], ["--threads", "1"],
              ["--model", "m.onnx"]]
)  # fmt: skip
def test_options_of_images_are_refused_without_images(built, flags):
    assert flags[0] in refused(built, *flags) and "--images" in refused(built, *flags)


def test_all_is_refused_where_no_text_is_printed(built):
    assert "--all" in refused(built, "--all", "--json", "-")


# what anybody may have written


def test_a_folder_without_a_report_is_refused(tmp_path):
    assert "without a report.json" in refused(tmp_path)
    assert "without a report.json" in refused(tmp_path / "none")


@pytest.mark.parametrize(
    "junk",
    [b"", b"\xff\xfe\x00", b"[" * 100_000, b"[]", b"3", b'{"schema": "calib8-report/1"}',
     b'{"schema": ["calib8-report/2"]}', b"\x00" * 99, b"1" * 5000],
)  # fmt: skip
def test_a_broken_report_is_one_sentence(tmp_path, junk):
    (tmp_path / "report.json").write_bytes(junk)
    refused(tmp_path)


@pytest.mark.parametrize(
    "how", [{"mean": [10**400]}, {"mean": "x"}, {"colour": "rgb"}, {"std": {}}]
)
def test_preprocessing_that_is_none_is_one_sentence(copied, held, how):
    refused(copied(lambda report: report["feed"].update(preprocess=how)), "--images", held)


@pytest.mark.parametrize("path", ["x" * 5000, "a\x00b", "/", "."])
def test_no_path_gives_a_traceback(copied, held, path):
    def edit(report):
        of(report).update(runnable=path)
        report["model"]["path"] = path

    refused(copied(edit), "--images", held)
    refused(copied(lambda report: of(report).update(runnable=path)), "--images", held)


def test_no_name_of_a_folder_gives_a_traceback():
    refused("x" * 5000)


def test_a_model_of_another_build_is_one_sentence(copied, held, tmp_path):
    x = make_value("x", [1, 3, 16, 16])
    y = make_value("other", [1, 3, 16, 16])
    node = make_node("Relu", "x", "other", name="r")
    onnx.save(make_model([node], [x], [y]), tmp_path / "o.onnx")
    out = copied(lambda report: of(report).update(runnable="o.onnx"))
    shutil.copy(tmp_path / "o.onnx", out)
    assert "same outputs" in refused(out, "--images", held)


# what the report says of the search


def test_values_that_no_reader_looks_at_are_not_clipped(small_cnn, pictures, tmp_path):
    """What lies below 0 before a Relu needs no room in the range, which loses nothing by it."""
    words = ["--images", pictures, "--out", tmp_path, "--target", "tensorrt", "--effort", "0"]
    words = [small_cnn, *words, "--method", "minmax", "--duration", "0", "--accept"]
    CliRunner().invoke(cli, ["build", *map(str, words)])
    rows = of(json.loads((tmp_path / "report.json").read_text()), "tensorrt")["tensors"]
    assert all(t["lo"] == -t["amax"] and t["hi"] == t["amax"] for t in rows)
    cut = [t for t in rows if t["lo"] > t["observed_min"]]
    assert cut and all(tensor["clipped"] == 0 for tensor in cut)
    assert "Clipped" not in said(tmp_path)


def test_the_report_has_what_was_tried_and_where_it_is_kept(built):
    report = json.loads((built / "report.json").read_text())
    (plan,) = [file for file in report["files"] if file["role"] == "plan"]
    assert plan["size_bytes"] == (built / "small_cnn.plan.toml").stat().st_size
    page, text = (built / "report.html").read_text(), (built / "report.md").read_text()
    assert '<a href="small_cnn.plan.toml">small_cnn.plan.toml</a>' in page
    assert "[small\\_cnn.plan.toml](small_cnn.plan.toml)" in text
    page = re.sub(r' data-head="[^"]*"|<wbr>', "", page)
    for name in ("onnxruntime", "tensorrt"):
        assert f">Search for {name} (" in page and f"## Search for {name}" in text
        for trial in of(report, name)["search"]["tried"]:
            assert f"<td>{trial['what']}</td>" in page and f"| {trial['what']} |" in text
    assert page.count("<td>yes</td>") == text.count("| yes |") >= 1


def test_verbose_tells_what_was_tried(small_cnn, pictures, built, tmp_path):
    out = shutil.copytree(built, tmp_path / "again")
    words = [small_cnn, "--images", pictures, "--out", out, "--target", "onnxruntime,tensorrt"]
    words += ["--duration", "0", "--mean", "0.5", "--std", "0.25", "--accept"]
    heads = "tried whole for tensorrt"
    for flags, shown in ([], False), (["--verbose"], True):
        result = CliRunner().invoke(cli, ["build", *map(str, words), *flags])
        assert result.exit_code == 0 and (heads in result.stdout) == shown


# --- compare
def save(path, nodes, *, out="y", weights=(), x="x"):
    value = make_value(x, ["n", 4])
    end = make_value(out, ["n", 4])
    made = [make_node(op, ins, outs, name=f"{op}:{outs}")
            for op, ins, outs in nodes]  # fmt: skip
    constants = [numpy_helper.from_array(np.asarray(v), name) for name, v in dict(weights).items()]
    return save_net(make_model(made, [value], [end], constants), path)


ONE = {"one": np.float32(1)}
CHAIN = [("Relu", "x", "a"), ("Mul", "a one", "b"), ("Add", "b one", "c"), ("Neg", "c", "y")]


@pytest.fixture
def images(tmp_path):
    path = tmp_path / "held.npz"
    np.savez(path, x=np.random.default_rng(0).normal(0, 1, (6, 4)).astype(np.float32))
    return path


def run_compare(*words):
    return CliRunner().invoke(cli, ["compare", *map(str, words)])


def told_compare(result):
    assert result.exit_code == 0, result.exception
    return json.loads(result.stdout)


def test_the_first_tensor_that_parts_is_told_by_its_node(tmp_path, images):
    a = save(tmp_path / "a.onnx", CHAIN, weights=ONE)
    b = save(tmp_path / "b.onnx", [CHAIN[0], ("Mul", "a two", "b"), *CHAIN[2:]],
             weights=ONE | {"two": np.float32(2)})  # fmt: skip
    said = run_compare(a, b, "--images", images).stdout
    assert "They part at 'b', made by Mul 'Mul:b': 0.0 dB" in said
    assert said.index("outputs") < said.index("  y  (Neg Neg:y)")
    layers = told_compare(run_compare(a, b, "--images", images, "--json", "-"))["layers"]
    assert [row["tensor"] for row in layers] == ["a", "b", "c"]


def test_models_that_agree_are_said_not_to_part(tmp_path, images):
    a, b = (save(tmp_path / f"{name}.onnx", CHAIN, weights=ONE) for name in "ab")
    found = told_compare(run_compare(a, b, "--images", images, "--json", "-"))
    assert found["parts_at"] is None and found["samples"] == 6
    assert all(row["sqnr_db"] == "inf" for row in found["layers"] + found["outputs"])
    assert "do not part" in run_compare(a, b, "--images", images).stdout


SCALE = {"s": np.float32(0.1), "z": np.uint8(128)}


@pytest.mark.parametrize(
    ("made", "read"), [("a", "a_dq"), ("a/float", "a")], ids=["pair behind", "pair before"]
)
def test_of_a_quantized_tensor_the_value_counts_that_is_read(tmp_path, images, made, read):
    a = save(tmp_path / "a.onnx", CHAIN, weights=ONE)
    pair = [("QuantizeLinear", f"{made} s z", "q"), ("DequantizeLinear", "q s z", read)]
    nodes = [("Relu", "x", made), *pair, ("Mul", f"{read} one", "b"), *CHAIN[2:]]
    b = save(tmp_path / "b.onnx", nodes, weights=ONE | SCALE)
    first = told_compare(run_compare(a, b, "--images", images, "--json", "-"))["layers"][0]
    assert first["tensor"] == "a" and 15 < first["sqnr_db"] < 60
    back = told_compare(run_compare(b, a, "--images", images, "--json", "-"))["layers"][0]
    assert (back["operator"], back["node"]) == ("Relu", f"Relu:{made}")


def test_the_limit_and_the_number_of_images_are_the_users(tmp_path, images):
    a = save(tmp_path / "a.onnx", CHAIN, weights=ONE)
    b = save(tmp_path / "b.onnx", [CHAIN[0], ("Mul", "a near", "b"), *CHAIN[2:]],
             weights=ONE | {"near": np.float32(1.01)})  # fmt: skip
    words = (a, b, "--images", images, "--json", "-")
    assert told_compare(run_compare(*words))["parts_at"] is None
    found = told_compare(run_compare(*words, "--min-sqnr", 50, "--limit", 2))
    assert found["parts_at"] == "b" and found["samples"] == 2 and found["min_sqnr_db"] == 50


def test_json_goes_to_a_file_beside_the_table(tmp_path, images):
    a, b = (save(tmp_path / f"{name}.onnx", CHAIN, weights=ONE) for name in "ab")
    result = run_compare(a, b, "--images", images, "--json", tmp_path / "found.json")
    assert "outputs" in result.stdout
    assert json.loads((tmp_path / "found.json").read_text())["looked"] == [4, 4]


def test_another_shape_or_nan_parts(tmp_path, images):
    a = save(tmp_path / "a.onnx", CHAIN, weights=ONE)
    b = save(tmp_path / "b.onnx", [CHAIN[0], ("Mul", "a nan", "b"), *CHAIN[2:]],
             weights=ONE | {"nan": np.float32(np.nan)})  # fmt: skip
    assert told_compare(run_compare(a, b, "--images", images, "--json", "-"))["parts_at"] == "b"


def test_what_holds_no_value_or_is_a_constant_does_not_part(tmp_path, images):
    none = {"from": np.array([0]), "to": np.array([0])}
    nodes = [*CHAIN, ("Slice", "a from to", "nothing")]
    a, b = (save(tmp_path / f"{name}.onnx", nodes, weights=ONE | none) for name in "ab")
    for number, other in enumerate((a, b)):
        model = onnx.load(other)
        value = numpy_helper.from_array(np.float32(number), "v")
        model.graph.node.append(make_node("Constant", "", "k", value=value))
        onnx.save(model, other)
    found = told_compare(run_compare(a, b, "--images", images, "--json", "-"))
    assert found["parts_at"] is None
    assert [row["tensor"] for row in found["layers"]] == ["a", "b", "c"]


def test_an_output_that_is_an_input_is_a_row(tmp_path, images):
    a = save(tmp_path / "a.onnx", CHAIN, weights=ONE)
    model = onnx.load(a)
    model.graph.output.append(model.graph.input[0])
    onnx.save(model, a)
    found = told_compare(run_compare(a, a, "--images", images, "--json", "-"))
    assert [row["tensor"] for row in found["outputs"]] == ["y", "x"]


def refused_compare(*words):
    result = run_compare(*words)
    assert isinstance(result.exception, Calib8Error), result.output
    return str(result.exception)


def test_outputs_that_one_model_gives_alone_are_told(tmp_path, images):
    """Without them nobody knows whether the models part."""
    a = save(tmp_path / "a.onnx", CHAIN, weights=ONE)
    b = save(tmp_path / "b.onnx", [*CHAIN[:3], ("Abs", "c", "z")], weights=ONE, out="z")
    said = run_compare(a, b, "--images", images).stdout
    assert "not compared: 'y'" in said
    assert "not compared: 'z'" in said
    assert "not compared" not in run_compare(a, a, "--images", images).stdout


def test_what_cannot_be_compared_is_refused_in_a_sentence(tmp_path, images):
    a = save(tmp_path / "a.onnx", CHAIN, weights=ONE)
    other = save(tmp_path / "o.onnx", [("Relu", "x", "z")], out="z")
    fed = save(tmp_path / "f.onnx", [("Relu", "w", "y")], x="w")
    (tmp_path / "no.onnx").write_text("text")
    assert "two models or two runtimes" in refused_compare(a, "--images", images)
    assert "tensors of the same names" in refused_compare(a, other, "--images", images)
    said = refused_compare(a, fed, "--images", images)
    assert "got x (float32) and w (float32)" in said
    doubled = onnx.load(a)
    doubled.graph.input[0].type.tensor_type.elem_type = TensorProto.DOUBLE
    doubled.graph.output[0].type.tensor_type.elem_type = TensorProto.DOUBLE
    doubled.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.float64(1), "one"))
    onnx.save(doubled, tmp_path / "d.onnx")
    said = refused_compare(a, tmp_path / "d.onnx", "--images", images)
    assert "got x (float32) and x (float64)" in said
    assert "must be an ONNX" in refused_compare(a, tmp_path / "no.onnx", "--images", images)
    assert "must be an ONNX" in refused_compare(tmp_path / "gone.onnx", a, "--images", images)
    assert "goes with --runtime openvino" in refused_compare(a, a, "--images", images, "--every")


@pytest.mark.slow
def test_the_node_is_found_where_another_runtime_parts(tmp_path, images, openvino):
    a = save(tmp_path / "a.onnx", CHAIN, weights=ONE)
    found = told_compare(run_compare(a, "--images", images, "--runtime", "openvino", "--json", "-"))
    assert found["parts_at"] == "c" and found["cut"]
    assert found["looked"][0] < found["looked"][1] == 4
    words = (a, "--images", images, "--runtime", "openvino", "--every")
    assert "4 of 4" in run_compare(*words, "--json", tmp_path / "found.json").stdout
    every = json.loads((tmp_path / "found.json").read_text())
    assert every["looked"] == [4, 4] and every["layers"][1]["sqnr_db"] == "inf"


@pytest.mark.slow
def test_what_closed_dimensions_change_is_told(tmp_path, images, openvino):
    words = ("--images", images, "--runtime", "openvino", "--json", "-")
    a = save(tmp_path / "a.onnx", CHAIN, weights=ONE)
    (note,) = told_compare(run_compare(a, *words))["notes"]
    assert "open dimensions closed" in note
    model = onnx.load(a)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(model, a)
    assert told_compare(run_compare(a, *words))["notes"] == []


def test_runtimes_whose_outputs_agree_are_not_cut(tmp_path, images, openvino):
    a = save(tmp_path / "a.onnx", [("Relu", "x", "a"), ("Neg", "a", "y")])
    found = told_compare(run_compare(a, "--images", images, "--runtime", "openvino", "--json", "-"))
    assert found["parts_at"] is None and found["looked"] == [1, 2]


@pytest.mark.slow
def test_a_runtime_that_crashes_on_a_cut_is_a_note(tmp_path, images, openvino):
    a = save(tmp_path / "a.onnx", [("Erf", "x", "a"), ("Add", "a a", "b"), ("Neg", "b", "y")])
    found = told_compare(
        run_compare(a, "--images", images, "--runtime", "openvino", "--every", "--json", "-")
    )
    assert found["parts_at"] == "b"
    _, note = found["notes"]
    assert "'a' could not be compared" in note and "status 11" in note


def test_a_runtime_that_refuses_the_model_says_why(tmp_path, images, openvino):
    a = save(tmp_path / "a.onnx", [("Cosh", "x", "y")])
    said = refused_compare(a, "--images", images, "--runtime", "openvino")
    assert "got: Operation Cosh is not supported" in said


def test_a_missing_runtime_says_how_to_get_it(tmp_path, images, monkeypatch):
    monkeypatch.setitem(sys.modules, "openvino", None)
    a = save(tmp_path / "a.onnx", CHAIN, weights=ONE)
    assert "calib8[openvino]" in refused_compare(a, "--images", images, "--runtime", "openvino")


def test_the_real_openvino_agrees_on_a_plain_model(tmp_path, images):
    pytest.importorskip("openvino", reason="OpenVINO is not installed")
    a = save(tmp_path / "a.onnx", CHAIN, weights=ONE)
    assert compare(a, None, images, runtime="openvino", every=True).parts_at is None


def test_a_cut_holds_what_its_tensor_needs_and_no_more(tmp_path):
    model = onnx.load(save(tmp_path / "a.onnx", CHAIN, weights=ONE))
    short = extract_output(model, "b")
    assert [node.op_type for node in short.graph.node] == ["Relu", "Mul"]
    assert [value.name for value in short.graph.output] == ["b"]
    assert len(model.graph.node) == 4


# --- builds
SCHEMA = "calib8-report/2"


@pytest.fixture(scope="module")
def built_builds(small_cnn, pictures, tmp_path_factory):
    """Two builds of one model by two methods, through the command; folder -> its screen."""
    from click.testing import CliRunner

    from deploy.cli import cli

    screens = {}
    for name, method in (("a", "minmax"), ("b", "mse")):
        folder = tmp_path_factory.mktemp("builds") / name
        words = ["build", str(small_cnn), "--images", str(pictures), "--out", str(folder)]
        words += ["--method", method, "--effort", "0", "--duration", "0", "--accept"]
        screens[folder] = CliRunner().invoke(cli, words, catch_exceptions=False).stdout
    return screens


@pytest.fixture
def changed(built_builds, tmp_path):
    """(key, ..., value) -> a folder with the report of a build in which one value is another."""

    def call(*place):
        folder = tmp_path / "changed"
        shutil.copytree(next(iter(built_builds)), folder, dirs_exist_ok=True)
        path = folder / "report.json"
        held = json.loads(path.read_text())
        *keys, last, value = place
        at = held
        for key in keys:
            at = at[key]
        at[last] = value
        path.write_text(json.dumps(held))
        return folder

    return call


def timing(p50):
    names = ("min", "max", "mean", "median", "p50", "p90", "p95", "p99")
    return {name: p50 for name in names} | {"cv_percent": 1.0}


def latency(p50):
    each = {"latency": timing(p50), "host": timing(p50)}
    return {"queries": 9, "warmup_queries": 1, "total_host_walltime_s": 1.0,
            "throughput_qps": 9.0, **each}  # fmt: skip


def timed(folder, *p50):
    """The same build with latencies."""
    path = folder / "report.json"
    held = json.loads(path.read_text())
    for engine, ms in zip(held["engines"], p50, strict=True):
        engine["latency"] = latency(ms)
    path.write_text(json.dumps(held))
    return folder


def test_one_build_shows_its_screen_again(run, built_builds):
    for folder, screen in built_builds.items():
        assert run("report", folder) == (0, screen, "")
        assert run("report", folder / "report.json")[1] == screen


def test_what_is_read_back_is_what_was_written(built_builds):
    for folder in built_builds:
        held = json.loads((folder / "report.json").read_text())
        assert to_json(read_stored_build(folder).report) == held


def test_builds_stand_side_by_side(run, built_builds, changed):
    a, b = built_builds
    fast = timed(changed("title", "x"), 3.0, 1.5)
    out = run.ok("report", a, b, fast)
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line.startswith("/")}
    assert lines[str(a)][1:3] == ["onnxruntime", "doubtful"]
    assert lines[str(a)][-2:] == ["minmax", "0"] and lines[str(b)][-2:] == ["mse", "0"]
    assert lines[str(b)][-5:-2] == ["10", "of", "10"]
    assert lines[str(fast)][3:6] == ["2.00x", "1.50", "ms"]
    assert f"{b}, onnxruntime: doubtful: " in " ".join(out.split())
    assert "3 builds compared" in out and "They differ" not in out.replace(
        "They differ   repair", ""
    )


def test_what_builds_differ_in_is_told(run, built_builds, changed):
    a, _ = built_builds
    other = changed("machine", "cpu", "Z80")
    settings = (other / "calib8.toml").read_text().replace("accept", "skip-bad")
    (other / "calib8.toml").write_text(settings + 'mean = "0.5"\n')
    code, out, _ = run("report", a, other)
    said = " ".join(out.split())
    assert code == 0 and f"mean: - ({a}); 0.5 ({other})" in said
    assert f"accept: True ({a}); - ({other})" in said and "method:" not in said
    assert f"machine: {read_stored_build(a).report.machine.cpu}" in said and "Z80, " in said
    assert "measured on different machines: compare speed-ups, not milliseconds" in said
    (other / "calib8.toml").unlink()  # as of a build from Python
    assert f"accept: True ({a}); - ({other})" in " ".join(run("report", a, other)[1].split())


def test_a_comparison_is_a_page_and_json_too(run, built_builds, tmp_path):
    a, b = built_builds
    page, file = tmp_path / "both.html", tmp_path / "both.json"
    run.ok("report", a, b, "--html", page, "--json", file)
    text, held = page.read_text(), json.loads(file.read_text())
    assert text.count('class="verdict doubtful"') == 2 and text.count("<script>") == 1
    assert str(a) in text.replace("<wbr>", "")
    assert held["schema"] == "calib8-builds/1" and held["names"] == [str(a), str(b)]
    assert [one["method"] for one in held["engines"]] == ["minmax", "mse"]
    assert (
        held["engines"][0]["verdict"]["level"] == "doubtful" and held["engines"][0]["effort"] == "0"
    )
    assert json.loads(run.ok("report", a, b, "--json", "-")) == held


def test_a_target_that_failed_is_a_line(run, built_builds, changed):
    a, _ = built_builds
    other = changed("targets", 0, "error", "a chip must be there, got none")
    code, out, _ = run("report", a, other)
    assert code == 0 and "failed" in out
    assert "a chip must be there, got none" in " ".join(out.split())
    held = json.loads((other / "report.json").read_text())
    held["engines"] = held["engines"][:1]
    (other / "report.json").write_text(json.dumps(held))
    said = " ".join(run("report", a, other)[1].split())
    assert f"{other}, onnxruntime: a chip must be there, got none" in said


def test_a_page_of_one_build_is_there_already(run, built_builds, tmp_path):
    a, _ = built_builds
    code, _, err = run("report", a, "--html", tmp_path / "x.html")
    assert code == 1 and "--html goes with a second folder, which was not given" in err


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
    (
        ("targets", 0, "layers", 0, "not_finite", [1]),
        "got 1 - at `$.targets[0].layers[0].n",
    ),
    (("machine", "versions", {"x": 1}), "Expected `str`, got `int` - at `$.machine.versions[...]`"),
]


@pytest.mark.parametrize(("place", "said"), WRONG)
def test_a_damaged_report_is_refused_in_a_sentence(run, built_builds, changed, place, said):
    code, out, err = run("report", next(iter(built_builds)), changed(*place))
    assert code == 1 and out == "" and said in err and "build again" in err


def test_what_is_no_build_is_refused(run, built_builds, tmp_path):
    a, _ = built_builds
    assert f"got {tmp_path} without a report.json" in run.fails("report", a, tmp_path)
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    assert "got invalid JSON" in run("report", a, broken)[2]
    broken.write_text("[]")
    assert "got None" in run("report", a, broken)[2]
    shutil.copy(a / "report.json", broken)
    (tmp_path / "calib8.toml").write_text("[")
    assert "calib8.toml must be the options of a build" in run.fails("report", a, broken)
    assert run("report")[0] == 2


def test_names_of_a_report_do_not_steer_the_terminal(run, built_builds, changed, tmp_path):
    folder = changed("targets", 0, "method", "\x1b[31m<script>bad\n")
    code, out, _ = run("report", next(iter(built_builds)), folder, "--html", tmp_path / "x.html")
    assert code == 0 and "\x1b" not in out and "\\x1b[31m<script>bad\\n" in out
    assert Path(tmp_path / "x.html").read_text().count("<script>") == 1
