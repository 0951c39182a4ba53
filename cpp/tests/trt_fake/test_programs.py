"""calib8-build through the fake TensorRT: what it asks, what it says, what it leaves on disk.

scripts/trt_fake_check builds the program against the headers of one version after the other, and
calls these tests for each: the version is $CALIB8_TRT_VERSION, the build folder
$CALIB8_TRT_PROGRAMS. settings.hpp lists the fake's settings.
"""

import ctypes
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest

from deploy.calibration import store

VERSION = os.environ["CALIB8_TRT_VERSION"]
PROGRAMS = Path(os.environ["CALIB8_TRT_PROGRAMS"])
PHOTOS = Path(__file__).parents[3] / "datasets" / "fashion" / "calib"

MAJOR = int(VERSION.split(".")[0])
RELEASE = {"10.0": "10.0.1", "10.16": "10.16.0", "11.1": "11.1.0"}.get(VERSION, VERSION)
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

    @property
    def builds(self) -> int:
        """How often TensorRT built."""
        return sum(line.startswith("build ") or line == "build" for line in self.trace)

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

    def build(
        self,
        *options: str,
        images: bool = True,
        fake: str = "",
        library: str = "",
        gpu: str = "A",
    ) -> Run:
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
            | {"CALIB8_FAKE_LIBRARY": library, "CALIB8_FAKE_GPU": gpu},
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
    again = folder.built("--calibrator", f"{word}Calibration")  # the word of the first line
    assert again.calibrated == 0
    assert folder.built().calibrated == 0  # the cache's own
    assert folder.report()["calibration"]["method"] == f"{word}Calibration"
    other = folder.built("--calibrator", "entropy2")
    assert other.calibrated == 5
    reason = folder.report()["calibration"]["reason"]
    assert reason.endswith("not with a calibrator EntropyCalibration2")
    assert "calibrator) must be one of" in folder.build("--calibrator", "mse").refused()


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
    assert folder.built("--trust-cache", images=False).calibrated == 0
    theirs = ours.replace("Entropy", "MinMax").replace("2\n", "\n", 1)
    folder.cache.write_text(theirs)
    assert folder.built("--trust-cache").calibrated == 0
    assert folder.report()["calibration"]["method"] == "MinMaxCalibration"


@calibrating
def test_a_trusted_cache_is_never_written(folder):
    folder.built()
    before = folder.cache.read_bytes(), folder.sidecar.read_bytes()
    folder.pictures(5, first=5)
    folder.model(IMAGE + "output scores float32 1 20\n")
    assert folder.built("--trust-cache").calibrated == 0
    assert "is trusted as it is" in folder.report()["calibration"]["reason"]
    said = folder.build("--trust-cache", "--calibrator", "minmax").refused()
    assert said.endswith("name its own calibrator, or none (--calibrator)")
    assert folder.build("--trust-cache", "--rebuild", fake="fail-engine").code == 2
    folder.model("input other float32 1 1 28 28\n" + SCORES)
    said = folder.build("--trust-cache").refused()
    assert "has no scale for its input 'other'; it is another model's" in said
    assert (folder.cache.read_bytes(), folder.sidecar.read_bytes()) == before
    folder.cache.write_text("no cache")
    assert "no cache" in folder.build("--trust-cache").refused()
    assert folder.cache.read_text() == "no cache"


@calibrating
def test_the_version_is_that_of_the_library_that_runs(folder):
    other = {8: "8.6.3", 10: "10.13.2"}[MAJOR]
    label = {8: 8603, 10: 101302}[MAJOR]
    assert folder.built(library=other).calibrated == 5
    assert folder.cache.read_text().startswith(f"TRT-{label}-")
    assert folder.built(library=other).calibrated == 0
    before = folder.cache.read_bytes()
    run = folder.built()  # another release of the same major version: told, and taken
    assert run.calibrated == 0 and "cache taken" in run.trace
    (note,) = folder.report()["notes"]
    assert note.startswith(f"model.onnx.cache is labelled for TensorRT {other} and is used by ")
    assert f"it was made by TensorRT {other} by" in folder.report()["calibration"]["reason"]
    assert folder.cache.read_bytes() == before


@calibrating
def test_a_cache_for_another_major_version_is_told_and_taken_where_it_is_trusted(folder):
    folder.built()
    other = {8: "TRT-101302", 10: "TRT-8601"}[MAJOR]
    text = folder.cache.read_text().replace(f"TRT-{LABEL}", other)
    document = json.loads(folder.sidecar.read_bytes())
    folder.cache.write_text(text)
    document["sha256"]["cache"] = hashlib.sha256(text.encode()).hexdigest()
    folder.sidecar.write_bytes(store.seal_json(document))
    said = folder.build(images=False).refused()
    assert "whose names of tensors are not those of" in said
    assert "cache taken" in folder.built("--trust-cache", "--rebuild", images=False).trace
    assert folder.cache.read_text() == text


@calibrating
def test_a_cache_that_tensorrt_refuses_all_the_same_is_told(folder):
    folder.built()
    before = folder.cache.read_bytes()
    said = folder.build("--rebuild", fake="refuse-cache").refused()
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
    assert "images feed one input, the model has 2: 'image'" in folder.build().refused()


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


@pytest.mark.skipif(MAJOR > 10, reason="TensorRT 11 takes the types of the model's own nodes")
@pytest.mark.parametrize("rest", ["fp32", "fp16", "bf16", "int4"])
def test_the_rest_runs_as_asked(folder, rest):
    folder.model(QDQ)
    if rest == "int4":
        said = folder.build("--rest", rest, images=False).refused()
        assert said == "--rest must be fp16, bf16 or fp32, got 'int4'"
    elif rest == "bf16" and MAJOR < 10:
        assert "bf16 is for TensorRT from 10 on" in folder.build("--rest", rest).refused()
    else:
        run = folder.built("--rest", rest, images=False)
        assert f"build int8{'' if rest == 'fp32' else f' {rest}'} tf32" in run.trace


def test_an_engine_is_built_again_only_for_something_else(folder):
    folder.model(QDQ)
    assert folder.built(images=False).builds == 1
    assert folder.built(images=False).builds == 0
    assert "the engine was built before" in folder.report()["notes"][1]
    assert folder.built("--rebuild", images=False).builds == 1
    assert folder.built("--workspace", "64", images=False).builds == 1
    folder.model(QDQ + "output more float32 1\n")
    assert folder.built("--workspace", "64", images=False).builds == 1
    assert folder.built("--workspace", "64", images=False, gpu="B").builds == 1
    folder.engine.write_bytes(folder.engine.read_bytes() + b"\n")
    assert folder.built("--workspace", "64", images=False, gpu="B").builds == 1
    assert folder.build("--rebuild", images=False, fake="fail-engine").code == 2
    assert folder.built("--workspace", "64", images=False, gpu="B").builds == 0


@calibrating
def test_another_cache_is_another_engine(folder):
    folder.built()
    assert folder.built().builds == 0
    folder.cache.write_text(f"TRT-{LABEL}-EntropyCalibration2\nimage: 3c008912\n")
    assert folder.built("--trust-cache").builds == 1


def test_timings_are_used_and_added_to(folder):
    folder.model(QDQ)
    assert "timings ''" in folder.built("--timing-cache", "t", images=False).trace
    assert (folder.path / "t").read_text() == "timings "
    run = folder.built("--timing-cache", "t", "--rebuild", images=False)
    assert "timings 'timings '" in run.trace
    (folder.path / "t").write_text("of another GPU")
    run = folder.built("--timing-cache", "t", "--rebuild", images=False)
    assert [line for line in run.trace if "timings" in line] == ["timings refused", "timings ''"]
    assert "t is not a timing cache of TensorRT" in " ".join(folder.report()["notes"])
    assert (folder.path / "t").read_text() == "of another GPU"


def test_memory_and_dla_are_asked_for(folder):
    folder.model(QDQ)
    run = folder.built("--workspace", "64", "--dla", "1", images=False)
    assert f"workspace {64 << 20}" in run.trace
    assert run.trace.index("default device DLA") < run.trace.index("DLA core 1")
    assert any(line.startswith("build") and "gpu-fallback" in line for line in run.trace)


def test_a_library_of_plugins_is_loaded_before_the_model_is_read(folder):
    source, library = folder.path / "p.c", folder.path / "p.so"
    source.write_text(
        "#include <stdio.h>\n#include <stdlib.h>\n__attribute__((constructor)) void put(void) {"
        ' FILE* f = fopen(getenv("CALIB8_FAKE_TRACE"), "a"); fputs("own plugin\\n", f);'
        " fclose(f); }\n"
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    folder.model(QDQ)
    trace = folder.built("--plugin", "p.so", images=False).trace
    assert trace.index("own plugin") < trace.index(f"network flags {1 if MAJOR < 10 else 0}")


def test_shapes_of_every_input_make_one_profile(folder):
    folder.model("quantize\ninput image float32 -1 1 -1 -1\ninput mask float32 -1 4\n" + SCORES)
    words = ["--opt-shapes", "image:4x1x28x28", "--min-shapes", "image:1x1x14x14"]
    words += ["--max-shapes", "image:8x1x56x56", "--opt-shapes", "mask:4x4"]
    run = folder.built(*words, images=False)
    assert "profile image 1x1x14x14 4x1x28x28 8x1x56x56" in run.trace
    assert "profile mask 4x4" in run.trace
    assert folder.report()["model"]["inputs"] == [
        "'image' float32 [4, 1, 28, 28]",
        "'mask' float32 [4, 4]",
    ]
    said = folder.build(*words, "--batch", "4", images=False).refused()
    assert "(--batch, --size) say the same thing, got both for 'image'" in said
    said = folder.build(*words[:2], "--max-shapes", "image:3x1x56x56", images=False).refused()
    assert "the least first and none above the largest, got 4x1x28x28, 4x1x28x28 and 3x1" in said


@calibrating
def test_a_calibration_has_one_shape_and_its_engine_the_range(folder):
    folder.model(f"input image float32 -1 1 28 28\n{SCORES}")
    words = ["--opt-shapes", "image:2x1x28x28", "--max-shapes", "image:8x1x28x28"]
    run = folder.built(*words)
    assert run.calibrated == 2
    profiles = [line for line in run.trace if line.startswith("profile")]
    assert profiles == ["profile image 2x1x28x28", "profile image 2x1x28x28 2x1x28x28 8x1x28x28"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo's model with its weights beside it, and Python's calibration of it."""
    path = tmp_path_factory.mktemp("demo")
    fashion = PHOTOS.parent / "fashion.onnx"
    model = onnx.load(fashion)
    onnx.save(
        model, path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=64
    )
    photos = sorted(PHOTOS.rglob("*.png"))[:5]
    (path / "list.txt").write_text("".join(f"{photo}\n" for photo in photos))
    python("calibrate m.onnx --images list.txt --preprocess grey-half", path)
    return path


def python(words, folder):
    """What Python says of a calibration for the TensorRT of these tests, kept as p.cache."""
    words += f" --target tensorrt --trt-version {RELEASE} -o p.cache"
    subprocess.run(
        [sys.executable, "-m", "deploy", *words.split()],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(PHOTOS.parents[2])},
        check=True,
        capture_output=True,
    )


@pytest.fixture
def taken(demo, tmp_path):
    """A folder with all of that, as it would be carried to a device."""
    for path in demo.iterdir():
        shutil.copy(path, tmp_path)
    folder = Folder(tmp_path)
    shutil.copy(tmp_path / "m.onnx", tmp_path / "model.onnx")
    folder.kept = [(tmp_path / f"p.cache{end}").read_bytes() for end in ("", ".json")]
    return folder


def one_weight_changed(path: Path, target: Path, **options: object) -> None:
    model = onnx.load(path)
    tensor = max(model.graph.initializer, key=lambda one: len(one.raw_data))
    tensor.raw_data = bytes([tensor.raw_data[0] ^ 1]) + tensor.raw_data[1:]
    onnx.save(model, target, **options)


WITH = ("--cache", "p.cache")


@calibrating
def test_a_cache_of_python_is_used_with_and_without_images(taken):
    for images in (False, True):
        run = taken.built(*WITH, "--rebuild", images=images)
        assert run.calibrated == 0 and "cache taken" in run.trace
        made = "the model and the images" if images else "the model"
        told = taken.report()["calibration"]
        assert told["reason"] == f"the cache fits {made}; it was made by calib8 0.1.0 by mse"
        assert told["reason"] in run.out and told["method"] == "EntropyCalibration2"
        assert "feed" in taken.report() if images else "feed" not in taken.report()
        taken.built(*WITH, "--rebuild", "--require-cache", images=images)
    taken.built(*WITH, "--rebuild", "--trust-cache", images=False)
    inside = onnx.load(taken.path / "m.onnx")  # the same graph, stored otherwise
    onnx.save(inside, taken.path / "model.onnx")
    assert taken.built(*WITH, images=False).calibrated == 0
    assert [(taken.path / f"p.cache{end}").read_bytes() for end in ("", ".json")] == taken.kept


@calibrating
@pytest.mark.parametrize("beside", [False, True])
def test_after_a_change_of_one_weight_it_is_refused(taken, beside):
    model = taken.path / "model.onnx"
    if beside:
        data = bytearray((taken.path / "w.bin").read_bytes())
        data[len(data) // 2] ^= 1
        (taken.path / "w.bin").write_bytes(data)
    else:
        one_weight_changed(model, model)
    part = "the model (weights or graph) changed" + (" (its external data)" if beside else "")
    assert f"no cache in their place: {part}; give" in taken.build(*WITH, images=False).refused()
    assert f"but {part};" in taken.build(*WITH, "--require-cache").refused()
    run = taken.built("--cache", "p.cache")
    assert run.calibrated == 5 and taken.report()["calibration"]["reason"] == part
    assert taken.built(*WITH, images=False).calibrated == 0  # of its own calibration
    assert "by EntropyCalibration2" in taken.report()["calibration"]["reason"]


@calibrating
def test_images_and_preprocessing_are_compared_where_there_are_images(taken):
    taken.pictures(5, first=5)
    assert "but the images changed (sha256);" in taken.build(*WITH, "--require-cache").refused()
    assert taken.built(*WITH, images=False).calibrated == 0
    photos = sorted(PHOTOS.rglob("*.png"))[:5]
    lines = "".join(f"{photo}\n" for photo in reversed(photos))
    (taken.path / "list.txt").write_text(lines)  # the order shows in no histogram
    assert taken.built(*WITH, "--require-cache", "--rebuild").calibrated == 0
    said = taken.build(*WITH, "--require-cache", "--preprocess", "unit").refused()
    assert "but the preprocessing changed (mean" in said


@calibrating
def test_nodes_that_the_caches_note_lists_run_in_float32_beside_fp16(taken):
    first, second = onnx.load(taken.path / "m.onnx").graph.node[:2]
    note = taken.path / "p.cache.json"
    document = json.loads(note.read_bytes())
    listed = {first.name: "another", "no layer's": second.output[0], "gone": "gone"}
    taken.built(*WITH, images=False)
    note.write_bytes(store.seal_json(document | {"float32_layers": listed}))
    for trust in ((), ("--trust-cache",)):
        run = taken.built(*WITH, "--rebuild", *trust, images=False)
        assert "build int8 fp16 obey tf32" in run.trace
        assert [line for line in run.trace if line.startswith("layer ")] == [
            f"layer {node.name} {what} float32"
            for node in (first, second)
            for what in ("computes", "output 0")
        ]
        said = "3 nodes run in float32, since their values overflow float16: "
        assert said in " ".join(taken.report()["notes"])
    assert store.read_cache_text(taken.path / "p.cache")[0] == taken.kept[0]  # as Python reads it
    wide = taken.built(*WITH, "--rest", "fp32", images=False)
    assert "build int8 tf32" in wide.trace and not any("layer " in one for one in wide.trace)
    assert taken.built(*WITH, images=False).builds == 1
    note.write_bytes(store.seal_json(document))  # another list is another engine
    assert taken.built(*WITH, images=False).builds == 1


@pytest.fixture(scope="module")
def python_build(demo, tmp_path_factory):
    """What Python's build of the demo's model writes for TensorRT."""
    out = tmp_path_factory.mktemp("build") / "out"
    words = "build m.onnx --images list.txt --preprocess grey-half --target tensorrt"
    done = subprocess.run(
        [sys.executable, "-m", "deploy", *words.split(), *["--effort", "0", "--duration", "0"],
         "--accept", "--out", out],
        cwd=demo,
        env=os.environ | {"PYTHONPATH": str(PHOTOS.parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.parametrize("kind", ["typed", "qdq"])
def test_a_typed_model_is_a_strongly_typed_network(python_build, tmp_path, kind):
    folder = Folder(tmp_path)
    shutil.copy(python_build / f"m.tensorrt.{kind}.onnx", tmp_path / "model.onnx")
    run = folder.built(images=False)
    strong = MAJOR == 10 and kind == "typed"
    flags = {8: 1, 10: 2 * strong, 11: 0}[MAJOR]  # explicit batch, strongly typed
    assert f"network flags {flags}" in run.trace
    assert ("build tf32" if strong or MAJOR == 11 else "build int8 fp16 tf32") in run.trace
    assert strong == ("the network is strongly typed: " in run.out)
    assert folder.built(images=False).builds == 0


@calibrating
def test_the_files_of_a_python_build_are_taken_as_they_are(python_build, tmp_path):
    shutil.copytree(python_build, tmp_path / "out")
    cache = tmp_path / "out" / "m.tensorrt.cache"
    release = store.read_cache_text(cache)[0].decode()[4:].split("-")[0]  # 8503, 100300
    folder = Folder(tmp_path)
    shutil.copy(tmp_path / "out" / "m.tensorrt.onnx", tmp_path / "model.onnx")
    if int(release[:-4] if len(release) > 4 else release[:-3]) == MAJOR:
        run = folder.built("--cache", "out/m.tensorrt.cache", images=False)
        assert run.calibrated == 0 and "made by calib8 0.1.0 by mse" in run.out
    else:
        said = folder.build("--cache", "out/m.tensorrt.cache", images=False).refused()
        assert "whose names of tensors are not those of" in said


@calibrating
def test_a_cache_of_python_made_of_arrays_is_used_with_and_without_them(folder):
    rng = np.random.default_rng(5)
    samples = rng.normal(size=(5, 1, 28, 28)).astype(np.float32)
    np.save(folder.path / "a.npy", samples)
    shutil.copy(PHOTOS.parent / "fashion.onnx", folder.path / "model.onnx")
    python("calibrate model.onnx --images a.npy", folder.path)
    for feed, made in (((), "the model"), (("a.npy",), "the model and the images")):
        run = folder.built(*feed, *WITH, "--rebuild", images=False)
        assert run.calibrated == 0 and "cache taken" in run.trace
        reason = folder.report()["calibration"]["reason"]
        assert reason == f"the cache fits {made}; it was made by calib8 0.1.0 by mse"
    np.save(folder.path / "a.npy", samples + 1)
    said = folder.build("a.npy", *WITH, "--require-cache", images=False).refused()
    assert "the images changed" in said


@calibrating
def test_several_inputs_of_any_type_are_built_by_a_cache(folder):
    folder.model(IMAGE + "input ids int32 1 4\n" + SCORES)
    assert "images feed one input, the model has 2" in folder.build().refused()
    folder.cache.write_text(f"TRT-{LABEL}-EntropyCalibration2\nimage: 3c008912\nids: 3c008912\n")
    run = folder.built("--trust-cache", images=False)
    assert "copy in 3136" in run.trace and "copy in 16" in run.trace


def arrays(folder, count=5, **others):
    """An .npz of samples of the image, and of other inputs."""
    rng = np.random.default_rng(3)
    image = rng.normal(size=(count, 1, 28, 28)).astype(np.float32)
    np.savez(folder.path / "a.npz", image=image, **others)
    return image


def fed(folder, *options, **settings):
    return folder.build("a.npz", *options, images=False, **settings)


@calibrating
def test_arrays_of_several_inputs_are_calibrated_as_tensorrt_reads_them(folder):
    ids = np.arange(20, dtype=np.int32).reshape(5, 4)
    scales = np.linspace(-3, 7, 10, dtype=np.float16).reshape(5, 2)
    image = arrays(folder, ids=ids, scales=scales)
    folder.model(IMAGE + "input ids int32 1 4\ninput scales float16 1 2\n" + SCORES)
    run = fed(folder)
    assert run.code == 0, run.error
    assert run.calibrated == 5
    rows = zip(image, ids, scales.astype(np.float32), strict=True)
    assert run.batches == b"".join(part.tobytes() for row in rows for part in row)
    made = json.loads(folder.sidecar.read_text())["fingerprint"]["made_from"]
    assert made["images"]["kind"] == "arrays" and made["preprocess"] == made["decoder"] == {}
    assert fed(folder).calibrated == 0  # the cache fits
    arrays(folder, ids=ids + 1, scales=scales)
    again = fed(folder)
    assert again.calibrated == 5
    assert "the images changed" in folder.report()["calibration"]["reason"]
    said = fed(folder, "--preprocess", "unit").refused()
    assert said.startswith("files of arrays are fed as they are, got preprocessing")


@calibrating
def test_a_models_int64_is_fed_as_the_type_tensorrt_has(folder):
    given = [
        onnx.helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, [1, 4]),
        onnx.helper.make_tensor_value_info("image", onnx.TensorProto.FLOAT, [1, 1, 28, 28]),
    ]
    graph = onnx.helper.make_graph([], "g", given, given[1:])
    onnx.save(onnx.helper.make_model(graph), folder.path / "model.onnx")
    ids = np.arange(-10, 10, dtype=np.int64).reshape(5, 4)
    image = arrays(folder, ids=ids)
    run = fed(folder)
    assert run.code == 0, run.error
    own = np.int32 if MAJOR < 10 else np.int64
    rows = zip(ids.astype(own), image, strict=True)
    assert run.batches == b"".join(part.tobytes() for row in rows for part in row)
    arrays(folder, ids=ids << 40)
    if MAJOR < 10:
        assert "as int32, which does not hold" in fed(folder).refused()


@calibrating
def test_weights_that_are_not_there_are_told(taken):
    (taken.path / "w.bin").unlink()
    assert "must be a file in the model's folder" in taken.build(*WITH, images=False).refused()


@calibrating
def test_without_images_a_cache_must_be_there(folder):
    said = folder.build(images=False).refused()
    assert "got none, and no cache in their place: model.onnx.cache does not exist yet" in said
    folder.built()
    (folder.path / "list.txt").unlink()
    assert folder.built("--rebuild", images=False).calibrated == 0
    folder.sidecar.unlink()
    assert "has no fingerprint beside it" in folder.build(images=False).refused()


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


class Opened:
    """How often each file of a folder is opened, by Linux's inotify."""

    def __init__(self, folder: Path) -> None:
        self.library = ctypes.CDLL(None)
        self.handle = self.library.inotify_init1(os.O_NONBLOCK)
        assert self.library.inotify_add_watch(self.handle, bytes(folder), 0x20) >= 0  # IN_OPEN

    def counts(self) -> dict[str, int]:
        """Since it was made or asked before."""
        found: dict[str, int] = {}
        data = os.read(self.handle, 1 << 20)
        while data:
            _, _, _, length = struct.unpack_from("iIII", data)
            name = data[16 : 16 + length].rstrip(b"\0").decode()
            found[name] = found.get(name, 0) + 1
            data = data[16 + length :]
        return found


@calibrating
def test_every_picture_is_read_once(folder):
    pictures = folder.path / "pictures"
    pictures.mkdir()
    chosen = [path.name for path in sorted(PHOTOS.rglob("*.png"))[:5]]
    for path in sorted(PHOTOS.rglob("*.png"))[:5]:
        (pictures / path.name).write_bytes(path.read_bytes())
    (folder.path / "list.txt").write_text("".join(f"pictures/{name}\n" for name in chosen))
    opened = Opened(pictures)
    assert folder.built().calibrated == 5
    assert opened.counts() == dict.fromkeys(chosen, 1)
    assert folder.built("--require-cache").calibrated == 0
    assert opened.counts() == dict.fromkeys(chosen, 1)


@calibrating
def test_batches_come_in_order_by_any_number_of_threads(folder):
    (folder.path / "bad.png").write_bytes(b"no picture")
    folder.pictures(9, more="bad.png\n")
    wanted = folder.built("--skip-bad", "--threads", "1").batches
    assert len(wanted) == 9 * 28 * 28 * 4
    for threads in ("2", "5"):
        folder.cache.unlink()
        run = folder.built("--skip-bad", "--threads", threads, "--rebuild")
        assert run.batches == wanted and "1 skipped: image bad.png" in run.out
    folder.cache.unlink()
    assert (
        "image bad.png cannot be decoded" in folder.build("--threads", "5", "--rebuild").refused()
    )
    assert (
        "--threads must be a whole number from 1, got '0'" in folder.build("--threads=0").refused()
    )
    assert "threads must be 1 to 1024, got 2000" in folder.build("--threads=2000").refused()


def test_threads_are_without_effect_on_a_model_that_is_not_calibrated(folder):
    folder.model(QDQ)
    assert "without effect: --preprocess, --threads, IMAGES\n" in folder.built("--threads=2").out


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
            "dimension 0 of its input 'image' to 1, got 2 by BuildOptions::batch (--batch)",
        ),
        (
            ["--size", "28x32"],
            "dimension 3 of its input 'image' to 28, got 32 by BuildOptions::size",
        ),
        (["--opt-shapes", "image:1x1xN"], "must read NAME:DIMS with numbers"),
        (["--max-shapes", "image:1x1x28x28"], "got none for 'image'; give --opt-shapes"),
        (["--opt-shapes", "x:1x1x28x28"], "shapes are for inputs of the model, got 'x' beside"),
        (["--opt-shapes", "image:2x1x28x28"], "shapes must fit the input 'image' 1x1x28x28"),
        (["--dla", "2"], "(--dla) must name one of this machine's 2 DLA cores, from 0, got 2"),
        (["--workspace", "0"], "--workspace must be a whole number from 1, got '0'"),
        (["--plugin", "none.so"], "a plugin library must load beside this TensorRT, got "),
        (["--input", "image:1x1x28x28"], "--input is no option"),
    ],
)
def test_no_option_is_dropped_in_silence(folder, options, said):
    folder.model(QDQ)
    assert said in folder.build(*options, images=False).refused()
    folder.built("--batch", "1", "--size", "28x28", images=False)
