"""What the packages hand on: every name in `__all__` is there, and importing costs little."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import calib8
import deploy
import deploy.errors
from deploy.errors import SdkMissingError
from deploy.targets import TARGETS
from deploy.tuning.search_options import DEFAULT_EFFORT, EFFORTS

ROOT = Path(__file__).parent.parent
PACKAGES = sorted(
    ".".join(path.parent.relative_to(ROOT).parts)
    for package in ("calibrators", "deploy")
    for path in (ROOT / package).rglob("__init__.py")
)


def test_every_package_says_what_it_is_and_exports_names_that_are_there():
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


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*(name.split('.')[0] for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    ["import deploy", "import deploy.cli", "import calib8", "import calib8; dir(calib8)"],
)
def test_importing_deploy_loads_no_heavy_library(statement):
    heavy = {"numpy", "onnx", "onnxruntime", "cv2", "torch", "tensorrt", "tqdm"}
    assert not loaded_by(statement) & heavy


def test_importing_calibrators_loads_no_model_library():
    assert not loaded_by("import calibrators") & {"onnx", "onnxruntime", "torch", "deploy"}


def test_the_version_is_a_plain_string():
    assert deploy.__version__.count(".") == 2


def checked(path: str) -> set[str]:
    """Names that a file hands to type checkers alone."""
    body = ast.parse((ROOT / path).read_text("utf-8")).body
    (block,) = [n for n in body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    return {alias.name for node in block.body for alias in node.names}


def test_the_face_is_whole():
    face = set(deploy.__all__)
    assert {"build", "calibrate", "bench", "inspect", "load", "Preprocess", "Method"} < face
    assert {"CachePolicy", "Report", "TARGETS", "__version__"} < face
    assert {kind.__name__ for kind in TARGETS.values()} < face
    assert set(deploy.errors.__all__) == {name for name in face if name.endswith("Error")}
    assert checked("deploy/__init__.py") == face - {"__version__"}
    for module in (deploy, calib8):
        assert face == {n for n in dir(module) if not n.startswith("__")} | {"__version__"}


def test_every_error_is_of_the_tree():
    for name in deploy.errors.__all__:
        assert issubclass(getattr(deploy, name), deploy.Calib8Error)


def test_the_projects_own_name_gives_the_same():
    assert calib8.__all__ == deploy.__all__ and set(deploy.__all__) <= set(dir(calib8))
    for name in deploy.__all__:
        assert getattr(calib8, name) is getattr(deploy, name)
    assert checked("calib8.py") == {"*"}


@pytest.mark.parametrize("package", [deploy, calib8])
def test_a_name_that_is_not_there_is_refused(package):
    with pytest.raises(AttributeError, match=f"{package.__name__}.*no attribute 'biuld'"):
        package.biuld  # noqa: B018


def test_an_inspection_fits_a_screen_and_tells_every_node(small_cnn):
    found = deploy.inspect(small_cnn, target="tensorrt")
    assert {node.name for node in found.nodes if node.op == "Gemm"} == {"Gemm_logits"}
    assert found.tensors and "tensors need a scale" in repr(found)
    assert "Flatten is not run in int8 on tensorrt" in repr(found)
    assert "Flatten_f" not in repr(found) and "Flatten_f" in found.text(everything=True)


@pytest.mark.slow
def test_the_documented_examples_run(small_cnn, pictures, tmp_path, monkeypatch, capsys):
    """docs/python.md, its examples one after the other in one namespace."""
    (tmp_path / "model.onnx").write_bytes(small_cnn.read_bytes())
    (tmp_path / "photos").symlink_to(pictures)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("deploy.tuning.timing._SECONDS", 0)  # no figure of these is looked at
    page = (ROOT / "docs" / "python.md").read_text("utf-8")
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(examples) >= 5
    held: dict[str, object] = {}
    for example in examples:
        exec(compile(example, "docs/python.md", "exec"), held)
    said = capsys.readouterr().out
    assert "a method is one of" in said and "Latency of model.onnx and model.int8.onnx" in said


def test_the_documented_efforts_are_those_of_the_search():
    page = (ROOT / "docs" / "accuracy.md").read_text("utf-8")
    for number, effort in EFFORTS.items():
        row = f"{effort.samples} | {effort.alone} | {effort.whole} |"
        assert re.search(rf"^\| {number}( \(default\))? \| {re.escape(row)}", page, re.MULTILINE)
    assert f"| {DEFAULT_EFFORT} (default) |" in page
