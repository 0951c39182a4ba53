"""The package: its names, notebooks, site, formats and bill of materials."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

import calib8
from calibrators.searches import SEARCHES
from deploy import errors
from deploy.cli import COMMANDS, cli
from deploy.errors import SdkMissingError
from deploy.feed.preprocess import PRESETS
from deploy.targets import TARGETS
from deploy.targets.options import declared_options
from deploy.tuning.search_options import DEFAULT_EFFORT, EFFORTS
from scripts import notebooks, sbom, site_pages
from tests.test_tutorials import TUTORIALS, alike

ROOT = Path(__file__).resolve().parents[1]
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


@pytest.mark.parametrize(
    "face",
    [
        "deploy",
        "deploy.cli",
        "calib8; dir(calib8)",
        "calib8.torch; dir(calib8.torch)",
        "calibrators",
    ],
)
def test_importing_a_package_loads_no_heavy_library(face):
    code = f"import sys; import {face}; print(*(name.split('.')[0] for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    own = {"deploy"} if face == "calibrators" else {"numpy", "cv2", "tensorrt", "tqdm", "msgspec"}
    assert not set(done.stdout.split()) & {"onnx", "onnxruntime", "torch", *own}


def test_onnx_runtime_stores_and_sends_nothing(small_cnn, tmp_path):
    model = small_cnn.read_bytes()
    code = f"from deploy.runtimes.ort import OrtSession; OrtSession.open({model!r})"
    homes = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "TMPDIR"), str(tmp_path))
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=homes, check=True)
    assert not list(tmp_path.iterdir())


def test_the_face_is_whole():
    face = set(calib8._IMPORT_PATHS)
    assert calib8.__version__.count(".") == 2
    assert {"build", "calibrate", "bench", "inspect", "load", "Preprocess", "Method"} < face
    assert {"CachePolicy", "Report", "TARGETS", "__version__"} < face
    assert {kind.__name__ for kind in TARGETS.values()} < face
    assert {name for name in face if name.endswith("Error")} == set(errors.__all__)
    assert all(issubclass(getattr(calib8, name), calib8.Calib8Error) for name in errors.__all__)
    assert face == names_of(calib8) | {"__version__"}


@pytest.mark.parametrize("package", [calib8, calib8.torch])
def test_a_name_that_is_not_there_is_refused(package):
    with pytest.raises(AttributeError, match=f"{package.__name__}.*no attribute 'biuld'"):
        package.biuld  # noqa: B018


def test_an_inspection_fits_a_screen_and_tells_every_node(small_cnn):
    found = calib8.inspect(small_cnn, target="tensorrt")
    assert {node.name for node in found.nodes if node.op == "Gemm"} == {"Gemm_logits"}
    assert found.tensors
    assert "tensors need a scale" in repr(found)
    assert "Flatten is not run in int8 on tensorrt" in repr(found)
    assert "Flatten_f" not in repr(found)
    assert "Flatten_f" in found.text(everything=True)


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
    assert "a method is one of" in said
    assert "Latency of model.onnx and model.int8.onnx" in said


def test_the_documented_efforts_are_those_of_the_search():
    page = (ROOT / "docs" / "accuracy.md").read_text("utf-8")
    for number, effort in EFFORTS.items():
        row = f"{effort.samples} | {effort.alone} | {effort.whole} |"
        assert re.search(rf"^\| {number}( \(default\))? \| {re.escape(row)}", page, re.MULTILINE)
    assert f"| {DEFAULT_EFFORT} (default) |" in page


NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def stored_outputs(path: Path) -> list[tuple[str, dict[str, object]]]:
    """Return for each code cell what it printed, and its last value by media type."""
    cells = [c for c in json.loads(path.read_text("utf-8"))["cells"] if c["cell_type"] == "code"]
    found = []
    for cell in cells:
        printed = "".join("".join(out["text"]) for out in cell["outputs"] if "text" in out)
        forms = next((out["data"] for out in cell["outputs"] if "data" in out), {})
        found.append((printed, forms))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_gives_the_outputs_that_it_stores(path, tmp_path):
    if path.stem == "pytorch":
        pytest.importorskip("torch", reason="this notebook needs torch: calib8[torch]")
    results = list(notebooks.run_cells(path, tmp_path))
    for (stored, forms), (printed, value) in zip(stored_outputs(path), results, strict=True):
        assert alike(stored, printed), f"stored:\n{stored}\nprinted:\n{printed}"
        text = "" if value is None else repr(value)
        assert alike("".join(forms.get("text/plain", "")), text), text
        if "image/png" in forms:
            assert "<iframe" in value._repr_html_()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_stores_a_report_and_no_path_of_a_machine(path):
    stored = stored_outputs(path)
    assert sum("image/png" in forms for _, forms in stored) == 1
    texts = [printed + "".join(forms.get("text/plain", "")) for printed, forms in stored]
    assert not re.search(r"/(tmp|root|home|work|usr)\b", "\n".join(texts))
    assert 2 <= len(NOTEBOOKS) <= 4


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return site_pages.pages()


def below(command: click.Command, path: str) -> list[tuple[str, click.Command]]:
    """(words of the command line, command) of a command and all below it."""
    found = [(path, command)]
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found += below(command.get_command(context, name), f"{path} {name}")
    return found


def test_every_command_has_its_page_with_every_option(made):
    for name in COMMANDS:
        page = made[f"reference/cli/{name}.md"]
        assert f"({name}.md)" in made["reference/cli/index.md"]
        for path, command in below(cli.get_command(click.Context(cli), name), f"calib8 {name}"):
            assert re.search(rf"^#+ {path}$", page, re.MULTILINE)
            for param in command.params:
                if isinstance(param, click.Option) and not param.hidden:
                    row = rf"^`.*{re.escape(param.opts[-1])}\b.*`$"
                    assert re.search(row, page, re.MULTILINE), (path, param.opts)


def test_every_public_name_has_its_entry(made):
    page = made["reference/api.md"]
    for name in names_of(calib8):
        value = getattr(calib8, name)
        assert not callable(value) or f"::: {value.__module__}.{name}" in page, name


def test_the_changelog_links_to_pages(made):
    page = made["changelog.md"]
    assert page.startswith("# Changelog")
    assert "[feeds.md](feeds.md)" in page
    assert "`docs/" not in page


def test_the_menu_has_every_page_once(made):
    """`mkdocs build --strict` says so too, where mkdocs is."""
    menu = re.findall(r"^ +- .*?([\w/-]+\.md)", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    docs = ROOT / "docs"
    pages = {str(page.relative_to(docs)) for page in docs.rglob("*.md")} | set(made)
    commands = {f"reference/cli/{name}.md" for name in COMMANDS}  # put there by the hook
    assert sorted(menu) == sorted(pages - commands)


def test_every_preset_method_and_target_option_is_in_its_table():
    pages = {page.stem: page.read_text("utf-8") for page in (ROOT / "docs").rglob("*.md")}
    flags = [option.flag for option in declared_options(TARGETS["onnxruntime"])]
    tables = {"preprocessing": PRESETS, "methods": SEARCHES, "onnxruntime": flags}
    for page, names in tables.items():
        rows = [line for line in pages[page].splitlines() if line.startswith("| `")]
        missing = [name for name in names if not any(f"`{name}" in row for row in rows)]
        assert not missing, f"docs/**/{page}.md has no row of {missing}"


def test_the_home_has_three_commands_and_a_door_to_every_tutorial():
    home = (ROOT / "docs" / "index.md").read_text("utf-8")
    (commands,) = re.findall(r"^```sh\n(.*?)^```", home, re.DOTALL | re.MULTILINE)
    assert len(commands.splitlines()) == 3
    doors = re.findall(r"^- \*\*\[.+?\]\((.+?)\)\*\*$", home, re.MULTILINE)
    assert sorted(doors) == sorted(f"tutorials/{name}.md" for name in TUTORIALS)


def test_links_between_pages_lead_somewhere(made):
    docs = ROOT / "docs"
    for page in [*docs.rglob("*.md"), ROOT / "README.md"]:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", page.read_text("utf-8")):
            end = (page.parent / link).resolve()
            assert end.exists() or str(end.relative_to(docs)) in made, f"{page}: {link}"


def test_bill_of_materials_names_the_wheel_and_no_path_of_the_machine():
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


OF_TORCH = {"trace", "profile", "fuse", "qat", "export"}


def names_of(module) -> set[str]:
    return {name for name in dir(module) if not name.startswith("__")}


def test_every_command_is_a_name_of_the_face():
    groups = {name for name in COMMANDS if isinstance(cli.get_command(None, name), click.Group)}
    assert set(COMMANDS) - OF_TORCH <= names_of(calib8)
    assert all(callable(getattr(calib8, name)) for name in set(COMMANDS) - OF_TORCH - groups)
    assert names_of(calib8.torch) > OF_TORCH
    for group in groups:  # what cannot be a function is made with others: build, read
        below = {name.replace("-", "_") for name in cli.get_command(None, group).commands}
        assert below - {"auto", "config", "show"} <= names_of(getattr(calib8, group))


def test_the_types_of_the_face_are_those_of_its_names():
    for path, module in {"calib8/__init__.py": calib8, "calib8/torch.py": calib8.torch}.items():
        body = ast.parse((ROOT / path).read_text("utf-8")).body
        (block,) = [n for n in body if isinstance(n, ast.If) and "not" not in ast.unparse(n.test)]
        lines = [line for line in block.body if isinstance(line, ast.ImportFrom)]
        shown = {one.asname for line in lines for one in line.names} - {None}  # `X as X` alone is
        shown |= {line.targets[0].id for line in block.body if isinstance(line, ast.Assign)}
        own = set(module._IMPORT_PATHS) - set(errors.__all__)
        assert shown == own
        homes = {f"{line.module}:{one.name}" for line in lines for one in line.names}
        homes = {home.replace("calib8:", "calib8.") for home in homes} - {"deploy.errors:*"}
        assert homes == {module._IMPORT_PATHS[name] for name in own}


def test_the_help_of_the_face_is_two_screens_that_name_everything():
    import pydoc

    text = pydoc.render_doc(calib8, renderer=pydoc.plaintext)
    assert len(text.splitlines()) < 66
    words = set(re.findall(r"\w+", text.partition("PACKAGE CONTENTS")[0]))
    assert names_of(calib8) - (set(errors.__all__) - {"Calib8Error"}) <= words
    for part in ("torch", "ascend", "cache"):
        entry = re.search(rf"^ *calib8\.{part} .*(?:\n {{12,}}.*)*", text, re.MULTILINE)
        listed = set(re.findall(r"\w+", entry[0]))
        assert names_of(getattr(calib8, part)) - {"Task", "TrialInputs"} <= listed, part


def test_a_python_object_that_is_no_model_is_refused_in_a_sentence(pictures, wording):
    class Net:
        graph = None  # as a traced module has

    for take in (calib8.load, calib8.inspect, lambda net: calib8.build(net, pictures)):
        with pytest.raises(calib8.ModelError) as refusal:
            take(Net())
        wording.check(refusal.value)


def test_values_are_quantized_by_a_search_or_by_scales(wording):
    searched = calib8.quantize([-1.0, 0.0, 1.0, 2.0], method="minmax", dtype="qint8")
    assert searched.quantized.stored.tolist()[-1] == 127
    assert "SQNR" in repr(searched)
    given = calib8.quantize([[0.5, 1.0], [2.0, 4.0]], scales=[0.5, 1], axis=0, dtype="qint8")
    assert given.quantized.stored.tolist() == [[1, 2], [2, 4]]
    for words in ({"scales": [1.0], "method": "mse"}, {"zero_points": [3]}):
        with pytest.raises(calib8.ConfigError) as refusal:
            calib8.quantize([1.0], **words)
        wording.check(refusal.value)
    with pytest.raises(calib8.ConfigError) as refusal:
        calib8.quantize(["text"])
    wording.check(refusal.value)


@pytest.mark.slow
def test_a_build_is_read_compared_explained_and_verified(small_cnn, pictures, tmp_path):
    quick = {"duration_s": 0, "tuning": calib8.Tuning(effort=0), "limit": 4}
    for name in "ab":
        built = calib8.build(small_cnn, pictures, out=tmp_path / name, **quick)
    assert calib8.report(tmp_path / "a").title == built.title
    both = calib8.report(tmp_path / "a", tmp_path / "b")
    assert len(both.engines) == 2
    assert "onnxruntime" in repr(both)
    assert repr(calib8.explain(tmp_path / "b")).startswith(built.title)
    int8 = next((tmp_path / "b").glob("*.int8.onnx"))
    assert calib8.compare(str(small_cnn), str(int8), pictures).layers
    found = calib8.verify(tmp_path / "b")
    assert found.passed
    assert "files are as the build of small_cnn wrote them" in repr(found)
    int8.write_bytes(b"")
    found = calib8.verify(tmp_path / "b")
    assert not found.passed
    assert found.changed == {int8.name: "was changed after it was written"}


@pytest.mark.slow
def test_a_type_checker_knows_the_names_of_the_face_and_no_others(tmp_path, monkeypatch):
    api = pytest.importorskip("mypy.api", reason="mypy is not installed")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("MYPYPATH", str(ROOT))
    known = "calib8.build, calib8.Method, calib8.ModelError, calib8.doctor, calib8.cache.read"
    user = tmp_path / "user.py"
    user.write_text(
        f"import calib8\n({known}, calib8.torch.qat, calib8.torch.trace)\ncalib8.biuld\n"
    )
    said = api.run([str(user)])[0]
    assert said.count("error:") == 1
    assert '"biuld"' in said
