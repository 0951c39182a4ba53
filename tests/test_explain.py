"""The command explain: what of a build loses accuracy where, and why."""

import json
import math
import shutil

import cv2
import numpy as np
import onnx
import pytest
from click.testing import CliRunner

from deploy.analysis.explain_build import explain
from deploy.cli import cli
from deploy.errors import Calib8Error
from deploy.tuning import plan_file, reasons
from tests.models import make_model, run_command, save_fixed_batch, save_net


def explain_text(*arguments):
    return run_command("explain", *arguments)


def explained_targets(*arguments):
    """Return the targets of an explanation, as JSON has them."""
    return json.loads(explain_text(*arguments, "--json", "-"))["targets"]


def refusal_of(*arguments, command="explain"):
    """Return the message, of one line, with which a command refuses."""
    result = CliRunner().invoke(cli, [command, *map(str, arguments)])
    assert result.exit_code == 1, result.exception
    assert isinstance(result.exception, Calib8Error), result.exception
    message = str(result.exception)
    assert message
    assert "\n" not in message
    return message


def build(model, images, out, *arguments):
    arguments = ("--images", images, "--out", out, "--duration", 0, "--accept", *arguments)
    return run_command("build", model, *arguments)


BOTH = ("--target", "onnxruntime,tensorrt", "--mean", 0.5, "--std", 0.25)


@pytest.fixture(scope="module")
def searched_build(small_cnn, pictures, tmp_path_factory):
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
def changed_copy(searched_build, tmp_path):
    """(edit) -> a copy of the build, its report changed by `edit`."""
    shutil.copytree(searched_build, out := tmp_path / "copy")

    def change(edit):
        report = report_of(searched_build)
        edit(report)
        return store_report(out, report)

    return change


def target_row(report, name="onnxruntime"):
    return next(target for target in report["targets"] if target["name"] == name)


@pytest.mark.slow
def test_explain_sections_follow_their_order(searched_build):
    text = explain_text(searched_build)
    report = report_of(searched_build)
    for name in ("onnxruntime", "tensorrt"):
        engine = next(e for e in report["engines"] if e["target"] == name and not e["reference"])
        block = text[text.index(f"\n{name}: {engine['verdict']['level']}") :]
        positions = [block.index(f"\n{label} ") for label in ("Why", "Parts", "Float", "Built")]
        assert positions == sorted(positions)
    assert "small_cnn.plan.toml" in text
    assert "Images " not in text


def test_explain_json_matches_the_report(searched_build, tmp_path):
    assert "onnxruntime:" in explain_text(searched_build, "--json", tmp_path / "why.json")
    document = json.loads((tmp_path / "why.json").read_text())
    assert document == json.loads(explain_text(searched_build, "--json", "-"))
    report = report_of(searched_build)
    assert document["schema"] == "calib8-explanation/1"
    assert len(document["targets"]) == 2
    assert document["targets"][0]["name"] == "onnxruntime"
    for target in document["targets"]:
        report_target = target_row(report, target["name"])
        floats = [node["name"] for node in report_target["nodes"] if node["precision"] == "float32"]
        assert sorted(name for group in target["kept"] for name in group["nodes"]) == sorted(floats)
        assert target["nodes"] == len(report_target["nodes"])
        layers = [layer["sqnr_db"] for layer in target["layers"]]
        assert layers == sorted(layers)
        assert len(layers) == len(report_target.get("layers", []))
        assert target["settled"] == report_target["search"]["settled"]
        clipped = [row["share"] for row in target["clipped"]]
        assert clipped == sorted(clipped, reverse=True)
        assert all(0 < share <= 1 for share in clipped)


def test_explain_takes_a_single_target(searched_build, wording):
    text = explain_text(searched_build, "--target", "tensorrt")
    assert "\ntensorrt: " in text
    assert "\nonnxruntime: " not in text
    wording.check(refusal_of(searched_build, "--target", "tensorr"))


def rows(label, count):
    figures = {"cosine_mean": 0.9, "cosine_min": 0.8, "max_abs_error": 0.1}
    return [{"name": f"{label}{i:02d}", "sqnr_db": 40.0 - i, **figures} for i in range(count)]


def test_explain_shows_ten_rows_unless_all(changed_copy):
    out = changed_copy(lambda report: target_row(report).update(layers=rows("layer", 14)))
    text = explain_text(out, "--target", "onnxruntime")
    assert "layer13" in text
    assert "layer04" in text
    assert "layer03" not in text
    assert "4 more; --all" in text
    everything = explain_text(out, "--target", "onnxruntime", "--all")
    assert "--all" not in everything
    assert everything.index("layer13") < everything.index("layer03") < everything.index("layer00")


def test_nan_layer_is_the_worst(changed_copy):
    layers = rows("layer", 3)
    layers[0]["sqnr_db"], layers[1]["sqnr_db"] = "nan", "inf"
    (target, _) = explained_targets(
        changed_copy(lambda report: target_row(report).update(layers=layers))
    )
    assert [row["name"] for row in target["layers"]] == ["layer00", "layer02", "layer01"]


FLOATS = (
    ("r", "Relu", "the node before it is float", reasons.RULE),
    (
        "m",
        "Mul",
        "converting to float and back would cost more than int8 saves",
        reasons.CONSEQUENCE,
    ),
    ("s", "Conv", "slower in int8: 9 us, 4 us in float", reasons.TIME),
    ("b", "Conv", "alone in int8 its group of 2 layers leaves 12.5 dB of y[0:4]", reasons.NOISE),
    ("a", "Conv", "alone in int8 it leaves 4.4 dB of y[4:22]", reasons.NOISE),
)


def test_float_reasons_are_ordered_by_kind(changed_copy):
    keys = ("name", "op", "reason", "precision")
    nodes = [dict(zip(keys, (*row[:3], "float32"), strict=True)) for row in FLOATS]
    text = explain_text(
        changed_copy(lambda report: target_row(report).update(nodes=nodes)),
        "--target",
        "onnxruntime",
    )
    assert "5 of 5 nodes" in text
    assert text.count(reasons.NOISE_NOTE) == 1
    labels = [
        "by noise    Conv a",
        "Conv b",
        "by time     Conv s",
        "in between  Mul m",
        "by rule     Relu r",
    ]
    positions = [text.index(label) for label in labels]
    assert positions == sorted(positions)


@pytest.mark.parametrize(("reason", "expected"), [row[2:] for row in FLOATS])
def test_reason_kind_follows_from_its_text(reason, expected):
    assert reasons.reason_kind(reason) == expected
    assert math.isfinite(reasons.reason_sqnr_db(reason)) == (expected == reasons.NOISE)


def test_built_split_is_marked_in_report(searched_build):
    plan = plan_file.read_plan(searched_build / "calib8/small_cnn.plan.toml")
    for target in report_of(searched_build)["targets"]:
        front = target["search"]["front"]
        (built,) = (split for split in front if split["taken"])
        (planned,) = (split for split in plan.targets[target["name"]].front if split.row.taken)
        assert built["number"] == planned.row.number


def test_choice_comes_from_plan_without_report(changed_copy):
    (target, _) = explained_targets(changed_copy(lambda report: target_row(report).pop("search")))
    assert target["settled"]
    assert target["front"]


def test_explain_lists_the_front(changed_copy):
    split = {"layers": 40, "float_layers": 8, "time": 0.7, "size": 0.3, "sqnr_db": 20.0}
    front = [split | {"number": number, "taken": number == 2} for number in (1, 2)]
    out = changed_copy(lambda report: target_row(report)["search"].update(front=front))
    text = explain_text(out, "--target", "onnxruntime")
    assert "--split 1" in text and "--split 2" in text and "8 of 40" in text


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    """Six pictures that the build did not calibrate with."""
    folder = tmp_path_factory.mktemp("held")
    rng = np.random.default_rng(3)
    for i in range(6):
        cv2.imwrite(str(folder / f"{i}.png"), rng.integers(100, 150, (16, 16, 3), np.uint8))
    return folder


def test_explain_names_the_worst_images(searched_build, held_out):
    text = explain_text(searched_build, "--images", held_out)
    assert "image, the worst of 6" in text
    for target in explained_targets(searched_build, "--images", held_out):
        errors = target["held"]
        assert errors["samples"] == 6
        assert len(errors["images"]) == 5
        figures = [image["sqnr_db"] for image in errors["images"]]
        assert figures == sorted(figures)
        assert {image["name"] for image in errors["images"]} <= {f"{i}.png" for i in range(6)}


def test_explain_is_equal_for_any_threads(searched_build, held_out):
    one_thread = explain(searched_build, images=str(held_out), threads=1)
    assert explain(searched_build, images=str(held_out), threads=3) == one_thread


def test_batch_padding_counts_as_no_image(small_cnn, held_out, pictures, tmp_path):
    model = save_fixed_batch(small_cnn, tmp_path / "four.onnx")
    build(model, pictures, tmp_path / "o", "--effort", 0)
    (target,) = explained_targets(tmp_path / "o", "--images", held_out)
    assert target["held"]["samples"] == 6
    assert len(set([image["name"] for image in target["held"]["images"]])) == 5


def test_images_of_class_numbers_have_no_sqnr(small_cnn, held_out, pictures, tmp_path):
    model = onnx.load(small_cnn)
    model.graph.node.append(onnx.helper.make_node("ArgMax", ["logits"], ["number"], axis=1))
    del model.graph.output[:]
    number = onnx.helper.make_tensor_value_info("number", onnx.TensorProto.INT64, ["batch", 1])
    model.graph.output.append(number)
    build(save_net(model, tmp_path / "number.onnx"), pictures, tmp_path / "o", "--effort", 0)
    text = explain_text(tmp_path / "o", "--images", held_out)
    assert "as FP32" in text and "NaN" not in text


def test_few_boxes_of_an_image_are_compared(detector, tmp_path):
    scenes = np.random.default_rng(0).uniform(0, 1, (24, 3, 32, 32)).astype(np.float32)
    np.save(tmp_path / "scenes.npy", scenes)
    build(detector, tmp_path / "scenes.npy", tmp_path / "o", "--effort", 0, "--task", "boxes")
    (target,) = explained_targets(tmp_path / "o", "--images", tmp_path / "scenes.npy")
    totals = [image["task"].partition(" of ")[2] for image in target["held"]["images"]]
    assert not {"1", "2", "3", "4"}.isdisjoint(totals)


def test_explain_preprocesses_as_the_build(searched_build, held_out):
    build_text = explain_text(searched_build, "--images", held_out)
    assert (
        explain_text(searched_build, "--images", held_out, "--mean", "0.5", "--std", "0.25")
        == build_text
    )
    assert explain_text(searched_build, "--images", held_out, "--mean", "0.1") != build_text


def test_explain_limits_images_and_skips_bad(searched_build, held_out, tmp_path):
    assert "the worst of 2" in explain_text(searched_build, "--images", held_out, "--limit", "2")
    folder = tmp_path / "held"
    shutil.copytree(held_out, folder)
    (folder / "0.png").write_bytes(b"no picture")
    assert "0.png" in refusal_of(searched_build, "--images", folder)
    text = explain_text(searched_build, "--images", folder, "--skip-bad")
    assert "the worst of 5" in text
    assert "1 skipped: image 0.png" in text
    assert "5.png" in text


def test_explain_finds_files_of_moved_build(changed_copy, held_out, small_cnn):
    def edit(report):
        for target in report["targets"]:
            target["runnable"] = f"elsewhere/{target['runnable'].rpartition('/')[2]}"

    assert "the worst of 6" in explain_text(changed_copy(edit), "--images", held_out)
    out = changed_copy(lambda report: report["model"].update(path="gone/net.onnx"))
    assert "--model" in refusal_of(out, "--images", held_out)
    assert "the worst of 6" in explain_text(out, "--images", held_out, "--model", small_cnn)


@pytest.mark.slow
def test_moved_build_is_not_its_successor(small_cnn, pictures, held_out, tmp_path):
    """`mv build kept`, and another build into build/."""
    new_folder, moved_folder = tmp_path / "build", tmp_path / "kept"
    build(small_cnn, pictures, new_folder, "--method", "minmax")
    first_targets = explained_targets(new_folder, "--images", held_out)
    new_folder.rename(moved_folder)
    build(small_cnn, pictures, new_folder, "--effort", 0, "--method", "percentile", "--percent", 60)
    moved_explanation = json.loads(explain_text(moved_folder, "--images", held_out, "--json", "-"))
    assert moved_explanation["targets"] == first_targets
    assert moved_explanation["plan"] == str(moved_folder / "calib8/small_cnn.plan.toml")
    next(moved_folder.glob("*.int8.onnx")).unlink()
    assert "kept" in refusal_of(moved_folder, "--images", held_out)


def test_explain_warns_of_another_float_model(searched_build, held_out, small_cnn, tmp_path):
    other_model = onnx.load(small_cnn)
    weight = other_model.graph.initializer[0]
    weight.CopyFrom(onnx.numpy_helper.from_array(-onnx.numpy_helper.to_array(weight), weight.name))
    arguments = (searched_build, "--images", held_out, "--model")
    path = save_net(other_model, tmp_path / "other.onnx")
    assert "other.onnx" in " ".join(explain_text(*arguments, path).split())
    assert "that was built from" not in explain_text(*arguments, small_cnn)


def test_target_without_runnable_file_is_named(changed_copy, held_out):
    out = changed_copy(lambda report: target_row(report).pop("runnable"))
    assert "run in ONNX Runtime" in explain_text(out, "--images", held_out)
    out = changed_copy(lambda report: target_row(report).update(runnable="gone.onnx"))
    assert "gone.onnx" in refusal_of(out, "--images", held_out)


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
def test_explain_option_without_input_is_refused(searched_build, flags, missing):
    message = refusal_of(searched_build, *flags)
    assert flags[0] in message
    assert missing in message


def test_folder_without_report_is_refused(tmp_path, wording):
    assert "without a report.json" in refusal_of(tmp_path)
    wording.check(refusal_of(tmp_path / "none"))
    refusal_of("x" * 5000)


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
        b'{"schema": "calib8-report/2", "title": "without results"}',
        b"\x00" * 99,
        b"1" * 5000,
    ],
)
def test_broken_report_is_refused(tmp_path, junk):
    (tmp_path / "report.json").write_bytes(junk)
    refusal_of(tmp_path)


@pytest.mark.parametrize(
    "preprocess", [{"mean": [10**400]}, {"mean": "x"}, {"hue": "rgb"}, {"std": {}}]
)
def test_broken_preprocessing_is_refused(changed_copy, held_out, preprocess):
    refusal_of(
        changed_copy(lambda report: report["feed"].update(preprocess=preprocess)),
        "--images",
        held_out,
    )


@pytest.mark.parametrize("path", ["x" * 5000, "a\x00b", "/", "."])
def test_hostile_paths_are_refused(changed_copy, held_out, path):
    def edit(report):
        target_row(report).update(runnable=path)
        report["model"]["path"] = path

    refusal_of(changed_copy(edit), "--images", held_out)
    refusal_of(
        changed_copy(lambda report: target_row(report).update(runnable=path)), "--images", held_out
    )


def test_engine_of_another_build_is_refused(changed_copy, held_out):
    out = changed_copy(lambda report: target_row(report).update(runnable="o.onnx"))
    shape = [1, 3, 16, 16]
    model = make_model([("Relu", "x", "other")], {"x": shape}, {"other": shape})
    save_net(model, out / "o.onnx")
    assert "same outputs" in refusal_of(out, "--images", held_out)


def test_unread_negative_values_count_as_unclipped(small_cnn, pictures, tmp_path):
    """What lies below 0 before a Relu needs no room in the range, which loses nothing by it."""
    arguments = ("--target", "tensorrt", "--effort", 0, "--method", "minmax")
    build(small_cnn, pictures, tmp_path, *arguments)
    rows = target_row(report_of(tmp_path), "tensorrt")["tensors"]
    assert all(t["lo"] == -t["amax"] and t["hi"] == t["amax"] for t in rows)
    cut = [t for t in rows if t["lo"] > t["observed_min"]]
    assert cut
    assert all(tensor["clipped"] == 0 for tensor in cut)
    text = explain_text(tmp_path)  # nor was anything searched
    assert "Clipped" not in text
    assert "Splits" not in text
    assert "Plan          none" in text


def test_report_lists_splits_and_plan_file(searched_build):
    report = report_of(searched_build)
    (plan,) = [file for file in report["files"] if file["role"] == "plan"]
    assert plan["size_bytes"] == (searched_build / "calib8/small_cnn.plan.toml").stat().st_size
    page = (searched_build / "report.html").read_text()
    text = (searched_build / "report.md").read_text()
    assert "It is kept in calib8/small_cnn.plan.toml." in page
    assert "It is kept in calib8/small_cnn.plan.toml." in text
    for name in ("onnxruntime", "tensorrt"):
        assert f">Splits for {name}" in page
        assert f"## Splits for {name}" in text


@pytest.mark.slow
def test_verbose_build_lists_splits(small_cnn, pictures, searched_build, tmp_path):
    out = shutil.copytree(searched_build, tmp_path / "again")
    for flags, shown in ([], False), (["--verbose"], True):
        screen = build(small_cnn, pictures, out, *BOTH, *flags)
        assert ("\nSplits for tensorrt\n" in screen) == shown
