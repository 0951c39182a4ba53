"""The shape of the house, read from the source without running it."""

import ast
import configparser
import fnmatch
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
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
    modules: set[str] = set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not lazy:
            continue
        if isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            for alias in child.names:
                name = f"{child.module}.{alias.name}"
                modules.add(name if name in MODULES else str(child.module))
        elif isinstance(child, ast.Import):
            modules |= {alias.name for alias in child.names}
        else:
            modules |= imports(child, lazy=lazy)
    return modules


def run_python(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", *arguments], cwd=ROOT, capture_output=True, text=True
    )


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


def test_upward_import_breaks_the_contracts(tmp_path):
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
    process = run_python(IMPORT_ALL, *names)
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize(
    ("package", "forbidden", "lazy"),
    [
        ("calibrators", SDKS | {"deploy"}, True),  # they stand on numpy
        ("deploy.commands", SDKS | {"numpy"}, False),  # nothing heavy at their top
    ],
)
def test_light_packages_import_no_heavy_library(package, forbidden, lazy):
    exceptions = {"calibrators.histogram": {"cv2"}, "calibrators.tensorrt": SDKS}  # cv2.calcHist
    for module in MODULES:
        if module.startswith(package):
            roots = {name.split(".")[0] for name in imports(tree(module), lazy=lazy)}
            assert not roots & forbidden - exceptions.get(module, set()), module


def test_figures_stay_within_their_limits():
    counts = house.counts(MODULES)
    exceeded = {
        figure: counts[figure] for figure in counts if counts[figure] > house.LIMITS[figure]
    }
    assert not exceeded, "see `python scripts/house.py`"


VAGUE_NAMES = re.compile(
    r"found|told|said|asked|kept|seen|heard|strewn|whole|settled|posted|wish|spool|looks|shown"
    r"|carried|again|keep|apart|beside|behind",
    re.IGNORECASE,
)


def test_public_names_are_no_riddles():
    """Participles and riddles name no module, class or public function."""
    for module in MODULES:
        definitions = [
            n for n in tree(module).body if isinstance(n, ast.ClassDef | ast.FunctionDef)
        ]
        for name in [module.rpartition(".")[2], *(node.name for node in definitions)]:
            assert not VAGUE_NAMES.fullmatch(name), f"{module}: {name} must name what it is or does"


def functions(package: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield (module, function) for the functions at the top of the modules of a package."""
    for module in MODULES:
        if module.startswith(f"{package}."):
            for node in tree(module).body:
                if isinstance(node, ast.FunctionDef):
                    yield module, node


def test_every_target_is_registered():
    """A file in targets/ with a class that builds is a target."""
    building = set()
    for module in MODULES:
        if not module.startswith("deploy.targets.") or module == "deploy.targets.base":
            continue
        for node in tree(module).body:
            if isinstance(node, ast.ClassDef):
                methods = {f.name for f in node.body if isinstance(f, ast.FunctionDef)}
                if {"build", "open"} <= methods:
                    building.add(f"{module}.{node.name}")
    assert building == {f"{kind.__module__}.{kind.__name__}" for kind in TARGETS.values()}


def test_every_frontend_is_registered():
    """A file in frontends/ with a public function `load_...` is a source of models."""
    room_functions = functions("deploy.frontends")
    loading = {
        f"{module}.{node.name}" for module, node in room_functions if node.name.startswith("load_")
    }
    assert loading == {f"{load.__module__}.{load.__name__}" for load in FRONTENDS.values()}


def test_every_search_is_registered():
    """A public function in calibrators/ that turns a Histogram into a Scale is a search."""
    searching = set()
    for _, node in functions("calibrators"):
        gives_scale = node.returns and ast.unparse(node.returns) == "Scale"
        takes_histogram = re.match(r"\w+: Histogram(,|$)", ast.unparse(node.args))
        name = node.name.replace("_", "-")
        if name in SEARCHES and gives_scale and takes_histogram:
            searching.add(name)
    # the entropy search stands twice, once for each of its statistics
    assert searching == set(SEARCHES) - {"entropy-tensorrt"}
    assert DEFAULT_METHOD in SEARCHES


def test_search_table_imports_no_heavy_library():
    process = run_python(
        "import sys, deploy.commands.build, deploy.commands.calibrate;"
        "print([m for m in ('numpy', 'cv2', 'onnx', 'onnxruntime') if m in sys.modules])"
    )
    assert process.stdout.strip() == "[]", process.stderr


def test_every_command_is_registered():
    """Every function in commands/ that a decorator makes a command or a group of commands."""
    decorated = set()
    for module, node in functions("deploy.commands"):
        for decorator in node.decorator_list:
            if re.match(r"(click\.|base\.sectioned_)(command|group)\b", ast.unparse(decorator)):
                decorated.add(f"{module}:{node.name}")
    paths = {f"deploy.commands.{module}:{name}" for name, (module, _) in COMMANDS.items()}
    assert decorated == paths


def test_grid_limits_stand_in_one_file():
    """`calibrators.grids` holds 127, 128 and 255; the KL search's 128 levels are another thing."""
    limits = set()
    for module in MODULES:
        if not module.startswith("calibrators") or module == "calibrators.grids":
            continue
        for node in ast.walk(tree(module)):
            is_number = isinstance(node, ast.Constant) and type(node.value) in (int, float)
            if is_number and node.value in (127, 128, 255):
                limits.add((module, node.value))
    assert limits <= {("calibrators.entropy", 128)}


def test_no_file_has_a_vague_name():
    vague_names = {"utils", "util", "helpers", "helper", "common", "misc"}
    for folder in ("deploy", "calibrators", "tests", "benchmarks", "datasets"):
        names = {part for path in (ROOT / folder).rglob("*.py") for part in Path(path).parts}
        assert not {name.removesuffix(".py") for name in names} & vague_names


def test_only_the_product_has_packages():
    """An __init__.py in datasets/ would hide Hugging Face's, one in tests/ the product."""
    for folder in ("datasets", "tests", "benchmarks", "cpp", "scripts", "examples", "docs"):
        assert not list((ROOT / folder).rglob("__init__.py"))


def test_wheel_holds_all_packages():
    """What `packages = find:` with its include list finds among the folders of the checkout."""
    config = setup()
    assert sorted(path.name for path in ROOT.glob("*.py")) == ["setup.py"]
    patterns = config["options.packages.find"]["include"].split()
    packages = set()
    for folder in ROOT.iterdir():
        if not folder.is_dir() or folder.name.startswith("."):
            continue
        for path in folder.rglob("__init__.py"):
            parts = path.parent.relative_to(ROOT).parts
            if not any(part.startswith(".") for part in parts):
                packages.add(".".join(parts))
    included = set()
    for pattern in patterns:
        included |= {*fnmatch.filter(packages, pattern)}
    assert {name.split(".")[0] for name in included} == {"calib8", "calibrators", "deploy"}
    # every folder of modules is found: a missing __init__.py would drop it from the wheel
    folders = {path.parent for path in MODULES.values()}
    assert included == {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    for package in ("calib8", "calibrators", "deploy"):  # and its types are shipped
        assert (ROOT / package / "py.typed").is_file()
        assert config["options.package_data"][package] == "py.typed"


def test_shared_library_exports_every_header():
    headers = sorted((ROOT / "cpp" / "include" / "calib8").glob("*.hpp"))
    assert headers
    for header in headers:
        text = header.read_text()
        begin = text.find("CALIB8_EXPORT_BEGIN")
        end = text.find("CALIB8_EXPORT_END")
        assert 0 < begin < end, f"{header.name} must stand between these two words"
        assert text.find("#include", begin) < 0, f"{header.name} must include before them"
