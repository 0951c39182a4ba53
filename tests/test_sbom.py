"""The bill of materials: its form, and that equal wheels give equal bytes."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "sbom.py"
METADATA = """Metadata-Version: 2.4
Name: Calib8.Test
Version: 1.2.3
License-Expression: Apache-2.0
License-File: LICENSE
Requires-Dist: numpy>=1.24
Requires-Dist: tomli>=2.0; python_version < "3.5"
Requires-Dist: torch; extra == "torch"
"""


def wheel(folder, text=METADATA):
    path = folder / "calib8_test-1.2.3-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        member = zipfile.ZipInfo("calib8_test-1.2.3.dist-info/METADATA", (1980, 1, 1, 0, 0, 0))
        archive.writestr(member, text)
    return path


def run(path, out):
    words = [sys.executable, str(SCRIPT), str(path), "--out", str(out)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_the_bill_names_what_the_wheel_needs_and_its_licences(tmp_path):
    done = run(wheel(tmp_path), tmp_path / "out")
    assert done.returncode == 0, done.stderr
    bill = json.loads((tmp_path / "out" / "sbom.cdx.json").read_text())
    own = bill["metadata"]["component"]
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    assert own["purl"] == "pkg:pypi/calib8-test@1.2.3"
    assert (
        own["licenses"] == [{"expression": "Apache-2.0"}] and len(own["hashes"][0]["content"]) == 64
    )
    (numpy,) = bill["components"]  # neither an extra nor a condition of elsewhere
    assert numpy["name"] == "numpy" and numpy["licenses"]
    edges = {edge["ref"]: edge["dependsOn"] for edge in bill["dependencies"]}
    assert edges == {own["purl"]: [numpy["purl"]], numpy["purl"]: []}
    table = (tmp_path / "out" / "licences.md").read_text()
    assert "| calib8-test | 1.2.3 | Apache-2.0 | LICENSE |" in table and "| numpy | " in table


def test_equal_wheels_give_equal_bytes(tmp_path):
    def written(name, text=METADATA):
        (tmp_path / name).mkdir()
        assert run(wheel(tmp_path / name, text), tmp_path / name).returncode == 0
        return [(tmp_path / name / f).read_bytes() for f in ("sbom.cdx.json", "licences.md")]

    assert written("a") == written("b") != written("c", METADATA.replace("1.2.3", "1.2.4"))


@pytest.mark.parametrize("text", ["Name: x\nVersion: 1\nRequires-Dist: not-here-at-all\n", None])
def test_what_cannot_be_listed_is_refused(tmp_path, text):
    path = tmp_path / "no.whl"
    path.write_text("x")
    done = run(path if text is None else wheel(tmp_path, text), tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert ("must be installed" if text else "a wheel has one METADATA") in done.stderr
