"""What a user's code prints goes to stderr: `--json -` is JSON whatever it says."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from deploy.cli import main

ROOT = Path(__file__).parents[1]
PRINTS = """
import ctypes, os, subprocess, sys
import numpy as np

def speak(where):
    print("python", where)
    os.write(1, f"descriptor {where}\\n".encode())
    ctypes.CDLL(None).puts(f"C {where}".encode())
    subprocess.run([sys.executable, "-S", "-c", f"print('child {where}')"], check=True)

speak("import")
"""
LOADER = """
def make():
    speak("call")
    for number in range(8):
        yield np.random.default_rng(number).normal(size=(1, 3, 16, 16)).astype("f4")
    speak("end")
"""
METRIC = """
def make(reference, outputs, label):
    if not COUNTS:
        speak("call")
    COUNTS.append(1)
    return 1.0

COUNTS = []
"""
CALIBRATOR = """
import tensorrt as trt
import pycuda.driver as cuda

class Calibrator(trt.IInt8EntropyCalibrator2):
    def __init__(self):
        speak("call")
        trt.IInt8EntropyCalibrator2.__init__(self)
        self.memory, self.number = cuda.mem_alloc(3 * 16 * 16 * 4), 0

    def get_batch_size(self):
        return 1

    def get_batch(self, names):
        self.number += 1
        if self.number > 8:
            speak("end")
            return None
        array = np.random.default_rng(self.number).normal(size=(1, 3, 16, 16)).astype("f4")
        cuda.memcpy_htod(self.memory, array)
        return [int(self.memory)]

    def read_calibration_cache(self):
        return None

    def write_calibration_cache(self, cache):
        pass

def make():
    return Calibrator()
"""
MODULE = """
from torch import nn

class Net(nn.Conv2d):
    def forward(self, x):
        if not COUNTS:
            speak("end")
        COUNTS.append(1)
        return super().forward(x)

def make():
    speak("call")
    return Net(3, 8, 3)

COUNTS = []
"""
# file that opens a user's code -> the code, and the options that give it
OPENERS = {
    "feed/loaders.py": (LOADER, "build {model} --images {code}:make"),
    "feed/calibrator.py": (CALIBRATOR, "build {model} --calibrator-script {code}:make"),
    "tasks/metric.py": (METRIC, "build {model} --images {array} --metric {code}:make"),
    "fx/source.py": (MODULE, "build {code}:make --input 1x3x16x16 --images {array} --int8-stem"),
}


def test_all_openers_of_code_are_tried():
    folder = ROOT / "deploy"
    callers = set()
    for path in folder.rglob("*.py"):
        if "load_function(" in path.read_text() and path.name != "usercode.py":
            callers.add(str(path.relative_to(folder)))
    assert callers == set(OPENERS)


@pytest.mark.slow
@pytest.mark.parametrize("opener", OPENERS)
def test_prints_are_not_in_the_json(opener, small_cnn, tmp_path, capfd):
    code, options = OPENERS[opener]
    if opener.startswith("fx/"):
        pytest.importorskip("torch", reason="torch is not installed")
    (tmp_path / "code.py").write_text(PRINTS + code)
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(8, 3, 16, 16)))
    paths = {"model": small_cnn, "code": tmp_path / "code.py", "array": tmp_path / "x.npy"}
    arguments = options.format(**paths).split()
    quick = ["--effort", "0", "--duration", "0", "--accept", "--out", str(tmp_path / "o")]
    main([*arguments, *quick, "--quiet", "--json", "-"])
    out, err = capfd.readouterr()
    assert json.loads(out)["targets"]
    for origin in ("python", "descriptor", "C", "child"):
        assert f"{origin} import\n" in err and f"{origin} call\n" in err


def test_stdout_of_a_process_is_left_to_its_text(tmp_path):
    """In a process of its own, whose C library holds back what it prints into a pipe."""
    command = "from deploy.terminal import say, separate_stdout\nfrom code import speak\n"
    command += "with separate_stdout():\n    speak('inside')\n    say('{}')\nprint('after')\n"
    (tmp_path / "code.py").write_text(PRINTS)
    process = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{command}"],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    assert process.stdout.splitlines()[-2:] == ["{}", "after"]
    assert sorted(process.stderr.split("\n")[:-1]) == sorted(
        f"{origin} inside" for origin in ("python", "descriptor", "C", "child")
    )


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_full_disk_is_one_sentence():
    command = [shutil.which("calib8", path=str(Path(sys.executable).parent)) or "calib8"]
    with Path("/dev/full").open("w") as full:
        process = subprocess.run(
            [*command, "quantize", "[0.5]", "--json", "-"],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert process.returncode == 1 and process.stderr.count("\n") == 1
