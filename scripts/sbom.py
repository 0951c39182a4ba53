"""The bill of materials of a wheel, and the licences of what it needs, by the packages' own words.

    python scripts/sbom.py calib8-0.1.0-py3-none-any.whl --out FOLDER

The wheel's own metadata says what it needs; what that is on this machine, and what it needs in
turn, is read from the packages that are installed beside the interpreter that runs this. Written
are `sbom.cdx.json` (CycloneDX 1.5) and `licences.md`. Both hold no time and no path: the same wheel
and the same packages give the same bytes. A package may bundle libraries (OpenCV does); its own
licence files tell of them, and are named.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import uuid
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from importlib import metadata
from pathlib import Path
from typing import Any

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_CLASSIFIER = "License :: "
_UNKNOWN = "not said"


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """What a package says of itself.

    Attributes:
        name: normalized, as in a package URL.
        version: of it.
        licence: an SPDX expression, or the package's own words.
        expression: whether it is one.
        files: names of its licence files.
        needs: names of the packages that it needs here.
    """

    name: str
    version: str
    licence: str
    expression: bool
    files: tuple[str, ...]
    needs: tuple[str, ...]

    @property
    def purl(self) -> str:
        """Its package URL."""
        return f"pkg:pypi/{self.name}@{self.version}"


def of_wheel(wheel: Path) -> Package:
    """The package in a wheel.

    Raises:
        SystemExit: it is none.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            (place,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
            return _package(Parser().parsestr(archive.read(place).decode()))
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise SystemExit(f"a wheel has one METADATA, got {wheel}: {error}") from error


def needed(root: Package) -> list[Package]:
    """What a package needs, directly or not, as it is installed here; sorted by name.

    Raises:
        SystemExit: something that it needs on every machine is not installed.
    """
    found: dict[str, Package] = {}
    waiting = list(root.needs)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = _package(metadata.metadata(name))
            waiting += found[name].needs
    return [found[name] for name in sorted(found)]


def _package(said: Message) -> Package:
    expression = said.get("License-Expression")
    return Package(
        name=_normal(str(said["Name"])),
        version=str(said["Version"]),
        licence=expression or _licence(said),
        expression=expression is not None,
        files=tuple(sorted(said.get_all("License-File") or ())),
        needs=tuple(sorted(set(_needs(said)))),
    )


def _licence(said: Message) -> str:
    """The field, where it is no whole text; else what the classifiers say."""
    field = str(said.get("License") or "").strip()
    if field and "\n" not in field and len(field) <= 80:
        return field
    rows = [str(row) for row in said.get_all("Classifier") or ()]
    words = [row.rpartition(" :: ")[2] for row in rows if row.startswith(_CLASSIFIER)]
    return " and ".join(words) or _UNKNOWN


def _needs(said: Message) -> Iterator[str]:
    """Names of what is needed here: extras are nobody's need, a condition may be of elsewhere."""
    for row in said.get_all("Requires-Dist") or ():
        words, _, condition = str(row).partition(";")
        match = _NAME.match(words.strip())
        if match is None or "extra" in condition:
            continue
        name = _normal(match[0])
        if _installed(name):
            yield name
        elif not condition:
            raise SystemExit(f"{said['Name']} needs {name}, which must be installed to be listed")


def _installed(name: str) -> bool:
    try:
        metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def bill(root: Package, packages: Sequence[Package], sha256: str) -> str:
    """CycloneDX 1.5 as JSON; `sha256`: of the wheel."""
    own = _component(root) | {"hashes": [{"alg": "SHA-256", "content": sha256}]}
    rows = [root, *packages]
    known = {package.name: package.purl for package in rows}
    document: dict[str, Any] = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": own},
        "components": [_component(package) for package in packages],
        "dependencies": [
            {"ref": package.purl, "dependsOn": sorted(known[name] for name in package.needs)}
            for package in rows
        ],
    }
    whole = json.dumps(document, sort_keys=True)
    document["serialNumber"] = f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, whole)}"
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def _component(package: Package) -> dict[str, Any]:
    said = {"expression": package.licence} if package.expression else None
    return {
        "type": "library",
        "bom-ref": package.purl,
        "name": package.name,
        "version": package.version,
        "purl": package.purl,
        "licenses": [said or {"license": {"name": package.licence}}],
    }


def licences(root: Package, packages: Iterable[Package]) -> str:
    """The list as Markdown."""
    lines = [
        f"# Licences of {root.name} {root.version} and of what it needs",
        "",
        "| package | version | licence | its licence files |",
        "| --- | --- | --- | --- |",
    ]
    for package in (root, *packages):
        cells = (package.name, package.version, package.licence, ", ".join(package.files) or "-")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--out", type=Path, default=Path())
    asked = parser.parse_args()
    root = of_wheel(asked.wheel)
    packages = needed(root)
    asked.out.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(asked.wheel.read_bytes()).hexdigest()
    (asked.out / "sbom.cdx.json").write_text(bill(root, packages, digest), "utf-8")
    (asked.out / "licences.md").write_text(licences(root, packages), "utf-8")
    print(f"{root.name} {root.version} and {len(packages)} packages: {asked.out}/sbom.cdx.json")


if __name__ == "__main__":
    main()
