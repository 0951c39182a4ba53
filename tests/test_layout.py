"""The shape of the house, read from the source without running it."""

import ast
import configparser
import fnmatch
from functools import cache
from pathlib import Path

import pytest

from calibrators import ACTIVATION
from calibrators.percentile import DEFAULT_PERCENT as PERCENT
from deploy.calibration.search import DEFAULT_METHOD, DEFAULT_PERCENT, METHODS
from deploy.cli import COMMANDS
from deploy.frontends import FRONTENDS
from deploy.targets import TARGETS

ROOT = Path(__file__).parent.parent
SDKS = {"torch", "tensorrt", "pycuda", "onnxruntime", "onnx", "cv2", "acl", "amct_onnx", "tqdm"}

# Each floor may import from the floors below it and from its own, never from above.
FLOORS = (
    {"deploy.cli", "deploy.__main__"},
    {"deploy.commands"},
    {"deploy.pipeline", "deploy.benchmark", "deploy.results"},
    {"deploy.measure"},
    {"deploy.report"},
    {"deploy.targets"},
    {"deploy.calibration"},
    {"deploy.frontends", "deploy.fx"},
    {"deploy.feed"},
    {"deploy.metrics"},
    {"deploy.ort"},
    {"deploy.graph"},
    {"deploy.tensors", "deploy.atomic", "deploy.stamped", "deploy.machine", "deploy.progress"},
    {"deploy.errors"},
    {"calibrators"},
)


def files() -> dict[str, Path]:
    found = {}
    for package in ("deploy", "calibrators"):
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = files()


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


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


def roots(module: str, *, lazy: bool) -> set[str]:
    return {name.split(".")[0] for name in imports(tree(module), lazy=lazy)}


def floor(module: str) -> int | None:
    for level, names in enumerate(FLOORS):
        if any(module == name or module.startswith(f"{name}.") for name in names):
            return level
    return None


def test_no_import_goes_round_in_a_circle():
    arrows = {m: imports(tree(m), lazy=True) & set(MODULES) - {m} for m in MODULES}
    left = dict(arrows)
    while left:  # take away what imports nothing that is left; a circle can never be taken
        free = {m for m, targets in left.items() if not targets & set(left)}
        assert free, f"these import each other: {sorted(left)}"
        left = {m: targets for m, targets in left.items() if m not in free}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_no_module_imports_from_a_floor_above(module):
    own = floor(module)
    if own is None:
        return
    above = {t for t in imports(tree(module), lazy=True) if (floor(t) or own) < own}
    assert not above


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("calibrators")])
def test_calibrators_stand_on_numpy(module):
    found = roots(module, lazy=True)
    assert "deploy" not in found
    if module != "calibrators.tensorrt":
        counting = {"cv2"} if module == "calibrators.histogram" else set()  # cv2.calcHist
        assert found & SDKS <= counting


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("deploy.commands")])
def test_commands_import_nothing_heavy_at_their_top(module):
    assert not roots(module, lazy=False) & (SDKS | {"numpy"})


def functions(module: str) -> dict[str, ast.FunctionDef]:
    return {n.name: n for n in tree(module).body if isinstance(n, ast.FunctionDef)}


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
    loading = {
        f"{module}.{name}"
        for module in MODULES
        if module.startswith("deploy.frontends.")
        for name in functions(module)
        if name.startswith("load_")
    }
    assert loading == {f"{load.__module__}.{load.__name__}" for load in FRONTENDS.values()}


def test_every_search_has_its_row():
    """A file in calibrators/ whose function of the same name turns a Histogram into a Scale."""
    searching = {
        module.rpartition(".")[2]
        for module in MODULES
        if module.startswith("calibrators.")
        for name, node in functions(module).items()
        if name == module.rpartition(".")[2] and node.args.args and node.returns
        if isinstance(node.args.args[0].annotation, ast.Name)
        if node.args.args[0].annotation.id == "Histogram"
        if isinstance(node.returns, ast.Name) and node.returns.id == "Scale"
    }
    assert searching == set(ACTIVATION)


def test_the_command_line_names_every_search():
    assert (*ACTIVATION, "entropy-tensorrt") == METHODS
    assert DEFAULT_METHOD in ACTIVATION and DEFAULT_PERCENT == PERCENT


def test_every_command_has_its_row():
    """A file in commands/ with a function under `@click.command` or `@click.group`."""
    decorated = {
        f"{module}:{name}"
        for module in MODULES
        if module.startswith("deploy.commands.")
        for name, node in functions(module).items()
        if {"click.command", "click.group"}
        & {ast.unparse(d).split("(")[0] for d in node.decorator_list}
    }
    assert decorated == {where for where, _ in COMMANDS.values()}


def test_grid_limits_are_written_in_one_file():
    """`calibrators.int8` holds 127, 128 and 255; the KL search's 128 levels are another thing."""
    elsewhere = {
        (module, node.value)
        for module in MODULES
        if module.startswith("calibrators") and module != "calibrators.int8"
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Constant) and type(node.value) in (int, float)
        if node.value in (127, 128, 255)
    }
    assert elsewhere <= {("calibrators.entropy", 128)}


def test_no_file_is_named_after_nothing():
    vague = {"utils", "util", "helpers", "helper", "common", "misc"}
    for folder in ("deploy", "calibrators", "tests", "benchmarks", "datasets"):
        names = {part for path in (ROOT / folder).rglob("*.py") for part in Path(path).parts}
        assert not {name.removesuffix(".py") for name in names} & vague


def test_data_and_tests_are_no_packages():
    """With an __init__.py, datasets/ would hide Hugging Face's, tests/ would hide the product."""
    for folder in ("datasets", "tests", "benchmarks", "cpp", "scripts"):
        assert not list((ROOT / folder).rglob("__init__.py"))


def test_the_wheel_holds_two_packages():
    """What `packages = find:` with its include list finds among the folders of the checkout."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    patterns = config["options.packages.find"]["include"].split()
    packages = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for top in ROOT.iterdir()
        if top.is_dir() and not top.name.startswith(".")
        for path in top.rglob("__init__.py")
        if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
    }
    held = {p for p in packages if any(fnmatch.fnmatchcase(p, pattern) for pattern in patterns)}
    assert {name.split(".")[0] for name in held} == {"calibrators", "deploy"}
    # every folder of modules is found: a missing __init__.py would drop it from the wheel
    folders = {path.parent for path in MODULES.values()}
    assert held == {".".join(folder.relative_to(ROOT).parts) for folder in folders}


@pytest.mark.parametrize("package", ["calibrators", "deploy"])
def test_types_are_shipped(package):
    assert (ROOT / package / "py.typed").is_file()
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert config["options.package_data"][package] == "py.typed"
