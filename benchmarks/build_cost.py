"""CPU time and peak memory of one `build`, an older checkout beside this one.

    git worktree add /tmp/older e978d3c
    python benchmarks/build_cost.py --old /tmp/older [--models fashion ...] [--rounds 3]
    python benchmarks/build_cost.py --models 20-mb 75-mb 300-mb --rounds 1 --threads 1 --each-target

Both sides run the same command in a process of its own, in turns: first into an empty folder, then
again, so that the second build finds the calibration of the first. No latency is measured
(`--duration 0`). With `--each-target` each target is also built alone. CPU time is user and system
time of the process with its children; a round's figures are their medians, memory is the largest.
EfficientNet-Lite0 must have been exported once by export_efficientnet.py, which needs torch; its
photos come from wheels. The nets of 20, 75 and 300 MB are five convolutions of random weights on
pictures of 32x32: memory is that of weights alone. Only ratios are worth comparing between
machines.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import onnx
from onnx import helper, numpy_helper

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import checkouts
from benchmarks.calibration_cost import image_list
from benchmarks.fetch_models import cache_folder

TARGETS = ("onnxruntime", "tensorrt", "ascend")
PASSES = ("first build", "second build")


def fashion(count: int) -> list[str]:
    """The bundled Fashion-MNIST network and up to 100 images of it."""
    data = checkouts.OWN / "datasets" / "fashion"
    words = [str(data / "fashion.onnx"), "--images", str(data / "calib.txt")]
    return [*words, "--mean", "0.5", "--std", "0.5", "--limit", str(count)]


def efficientnet(count: int) -> list[str]:
    """EfficientNet-Lite0 and photos."""
    model = cache_folder() / "efficientnet-lite0.onnx"
    if not model.is_file():
        sys.exit(f"no {model}; python benchmarks/export_efficientnet.py makes it")
    return [str(model), "--images", str(image_list(count)), "--preprocess", "efficientnet-lite"]


def weights_net(megabytes: int, count: int) -> list[str]:
    """A generated net whose weights take so many MB, and up to 4 pictures of noise."""
    folder = Path(tempfile.gettempdir()) / "calib8-weights-net"
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(4)
    for number in range(min(count, 4)):
        noise = rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)
        cv2.imwrite(str(folder / f"{number}.png"), noise)
    # a multiple of 16, as in real nets: ONNX Runtime then lays the weights out anew, in a copy
    channels = 16 * round((megabytes * 1e6 / 4 / 9 / 4) ** 0.5 / 16)
    nodes, weights, tensor = [], [], "image"
    for layer in range(5):
        shape = (channels, 3 if layer == 0 else channels, 3, 3)
        weight = rng.standard_normal(shape, dtype=np.float32) / np.float32(channels**0.5 * 3)
        weights.append(numpy_helper.from_array(weight, f"w{layer}"))
        inputs = [tensor, f"w{layer}"]
        nodes += [
            helper.make_node("Conv", inputs, [f"c{layer}"], pads=[1] * 4, strides=[2, 2]),
            helper.make_node("Relu", [f"c{layer}"], [f"r{layer}"]),
        ]
        tensor = f"r{layer}"
    ends = (
        [helper.make_tensor_value_info("image", 1, [1, 3, 32, 32])],
        [helper.make_tensor_value_info(tensor, 1, [1, channels, 1, 1])],
    )
    graph = helper.make_graph(nodes, "net", *ends, weights)
    opsets = [helper.make_opsetid("", 13)]
    path = folder / f"net{megabytes}.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return [str(path), "--images", str(folder), "--effort", "0"]


MODELS: Mapping[str, Callable[[int], list[str]]] = {
    "fashion": fashion,
    "efficientnet-lite0": efficientnet,
    **{f"{size}-mb": partial(weights_net, size) for size in (20, 75, 300)},
}


def twice(
    checkout: Path, words: list[str], targets: Sequence[str], folder: Path
) -> list[checkouts.Run]:
    """Build into an empty folder, and again into the same one."""
    shutil.rmtree(folder, ignore_errors=True)
    command = ["build", *words, "--duration", "0", "--out", "out"]
    for target in targets:
        command += ["--target", target]
    runs = [checkouts.calib8(checkout, command, folder) for _ in PASSES]
    for run in runs:
        if run.code:
            sys.exit(f"{checkout}: calib8 {' '.join(command)}: {run.last_line}")
    return runs


def rows(name: str, taken: Mapping[str, list[list[checkouts.Run]]]) -> list[str]:
    """One line of the table for each pass; `taken` is side -> round -> pass."""
    lines = []
    for number, label in enumerate(PASSES):
        cells = [name, label]
        for figure, join, form in (
            ("cpu_s", statistics.median, "{:.2f} s"),
            ("rss_mb", max, "{:.0f} MB"),
        ):
            sides = {
                side: join([getattr(one[number], figure) for one in rounds])
                for side, rounds in taken.items()
            }
            cells += [form.format(sides[side]) if side in sides else "" for side in ("old", "new")]
            both = len(sides) == 2
            cells.append(f"{sides['new'] / sides['old']:.2f}x" if both else "")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--old", type=Path, help="an older checkout; without it only this one runs")
    parser.add_argument("--new", type=Path, default=checkouts.OWN, help="[this checkout]")
    parser.add_argument("--only-old", action="store_true", help="leave the new side out")
    parser.add_argument(
        "--models", nargs="*", choices=MODELS, default=["fashion", "efficientnet-lite0"]
    )
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--each-target", action="store_true", help="also each target alone")
    asked = parser.parse_args()
    sides = {"old": asked.old} if asked.old else {}
    if not asked.only_old:
        sides["new"] = asked.new
    sides = {side: path.resolve() for side, path in sides.items()}
    for path in sides.values():
        checkouts.check(path)
    print("| model | build | CPU before | CPU now | ratio | peak before | peak now | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    target_sets = [TARGETS]
    if asked.each_target:
        target_sets += [(target,) for target in TARGETS]
    with tempfile.TemporaryDirectory(prefix="calib8-cost-") as folder:
        for name, targets in itertools.product(asked.models, target_sets):
            words = [*MODELS[name](asked.images), "--threads", str(asked.threads)]
            taken: dict[str, list[list[checkouts.Run]]] = {side: [] for side in sides}
            for _ in range(asked.rounds):
                for side, path in sides.items():
                    taken[side].append(twice(path, words, targets, Path(folder) / side))
            print("\n".join(rows(f"{name}, {' '.join(targets)}", taken)), flush=True)
    print(
        f"\n{asked.images} images, {asked.threads} threads;"
        f" median CPU and largest peak of {asked.rounds} rounds"
    )


if __name__ == "__main__":
    main()
