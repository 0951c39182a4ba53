"""The package: imports and exports, notebooks and bill of materials."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.errors import SdkMissingError
from scripts import notebooks, sbom
from tests.test_tutorials import is_alike

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = sorted(
    ".".join(path.parent.relative_to(ROOT).parts)
    for package in ("calibrators", "deploy")
    for path in (ROOT / package).rglob("__init__.py")
)


def test_packages_have_docstrings_and_valid_exports():
    for name in PACKAGES:
        try:
            package = importlib.import_module(name)
        except SdkMissingError:  # torch's half
            continue
        assert (package.__doc__ or "").strip(), name
        exported = list(getattr(package, "__all__", []))
        assert len(exported) == len(set(exported)), name
        for item in exported:
            assert getattr(package, item) is not None, f"{name}.{item}"


@pytest.mark.parametrize(
    "statement",
    [
        "deploy",
        "deploy.cli",
        "calib8; dir(calib8)",
        "calib8.torch; dir(calib8.torch)",
        "calibrators",
    ],
)
def test_import_loads_no_heavy_library(statement):
    program = f"import sys; import {statement}; print(*sys.modules)"
    command = [sys.executable, "-c", program]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    packages = {name.partition(".")[0] for name in process.stdout.split()}
    forbidden = {"onnx", "onnxruntime", "torch"}
    if statement == "calibrators":
        forbidden |= {"deploy"}
    else:
        forbidden |= {"numpy", "cv2", "tensorrt", "tqdm", "msgspec"}
    assert not packages & forbidden


def test_onnxruntime_stores_nothing(small_cnn, tmp_path):
    model = small_cnn.read_bytes()
    code = f"from deploy.runtimes.ort import OrtSession; OrtSession.open({model!r})"
    homes = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "TMPDIR"), str(tmp_path))
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=homes, check=True)
    assert not list(tmp_path.iterdir())


NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def stored_outputs(path: Path) -> list[tuple[str, dict[str, object]]]:
    """Return for each code cell what it printed, and its first value by media type."""
    outputs = []
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        texts = ["".join(out["text"]) for out in cell["outputs"] if "text" in out]
        values = [out["data"] for out in cell["outputs"] if "data" in out]
        outputs.append(("".join(texts), values[0] if values else {}))
    return outputs


@pytest.mark.slow
@pytest.mark.release  # the tutorials run the same commands
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_gives_its_stored_outputs(path, tmp_path):
    if path.stem == "pytorch":
        pytest.importorskip("torch", reason="this notebook needs torch: calib8[torch]")
    results = list(notebooks.run_cells(path, tmp_path))
    for (stored, forms), (printed, value) in zip(stored_outputs(path), results, strict=True):
        assert is_alike(stored, printed), f"stored:\n{stored}\nprinted:\n{printed}"
        text = "" if value is None else repr(value)
        assert is_alike("".join(forms.get("text/plain", "")), text), text
        if "image/png" in forms:
            assert "<iframe" in value._repr_html_()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_stores_report_without_paths(path):
    stored = stored_outputs(path)
    assert sum("image/png" in forms for _, forms in stored) == 1
    texts = [printed + "".join(forms.get("text/plain", "")) for printed, forms in stored]
    assert not re.search(r"/(tmp|root|home|work|usr)\b", "\n".join(texts))
    assert 2 <= len(NOTEBOOKS) <= 4


def test_bill_of_materials_holds_no_path():
    numpy = {"bom-ref": "numpy==2", "name": "numpy", "version": "2"}
    numpy["licenses"] = [{"license": {"name": "License :: OSI Approved :: BSD | x"}}]
    calib8_row = {"bom-ref": "calib8==1", "name": "calib8", "version": "1"}
    calib8_row["licenses"] = [{"expression": "Apache-2.0"}]
    calib8_row["externalReferences"] = [{"url": "file:///home/user/calib8"}]
    pip = {"bom-ref": "pip==9", "name": "pip", "version": "9"}
    environment = {
        "metadata": {},
        "components": [calib8_row, numpy, pip],
        "dependencies": [{"ref": "pip==9"}, {"ref": "calib8==1", "dependsOn": ["numpy==2"]}],
    }
    bill = sbom.bill_of_wheel(environment, "ab12")
    assert bill["components"] == [numpy]
    assert bill["metadata"]["component"]["hashes"] == [{"alg": "SHA-256", "content": "ab12"}]
    assert [row["ref"] for row in bill["dependencies"]] == ["calib8==1"]
    assert "file://" not in json.dumps(bill)
    table = sbom.licence_table(bill)
    assert "| calib8 | 1 | Apache-2.0 |" in table
    assert "| numpy | 2 | BSD \\| x |" in table
