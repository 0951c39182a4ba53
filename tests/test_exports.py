"""What the packages hand on: every name in `__all__` is there, and importing costs little."""

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import deploy
from deploy.errors import SdkMissingError

ROOT = Path(__file__).parent.parent
PACKAGES = sorted(
    ".".join(path.parent.relative_to(ROOT).parts)
    for package in ("calibrators", "deploy")
    for path in (ROOT / package).rglob("__init__.py")
)


def imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except SdkMissingError as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("name", PACKAGES)
def test_every_exported_name_is_there_once(name):
    package = imported(name)
    exported = list(getattr(package, "__all__", []))
    assert len(exported) == len(set(exported))
    for item in exported:
        assert getattr(package, item) is not None, item


@pytest.mark.parametrize("name", PACKAGES)
def test_every_package_says_what_it_is(name):
    assert (imported(name).__doc__ or "").strip()


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*(name.split('.')[0] for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("statement", ["import deploy", "import deploy.cli"])
def test_importing_deploy_loads_no_heavy_library(statement):
    heavy = {"numpy", "onnx", "onnxruntime", "cv2", "torch", "tensorrt", "tqdm"}
    assert not loaded_by(statement) & heavy


def test_importing_calibrators_loads_no_model_library():
    assert not loaded_by("import calibrators") & {"onnx", "onnxruntime", "torch", "deploy"}


def test_the_version_is_a_plain_string():
    assert deploy.__version__.count(".") == 2
