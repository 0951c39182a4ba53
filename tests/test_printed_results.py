"""Public results: printed, each is what its command prints; rows of tables; notebooks."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import calib8
from deploy.errors import ConfigError
from deploy.terminal import PrintedResult

QUICK = {"duration_s": 0, "effort": 0, "targets": ("onnxruntime", "tensorrt")}
FLAGS = ("--duration", 0, "--effort", 0, "--target", "onnxruntime,tensorrt")


@pytest.fixture(scope="module")
def built(small_cnn, pictures, tmp_path_factory):
    folder = tmp_path_factory.mktemp("printed") / "build"
    return calib8.build(small_cnn, pictures, out=folder, **QUICK), folder


def cases(small_cnn, pictures, folder):
    """Yield (result, the command of the same name)."""
    engine = folder / "small_cnn.int8.onnx"
    images = ("--images", pictures)
    yield calib8.report(folder), ("report", folder)
    yield calib8.report(folder, folder), ("report", folder, folder)
    yield calib8.explain(folder), ("explain", folder)
    yield calib8.explain(folder, targets=["tensorrt"]), ("explain", folder, "--target", "tensorrt")
    yield calib8.verify(folder), ("verify", folder)
    yield calib8.doctor(), ("doctor",)
    yield calib8.quantize([0.5, -1.0]), ("quantize", "[0.5, -1.0]")
    targets = ("onnxruntime", "tensorrt")
    inspection = calib8.inspect(small_cnn, targets=targets)
    yield inspection, ("inspect", small_cnn, "--target", ",".join(targets))
    comparison = calib8.compare(small_cnn, engine, pictures)
    yield comparison, ("compare", small_cnn, engine, *images, "--limit", 20)
    check = calib8.check(folder, pictures, duration_s=0)
    yield check, ("check", folder, *images, "--duration", 0)


def test_printed_results_are_what_commands_print(built, small_cnn, pictures, run):
    folder = built[1]
    kinds = set()
    for result, command in cases(small_cnn, pictures, folder):
        assert isinstance(result, PrintedResult)
        assert f"{result}\n".strip() == run(*command)[1].strip(), command[0]
        assert result._repr_html_().startswith(("<pre>", "<iframe"))
        kinds.add(type(result))
    assert len(kinds) == 8


def test_printed_calibration_is_the_commands(small_cnn, pictures, tmp_path, run):
    cache = tmp_path / "c.cache"
    run.ok("calibrate", small_cnn, "--images", pictures, "-o", cache)
    result = calib8.calibrate(small_cnn, pictures, cache=cache)  # that of the command, reused
    again = run.ok("calibrate", small_cnn, "--images", pictures, "-o", cache)
    assert f"{result}\n" == again


def test_every_public_function_returns_a_printed_result():
    """Models, arrays and bytes print as they are; the others are what the commands print."""
    names = set(calib8._IMPORT_PATHS) - {"load", "torch", "ascend", "cache"}
    functions = filter(inspect.isfunction, (getattr(calib8, name) for name in names))
    results = set()
    for function in functions:
        hint = inspect.signature(function).return_annotation
        for name in getattr(hint, "__name__", str(hint)).split(" | "):
            results.add(getattr(inspect.getmodule(function), name.rpartition(".")[2]))
    assert len(results) == 9
    assert all(issubclass(result, PrintedResult) for result in results)


def test_rows_name_the_target_of_each(built):
    report, _ = built
    nodes = report.rows("nodes")
    assert {row["target"] for row in nodes} == {"onnxruntime", "tensorrt"}
    assert sum(row["precision"] == "uint8" for row in nodes) > 0
    engines = {row["label"]: row for row in report.rows("engines")}
    outputs = report.engine("tensorrt").accuracy.outputs
    assert engines["tensorrt"]["verdict.level"] == report.engine("tensorrt").verdict.level
    assert [row["sqnr_db"] for row in report.rows("outputs")][-1] == outputs[0].sqnr_db
    assert {row["role"] for row in report.rows("files")} >= {"int8 engine", "report"}
    assert all(np.isscalar(value) or value is None for row in nodes for value in row.values())


def test_unknown_table_is_refused_with_its_names(built):
    with pytest.raises(ConfigError, match="did you mean 'layers'"):
        built[0].rows("layer")


def test_effort_is_given_once(small_cnn, pictures, tmp_path):
    with pytest.raises(ConfigError, match="1 and 2"):
        calib8.build(small_cnn, pictures, out=tmp_path, effort=1, tuning=calib8.Tuning(effort=2))
