"""calib8-build through the fake TensorRT: what it asks, what it says, what it leaves on disk.

scripts/trt_fake_check builds the program against the headers of one version after the other, and
calls these tests for each: the version is $CALIB8_TRT_VERSION, the build folder
$CALIB8_TRT_PROGRAMS. The fake's settings are told in fake.hpp.
"""

import json
import os
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

VERSION = os.environ["CALIB8_TRT_VERSION"]
PROGRAMS = Path(os.environ["CALIB8_TRT_PROGRAMS"])
PHOTOS = Path(__file__).parents[3] / "datasets" / "fashion" / "calib"

MAJOR = int(VERSION.split(".")[0])
LABEL = {"8.5.3": 8503, "8.6.1": 8601, "10.0": 100001, "10.16": 101600}.get(VERSION)
calibrating = pytest.mark.skipif(MAJOR > 10, reason="TensorRT 11 has no calibrators")
IMAGE = "input image float32 1 1 28 28\n"
SCORES = "output scores float32 1 10\n"
QDQ = "quantize\n" + IMAGE + SCORES
PLAN = "fake engine\n"


@dataclass(frozen=True)
class Run:
    """What one run of the program left."""

    code: int
    out: str
    error: str
    trace: list[str]
    batches: bytes
    inputs: bytes

    @property
    def calibrated(self) -> int:
        """Batches that TensorRT took."""
        return sum(line.startswith("batch ") and line[6:].isdigit() for line in self.trace)

    def refused(self) -> str:
        """The one sentence of a run that must fail."""
        assert self.code == 2, (self.code, self.out, self.error)
        own = [line for line in self.error.splitlines() if not line.startswith("TensorRT: ")]
        assert len(own) == 1 and own[0].startswith("calib8-build: "), self.error
        return own[0].removeprefix("calib8-build: ")


class Folder:
    """A folder with a model, a list of pictures, and what runs leave in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.engine = path / "model.onnx.engine"
        self.cache = path / "model.onnx.cache"
        self.sidecar = path / "model.onnx.cache.json"

    def model(self, text: str) -> None:
        (self.path / "model.onnx").write_text(text)

    def pictures(self, count: int, *, first: int = 0, more: str = "") -> None:
        chosen = sorted(PHOTOS.rglob("*.png"))[first : first + count]
        lines = "".join(f"{path}\n" for path in chosen)
        (self.path / "list.txt").write_text(lines + more)

    def build(self, *options: str, images: bool = True, fake: str = "", library: str = "") -> Run:
        trace, batches, inputs = (self.path / name for name in ("trace", "batches", "inputs"))
        for path in (trace, batches, inputs):
            path.unlink(missing_ok=True)
        settings = {
            "FAKE": fake,
            "FAKE_TRACE": trace,
            "FAKE_BATCHES": batches,
            "FAKE_INPUTS": inputs,
        }
        command = [str(PROGRAMS / "src/trt/calib8-build"), "model.onnx"]
        command += ["list.txt", "--preprocess", "grey-half"] if images else []
        done = subprocess.run(
            [*command, "--duration", "0", "--json", "report.json", *options],
            cwd=self.path,
            env=os.environ
            | {f"CALIB8_{name}": str(value) for name, value in settings.items()}
            | {"CALIB8_FAKE_LIBRARY": library},
            capture_output=True,
            text=True,
            check=False,
        )
        assert "Sanitizer" not in done.stderr and "runtime error" not in done.stderr, done.stderr
        return Run(
            done.returncode,
            done.stdout,
            done.stderr,
            trace.read_text().splitlines() if trace.exists() else [],
            batches.read_bytes() if batches.exists() else b"",
            inputs.read_bytes() if inputs.exists() else b"",
        )

    def built(self, *options: str, **settings: object) -> Run:
        run = self.build(*options, **settings)
        assert run.code == 0, run.error
        assert self.engine.read_text().startswith(PLAN)
        return run

    def report(self) -> dict:
        return json.loads((self.path / "report.json").read_text())


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = Folder(tmp_path)
    made.model(IMAGE + SCORES)
    made.pictures(5)
    return made


@calibrating
def test_live_calibration_feeds_what_is_preprocessed_and_builds_by_its_cache(folder):
    run = folder.built()
    header = f"TRT-{LABEL}-EntropyCalibration2"
    # without TF32 and fp16 while it looks at the values, with both in the engine
    about_it = [line for line in run.trace if line.split()[0] in ("build", "calibrate", "cache")]
    assert about_it == [
        "build int8",
        f"calibrate {header} int8",
        "build int8 fp16 tf32",
        "cache taken",
    ]
    assert run.trace.count("batch size 1") == 2
    assert run.calibrated == 5
    subprocess.run(
        f"{PROGRAMS}/calib8-cache feed list.txt --input image:1x1x28x28 --preprocess grey-half"
        " --out fed".split(),
        cwd=folder.path,
        check=True,
        capture_output=True,
    )
    assert run.batches == (folder.path / "fed").read_bytes()
    values = struct.unpack(f"<{len(run.batches) // 4}f", run.batches)
    scale = struct.pack(">f", max(map(abs, values)) / 127).hex()
    assert folder.cache.read_text() == f"{header}\nimage: {scale}\n"
    told = folder.report()["calibration"]
    assert told["reused"] is False and "does not exist yet" in told["reason"]


@calibrating
@pytest.mark.parametrize(
    ("calibrator", "word"),
    [("entropy", "Entropy"), ("minmax", "MinMax"), ("legacy", "Legacy")],
)
def test_every_calibrator_of_tensorrt(folder, calibrator, word):
    run = folder.built("--calibrator", calibrator)
    assert f"calibrate TRT-{LABEL}-{word}Calibration int8" in run.trace
    again = folder.built("--calibrator", calibrator)
    assert again.calibrated == 0
    other = folder.built()
    assert other.calibrated == 5
    assert "the method changed" in folder.report()["calibration"]["reason"]


@calibrating
def test_a_second_build_takes_the_cache_and_no_batch(folder):
    folder.built()
    cache = folder.cache.read_bytes()
    run = folder.built("--require-cache", "--rest", "fp32")
    assert run.calibrated == 0 and not run.batches
    assert "cache taken" in run.trace and "build int8 tf32" in run.trace
    assert folder.cache.read_bytes() == cache
    assert folder.report()["calibration"]["reused"] is True


@calibrating
def test_a_stale_cache_is_told_and_made_anew(folder):
    folder.built()
    folder.pictures(5, first=5)
    assert "the images changed" in folder.build("--require-cache").refused()
    run = folder.built()
    assert run.calibrated == 5
    assert "the images changed" in folder.report()["calibration"]["reason"]
    folder.model(IMAGE + "output scores float32 1 20\n")
    assert folder.built().calibrated == 5
    assert "the model" in folder.report()["calibration"]["reason"]


@calibrating
def test_a_foreign_cache_is_taken_only_where_it_is_trusted(folder):
    ours = f"TRT-{LABEL}-EntropyCalibration2\nimage: 3c008912\n"
    folder.cache.write_text(ours)
    assert folder.built("--trust-cache").calibrated == 0
    assert folder.cache.read_text() == ours and not folder.sidecar.exists()
    assert "no fingerprint" in folder.build("--require-cache").refused()
    folder.cache.write_text(ours.replace("Entropy", "MinMax").replace("2\n", "\n", 1))
    run = folder.built("--trust-cache")
    assert run.calibrated == 5
    assert "begins with TRT-" in folder.report()["calibration"]["reason"]
    assert folder.cache.read_text() != ours


@calibrating
def test_the_version_is_that_of_the_library_that_runs(folder):
    other = {8: "8.6.3", 10: "10.13.2"}[MAJOR]
    label = {8: 8603, 10: 101302}[MAJOR]
    assert folder.built(library=other).calibrated == 5
    assert folder.cache.read_text().startswith(f"TRT-{label}-")
    assert folder.built(library=other).calibrated == 0
    assert folder.built().calibrated == 5
    assert f"a version changed (tensorrt {other} ->" in folder.report()["calibration"]["reason"]


@calibrating
def test_a_cache_that_tensorrt_refuses_all_the_same_is_told(folder):
    folder.built()
    before = folder.cache.read_bytes()
    said = folder.build(fake="refuse-cache").refused()
    assert "could not build model.onnx: Calibration failure occurred" in said
    assert "TensorRT must take the known cache, but refused it" in said
    assert folder.cache.read_bytes() == before


@calibrating
@pytest.mark.parametrize(
    ("fake", "said"),
    [
        ("out-of-memory", "CUDA could not reserve 3136 bytes on the GPU: out of memory"),
        ("fail-second-copy", "CUDA could not copy a calibration batch to the GPU: an illegal"),
    ],
)
def test_what_a_callback_throws_comes_out(folder, fake, said):
    assert folder.build(fake=fake).refused().startswith(said)
    assert not folder.cache.exists() and not folder.engine.exists()


@calibrating
def test_a_bad_picture_comes_out_or_is_skipped(folder):
    (folder.path / "bad.png").write_text("no picture")
    folder.pictures(3, more="bad.png\n")
    run = folder.build()
    assert "image bad.png cannot be decoded" in run.refused()
    assert run.calibrated == 3 and not folder.cache.exists()
    assert folder.built("--skip-bad").calibrated == 3
    assert any("1 skipped" in note for note in folder.report()["notes"])


@calibrating
def test_a_calibration_that_stops_early_or_gives_no_cache_is_told_in_tensorrts_words(folder):
    said = folder.build(fake="stop-early").refused()
    assert said.startswith("TensorRT must see every batch, got 1 of 5; its scales are not usable")
    assert said.endswith("; TensorRT said: TensorRT logged no error")
    said = folder.build(fake="no-cache").refused()
    assert said.startswith("TensorRT took 5 batches but wrote no calibration cache")
    said = folder.build(fake="no-cache,fail-after-calibrating").refused()
    assert "Error Code 10: no implementation found." in said and "wrote no calibration" in said
    assert not folder.cache.exists() and not folder.engine.exists()


@calibrating
def test_a_build_that_fails_before_calibrating_says_tensorrts_words_alone(folder):
    run = folder.build(fake="fail-before")
    words = "TensorRT could not build model.onnx: Error Code 4: Network has an unsupported layer."
    assert run.refused() == words
    assert run.calibrated == 0 and not folder.cache.exists()


@calibrating
@pytest.mark.parametrize(
    ("fake", "words"),
    [
        ("fail-after-calibrating", "Error Code 10: no implementation found."),
        ("fail-engine", "Error Code 2: out of GPU memory."),
    ],
)
def test_a_build_that_fails_after_calibrating_says_tensorrts_words_and_keeps_the_cache(
    folder, fake, words
):
    run = folder.build(fake=fake)
    assert run.refused() == f"TensorRT could not build model.onnx: {words}"
    assert run.calibrated == 5 and not folder.engine.exists()
    assert folder.built("--require-cache").calibrated == 0


@calibrating
@pytest.mark.parametrize("fixed", [True, False])
def test_only_whole_batches_are_used_and_the_rest_is_told(folder, fixed):
    batch = "4" if fixed else "-1"
    folder.model(f"input image float32 {batch} 1 28 28\n{SCORES}")
    folder.pictures(10)
    options = [] if fixed else ["--batch", "4"]
    run = folder.built(*options)
    assert run.calibrated == 2 and len(run.batches) == 8 * 28 * 28 * 4
    sentence = "of 4 samples here: the last 2 of 10 samples fill none and were left out"
    (told,) = [note for note in folder.report()["notes"] if "whole batches" in note]
    assert told.endswith(sentence)
    assert folder.built(*options).calibrated == 0
    assert told in folder.report()["notes"]
    folder.pictures(8)
    assert folder.built(*options).calibrated == 2
    assert not any("whole batches" in note for note in folder.report()["notes"])
    folder.pictures(3)
    said = folder.build(*options).refused()
    assert said.endswith("got 3 samples for batches of 4; give more images or a smaller batch")


@calibrating
def test_open_dimensions_take_the_options_in_one_profile(folder):
    folder.model(f"input image float32 -1 1 -1 -1\n{SCORES}")
    said = folder.build("--batch", "2", images=False).refused()
    assert "got none" in said
    run = folder.built("--batch", "2", "--size", "14x28")
    assert run.trace.count("profile image 2x1x14x28") == 2
    assert run.calibrated == 2 and len(run.batches) == 4 * 14 * 28 * 4
    assert "input shape image 2x1x14x28" in run.trace
    assert "copy in 3136" in run.trace


@calibrating
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_narrow_float_input_is_calibrated_in_float32_and_run_in_its_own(folder, dtype):
    if dtype == "bfloat16" and MAJOR < 10:
        pytest.skip("TensorRT has bfloat16 from 9 on")
    folder.model(f"input image {dtype} 1 1 28 28\n{SCORES}")
    run = folder.built()
    assert run.calibrated == 5 and len(run.batches) == 5 * 28 * 28 * 4
    assert "copy in 1568" in run.trace
    assert folder.report()["model"]["inputs"] == [f"'image' {dtype} [1, 1, 28, 28]"]


@calibrating
@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "bool"])
def test_an_input_that_pictures_do_not_become_is_named_as_the_network_has_it(folder, dtype):
    if dtype == "int64" and MAJOR < 10:
        pytest.skip("TensorRT has int64 from 10 on")
    folder.model(f"input ids {dtype} 1 1 28 28\n{SCORES}")
    said = folder.build().refused()
    assert said.startswith(f"images become float32, the input is 'ids' {dtype} [1, 1, 28, 28]")


@calibrating
def test_several_inputs_and_no_pictures_are_told(folder):
    assert "calibrated with images, got none" in folder.build(images=False).refused()
    folder.model(IMAGE + "input mask float32 1 1\n" + SCORES)
    assert "the model has 2; build it with Python's calib8" in folder.build().refused()


@pytest.mark.skipif(MAJOR < 11, reason="until TensorRT 10 there are calibrators")
def test_tensorrt_11_says_that_it_has_no_calibrators(folder):
    said = folder.build().refused()
    assert said.startswith(
        f"TensorRT {VERSION}.0 has no calibrators and takes int8 from Q/DQ nodes"
    )
    assert said.endswith("make them with Python's calib8 build --target tensorrt")
    folder.model(QDQ)
    said = folder.build("--rest", "fp16", images=False).refused()
    assert said.startswith("--rest is for TensorRT until 10")


def test_a_model_with_qdq_nodes_is_built_without_calibrating_and_says_what_had_no_effect(folder):
    folder.model(QDQ)
    run = folder.built(images=False)
    assert ("build tf32" if MAJOR > 10 else "build int8 fp16 tf32") in run.trace
    assert run.calibrated == 0 and not folder.cache.exists()
    assert folder.report()["notes"] == ["int8 by the model's own Q/DQ nodes, not calibrated here"]
    folder.built("--cache", "x")
    assert folder.report()["notes"][0].endswith("; without effect: --cache, --preprocess, IMAGES")


def test_the_network_is_explicit_and_the_plugins_are_there_before_it_is_read(folder):
    folder.model("plugin\n" + QDQ)
    run = folder.built(images=False)
    assert f"network flags {1 if MAJOR < 10 else 0}" in run.trace
    assert run.trace.index("plugins") < run.trace.index(
        next(s for s in run.trace if "network" in s)
    )
    said = folder.build(images=False, fake="no-plugins").refused()
    assert said.startswith("TensorRT cannot read model.onnx: Plugin not found")
    assert f"libnvinfer_plugin.so.{MAJOR} did not register its plugins" in said


def test_an_engine_is_timed_from_pinned_memory_by_cudas_events(folder):
    folder.model(QDQ)
    run = folder.built("--device", "1", images=False)
    assert run.trace[0] == "device 1"
    assert "copy in 3136" in run.trace and "copy out 40" in run.trace
    (engine,) = folder.report()["engines"]
    found = engine["latency"]
    assert [found[stage]["p50"] for stage in ("h2d", "gpu_compute", "d2h")] == [1, 1, 1]
    assert run.trace.count("copy in 3136") >= 10


@pytest.mark.parametrize(
    ("dtype", "size"), [("float16", 2), ("int32", 4), ("int64", 8), ("bool", 1), ("bfloat16", 2)]
)
def test_inputs_and_outputs_have_the_engines_own_types(folder, dtype, size):
    if dtype in ("int64", "bfloat16") and MAJOR < 10:
        pytest.skip("TensorRT has this type from 9 or 10 on")
    folder.model(f"quantize\ninput ids {dtype} 1 7\noutput next {dtype} 1 5\n")
    run = folder.built(images=False)
    assert f"copy in {7 * size}" in run.trace and f"copy out {5 * size}" in run.trace
    assert folder.report()["model"]["inputs"] == [f"'ids' {dtype} [1, 7]"]


@pytest.mark.parametrize(
    ("dtype", "read", "least", "most"),
    [
        ("float32", "<f4", -1, 1),
        ("float16", "<f2", -1, 1),
        ("int32", "<i4", 0, 1),
        ("int64", "<i8", 0, 1),
        ("bool", "u1", 0, 1),
        ("uint8", "u1", 0, 255),
        ("bfloat16", "<u2", -1, 1),
    ],
)
def test_what_is_timed_is_fed_random_values_the_same_every_time(folder, dtype, read, least, most):
    if dtype in ("int64", "bfloat16") and MAJOR < 10:
        pytest.skip("TensorRT has this type from 9 or 10 on")
    folder.model(f"quantize\ninput x {dtype} 1 500\noutput next float32 1 5\n")
    run = folder.built(images=False)
    fed = np.frombuffer(run.inputs, read).reshape(-1, 500)
    assert len(fed) >= 10 and (fed == fed[0]).all()
    values = fed[0]
    if dtype == "bfloat16":
        values = (values.astype("<u4") << 16).view("<f4")
    assert least <= values.min() < least + (most - least) / 20
    assert most - (most - least) / 20 < values.max() <= most
    assert abs(values.mean() - (least + most) / 2) < (most - least) / 10
    assert folder.built(images=False).inputs[: fed[0].nbytes] == fed[0].tobytes()


def test_a_duration_may_be_less_than_a_second(folder):
    folder.model(QDQ)
    folder.built("--duration", "0.01", images=False)
    (engine,) = folder.report()["engines"]
    assert engine["latency"]["queries"] >= 10
    for wrong in ("x", "-1", "1e3", ".5", "1.2.3", ""):
        said = folder.build("--duration", wrong, images=False).refused()
        assert said.startswith("--duration must be a number from 0, such as 3 or 0.5, got")


def test_plugins_that_are_missing_are_told_where_an_engine_is_not_loaded(folder):
    folder.model(QDQ)
    said = folder.build(images=False, fake="no-plugins,fail-load").refused()
    assert said.startswith("TensorRT cannot load the engine: Serialization assertion failed")
    assert said.endswith(f"; libnvinfer_plugin.so.{MAJOR} did not register its plugins")
    folder.built(images=False, fake="no-plugins")


@pytest.mark.skipif(MAJOR > 8, reason="from 10 on the library itself judges who may load it")
def test_a_library_of_another_major_version_is_told_in_its_words(folder):
    said = folder.build(library="7.2.3").refused()
    assert said.endswith("Major version of the library and the headers differ.")


@calibrating
def test_pipes_and_devices_in_place_of_a_cache_are_told(folder):
    folder.built()
    for place in (folder.sidecar, folder.cache):
        kept = place.read_bytes()
        place.unlink()
        os.mkfifo(place)
        said = folder.build("--require-cache").refused()
        assert "it is no regular file" in said
        place.unlink()
        place.write_bytes(kept)
    assert folder.built("--require-cache").calibrated == 0
    folder.sidecar.write_text("[" * 200_000)
    assert "is not a fingerprint" in folder.build("--require-cache").refused()


def test_an_output_whose_size_depends_on_the_data_is_allocated_as_it_runs(folder):
    folder.model(QDQ + "output boxes float32 ? 4\n")
    run = folder.built(images=False)
    assert "copy out 112" in run.trace  # 7 boxes in the fake
    assert "out of memory" in folder.build(images=False, fake="out-of-memory").refused()


def test_an_input_that_is_a_shape_is_told(folder):
    folder.model("quantize\nshape sizes int32 2\n" + SCORES)
    assert "the values of 'sizes' are a shape" in folder.build(images=False).refused()


@pytest.mark.parametrize(
    ("fake", "said"),
    [
        ("no-gpu", "TensorRT could not make a builder: CUDA initialization failure"),
        ("fail-before", "TensorRT could not build model.onnx: Error Code 4"),
        ("fail-engine", "TensorRT could not build model.onnx: Error Code 2"),
        ("fail-load", "TensorRT cannot load the engine: Serialization assertion failed"),
        ("fail-run", "TensorRT refused to run the engine: Error Code 1: Cask"),
    ],
)
def test_whatever_tensorrt_refuses_is_told_in_its_words(folder, fake, said):
    folder.model(QDQ)
    assert folder.build(images=False, fake=fake).refused().startswith(said)


def test_a_model_that_is_none_and_a_gpu_that_is_none_are_told(folder):
    folder.model("hello\n")
    assert "TensorRT cannot read model.onnx: Failed to parse" in folder.build().refused()
    said = folder.build("--device", "7").refused()
    assert said == "CUDA could not use GPU 7: invalid device ordinal"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--batch", "2"],
            "the model fixes dimension 0 of its input 'image' to 1, got 2 by --batch",
        ),
        (["--size", "28x32"], "fixes dimension 3 of its input 'image' to 28, got 32 by --size"),
        (["--rest", "int4"], "--rest must be fp16 or fp32, got 'int4'"),
        (["--input", "image:1x1x28x28"], "--input is no option"),
    ],
)
def test_no_option_is_dropped_in_silence(folder, options, said):
    folder.model(QDQ)
    assert said in folder.build(*options, images=False).refused()
    folder.built("--batch", "1", "--size", "28x28", images=False)
