"""`calib8 explain`: what loses what where, and what was tried."""

import json
import math
import re
import shutil

import cv2
import numpy as np
import onnx
import pytest
from click.testing import CliRunner

from deploy.analysis.explain_build import ChannelSums, explain
from deploy.cli import cli
from deploy.errors import Calib8Error
from deploy.method import NO_CHOICES
from deploy.tuning.plan_file import (
    CONSEQUENCE,
    NOISE,
    RULE,
    TIME,
    WHOLE,
    TargetPlan,
    kind,
    read_plan,
    remaining,
)


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
    folder = tmp_path_factory.mktemp("explained")
    out = folder / "build"
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
    text = said(built, "--json", tmp_path / "why.json")
    assert "onnxruntime:" in text
    held = json.loads((tmp_path / "why.json").read_text())
    assert held["targets"][0]["name"] == "onnxruntime"


def test_one_target_alone_is_told_of(built):
    text = said(built, "--target", "tensorrt")
    assert "\ntensorrt: " in text and "\nonnxruntime: " not in text
    assert "did you mean 'tensorrt'?" in refused(built, "--target", "tensorr")


def rows(label, count):
    return [
        {"name": f"{label}{i:02d}", "sqnr_db": 40.0 - i, "cosine_mean": 0.9, "cosine_min": 0.8}
        for i in range(count)
    ]


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
    assert kind(reason) == expected
    assert math.isfinite(remaining(reason)) == (expected == NOISE)


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
    found = json.loads(said(built, "--images", held, "--json", "-"))
    for target in found["targets"]:
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
    names = [image["name"] for image in target["held"]["images"]]
    assert len(set(names)) == 5


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


def test_a_build_that_was_moved_is_not_another_one_that_stands_in_its_place_now(
    small_cnn, pictures, held, tmp_path
):
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
    note = "SmoothQuant: worst part 20.0 -> 30.0 dB, {}"
    for word, found in (("kept", False), ("not kept", True)):
        out = copied(lambda report, word=word: report.update(notes=[note.format(word)]))
        targets = json.loads(said(out, "--images", held, "--json", "-"))["targets"]
        assert [bool(one["held"]["channels"]) for one in targets] == [found, found]


def test_channels_that_are_silent_lose_nothing():
    sums = ChannelSums()
    reference = np.ones((1, 4, 3), np.float32)
    reference[0, 1] = 0
    noisy = reference + np.float32([0, 0.5, 0.1, 0.2]).reshape(1, 4, 1)
    sums.add(reference, noisy)
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
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 3, 16, 16])
    y = onnx.helper.make_tensor_value_info("other", onnx.TensorProto.FLOAT, [1, 3, 16, 16])
    node = onnx.helper.make_node("Relu", ["x"], ["other"], name="r")
    opset = [onnx.helper.make_opsetid("", 13)]
    graph = onnx.helper.make_graph([node], "g", [x], [y])
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=8), tmp_path / "o.onnx")
    out = copied(lambda report: of(report).update(runnable="o.onnx"))
    shutil.copy(tmp_path / "o.onnx", out)
    assert "same outputs" in refused(out, "--images", held)


# what the report says of the search


def test_values_that_no_reader_looks_at_are_not_clipped(small_cnn, pictures, tmp_path):
    """What lies below 0 before a Relu needs no room in the range, which loses nothing by it."""
    words = ["--images", pictures, "--out", tmp_path, "--target", "tensorrt", "--effort", "0"]
    words = [small_cnn, *words, "--method", "minmax", "--duration", "0", "--accept"]
    CliRunner().invoke(cli, ["build", *map(str, words)])
    report = json.loads((tmp_path / "report.json").read_text())
    rows = of(report, "tensorrt")["tensors"]
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
