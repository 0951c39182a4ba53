"""What runs in int8 on TensorRT: calib8's Q/DQ models beside those of NVIDIA ModelOpt 0.47.

    python benchmarks/placement.py [NAME ...] [--samples N] [--out FOLDER] [--venvs FOLDER]

Prints a row a model and tool: how many convolutions, products, residual Adds and pools each has in
int8, and why calib8 leaves one in float that ModelOpt does not. Exit code 1 where it has no reason.
ModelOpt 0.47 is installed once into an environment of its own (see peers.py), with torch: a few
hundred MB with the CPU's wheel, much more with CUDA's.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import onnx  # noqa: E402
import peers  # noqa: E402
from fetch_models import FetchError  # noqa: E402
from tensorrt_cases import cases  # noqa: E402
from trial import Trial, table  # noqa: E402

from deploy.errors import Calib8Error  # noqa: E402
from deploy.frontends import load  # noqa: E402
from deploy.targets import TensorRT  # noqa: E402

KINDS = {
    "Conv": ("Conv", "ConvTranspose"),
    "MatMul, Gemm": ("MatMul", "Gemm"),
    "Add": ("Add",),
    "pooling": ("MaxPool", "AveragePool", "GlobalAveragePool", "ReduceMean"),
}
HEAD = ["model", "tool", *KINDS, "in float where ModelOpt has int8"]
NAMES = ("fashion", "resnet-18", "efficientnet-lite0", "yolov8n-nudenet", "vit-s-focus")


def placed(path: Path) -> dict[str, dict[str, bool]]:
    """Kind -> its nodes -> whether a node reads what TensorRT quantizes.

    A Conv or product reads both its factors from a Dequantize, a pool its input, and an Add of two
    tensors one of them: the other is added inside the node that makes it.
    """
    graph = onnx.load(path).graph
    makers = {name: node for node in graph.node for name in node.output}
    fixed = {t.name for t in graph.initializer}
    fixed |= {name for name, node in makers.items() if node.op_type == "Constant"}
    found: dict[str, dict[str, bool]] = {kind: {} for kind in KINDS}
    for node in graph.node:
        kind = next((k for k, types in KINDS.items() if node.op_type in types), None)
        varying = [name for name in node.input if name and name not in fixed]
        read = [name in makers and makers[name].op_type == "DequantizeLinear" for name in varying]
        if kind in ("Conv", "MatMul, Gemm"):
            found[kind][node.name] = len(read) > 1 and all(read[:2])
        elif kind is not None and _counts(node, len(varying), graph):
            found[kind][node.name] = any(read)
    return found


def _counts(node: onnx.NodeProto, varying: int, graph: onnx.GraphProto) -> bool:
    """Whether a node is an Add of two tensors or a pool; a norm's ReduceMean is none."""
    if node.op_type == "Add":
        return varying == 2
    after = {n.op_type for n in graph.node if node.output[0] in n.input}
    return node.op_type != "ReduceMean" or not after & {"Sub", "Add", "Pow", "Sqrt"}


def why_fewer(
    model: Path, own: dict[str, dict[str, bool]], other: dict[str, dict[str, bool]]
) -> list[str]:
    """Why calib8 leaves in float what ModelOpt has in int8; "no reason" where it has none."""
    decisions = TensorRT().plan(load(model).model).decisions
    reasons = {d.node: f"{d.op_type}: {d.reason}" for d in decisions if d.reason}
    missed = [
        reasons.get(name, f"{kind}: no reason")
        for kind, nodes in other.items()
        for name, small in nodes.items()
        if small and not own[kind].get(name, False)
    ]
    return [f"{count} {why}" for why, count in Counter(missed).most_common()]


def rows(name: str, folder: Path, environments: Path, samples: int) -> list[list[str]]:
    """Both tools on one model."""
    trial = Trial(name=name, case=cases()[name], folder=folder, threads=2)
    for file in sorted(trial.calibration.glob("*.npz"))[samples:]:
        file.unlink()
    found, told = {}, {}
    words = {"calib8": ("--target", "tensorrt", "--effort", "0", "--method", "minmax")}
    for tool in ("calib8", "modelopt"):
        out = folder / f"{name}-{tool}"
        asked = (trial.model, trial.calibration, out, environments, *words.get(tool, ()))
        made = peers.quantize(tool, *asked)
        told[tool] = made.says
        if made.engine is not None:
            found[tool] = placed(made.engine)
    reasons = []
    if len(found) == 2:
        reasons = why_fewer(trial.model, found["calib8"], found["modelopt"])
    cells = []
    for tool, said in told.items():
        nodes = found.get(tool, {})
        counts = [f"{sum(n.values())} of {len(n)}" if n else "-" for n in nodes.values()]
        last = "; ".join(reasons) if tool == "calib8" else ""
        cells.append([name, tool, *(counts or [""] * len(KINDS)), said or last])
    return cells


def main() -> int:
    """Print the table; 1 where calib8 has fewer without a reason, or a tool failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--samples", type=int, default=8, help="calibration samples")
    parser.add_argument("--out", type=Path, default=None, help="folder to keep everything in")
    parser.add_argument("--venvs", type=Path, default=peers.environments())
    asked = parser.parse_args()
    folder = asked.out or Path(tempfile.mkdtemp(prefix="calib8-placement-"))
    folder.mkdir(parents=True, exist_ok=True)
    every: list[list[str]] = []
    for name in asked.names or NAMES:
        try:
            every += rows(name, folder, asked.venvs, asked.samples)
        except (Calib8Error, FetchError, OSError) as error:
            every.append([name, "none", *[""] * len(KINDS), f"no reason: left out: {error}"])
        print(" | ".join(every[-1]), flush=True)
    print(f"\n{table(HEAD, every)}")
    return int(any("no reason" in row[-1] or not row[2] for row in every))


if __name__ == "__main__":
    sys.exit(main())
