"""Small models that are valid and odd, or hostile: built, or refused, each in bounded memory.

What `tests/test_frontend_forms.py`, `test_frontend_hostile.py` and `test_frontend_plugins.py` have
is not here again: sequences, text, names like those that calib8 adds, functions and constants that
double.
"""

from __future__ import annotations

import random
import resource
import shutil
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import onnx
from onnx import helper, parser

from scripts.attacks import whole
from scripts.attacks.children import run
from scripts.attacks.forms import model_of
from scripts.attacks.fuzz import NO_MEMORY, limit_memory
from scripts.attacks.outcome import FAILED, SURVIVED, Outcome, judged
from scripts.attacks.part import Case, Part
from scripts.attacks.subject import made

BUILT, REFUSED, EITHER = (0,), (1,), (0, 1)
_CPU_S = 40
_MEMORY = 1 << 30  # bytes beyond what the process has at its start
Odd = Callable[[], onnx.ModelProto]

_C = "c = Conv (x, w) "
_R = _C + "r = Relu (c) "
_TAIL = " y = Conv (r, v)"
_NORM = "c = Conv (x, w) r = BatchNormalization {} (c, one4, zero4, zero4, {}) y = Conv (r, v)"
_LOOP = """ l = Loop ({}, true, r) <body = b (int64 i, bool ci, float[n, 4, 14, 14] s)
    => (bool co, float[n, 4, 14, 14] so) {{ co = Identity (ci) so = {} (s{}) }}>"""
_OWN = '<domain: "my", opset_import: ["": 17, "my": 1]> '


def _nested(depth: int) -> onnx.ModelProto:
    """Ifs in Ifs."""
    body = "z0 = Neg (c)"
    for level in range(depth):
        body = f"""i{level} = If (true) <then_branch = t{level} () => (z{level}) {{ {body} }},
            else_branch = e{level} () => (e{level}) {{ e{level} = Relu (c) }}>
            z{level + 1} = Identity (i{level})"""
    return model_of(f"{_C} {body} y = Neg (z{depth})")


def _calling(*functions: str) -> onnx.ModelProto:
    """A model whose function F0 calls others."""
    model = model_of(_C + "y = my.F0 (c)", domains=["my"], ir=9)
    model.functions.extend(parser.parse_function(_OWN + text) for text in functions)
    return model


def _changed(change: Callable[[onnx.ModelProto], object], *words: str) -> onnx.ModelProto:
    model = model_of(*words)
    change(model)
    return model


def _fed(model: onnx.ModelProto, count: int) -> None:
    for number in range(count):
        model.graph.input.append(helper.make_tensor_value_info(f"i{number}", 1, [1]))


def _named(word: str, tensor: str, node: str) -> onnx.ModelProto:
    """Where the input is called `word`, and others too."""
    model = model_of(_R + _TAIL)
    names = {"x": word, "c": tensor, "y": f"{tensor}o"}
    for one in model.graph.node:
        one.name = f"{node}{one.name}"
        for held in (one.input, one.output):
            held[:] = [names.get(name, name) for name in held]
    model.graph.input[0].name, model.graph.output[0].name = word, f"{tensor}o"
    return model


def _referring(model: onnx.ModelProto) -> None:
    model.graph.node[1].attribute.add(name="alpha", type=1, ref_attr_name="q")


def _metadata(model: onnx.ModelProto) -> None:
    for key, value in {
        "names": "{" * 90000, "imgsz": "[" * 90000, "stride": "9" * 90000, "task": "detect",
        "pretrained_cfg": '{"a":' * 9000, "character": "\x1b" * 999, "preprocessor_config": "[" * 9,
    }.items():  # fmt: skip
        model.metadata_props.add(key=key, value=value)


def _text(nodes: str, outputs: str = "float y", **more: object) -> Odd:
    return partial(model_of, nodes, outputs, **more)  # type: ignore[arg-type]


# name: (exit codes, what makes it)
ODD: dict[str, tuple[Collection[int], Odd]] = {
    "weight computed": (
        BUILT, _text(_R + "s = ReduceMean <keepdims = 0> (x) u = Mul (v, s) y = Conv (r, u)")),
    "weight transposed": (
        BUILT, _text(_R + "u = Transpose <perm = [1, 0, 2, 3]> (v) y = Conv (r, u)")),
    "weight of two groupings": (
        BUILT, _text(_R + "a = Conv <group = 4> (r, dw) b = Slice (a, zero1, one1, one1) "
                     "k = Concat <axis = 1> (b, b, b, b) d = Conv <group = 4> (k, dw) "
                     "e = ReduceMean <axes = [1]> (d) y = Conv (e, dw)")),
    "bias of two": (BUILT, _text("c = Conv (x, w, one4) r = Relu (c) y = Conv (r, v, one4)")),
    "weight read by an Add": (
        BUILT, _text(_R + "d = Conv (r, v) s = ReduceSum <keepdims = 0> (v) y = Add (d, s)")),
    "weight is an output": (BUILT, _text(_R + _TAIL, "float y, float v")),
    "weight in a loop": (
        BUILT, _text(_R + "q = Conv (r, v)" + _LOOP.format("two", "Conv", ", v") + "y = Relu (l)")),
    "weight is fed": (REFUSED, _text(_R + _TAIL, inputs="float[n,3,16,16] x, float[4,4,1,1] v")),
    "bias without a name": (BUILT, _text("c = Conv (x, w, ) r = Relu (c)" + _TAIL)),
    "Conv1d": (BUILT, _text("q = Reshape (x, s) r = Conv (q, long) y = Relu (r)",
                            constants="int64[3] s = {0, 3, 256}")),
    "Conv3d": (BUILT, _text("q = Reshape (x, s) r = Conv (q, cube) y = Relu (r)",
                            constants="int64[5] s = {0, 3, 4, 8, 8}")),
    "output_shape": (
        BUILT, _text(_R + "y = ConvTranspose <output_shape = [28, 28], strides = [2, 2]> (r, v)")),
    "ConvTranspose with groups": (
        BUILT, _text(_R + "y = ConvTranspose <group = 2, strides = [2, 2]> (r, grouped)")),
    "Gemm with all": (
        EITHER, _text("f = Flatten (x) t = Transpose (f) "
                     "y = Gemm <transA = 1, alpha = 0.5, beta = 2.0> (t, flat, b5)")),
    "constant left": (
        EITHER, _text("q = ReduceMean <axes = [1], keepdims = 0> (x) y = MatMul (left, q)")),
    "MatMul of a line": (EITHER, _text("q = MatMul (x, line) y = MatMul (q, line)")),
    "MatMul of three axes": (
        BUILT, _text("q = ReduceMean <axes = [1], keepdims = 0> (x) y = MatMul (q, deep)")),
    "MatMul of itself": (BUILT, _text(_R + "y = MatMul (r, r)")),
    "Concat of one": (BUILT, _text(_R + "k = Concat <axis = 0> (r, r) y = Conv (k, v)")),
    "Concat with a constant": (
        BUILT, _text(_R + "d = Conv (r, v) s = Expand (half, k) y = Concat <axis = 0> (d, s)",
                     constants="int64[4] k = {1, 4, 14, 14}")),
    "Add of one": (BUILT, _text(_R + "a = Add (r, r) y = Conv (a, v)")),
    "all is 0": (BUILT, _text(_R + "a = Mul (r, zerof) y = Conv (a, v)")),
    "indices of MaxPool": (
        BUILT, _text(_R + "p, i = MaxPool <kernel_shape = [2, 2]> (r) y = Conv (p, v)",
                     "float y, int64 i")),
    "mask of Dropout": (
        BUILT, _text(_R + "d, mask = Dropout (r) y = Conv (d, v)", "float y, bool mask")),
    "variance 0": (REFUSED, _text(_NORM.format("<epsilon = 0.0>", "zero4"))),
    "variance below 0": (
        REFUSED, _text(_NORM.format("", "b"), constants="float[4] b = {-1, -1, 1, 1}")),
    "norm in training": (
        EITHER, _text("c = Conv (x, w) r, a, b = BatchNormalization <training_mode = 1> "
                      "(c, one4, zero4, zero4, one4)" + _TAIL, "float y, float a")),
    "Clip of nothing": (BUILT, _text(_C + "r = Clip (c)" + _TAIL)),
    "Clip turned": (BUILT, _text(_C + "r = Clip (c, six, zerof)" + _TAIL)),
    "Clip computed": (
        BUILT, _text(_C + "t = ReduceMax <keepdims = 0> (x) r = Clip (c, , t)" + _TAIL)),
    "FusedConv": (
        EITHER, _text('r = com.microsoft.FusedConv <activation = "Relu"> (x, w)' + _TAIL,
                     domains=["com.microsoft"])),
    "Gelu of Microsoft": (
        EITHER, _text(_C + "r = com.microsoft.Gelu (c)" + _TAIL, domains=["com.microsoft"])),
    "unused domain": (BUILT, _text(_R + _TAIL, domains=["foo.bar"])),
    "opset 7": (BUILT, _text(_R + _TAIL, opset=7, ir=4)),
    "opset 23": (BUILT, _text(_R + _TAIL, opset=23, ir=11)),
    "float64": (
        EITHER, _text("d = Cast <to = 11> (x) k = Cast <to = 11> (line) e = MatMul (d, k) "
                      "y = Cast <to = 1> (e)")),
    "int8 weight": (
        EITHER, _text("u = DequantizeLinear (k, half) r = Conv (x, w) y = Conv (r, u)",
                      constants="int8[1, 4, 1, 1] k = {1, 2, 3, 4}")),
    "uint8 input": (
        BUILT, _text("f = Cast <to = 1> (x) c = Conv (f, w) r = Relu (c)" + _TAIL,
                     inputs="uint8[n, 3, 16, 16] x")),
    "bfloat16": (EITHER, _text("b = Cast <to = 16> (x) f = Cast <to = 1> (b) y = Conv (f, w)")),
    "two inputs": (
        REFUSED, _text(_R + "a = Add (r, z) y = Conv (a, v)",
                       inputs="float[n, 3, 16, 16] x, float[1, 4, 14, 14] z")),
    "input unused": (EITHER, _text(_R + _TAIL, inputs="float[n, 3, 16, 16] x, float[1] z")),
    "sizes all open": (REFUSED, _text(_R + _TAIL, inputs="float[a, b, c1, d1] x")),
    "one size twice": (REFUSED, _text(_R + _TAIL, inputs="float[n, 3, n, n] x")),
    "dead nodes": (BUILT, _text(_R + _TAIL + " dead = Conv (r, v)")),
    "batch 0": (REFUSED, _text(_R + _TAIL, inputs="float[0, 3, 16, 16] x")),
    "batch 3": (BUILT, _text(_R + _TAIL, inputs="float[3, 3, 16, 16] x")),
    "output of places": (BUILT, _text(_R + "d = Conv (r, v) y = NonZero (d)", "int64 y")),
    "output of NaN": (EITHER, _text(_C + "z = Sub (c, c) y = Div (z, z)")),
    "NaN inside": (
        EITHER, _text(_C + "z = Sub (c, c) r = Div (z, z) d = Conv (r, v) y = Relu (d)")),
    "nothing inside": (
        EITHER, _text(_R + "s = Slice (r, zero1, zero1, one1) k = Concat <axis = 1> (r, s) "
                      "y = Conv (k, v)")),
    "reference outside": (
        REFUSED, partial(_changed, _referring, _C + "r = LeakyRelu (c)" + _TAIL)),
    "weight of no channels": (
        EITHER, _text(_R + "e = Conv (r, none) k = Concat <axis = 1> (e, r) y = Conv (k, v)",
                      constants="float[0, 4, 1, 1] none = {}")),
    "weight 0": (BUILT, _text(_R + "u = Mul (v, zerof) y = Conv (r, u)")),
    "weight 1e38": (
        EITHER, _text(_R + "u = Mul (v, k) y = Conv (r, u)", constants="float k = {1e38}")),
    "weight 1e-42": (
        EITHER, _text(_R + "u = Mul (v, k) y = Conv (r, u)", constants="float k = {1e-42}")),
    "LSTM both ways": (
        BUILT, _text("q = ReduceMean <axes = [1], keepdims = 0> (x) "
                     'l = LSTM <hidden_size = 4, direction = "bidirectional"> (q, both, back) '
                     "t = Transpose <perm = [0, 2, 1, 3]> (l) y = MatMul (t, k)",
                     constants="float[4, 2] k = {1, 2, 3, 4, 5, 6, 7, 8}")),
    "embedding": (BUILT, _text("i = Cast <to = 7> (x) g = Gather (table, i) y = MatMul (g, wq)")),
    "cubic": (
        BUILT, _text(_R + 'u = Resize <mode = "cubic"> (r, , , k) y = Conv (u, v)',
                     constants="int64[4] k = {1, 4, 40, 40}")),
    "Einsum": (BUILT, _text(_R + 'y = Einsum <equation = "nchw,cd->ndhw"> (r, m)')),
    "Scan": (
        BUILT, _text(_R + "s = Scan <num_scan_inputs = 1, body = b (float[4, 14, 14] a) => "
                     "(float[4, 14, 14] o) { o = Relu (a) }> (r) y = Conv (s, v)")),
    "If in If": (BUILT, partial(_nested, 20)),
    "function of itself": (REFUSED, partial(_calling, "F0 (a) => (o) { o = my.F0 (a) }")),
    "two functions of each other": (
        REFUSED, partial(_calling, "F0 (a) => (o) { o = my.F1 (a) }",
                         "F1 (a) => (o) { o = my.F0 (a) }")),
    "Concat that doubles": (
        EITHER, _text(_C + " ".join(f"c{n} = Concat <axis = 1> ({f'c{n - 1}' if n else 'c'}, "
                                    f"{f'c{n - 1}' if n else 'c'})" for n in range(30))
                      + " y = ReduceSum <keepdims = 0> (c29)")),
    "ConstantOfShape of 90 G": (
        EITHER, _text(_C + "k = ConstantOfShape (s) t = ReduceSum <keepdims = 0> (k) "
                      "y = Add (c, t)",
                      constants="int64[2] s = {300000, 300000}")),
    "Expand": (EITHER, _text(_C + "y = Expand (c, s)", constants="int64[4] s = {1048576,4,14,14}")),
    "Tile": (EITHER, _text(_C + "y = Tile (c, s)", constants="int64[4] s = {1, 1, 30000, 30000}")),
    "Resize": (
        EITHER, _text(_C + 'y = Resize <mode = "linear"> (c, , s)',
                      constants="float[4] s = {1.0, 1.0, 5000.0, 5000.0}")),
    "Pad": (EITHER, _text("q = Pad (x, s) y = Conv (q, w)",
                          constants="int64[8] s = {0, 0, 100000, 100000, 0, 0, 0, 0}")),
    "pads": (EITHER, _text("y = Conv <pads = [60000, 60000, 60000, 60000]> (x, w)")),
    "Range": (
        EITHER, _text(_C + "q = Range (zero, k, one) s = ReduceSum <keepdims = 0> (q) "
                      "f = Cast <to = 1> (s) y = Add (c, f)",
                      constants="int64 k = {1099511627776}")),
    "OneHot": (
        EITHER, _text(_C + "o = OneHot (two1, k, s) q = ReduceSum <keepdims = 0> (o) "
                      "y = Add (c, q)",
                      constants="int64[1] k = {274877906944}, float[2] s = {0.0, 1.0}")),
    "sizes of 2^62": (
        REFUSED, _text(_C + "y = Relu (c)",
                       inputs="float[n, 3, 4611686018427387904, 4611686018427387904] x")),
    "sizes of 100000": (EITHER, _text(_R + _TAIL, inputs="float[n, 3, 100000, 100000] x")),
    "batch of 2^31": (EITHER, _text(_R + _TAIL, inputs="float[2147483648, 3, 16, 16] x")),
    "64 axes": (REFUSED, _text("y = Relu (x)", inputs=f"float[{', '.join('1' * 64)}] x")),
    "text input": (REFUSED, _text("y = Identity (x)", "string y", inputs="string[1, 1] x")),
    "optional input": (
        REFUSED, _text("q = OptionalGetElement (x) y = Conv (q, w)",
                       inputs="optional(float[1, 3, 16, 16]) x")),
    "bool input": (
        EITHER, _text("f = Cast <to = 1> (x) y = Conv (f, w)", inputs="bool[1, 3, 16, 16] x")),
    "nothing to quantize": (EITHER, _text("a = Abs (x) y = Sqrt (a)")),
    "20,000 inputs": (EITHER, partial(_changed, lambda m: _fed(m, 20_000), _R + _TAIL)),
    "300 outputs": (
        BUILT, _text(_C + " ".join(f"y{n} = Relu (c)" for n in range(300)),
                     ", ".join(f"float y{n}" for n in range(300)))),
    "Sum of 20,000": (EITHER, _text(_C + f"y = Sum ({', '.join(['c'] * 20_000)})")),
    "name of 2 MB": (REFUSED, partial(_named, "x", "A" * 2_000_000, "")),
    "name of 128 KB": (BUILT, partial(_named, "x", "A" * 130_000, "")),
    "names of a shell": (
        BUILT, partial(_named, "x$(touch PWNED)`touch PWNED`;touch PWNED' --foo \"|&",
                       "</script><img src=x onerror=alert(1)>\"\x1b]0;x\x07\u202e|", "\n")),
    "name of two lines": (EITHER, partial(_named, "x\ntouch PWNED\n", "c", "")),
    "name of an option": (BUILT, partial(_named, "--help", "c", "")),
    "metadata": (EITHER, partial(_changed, _metadata, _R + _TAIL)),
    "stride 0": (REFUSED, _text("y = Conv <strides = [0, 0]> (x, w)")),
    "group 2^40": (REFUSED, _text("y = Conv <group = 1099511627776> (x, w)")),
    "dilation 2^40": (REFUSED, _text("y = Conv <dilations = [1099511627776, 1]> (x, w)")),
    "MaxPool of 2^30": (
        EITHER, _text(_C + "y = MaxPool <kernel_shape = [1073741824, 1073741824], "
                      "pads = [536870912, 536870912, 536870912, 536870912]> (c)")),
    "blocks of 0": (REFUSED, _text(_C + "y = DepthToSpace <blocksize = 0> (c)")),
    "Gather beyond": (
        REFUSED, _text(_C + "y = Gather <axis = 1> (c, k)", constants="int64 k = {99}")),
}  # fmt: skip


def _start(folder: Path, count: int) -> Case:
    subject, out, path = made(folder / "subject"), folder / "out", folder / "case.onnx"
    names = list(ODD)

    def case(rng: random.Random, number: int) -> Outcome:
        name = names[number * len(names) // count]
        codes, make = ODD[name]
        path.write_bytes(make().SerializeToString())
        _, _, *words = subject.build(0, out, "--limit", "4", "-q")
        ended = run(["build", str(path), *words], before=partial(_limit_process, _MEMORY))
        outcome = judged(ended, refusals=(1,))
        wrong = outcome.why if outcome.word == FAILED else ""
        if not wrong and ended.code not in codes:
            wrong = f"exit code {ended.code}, not {codes}: {ended.err[-300:]!r}"
        if NO_MEMORY in ended.err:
            wrong = f"needed over {_MEMORY >> 30} GiB"
        left = whole.leftovers(out)
        wrong = wrong or (f"temporary files stay: {left}" if left else "")
        wrong = wrong or ("a command ran" if Path("PWNED").exists() else "")
        shutil.rmtree(out, ignore_errors=True)
        if wrong:
            return Outcome(FAILED, f"{name}: {wrong}", path)
        return Outcome(SURVIVED) if ended.code == 0 else outcome

    return case


def _limit_process(memory: int) -> None:
    limit_memory(memory)
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))


PARTS = (Part(name="odd-models", short=len(ODD) // 2, long=len(ODD), start=_start, limit_s=600),)
