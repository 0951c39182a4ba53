"""What one int8 Conv costs in ONNX Runtime beside float, by its form and by the signs of its grids.

    python benchmarks/int8_kernels.py        all signs
    python benchmarks/int8_kernels.py us     unsigned activations and signed weights alone

Least time of the kernel over many runs, one thread, in microseconds: a kernel that is last of
three alike, so that its layout is that of a whole model. "padded" is a first Conv with channels of
zeros up to four, and the time that the Pad takes.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from trial import table  # noqa: E402

from deploy.runtimes.ort import profile_kernels  # noqa: E402

_RUNS = 60
SIGNS = ("us", "uu", "ss")  # of activations and weights: unsigned, signed
KINDS = {"u": np.uint8, "s": np.int8}


@dataclass(frozen=True)
class Form:
    """One Conv."""

    what: str
    window: int
    size: int
    inner: int
    outer: int
    groups: int = 1
    stride: int = 1
    padded: int = 0  # channels of zeros among the inner ones


FORMS = [
    Form("pointwise", 1, 14, 80, 480),
    Form("pointwise", 1, 14, 480, 80),
    Form("dense", 3, 56, 32, 32),
    *(Form("depthwise", 3, 56, c, c, c) for c in (136, 144)),
    *(Form("depthwise", 5, 28, c, c, c) for c in (232, 240, 248)),
    *(Form("depthwise", 3, 112, c, c, c) for c in (16, 32)),
    *(
        Form("padded" if zeros else "first", window, 112, inner + zeros, outer, 1, 2, zeros)
        for window, inner, outer in (
            *((3, 1, outer) for outer in (16, 32, 64)),
            *((3, 3, outer) for outer in (32, 64, 96)),
            *((window, inner, 32) for window in (5, 7) for inner in (1, 3)),
        )
        for zeros in (0, 4 - inner)
    ),
]


def model_of(form: Form, signs: str) -> onnx.ModelProto:
    """Three of the Conv in a row where it keeps the size, else one; in float without signs."""
    rng = np.random.default_rng(0)
    shape = (form.outer, form.inner // form.groups, form.window, form.window)
    many = 3 if form.inner == form.outer and form.stride == 1 else 1
    kept: dict[str, np.ndarray] = {"b": np.zeros(form.outer, np.int32 if signs else np.float32)}
    given = {"pads": [form.window // 2] * 4, "group": form.groups, "strides": [form.stride] * 2}
    nodes, source, fed = [], "x", form.inner - form.padded
    if signs:
        grid, held = KINDS[signs[0]], KINDS[signs[1]]
        lowest, middle = np.iinfo(grid).min, 128 if signs[1] == "u" else 0
        kept |= {"s": np.float32(0.02), "z": grid(lowest), "zw": np.full(form.outer, middle, held)}
        kept |= {"sw": np.full(form.outer, 0.01, np.float32)}
        kept["w"] = (rng.integers(-127, 128, shape) + middle).astype(held)
        nodes, source = [helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"])], "q"
        if form.padded:
            kept["pads"] = np.array([0, 0, 0, 0, 0, form.padded, 0, 0], np.int64)
            nodes, source = [*nodes, helper.make_node("Pad", ["q", "pads", "z"], ["p"])], "p"
    else:
        shape = (form.outer, fed // form.groups, form.window, form.window)
        kept["w"] = rng.normal(scale=0.01, size=shape).astype(np.float32)
    for number in range(many):
        out = f"y{number}"
        if signs:
            reads = [source, "s", "z", "w", "sw", "zw", "s", "z", "b"]
            nodes.append(
                helper.make_node("QLinearConv", reads, [out], name=f"conv{number}", **given)
            )
        else:
            conv = helper.make_node("Conv", [source, "w", "b"], [f"c{number}"], **given)
            nodes += [conv, helper.make_node("Relu", [f"c{number}"], [out])]
        source = out
    if signs:
        nodes.append(helper.make_node("DequantizeLinear", [source, "s", "z"], ["y"]))
        source = "y"
    graph = helper.make_graph(
        nodes,
        "kernel",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, fed, *[form.size] * 2])],
        [helper.make_tensor_value_info(source, TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in kept.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def least_us(model: onnx.ModelProto, form: Form) -> float:
    """The quickest run of the quickest of its Convs, and of the Pad before it."""
    rng = np.random.default_rng(1)
    shape = (1, form.inner - form.padded, form.size, form.size)
    feed = {"x": rng.normal(size=shape).astype(np.float32)}
    found: dict[str, list[float]] = defaultdict(list)
    pads: list[float] = []
    for name, kind, taken in profile_kernels(model, [feed], runs=_RUNS):
        if "Conv" in kind:
            found[name].append(taken)
        elif kind == "Pad":
            pads.append(taken)
    return min(min(times[2:]) for times in found.values()) + min(pads[2:], default=0.0)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("signs", nargs="*", help="of activations and weights: us, uu or ss")
    signs = parser.parse_args().signs or SIGNS
    if unknown := set(signs).difference(SIGNS):
        parser.error(f"signs must be of {', '.join(SIGNS)}, got {', '.join(sorted(unknown))}")
    rows = []
    for form in FORMS:
        shape = f"{form.window}x{form.window}, {form.size}x{form.size}, {form.inner}->{form.outer}"
        times = [f"{least_us(model_of(form, s), form):.0f}" for s in ("", *signs)]
        rows.append([form.what, shape, *times])
        print(" | ".join(rows[-1]), flush=True)
    grids = (", ".join({"u": "uint8", "s": "int8"}[sign] for sign in pair) for pair in signs)
    head = ["Conv", "window, size, channels", "float", *grids]
    print(f"\n{table(head, rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
