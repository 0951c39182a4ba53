"""Public classes explain their fields to `help()`."""

import dataclasses
import inspect
import re

import msgspec
import pytest

import calib8
from deploy.calibration.calibration_result import CalibrationResult
from deploy.report import model as report_model
from deploy.targets import TARGETS


def public_classes() -> list[type]:
    """Classes that users name or get hold of, each once."""
    classes = [*TARGETS.values(), CalibrationResult]
    for module in (calib8, report_model):
        classes += [
            value for name in dir(module) if is_public_class(value := getattr(module, name))
        ]
    classes.remove(report_model.Findings)  # Report, which users get, explains its fields
    return sorted(set(classes), key=lambda kind: kind.__qualname__)


def is_public_class(value: object) -> bool:
    return inspect.isclass(value) and value.__module__.startswith(("deploy", "calib8"))


def field_names(kind: type) -> list[str]:
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    if issubclass(kind, msgspec.Struct):
        return list(kind.__struct_fields__)
    return []


@pytest.mark.parametrize("kind", public_classes(), ids=lambda kind: kind.__qualname__)
def test_every_field_stands_under_attributes(kind):
    documentation = "\n".join(inspect.getdoc(parent) or "" for parent in kind.__mro__[:-1])
    attributes = documentation.partition("Attributes:")[2]
    entries = re.findall(r"^ {4}([\w, ]+):", attributes, re.MULTILINE)
    described = {name for entry in entries for name in entry.split(", ")}
    public = {name for name in field_names(kind) if not name.startswith("_")}
    assert public - described == set()
