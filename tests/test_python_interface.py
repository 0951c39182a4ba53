"""The Python interface: names of calib8, and calls that read, quantize and verify."""

from __future__ import annotations

import ast
import doctest
import inspect
import math
import re
from pathlib import Path

import click
import numpy as np
import pytest

import calib8
from deploy import errors
from deploy.cli import COMMANDS, cli
from deploy.targets import TARGETS

ROOT = Path(__file__).resolve().parents[1]


def test_public_names_are_complete():
    public_names = set(calib8._IMPORT_PATHS)
    assert calib8.__version__.count(".") == 2
    assert {"build", "calibrate", "bench", "inspect", "load", "Preprocess", "Method"} < public_names
    assert {"CachePolicy", "Report", "TARGETS", "__version__"} < public_names
    assert {kind.__name__ for kind in TARGETS.values()} < public_names
    assert {name for name in public_names if name.endswith("Error")} == set(errors.__all__)
    assert all(issubclass(getattr(calib8, name), calib8.Calib8Error) for name in errors.__all__)
    assert public_names == public_names_of(calib8) | {"__version__"}


@pytest.mark.parametrize("package", [calib8, calib8.torch])
def test_unknown_attribute_is_refused(package):
    with pytest.raises(AttributeError, match=f"{package.__name__}.*no attribute 'biuld'"):
        package.biuld  # noqa: B018


def test_inspection_repr_is_short(small_cnn):
    inspection = calib8.inspect(small_cnn, targets="tensorrt")
    (target,) = inspection.targets
    assert {node.name for node in target.nodes if node.op == "Gemm"} == {"Gemm_logits"}
    assert target.tensors
    assert "tensors need a scale" in repr(inspection)
    assert "Flatten is not run in int8 on tensorrt" in repr(inspection)
    assert "Flatten_f" not in repr(inspection)
    assert "Flatten_f" in inspection.to_screen(everything=True)


@pytest.mark.slow
def test_documented_python_examples_run(small_cnn, pictures, tmp_path, monkeypatch, capsys):
    """docs/python.md, its examples one after the other in one namespace."""
    (tmp_path / "model.onnx").write_bytes(small_cnn.read_bytes())
    (tmp_path / "photos").symlink_to(pictures)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("deploy.tuning.timing._SPLIT_S", 0.01)  # no figure of these is looked at
    page = (ROOT / "docs" / "python.md").read_text("utf-8")
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(examples) >= 5
    namespace: dict[str, object] = {}
    for example in examples:
        exec(compile(example, "docs/python.md", "exec"), namespace)
    output = capsys.readouterr().out
    assert "a method is one of" in output
    assert "Latency of model.onnx and model.int8.onnx" in output


@pytest.mark.slow
@pytest.mark.parametrize("examples", ["printed_results", "printed_results_torch"])
def test_results_print_what_their_commands_print(examples, tmp_path, monkeypatch):
    if examples.endswith("torch"):
        pytest.importorskip("torch")
    (tmp_path / "datasets").symlink_to(ROOT / "datasets")
    monkeypatch.chdir(tmp_path)
    tried = doctest.testfile(
        str(ROOT / "tests" / f"{examples}.txt"),
        module_relative=False,
        globs={"calib8": calib8},
        optionflags=doctest.ELLIPSIS,
    )
    assert tried.attempted > 10
    assert not tried.failed


def test_paths_may_be_strings():
    for module in (calib8, calib8.ascend, calib8.cache):
        for name in public_names_of(module):
            function = getattr(module, name)
            if not inspect.isfunction(function):
                continue
            for parameter in inspect.signature(function).parameters.values():
                annotation = str(parameter.annotation)
                assert "Path" not in annotation or "str" in annotation, (name, parameter)


TORCH_COMMANDS = {"trace", "profile", "fuse", "qat", "export"}


def public_names_of(module) -> set[str]:
    return {name for name in dir(module) if not name.startswith("__")}


def test_every_command_is_a_public_name():
    groups = {name for name in COMMANDS if isinstance(cli.get_command(None, name), click.Group)}
    assert set(COMMANDS) - TORCH_COMMANDS <= public_names_of(calib8)
    assert all(callable(getattr(calib8, name)) for name in set(COMMANDS) - TORCH_COMMANDS - groups)
    assert public_names_of(calib8.torch) > TORCH_COMMANDS
    for group in groups:  # what cannot be a function is made with others: build, read
        subcommands = {name.replace("-", "_") for name in cli.get_command(None, group).commands}
        assert subcommands - {"auto", "config", "show"} <= public_names_of(getattr(calib8, group))


def test_type_checked_names_match_lazy_imports():
    for path, module in {"calib8/__init__.py": calib8, "calib8/torch.py": calib8.torch}.items():
        body = ast.parse((ROOT / path).read_text("utf-8")).body
        (block,) = [n for n in body if isinstance(n, ast.If) and "not" not in ast.unparse(n.test)]
        lines = [line for line in block.body if isinstance(line, ast.ImportFrom)]
        typed_names = {line.targets[0].id for line in block.body if isinstance(line, ast.Assign)}
        typed_paths = set()
        for line in lines:
            for alias in line.names:
                if alias.asname is not None:  # a checker shows `X as X` alone to users
                    typed_names.add(alias.asname)
                typed_paths.add(f"{line.module}:{alias.name}".replace("calib8:", "calib8."))
        expected = set(module._IMPORT_PATHS) - set(errors.__all__)
        assert typed_names == expected
        assert typed_paths - {"deploy.errors:*"} == {module._IMPORT_PATHS[n] for n in expected}


def test_python_help_names_everything_briefly():
    import pydoc

    text = pydoc.render_doc(calib8, renderer=pydoc.plaintext)
    assert len(text.splitlines()) < 66
    help_words = set(re.findall(r"\w+", text.partition("PACKAGE CONTENTS")[0]))
    assert public_names_of(calib8) - (set(errors.__all__) - {"Calib8Error"}) <= help_words
    for part in ("torch", "ascend", "cache"):
        entry = re.search(rf"^ *calib8\.{part} .*(?:\n {{12,}}.*)*", text, re.MULTILINE)
        entry_words = set(re.findall(r"\w+", entry[0]))
        assert public_names_of(getattr(calib8, part)) - {"Task", "TrialInputs"} <= entry_words, part


def test_object_without_a_model_is_refused(pictures, wording):
    class Net:
        graph = None  # as a traced module has

    for take in (calib8.load, calib8.inspect, lambda net: calib8.build(net, pictures)):
        with pytest.raises(calib8.ModelError) as refusal:
            take(Net())
        wording.check(refusal.value)


def test_quantize_takes_method_or_scales(wording):
    searched = calib8.quantize([-1.0, 0.0, 1.0, 2.0], method="minmax", dtype="qint8")
    assert searched.quantized.stored.tolist()[-1] == 127
    assert "SQNR" in repr(searched)
    scaled = calib8.quantize([[0.5, 1.0], [2.0, 4.0]], scales=[0.5, 1], axis=0, dtype="qint8")
    assert scaled.quantized.stored.tolist() == [[1, 2], [2, 4]]
    alone = calib8.quantize([0.5, 1.0], scales=0.5, zero_points=3)
    assert alone.quantized.stored.tolist() == [4, 5]
    for options in ({"scales": [1.0], "method": "mse"}, {"zero_points": [3]}):
        with pytest.raises(calib8.ConfigError) as refusal:
            calib8.quantize([1.0], **options)
        wording.check(refusal.value)
    with pytest.raises(calib8.ConfigError) as refusal:
        calib8.quantize(["text"])
    wording.check(refusal.value)


@pytest.mark.parametrize("target", [calib8.TensorRT(rest="fp32"), calib8.TensorRT])
def test_target_may_stand_alone(target, small_cnn):
    images = np.ones((2, 3, 16, 16), np.float32)
    calibration = calib8.calibrate(small_cnn, images, targets=target)
    assert set(calibration.observations_by_target) == {"tensorrt"}


@pytest.mark.parametrize(
    "options",
    [
        {"duration_s": math.inf},
        {"duration_s": math.nan},
        {"duration_s": -1},
        {"threads": 1.5},
        {"threads": "2"},
        {"threads": 10**6},
    ],
)
def test_impossible_numbers_are_refused(options, small_cnn, tmp_path):
    images = np.ones((2, 3, 16, 16), np.float32)
    with pytest.raises(calib8.ConfigError):
        calib8.build(small_cnn, images, out=tmp_path / "build", effort=0, **options)


def test_numbers_of_numpy_and_any_path_are_accepted(small_cnn, tmp_path):
    class Location:
        def __fspath__(self):
            return str(tmp_path / "m.cache")

    images = [np.ones((1, 3, 16, 16), np.float32)]
    numbers = {"skip_bad": np.bool_(True), "until_stable": np.float32(0.5)}
    calib8.calibrate(small_cnn, images, cache=Location(), **numbers)
    assert (tmp_path / "m.cache").is_file()


def test_images_may_be_indexed_or_read_one_by_one(small_cnn):
    class Indexed:
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return np.full((1, 3, 16, 16), index, np.float32)

    class Reader:
        left = 2

        def get_next(self):
            self.left -= 1
            return None if self.left < 0 else {"x": np.ones((1, 3, 16, 16), np.float32)}

    for images in (Indexed(), Reader()):
        assert calib8.calibrate(small_cnn, images).feed.count == 2


@pytest.mark.parametrize(
    "options",
    [
        {"float_nodes": 5},
        {"float_nodes": [5]},
        {"repairs": 5},
        {"repairs": [5]},
        {"duration_s": "3"},
        {"tuning": 1},
        {"gates": {"max_loss": 0.1}},
        {"out": 5},
        {"out": ""},
        {"cache": ""},
        {"cache": b"cache"},
    ],
)
def test_arguments_of_wrong_types_are_refused(options, small_cnn, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    images = np.ones((2, 3, 16, 16), np.float32)
    with pytest.raises(calib8.ConfigError):
        calib8.build(small_cnn, images, effort=0, **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_python_reads_compares_and_verifies_builds(small_cnn, pictures, tmp_path):
    quick = {"duration_s": 0, "tuning": calib8.Tuning(effort=0), "limit": 4}
    for name in "ab":
        built = calib8.build(small_cnn, pictures, out=tmp_path / name, **quick)
    assert calib8.report(tmp_path / "a").title == built.title
    comparison = calib8.report(tmp_path / "a", tmp_path / "b")
    assert len(comparison.engines) == 2
    assert "onnxruntime" in repr(comparison)
    assert repr(calib8.explain(tmp_path / "b")).startswith(built.title)
    int8 = next((tmp_path / "b").glob("*.int8.onnx"))
    assert calib8.compare(str(small_cnn), str(int8), pictures).layers
    verification = calib8.verify(tmp_path / "b")
    assert verification.passed
    assert "files are as the build of small_cnn wrote them" in repr(verification)
    int8.write_bytes(b"")
    verification = calib8.verify(tmp_path / "b")
    assert not verification.passed
    assert verification.changed == {int8.name: "was changed after it was written"}


@pytest.mark.slow
def test_type_checker_knows_exactly_public_names(tmp_path, monkeypatch):
    api = pytest.importorskip("mypy.api", reason="mypy is not installed")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("MYPYPATH", str(ROOT))
    names = "calib8.build, calib8.Method, calib8.ModelError, calib8.doctor, calib8.cache.read"
    user = tmp_path / "user.py"
    user.write_text(
        f"import calib8\n({names}, calib8.torch.qat, calib8.torch.trace)\ncalib8.biuld\n"
    )
    output = api.run([str(user)])[0]
    assert output.count("error:") == 1
    assert '"biuld"' in output
