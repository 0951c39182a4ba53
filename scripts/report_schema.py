"""The contract of report.json: a JSON Schema and a page, made from the classes of the report.

    python scripts/report_schema.py     writes docs/report.schema.json

`tests/test_report_contract.py` holds that the file is the one that the classes give, that every key
is described, and that reports keep to it. A change of the file is a change of the contract.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

from deploy.metrics.output_errors import NOT_WRITTEN
from deploy.report import Report
from deploy.report.model import SCHEMA
from deploy.report.previews import PAGE_ONLY

FILE = Path(__file__).resolve().parents[1] / "docs" / "report.schema.json"
NUMBER = {"$ref": "#/$defs/Number"}
# Fields of a class that are not written, and what is written besides.
UNWRITTEN = {"Accuracy": NOT_WRITTEN, "Latency": ("samples_ms",)}
ADDED = {
    "Latency": {
        "warnings": {
            "type": "array",
            "items": {"type": "string"},
            "description": "sentences on measurements that are not steady.",
        }
    },
    "Report": {"schema": {"const": SCHEMA, "description": "name and number of this contract."}},
}
RULES = f"""\
This page describes `report.json` and the `--json` of `build`, `check` and `bench`, whose schema is
`"{SCHEMA}"`. [report.schema.json](../report.schema.json) has the same as a JSON Schema.

- A key keeps its name, type, unit and meaning; a change of these changes the number of the schema.
- New keys may be added: ignore keys that you do not know.
- A key without a value is left out, or null ("None" on this page); a key with `?` may be left out.
- A number that JSON cannot represent is `"inf"`, `"-inf"` or `"nan"`.
- Sentences (`notes`, `alerts`, `reasons`, `reason`, `words`, `why`, `form`, `settled`) are for
  people, and may change.
"""


def describe_fields(kind: type) -> dict[str, str]:
    """Return field -> its text in the section `Attributes:` of a class docstring."""
    text = (kind.__doc__ or "").partition("Attributes:\n")[2]
    texts: dict[str, str] = {}
    names: list[str] = []
    for line in text.splitlines():
        entry = re.match(r" {8}(\w+(?:, \w+)*): (.*)", line)
        if entry:
            names = entry[1].split(", ")
            texts |= dict.fromkeys(names, entry[2])
        elif names and re.match(r" {9,}\S", line):
            texts |= {name: f"{texts[name]} {line.strip()}" for name in names}
        else:
            names = []
    return texts


def find_classes(kind: type) -> dict[str, type]:
    """Return name -> class of a dataclass and of all dataclasses in its fields."""
    classes = {kind.__name__: kind}
    hints = get_type_hints(kind)
    for stored_field in fields(kind):
        if stored_field.metadata == PAGE_ONLY:  # for the page alone
            continue
        for inner in _dataclasses_in(hints[stored_field.name]):
            if inner.__name__ not in classes:
                classes |= find_classes(inner)
    return classes


def _dataclasses_in(hint: Any) -> Iterator[type]:
    if is_dataclass(hint) and isinstance(hint, type):
        yield hint
    for argument in get_args(hint):
        yield from _dataclasses_in(argument)


def make_schema() -> dict[str, Any]:
    """Return the JSON Schema of a report."""
    raw = msgspec.json.schema(Report, schema_hook=lambda kind: {"title": "any value"})
    definitions = {}
    for name, kind in sorted(find_classes(Report).items()):
        properties = _describe_class(name, kind, raw["$defs"][name]["properties"])
        # those without a default: the others may be missing in a report of an earlier version
        required = [key for key in raw["$defs"][name].get("required", []) if key in properties]
        first_line = (kind.__doc__ or "").strip().partition("\n")[0].partition(";")[0].rstrip(".")
        definitions[name] = {
            "type": "object",
            "description": f"{first_line}.",
            "properties": properties,
            "required": required,
        }
    definitions["Number"] = {"anyOf": [{"type": "number"}, {"enum": ["inf", "-inf", "nan"]}]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": SCHEMA,
        "$ref": "#/$defs/Report",
        "$defs": definitions,
    }


def _describe_class(name: str, kind: type, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return key -> its type and description."""
    texts = describe_fields(kind)
    properties: dict[str, Any] = {}
    for stored_field in fields(kind):
        key = stored_field.name
        if key in UNWRITTEN.get(name, ()) or stored_field.metadata == PAGE_ONLY:
            continue
        properties[key] = {**_plain_type(raw[key]), "description": texts[key]}
    return properties | ADDED.get(name, {})


def _plain_type(raw: Any) -> dict[str, Any]:
    """Return msgspec's schema of a type without defaults, with numbers as a report writes them."""
    if raw.get("type") == "number":
        return dict(NUMBER)
    kept = {key: raw[key] for key in ("$ref", "type", "const", "enum", "title") if key in raw}
    for key in ("items", "additionalProperties"):
        if isinstance(raw.get(key), dict):
            kept[key] = _plain_type(raw[key])
    if "anyOf" in raw:
        kept["anyOf"] = [_plain_type(option) for option in raw["anyOf"]]
    if "prefixItems" in raw:
        kept["prefixItems"] = [_plain_type(option) for option in raw["prefixItems"]]
    return kept


def type_text(value: Mapping[str, Any]) -> str:
    """Return a type of the schema as text, with links to the classes of the page."""
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return "number" if name == "Number" else f"[{name}](#{name.lower()})"
    if "const" in value:
        return f"`{json.dumps(value['const'])}`"
    if "anyOf" in value:
        options = [type_text(option) for option in value["anyOf"] if option.get("type") != "null"]
        return " or ".join(options)
    if value.get("type") == "array":
        if "prefixItems" in value:
            return f"[{', '.join(map(type_text, value['prefixItems']))}]"
        return f"list of {type_text(value.get('items', {}))}"
    if value.get("type") == "object":
        return f"map to {type_text(value.get('additionalProperties', {}))}"
    return str(value.get("type", "any"))


def page() -> str:
    """Return the page of the contract in Markdown: the rules, and a table for each class."""
    schema = make_schema()
    definitions = dict(schema["$defs"])
    del definitions["Number"]
    report = {"Report": definitions.pop("Report")}
    lines = ["# report.json, key by key", "", RULES]
    for name, definition in (report | definitions).items():
        lines += [f"## {name}", "", definition["description"], "", "| key | type | |"]
        lines.append("| --- | --- | --- |")
        for key, value in definition["properties"].items():
            text = re.sub(r"([\\*_\[\]|<])", r"\\\1", value["description"])
            mark = "" if key in definition["required"] else "?"
            lines.append(f"| `{key}`{mark} | {type_text(value)} | {text} |")
        lines.append("")
    return "\n".join([*lines, ""])


def schema_text() -> str:
    """Return the text of the file."""
    return json.dumps(make_schema(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(schema_text(), encoding="utf-8")
