"""The contract of report.json: its schema is that of the classes, and reports keep to it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import calib8
from deploy.calibration.sample_checks import HalvesAgreement
from deploy.report import Report, to_json
from deploy.report.documents import read_report
from deploy.report.model import SCHEMA
from deploy.report.parts import CalibrationPart, EarlierPart, EngineRow
from deploy.report.verdict import Verdict
from scripts.report_schema import FILE, NUMBER, make_schema, page, schema_text

OLD_REPORT = Path(__file__).parent / "golden" / "formats" / "0.1.0" / "report.json"
TYPES = {"string": str, "integer": int, "boolean": bool, "array": list, "object": dict}
CONTRACT = make_schema()


def flaws(value: Any, schema: dict[str, Any], path: str = "report") -> list[str]:
    """Return the places of a document that break the schema, or that it does not describe."""
    if schema.get("$ref") == NUMBER["$ref"]:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return [] if is_number or value in ("inf", "-inf", "nan") else [path]
    if "$ref" in schema:
        return flaws(value, CONTRACT["$defs"][schema["$ref"].rpartition("/")[2]], path)
    if "const" in schema:
        return [] if value == schema["const"] else [path]
    if "anyOf" in schema:
        return min((flaws(value, option, path) for option in schema["anyOf"]), key=len)
    if schema.get("type") == "null":
        return [] if value is None else [path]
    if "type" not in schema:  # any value
        return []
    if not isinstance(value, TYPES[schema["type"]]):
        return [path]

    found = []
    if isinstance(value, list):
        for number, item in enumerate(value):
            positions = schema.get("prefixItems")
            item_schema = positions[number] if positions else schema["items"]
            found += flaws(item, item_schema, f"{path}[{number}]")
    elif isinstance(value, dict) and "properties" in schema:
        found += [f"{path}.{key} is missing" for key in set(schema["required"]) - value.keys()]
        for key, item in value.items():
            if key not in schema["properties"]:
                found.append(f"{path}.{key} is not described")
            else:
                found += flaws(item, schema["properties"][key], f"{path}.{key}")
    elif isinstance(value, dict):
        for key, item in value.items():
            found += flaws(item, schema["additionalProperties"], f"{path}.{key}")
    return found


def test_stored_schema_is_that_of_the_classes():
    """`python scripts/report_schema.py` writes it again: a change is one of the contract."""
    assert FILE.read_text("utf-8") == schema_text()
    assert CONTRACT["title"] == SCHEMA


def test_every_key_of_a_report_is_described():
    text = page()
    for name, definition in CONTRACT["$defs"].items():
        for key, value in definition.get("properties", {}).items():
            assert len(value["description"]) > 5, (name, key)
            assert f"| `{key}`" in text
    for name in set(CONTRACT["$defs"]) - {"Number"}:
        assert f"## {name}\n" in text


@pytest.mark.slow
def test_reports_keep_to_the_contract(detector, small_cnn, pictures, tmp_path):
    quick = {"duration_s": 0.02, "effort": 1, "out": tmp_path}
    targets = ("onnxruntime", "tensorrt", "ascend")
    calib8.build(
        small_cnn, pictures, targets=targets, labels=[1] * 20, eval_images=pictures, **quick
    )
    written = json.loads((tmp_path / "report.json").read_text())
    assert flaws(written, CONTRACT) == []
    engine = tmp_path / "small_cnn.int8.onnx"
    bench = calib8.bench(engine, against=small_cnn, duration_s=0.02, batches=[1, 2], profile=True)
    assert flaws(to_json(bench), CONTRACT) == []
    found = calib8.build(detector, pictures, duration_s=0, effort=0, out=tmp_path / "boxes")
    assert flaws(to_json(found), CONTRACT) == []


def test_report_of_an_earlier_version_keeps_to_the_contract():
    found = flaws(json.loads(OLD_REPORT.read_text()), CONTRACT)
    assert {flaw.partition(".search.")[2] for flaw in found} == {"tried is not described"}  # gone


@pytest.mark.parametrize("change", [{"title": 3}, {"engines": [{}]}, {"x": 1}])
def test_a_broken_report_is_noticed(change):
    assert flaws(to_json(Report()) | change, CONTRACT) != []


def test_differences_of_halves_are_read_back(tmp_path):
    agreement = HalvesAgreement(samples=4, within=0.2, tensors=3, differences={"a": 0.5, "b": 0.3})
    report = Report(
        engines=(EngineRow(label="FP32"),), calibration=CalibrationPart(agreement=agreement)
    )
    (tmp_path / "report.json").write_text(json.dumps(to_json(report)))
    read = read_report(tmp_path / "report.json")
    assert read.calibration.agreement == agreement
    assert to_json(read) == to_json(report)
    assert replace(read, title="b") != report


def test_empty_fields_are_read_back(tmp_path):
    """Those of a verdict have no default; a split of an earlier build may be gone."""
    earlier = EarlierPart(target="onnxruntime", text="good", split=None)
    engine = EngineRow(label="FP32", verdict=Verdict("good", ()))
    report = Report(engines=(engine,), earlier=(earlier,))
    (tmp_path / "report.json").write_text(json.dumps(to_json(report)))
    read = read_report(tmp_path / "report.json")
    assert (read.engines, read.earlier) == (report.engines, report.earlier)
    assert flaws(to_json(report), CONTRACT) == []
