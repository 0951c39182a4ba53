"""The shape of the house, read from the source without running it."""

import ast
import configparser
import fnmatch
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from calibrators.searches import DEFAULT_METHOD, SEARCHES
from deploy.cli import COMMANDS
from deploy.frontends import FRONTENDS
from deploy.targets import TARGETS
from scripts import house

ROOT = Path(__file__).parent.parent
SDKS = {"torch", "tensorrt", "pycuda", "cuda", "onnxruntime", "onnx", "openvino", "cv2", "tqdm"}
SDKS |= {"acl", "amct_onnx"}

MODULES = house.modules(ROOT)
# What needs a package that is not here (torch) may say so, and only that.
IMPORT_ALL = """
import importlib, sys
failed = []
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        package = (getattr(error, "name", None) or "deploy").split(".")[0]
        if type(error).__name__ != "SdkMissingError" and package in ("deploy", "calibrators"):
            failed.append(f"{name}: {error!r}")
sys.exit("\\n".join(failed) or 0)
"""


def tree(module: str) -> ast.Module:
    return house.tree(MODULES[module])


def imports(node: ast.AST, *, lazy: bool) -> set[str]:
    """Modules imported below a node, those for type checkers left out; `lazy`: in functions too."""
    found: set[str] = set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not lazy:
            continue
        if isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            for alias in child.names:
                whole = f"{child.module}.{alias.name}"
                found.add(whole if whole in MODULES else str(child.module))
        elif isinstance(child, ast.Import):
            found |= {alias.name for alias in child.names}
        else:
            found |= imports(child, lazy=lazy)
    return found


def listed(wrong) -> str:
    return "\n" + "\n".join(f"  {one}" for one in wrong)


def in_another_process(*words) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", *words], cwd=ROOT, capture_output=True, text=True)


def check_imports(checkout: Path) -> subprocess.CompletedProcess:
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", program, "--no-cache"]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)


def setup() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config


def test_imports_keep_to_the_contracts():
    """Rooms import downwards, without a circle: the contracts of setup.cfg."""
    result = check_imports(ROOT)
    assert result.returncode == 0, result.stdout


def test_an_upward_import_breaks_the_contracts(tmp_path):
    for package in ("calib8", "deploy", "calibrators"):
        shutil.copytree(ROOT / package, tmp_path / package)
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    with (tmp_path / "deploy" / "feed" / "feed.py").open("a") as file:
        file.write("\n\ndef lazy():\n    from deploy.pipeline import build\n")
    result = check_imports(tmp_path)
    assert result.returncode == 1
    assert "deploy.feed.feed -> deploy.pipeline" in result.stdout


@pytest.mark.slow
def test_every_module_can_be_imported():
    names = [name for name in MODULES if not name.endswith("__main__")]
    done = in_another_process(IMPORT_ALL, *names)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("package", "never", "lazy"),
    [
        ("calibrators", SDKS | {"deploy"}, True),  # they stand on numpy
        ("deploy.commands", SDKS | {"numpy"}, False),  # nothing heavy at their top
    ],
)
def test_a_package_imports_little(package, never, lazy):
    excepted = {"calibrators.histogram": {"cv2"}, "calibrators.tensorrt": SDKS}  # cv2.calcHist
    wrong = {
        module: found
        for module in MODULES
        if module.startswith(package)
        for roots in [{name.split(".")[0] for name in imports(tree(module), lazy=lazy)}]
        if (found := roots & never - excepted.get(module, set()))
    }
    assert not wrong


def test_figures_stay_within_their_limits():
    counts = house.counts(MODULES)
    exceeded = {
        figure: counts[figure] for figure in counts if counts[figure] > house.LIMITS[figure]
    }
    assert not exceeded, "see `python scripts/house.py`"


NO_NAMES = re.compile(
    r"found|told|said|asked|kept|seen|heard|strewn|whole|settled|posted|wish|spool|looks|shown"
    r"|carried|again|keep|apart|beside|behind",
    re.IGNORECASE,
)


def test_names_are_words_of_the_field():
    """Participles and riddles name no module, class or public function."""
    wrong = [f"module {name}" for name in MODULES if NO_NAMES.fullmatch(name.rpartition(".")[2])]
    for module in MODULES:
        for node in tree(module).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and NO_NAMES.fullmatch(node.name):
                wrong.append(f"{module}.{node.name}")
    assert not wrong, f"name what it is or does:{listed(wrong)}"


def functions(room: str) -> list[tuple[str, ast.FunctionDef]]:
    """(module, function) of every function of a room."""
    inside = [module for module in MODULES if module.startswith(f"{room}.")]
    return [(m, node) for m in inside for node in tree(m).body if isinstance(node, ast.FunctionDef)]


def test_every_target_has_its_row():
    """A file in targets/ with a class that builds is a target."""
    building = {
        f"{module}.{node.name}"
        for module in MODULES
        if module.startswith("deploy.targets.") and module != "deploy.targets.base"
        for node in tree(module).body
        if isinstance(node, ast.ClassDef)
        if {"build", "open"} <= {f.name for f in node.body if isinstance(f, ast.FunctionDef)}
    }
    assert building == {f"{kind.__module__}.{kind.__name__}" for kind in TARGETS.values()}


def test_every_frontend_has_its_row():
    """A file in frontends/ with a public function `load_...` is a source of models."""
    made = functions("deploy.frontends")
    loading = {f"{module}.{one.name}" for module, one in made if one.name.startswith("load_")}
    assert loading == {f"{load.__module__}.{load.__name__}" for load in FRONTENDS.values()}


def test_every_search_has_its_row():
    """A public function in calibrators/ that turns a Histogram into a Scale is a search."""
    searching = {
        one.name
        for _, one in functions("calibrators")
        if one.name in SEARCHES and one.returns and ast.unparse(one.returns) == "Scale"
        if re.match(r"\w+: Histogram(,|$)", ast.unparse(one.args))
    }
    # the entropy search stands twice, once for each of its statistics
    assert searching == set(SEARCHES) - {"entropy-tensorrt"}
    assert DEFAULT_METHOD in SEARCHES


def test_the_table_of_searches_is_read_without_what_they_compute_with():
    done = in_another_process(
        "import sys, deploy.commands.build, deploy.commands.calibrate;"
        "print([m for m in ('numpy', 'cv2', 'onnx', 'onnxruntime') if m in sys.modules])"
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_every_command_has_its_row():
    """A file in commands/ with a function under `@click.command` or `@click.group`."""
    decorated = {
        f"{module}:{one.name}"
        for module, one in functions("deploy.commands")
        if any(re.match(r"click\.(command|group)\b", ast.unparse(d)) for d in one.decorator_list)
    }
    assert decorated == {where for where, _ in COMMANDS.values()}


def test_grid_limits_are_written_in_one_file():
    """`calibrators.grids` holds 127, 128 and 255; the KL search's 128 levels are another thing."""
    elsewhere = {
        (module, node.value)
        for module in MODULES
        if module.startswith("calibrators") and module != "calibrators.grids"
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Constant) and type(node.value) in (int, float)
        if node.value in (127, 128, 255)
    }
    assert elsewhere <= {("calibrators.entropy", 128)}


def test_no_file_is_named_after_nothing_and_only_the_product_has_packages():
    vague = {"utils", "util", "helpers", "helper", "common", "misc"}
    for folder in ("deploy", "calibrators", "tests", "benchmarks", "datasets"):
        names = {part for path in (ROOT / folder).rglob("*.py") for part in Path(path).parts}
        assert not {name.removesuffix(".py") for name in names} & vague
    # With an __init__.py, datasets/ would hide Hugging Face's, tests/ would hide the product.
    for folder in ("datasets", "tests", "benchmarks", "cpp", "scripts", "examples", "docs"):
        assert not list((ROOT / folder).rglob("__init__.py"))


def test_the_wheel_holds_two_packages_and_the_face():
    """What `packages = find:` with its include list finds among the folders of the checkout."""
    config = setup()
    assert sorted(path.name for path in ROOT.glob("*.py")) == ["setup.py"]
    patterns = config["options.packages.find"]["include"].split()
    packages = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for top in ROOT.iterdir()
        if top.is_dir() and not top.name.startswith(".")
        for path in top.rglob("__init__.py")
        if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
    }
    held = {p for p in packages if any(fnmatch.fnmatchcase(p, pattern) for pattern in patterns)}
    assert {name.split(".")[0] for name in held} == {"calib8", "calibrators", "deploy"}
    # every folder of modules is found: a missing __init__.py would drop it from the wheel
    folders = {path.parent for path in MODULES.values()}
    assert held == {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    for package in ("calib8", "calibrators", "deploy"):  # and its types are shipped
        assert (ROOT / package / "py.typed").is_file()
        assert config["options.package_data"][package] == "py.typed"


def test_a_shared_library_shows_every_header_of_cpp():
    headers = sorted((ROOT / "cpp" / "include" / "calib8").glob("*.hpp"))
    assert headers
    for header in headers:
        text = header.read_text()
        shown = text.find("CALIB8_EXPORT_BEGIN"), text.find("CALIB8_EXPORT_END")
        assert 0 < shown[0] < shown[1], f"{header.name} must stand between these two words"
        assert text.find("#include", shown[0]) < 0, f"{header.name} must include before them"
