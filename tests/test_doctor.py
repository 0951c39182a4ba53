"""The command doctor: what of this machine calib8 can use."""

import json
from dataclasses import replace

from deploy.analysis import environment
from deploy.machine import this_machine
from deploy.targets import TARGETS


def doctor_checks(run):
    code, out, err = run("doctor", "--json")
    assert code == 0
    assert not err
    return {check["what"]: check for check in json.loads(out)}


def test_doctor_names_missing_sdks(run, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    lines = {line.split()[1]: line for line in run.ok("doctor").splitlines()}
    rows = {"calib8", "counting", "packages", "CPU", "torch", "distributed", "openvino"}
    assert set(lines) == {*rows, *TARGETS}
    assert lines["onnxruntime"].startswith("+")
    assert "ONNX Runtime 1." in lines["onnxruntime"]
    assert lines["tensorrt"].startswith("-")
    assert "pip install" in lines["tensorrt"]
    assert "`atc`" in lines["ascend"]


def test_doctor_names_tensorrt_and_gpu(run, tensorrt):
    tensorrt("10.13.0.35")
    finding = doctor_checks(run)["tensorrt"]
    assert finding["there"]
    assert "TensorRT 10.13.0.35 on " in finding["words"]


def test_doctor_names_atc(run, monkeypatch, tmp_path):
    (tmp_path / "atc").write_text("#!/bin/sh\n")
    (tmp_path / "atc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor_checks(run)["ascend"]["words"].startswith(
        "builds and runs engines: " + str(tmp_path)
    )


def test_doctor_warns_of_cpu_without_int8(run, monkeypatch):
    monkeypatch.setattr(environment, "this_machine", lambda: replace(this_machine(), int8=()))
    cpu = doctor_checks(run)["CPU"]
    assert not cpu["there"]
    assert "may saturate" in cpu["words"]


def test_doctor_names_extra_of_missing_package(run, monkeypatch):
    def raise_missing(name):
        raise environment.PackageNotFoundError(name)

    monkeypatch.setattr(environment, "version", raise_missing)
    assert "pip install '.[torch]'" in doctor_checks(run)["torch"]["words"]
