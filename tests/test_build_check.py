"""`calib8 check`: the files of a build as they are, on other images, by the rules of a build."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import calib8
from deploy.analysis.build_check import _change_alerts
from deploy.analysis.build_reader import Verification
from deploy.errors import BackendError, CacheError, ConfigError, ExportError
from deploy.files.manifest import sha256
from deploy.targets import TARGETS
from deploy.targets.base import BuildResult
from tests.models import make_model, save_net

PREPROCESS = {"mean": 0.5, "std": 0.25}
QUICK = {"duration_s": 0, "preprocess": PREPROCESS, "tuning": calib8.Tuning(effort=0)}


def file_bytes(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def damage_weights(path):
    """Draw the int8 weights of a Q/DQ model again."""
    model = onnx.load(path)
    rng = np.random.default_rng(1)
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.dtype == np.int8 and values.ndim > 1:
            drawn = rng.integers(-100, 100, values.shape, dtype=np.int8)
            tensor.CopyFrom(numpy_helper.from_array(drawn, tensor.name))
    onnx.save(model, path)


@pytest.fixture(scope="module")
def shipped(small_cnn, pictures, tmp_path_factory):
    """A build for every target, its limits and preprocessing set."""
    folder = tmp_path_factory.mktemp("shipped") / "build"
    gates = calib8.Gates(max_loss=0.5)
    options = {"targets": list(TARGETS), "eval_images": pictures, "gates": gates, **QUICK}
    calib8.build(small_cnn, pictures, out=folder, **options)
    return folder


@pytest.fixture
def copy(shipped, tmp_path):
    return shutil.copytree(shipped, tmp_path / "copy")


def sqnr_db(engine):
    return [output.sqnr_db for output in engine.accuracy.outputs]


def check(path, images, **options):
    return calib8.check(path, images, duration_s=0, **options)


def test_check_repeats_the_builds_figures(shipped, pictures):
    """On the build's own images: the same preprocessing, files and rules."""
    before = file_bytes(shipped)
    report = check(shipped, pictures)
    built = calib8.report(shipped)
    for target in TARGETS:
        engine, built_engine = report.engine(target), built.engine(target)
        assert sqnr_db(engine) == pytest.approx(sqnr_db(built_engine), abs=1e-3)
        assert engine.verdict == built_engine.verdict
        assert engine.path == built_engine.path
    assert "Ship" in built.to_screen()
    assert "Ship" not in report.to_screen()  # nothing was written
    assert report.request.max_loss == 0.5
    assert not report.failed
    assert file_bytes(shipped) == before


def test_damaged_weights_are_named_and_unusable(copy, small_cnn, pictures, run, tmp_path):
    name = "small_cnn.int8.onnx"
    damage_weights(copy / name)
    limits = ("--images", pictures, "--max-loss", "0.01", "--duration", 0)
    code, _, _ = run("check", copy, *limits, "--json", tmp_path / "found.json")
    report = json.loads((tmp_path / "found.json").read_text())
    assert code == 3
    assert any(name in alert for alert in report["alerts"])
    levels = {e["target"]: e["verdict"]["level"] for e in report["engines"] if "verdict" in e}
    assert levels["onnxruntime"] == "unusable"
    assert report["request"]["max_loss"] == 0.01

    code, _, err = run("check", copy / name, "--against", small_cnn, *limits, "--mean", 0.5, "-q")
    assert code == 3
    assert "unusable" in err


def test_missing_file_fails_and_others_are_checked(copy, pictures, run):
    (copy / "small_cnn.int8.onnx").unlink()
    code, out, _ = run("check", copy, "--images", pictures, "--duration", 0)
    assert code == 1
    assert "small_cnn.int8.onnx is missing" in " ".join(out.split())
    report = check(copy, pictures)
    assert [target.name for target in report.targets] == ["onnxruntime"]
    assert {e.target for e in report.engines if e.accuracy} == {*TARGETS} - {"onnxruntime"}


@pytest.mark.parametrize(
    ("target", "name", "is_missing"),
    [
        ("tensorrt", "small_cnn.tensorrt.cache", False),
        ("tensorrt", "small_cnn.tensorrt.qdq.onnx", True),
        ("ascend", "small_cnn_deploy_model.onnx", False),
        ("ascend", "small_cnn_record.txt", True),
    ],
)
def test_changed_file_that_is_not_run_fails(target, name, is_missing, copy, pictures, run):
    """A gate that runs another file of the target says nothing of this one."""
    if is_missing:
        (copy / name).unlink()
    else:
        (copy / name).write_text("junk")
    report = check(copy, pictures)
    (failed,) = report.targets
    assert failed.name == target
    assert name in failed.error
    assert {e.target for e in report.engines if e.accuracy} == {*TARGETS} - {target}
    assert run("check", copy, "--images", pictures, "--duration", 0)[0] == 1


def test_changed_scripts_are_alerts(copy, pictures):
    (copy / "small_cnn_trtexec.sh").write_text("echo mine")
    (copy / "small_cnn_README.txt").unlink()
    report = check(copy, pictures)
    assert not report.failed
    (alert,) = report.alerts
    assert "small_cnn_trtexec.sh was changed" in alert
    assert "small_cnn_README.txt is missing" in alert


def test_model_in_memory_is_saved_for_later_checks(small_cnn, pictures, tmp_path):
    """A build that was moved still has the model that no file of the user's holds."""
    model = onnx.load(small_cnn)
    built = calib8.build(model, pictures, out=tmp_path / "first", **QUICK)
    folder = (tmp_path / "first").rename(tmp_path / "moved")
    name = Path(calib8.report(folder).model.path).name
    assert onnx.load(folder / "calib8" / name) == model
    report = check(folder, pictures)
    assert not report.failed
    assert not report.alerts
    assert report.engine("FP32").size_bytes == built.engine("FP32").size_bytes
    assert calib8.explain(folder, images=pictures).targets[0].held.samples > 0


def test_check_finds_the_model_from_another_folder(copy, small_cnn, pictures, monkeypatch):
    """A relative path of the model starts where the build ran, above its folder."""
    report = json.loads((copy / "report.json").read_text())
    report["model"]["path"] = "model.onnx"
    (copy / "report.json").write_text(json.dumps(report))
    shutil.copy(small_cnn, copy.parent / "model.onnx")
    elsewhere = copy.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "model.onnx").write_bytes(b"another model")
    monkeypatch.chdir(elsewhere)
    assert not check("../copy", pictures).failed


@pytest.mark.slow
def test_labels_by_folder_reach_the_check(small_cnn, pictures, tmp_path, run):
    """As for `build`: the classes are numbers of folders, from the command line too."""
    for label in range(2):
        shutil.copytree(pictures, tmp_path / "held" / str(label))
    run.ok("build", small_cnn, "--images", pictures, "--out", tmp_path / "b", "--effort", 0)
    options = ("--images", tmp_path / "held", "--labels", "folders", "--duration", 0)
    run("check", tmp_path / "b", *options, "--json", tmp_path / "found.json")
    report = json.loads((tmp_path / "found.json").read_text())
    accuracies = [engine["accuracy"] for engine in report["engines"] if "accuracy" in engine]
    assert accuracies[0]["top1_reference"] is not None


def test_float_file_is_no_engine_to_check(small_cnn, pictures):
    with pytest.raises(ConfigError, match=r"small_cnn\.onnx"):
        check(small_cnn, pictures, against=small_cnn)


def test_samples_in_memory_are_not_printed(shipped, small_cnn):
    samples = [np.ones((1, 3, 16, 16), np.float32)] * 2
    assert check(shipped, samples).feed.source == "arrays in memory"


def test_engine_for_a_gpu_is_one_sentence(copy, pictures, wording):
    """A folder built on the GPU machine, with the engine and its manifest's entry."""
    (copy / "small_cnn.engine").write_bytes(b"made on a GPU")
    report_path = copy / "report.json"
    report = json.loads(report_path.read_text())
    engine = next(e for e in report["engines"] if e["target"] == "tensorrt")
    engine["path"] = "elsewhere/small_cnn.engine"
    report_path.write_text(json.dumps(report))
    alerts = check(copy, pictures).alerts
    changed, absent = alerts
    wording.check(changed)
    assert "small_cnn.engine" in absent
    assert "small_cnn.tensorrt.typed.onnx" in absent


def test_float16_scales_are_warned_of(copy, small_cnn, pictures):
    """Their verdict is that of ONNX Runtime, not that of the device which they are for."""
    name = "small_cnn.tensorrt.typed.onnx"
    report = check(copy / name, pictures, against=small_cnn, preprocess=PREPROCESS)
    assert any(name in alert and "float16" in alert for alert in report.alerts)
    assert not any("float16" in alert for alert in check(copy, pictures).alerts)
    report = calib8.bench(
        copy / name, against=small_cnn, images=pictures, preprocess=PREPROCESS, duration_s=0
    )
    assert any(name in note and "float16" in note for note in report.notes)


def test_file_that_is_no_model_fails_its_target_alone(copy, pictures):
    """A file that the folder's list of checksums agrees with, and that does not parse."""
    path = copy / "small_cnn.tensorrt.typed.onnx"
    digest = sha256(path.read_bytes())
    path.write_bytes(b"no model" * 9)
    for listing in (copy / "report.json", copy / "calib8" / "manifest.json"):
        text = listing.read_text()
        listing.write_text(text.replace(digest, sha256(path.read_bytes())))
    report = check(copy, pictures)
    failed = [target for target in report.targets if target.error]
    assert [target.name for target in failed] == ["tensorrt"]
    assert path.name in failed[0].error


def test_nothing_to_check_is_refused(copy, pictures):
    for path in copy.glob("*.onnx"):
        path.unlink()
    with pytest.raises(BackendError, match="small_cnn"):
        check(copy, pictures)


def test_folder_without_manifest_is_refused(copy, pictures):
    (copy / "calib8" / "manifest.json").unlink()
    with pytest.raises(CacheError, match="manifest"):
        check(copy, pictures)


def test_engine_alone_needs_its_float_model(shipped, pictures, small_cnn):
    engine = shipped / "small_cnn.int8.onnx"
    with pytest.raises(ConfigError, match="--against"):
        check(engine, pictures)
    for name in ("small_cnn_deploy_model.onnx", "small_cnn_fake_quant_model.onnx"):
        with pytest.raises(ConfigError, match="folder of the build"):
            check(shipped / name, pictures, against=small_cnn)
    row = check(engine, pictures, against=small_cnn, preprocess=PREPROCESS).engine("int8")
    built = calib8.report(shipped).engine("onnxruntime")
    assert sqnr_db(row) == pytest.approx(sqnr_db(built), abs=1e-3)


def test_images_of_a_qdq_build_did_not_calibrate(shipped, small_cnn, pictures, run, tmp_path):
    qdq = shipped / "small_cnn.tensorrt.qdq.onnx"
    float_model = shutil.copy(small_cnn, tmp_path / "float.onnx")
    files = (qdq, "--float", float_model, "--images", pictures, "--out", tmp_path / "qdq")
    run.ok("build", *files, "--duration", 0, "--mean", 0.5, "--std", 0.25, "--accept")
    report = check(tmp_path / "qdq", pictures)
    assert "calibration images" not in report.engine("int8").verdict.text
    assert report.model.path == str(float_model)  # the float model that the build was compared with
    assert not report.alerts

    moved = float_model.rename(tmp_path / "moved.onnx")
    assert any("--against" in alert for alert in check(tmp_path / "qdq", pictures).alerts)
    assert not check(tmp_path / "qdq", pictures, against=moved).alerts


def test_qdq_build_without_images_asks_for_some(shipped, pictures, run, tmp_path):
    qdq = shipped / "small_cnn.tensorrt.qdq.onnx"
    text = run.ok("build", qdq, "--out", tmp_path / "q", "--duration", 0)
    assert f"--config {tmp_path}/q/calib8.toml --images PATH" in " ".join(text.split())
    assert "was fed arrays" not in str(check(tmp_path / "q", pictures).alerts)


def test_pictures_after_arrays_need_their_preprocessing(small_cnn, pictures, tmp_path):
    arrays = list(np.random.default_rng(1).random((8, 1, 3, 16, 16), np.float32))
    options = {key: value for key, value in QUICK.items() if key != "preprocess"}
    calib8.build(small_cnn, arrays, out=tmp_path, **options)

    unnamed = check(tmp_path, pictures)
    assert any("fed arrays" in alert and "--mean" in alert for alert in unnamed.alerts)
    assert "fed arrays" in unnamed.engine("int8").verdict.reasons[0]
    for report in (check(tmp_path, pictures, preprocess=PREPROCESS), check(tmp_path, arrays)):
        assert "fed arrays" not in f"{report.alerts} {report.engine('int8').verdict}"


def test_check_names_assumed_preprocessing(small_cnn, pictures, tmp_path):
    options = {**QUICK, "preprocess": None, "task": "none"}
    calib8.build(small_cnn, pictures, out=tmp_path, **options)
    assert check(tmp_path, pictures).engine("int8").verdict.assumes_inputs
    engine_alone = check(tmp_path / "small_cnn.int8.onnx", pictures, against=small_cnn, task="none")
    assert engine_alone.engine("int8").verdict.assumes_inputs
    assert not check(tmp_path, pictures, preprocess="unit").engine("int8").verdict.assumes_inputs


def test_random_model_is_in_question_again(tmp_path, run):
    rng = np.random.default_rng(2)
    nodes = "h = MatMul(x, w) r = RandomNormalLike(h) y = Add(h, r)"
    weights = {"w": rng.normal(size=(8, 4)).astype(np.float32)}
    save_net(make_model(nodes, {"x": [1, 8]}, {"y": [1, 4]}, weights), tmp_path / "net.onnx")
    arrays = tmp_path / "x.npy"
    np.save(arrays, rng.normal(size=(40, 8)).astype(np.float32))
    options = ("--images", arrays, "--duration", 0)
    out = tmp_path / "o"
    build = ("build", tmp_path / "net.onnx", *options, "--effort", 0)
    text = run.ok(*build, "--target", "onnxruntime,tensorrt", "--out", out)
    checked = run.ok("check", out, *options)
    assert "evaluation mode" in text and "--labels FILE" in text
    assert text.split("\n")[1:3] == checked.split("\n")[1:3]  # the verdict
    assert "draws random numbers, which" in " ".join(checked.split())
    trusted = ("--cache", out / "net.tensorrt.cache", "--trust-cache", "--out", tmp_path / "p")
    of_pairs = ("build", out / "net.int8.onnx", "--float", tmp_path / "net.onnx", *options)
    for arguments in ((*build, *trusted), (*of_pairs, "--out", tmp_path / "q")):
        assert "itself draws random numbers" in " ".join(run.ok(*arguments).split())


def test_dropout_of_training_is_in_question_again(tmp_path, run):
    """ONNX Runtime leaves it out, except where calibration observes its output."""
    rng = np.random.default_rng(2)
    nodes = "h = MatMul(x, w) d = Dropout(h, ratio, mode) m = MatMul(d, v) y = Add(m, b)"
    weights = {name: rng.normal(size=(8, 8)).astype(np.float32) for name in "wv"}
    weights |= {"ratio": np.float32(0.5), "mode": np.array(True)}
    weights["b"] = np.float32([50, *[0] * 7])  # one class for all, which would be in question else
    save_net(make_model(nodes, {"x": [1, 8]}, {"y": [1, 8]}, weights), tmp_path / "net.onnx")
    np.save(tmp_path / "x.npy", rng.normal(size=(40, 8)).astype(np.float32))
    options = ("--images", tmp_path / "x.npy", "--duration", 0)
    run.ok("build", tmp_path / "net.onnx", *options, "--out", tmp_path / "o", "--effort", 0)
    built = calib8.report(tmp_path / "o").engine("onnxruntime").verdict
    checked = check(tmp_path / "o", tmp_path / "x.npy").engine("onnxruntime").verdict
    assert built.blames_randomness and checked.blames_randomness
    assert built.level == checked.level


def test_speed_limit_without_timing_is_doubtful(shipped, pictures):
    report = check(shipped, pictures, gates=calib8.Gates(min_speedup=1.2))
    assert report.engine("onnxruntime").verdict.level == "doubtful"
    assert report.request.max_loss == 0.5  # that of the build


@pytest.mark.slow
def test_less_effort_replaces_no_searched_build(small_cnn, pictures, tmp_path):
    searched = {**QUICK, "tuning": calib8.Tuning(effort=1)}
    calib8.build(small_cnn, pictures, out=tmp_path, **searched)
    before = file_bytes(tmp_path)
    with pytest.raises(ExportError, match=r"--effort 0 .* --effort 1"):
        calib8.build(small_cnn, pictures, out=tmp_path, **QUICK)
    assert file_bytes(tmp_path) == before

    calib8.build(small_cnn, pictures, out=tmp_path, **searched)
    calib8.build(small_cnn, pictures, out=tmp_path, targets="tensorrt", **QUICK)
    force = calib8.CachePolicy(force=True)
    calib8.build(small_cnn, pictures, out=tmp_path, cache=force, **QUICK)


def test_similar_file_name_in_error_hides_no_alert(tmp_path):
    known_files = SimpleNamespace(files={"net.onnx": "", "old-net.onnx": ""})
    changed = dict.fromkeys(known_files.files, "is missing")
    verification = Verification(tmp_path, known_files, changed, cache_changed=False)
    results = [BuildResult(target="onnxruntime", error="old-net.onnx is missing; build again")]
    (alert,) = _change_alerts(verification, results)
    assert alert.endswith(": net.onnx is missing")


def test_list_of_paths_gets_the_builds_preprocessing(shipped, pictures):
    paths = sorted(pictures.iterdir())
    report = check(shipped, paths)
    built_engine = calib8.report(shipped).engine("onnxruntime")
    assert sqnr_db(report.engine("onnxruntime")) == pytest.approx(sqnr_db(built_engine), abs=1e-3)


def test_folder_of_arrays_gets_no_preprocessing(shipped, tmp_path):
    rng = np.random.default_rng(3)
    for number in range(2):
        array = rng.uniform(-2, 2, (1, 3, 16, 16)).astype(np.float32)
        np.save(tmp_path / f"{number}.npy", array)
    assert check(shipped, tmp_path).engine("onnxruntime").accuracy is not None
