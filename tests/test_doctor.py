"""`calib8 doctor`: what is here, what is not, and what brings it."""

import json
from dataclasses import replace

from deploy.analysis import environment
from deploy.machine import this_machine
from deploy.targets import TARGETS


def found(run):
    code, out, err = run("doctor", "--json")
    assert code == 0 and not err
    return {one["what"]: one for one in json.loads(out)}


def test_a_machine_without_sdks_is_told_what_to_install(run, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    code, out, _ = run("doctor")
    assert code == 0
    lines = {line.split()[1]: line for line in out.splitlines()}
    assert {
        "calib8",
        "counting",
        "packages",
        "CPU",
        *TARGETS,
        "torch",
        "distributed",
        "openvino",
    } == set(lines)
    assert lines["onnxruntime"].startswith("+") and "ONNX Runtime 1." in lines["onnxruntime"]
    assert lines["tensorrt"].startswith("-") and "pip install" in lines["tensorrt"]
    assert "`atc`" in lines["ascend"]


def test_tensorrt_and_its_gpu_are_named(run, tensorrt):
    tensorrt("10.13.0.35")
    here = found(run)["tensorrt"]
    assert here["there"] and "TensorRT 10.13.0.35 on " in here["words"]


def test_atc_is_named(run, monkeypatch, tmp_path):
    (tmp_path / "atc").write_text("#!/bin/sh\n")
    (tmp_path / "atc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert found(run)["ascend"]["words"].startswith("builds and runs engines: " + str(tmp_path))


def test_a_cpu_without_int8_is_told(run, monkeypatch):
    monkeypatch.setattr(environment, "this_machine", lambda: replace(this_machine(), int8=()))
    cpu = found(run)["CPU"]
    assert not cpu["there"] and "may saturate" in cpu["words"]


def test_a_missing_package_says_what_it_is_for(run, monkeypatch):
    def gone(name):
        raise environment.PackageNotFoundError(name)

    monkeypatch.setattr(environment, "version", gone)
    assert "pip install '.[torch]'" in found(run)["torch"]["words"]
