"""Make the bill of materials of a wheel from that of the environment in which it is installed.

    python scripts/sbom.py ENVIRONMENT.json WHEEL --out FOLDER

ENVIRONMENT.json is what `cyclonedx-py environment --output-reproducible` writes. The bill names the
wheel and its digest as its subject, and leaves out this machine's paths and the tools that every
environment has; `licences.md` lists the same packages. Equal inputs give equal bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

TOOLS = ("pip", "setuptools", "wheel")
SUBJECT = "calib8"
MAX_DECLARED_CHARACTERS = 80


def bill_of_wheel(environment: dict[str, Any], digest: str) -> dict[str, Any]:
    """Return the bill of the wheel with this SHA-256 digest.

    Raises:
        SystemExit: calib8 is not among the components.
    """
    components = {row["name"]: row for row in environment["components"]}
    if SUBJECT not in components:
        raise SystemExit(f"the environment must have {SUBJECT} installed")
    subject = components.pop(SUBJECT)
    subject.pop("externalReferences", None)  # the path from which it was installed
    subject["hashes"] = [{"alg": "SHA-256", "content": digest}]

    tool_refs = {components.pop(name)["bom-ref"] for name in TOOLS if name in components}
    dependencies = [row for row in environment["dependencies"] if row["ref"] not in tool_refs]
    return environment | {
        "metadata": environment["metadata"] | {"component": subject},
        "components": list(components.values()),
        "dependencies": dependencies,
    }


def licence_names(component: dict[str, Any]) -> str:
    """Return the licences of a component: SPDX expressions, identifiers, or declared words."""
    names = []
    for row in component.get("licenses", []):
        licence = row.get("license", {})
        text = licence.get("text", {}).get("content", "")
        if "expression" in row:
            names.append(row["expression"])
        elif "id" in licence:
            names.append(licence["id"])
        elif not text:
            names.append(licence["name"].rpartition(" :: ")[2])
        elif len(text) <= MAX_DECLARED_CHARACTERS:  # a declared name; longer ones are whole texts
            names.append(text)
    return ", ".join(names) or "see its files"


def licence_table(bill: dict[str, Any]) -> str:
    """Return the packages and their licences as Markdown."""
    lines = ["| package | version | licence |", "| --- | --- | --- |"]
    for component in (bill["metadata"]["component"], *bill["components"]):
        licences = licence_names(component).replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {component['name']} | {component['version']} | {licences} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("environment", type=Path)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--out", type=Path, default=Path())
    arguments = parser.parse_args()
    digest = hashlib.sha256(arguments.wheel.read_bytes()).hexdigest()
    bill = bill_of_wheel(json.loads(arguments.environment.read_text("utf-8")), digest)

    arguments.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(bill, indent=1, sort_keys=True) + "\n"
    (arguments.out / "sbom.cdx.json").write_text(text, "utf-8")
    (arguments.out / "licences.md").write_text(licence_table(bill), "utf-8")
    print(f"{len(bill['components'])} packages beside {SUBJECT}: {arguments.out}/sbom.cdx.json")


if __name__ == "__main__":
    main()
