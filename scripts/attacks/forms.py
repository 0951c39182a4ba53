"""Small models of many forms, to be changed: x [n, 3, 16, 16], which pictures fit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, parser
from onnx.external_data_helper import convert_model_to_external_data, write_external_data_tensors
from onnx.shape_inference import infer_shapes

_FORMS = {
    "control": """c = Conv <pads = [1, 1, 1, 1]> (x, w) r = Relu (c)
        top = ReduceMax <keepdims = 0> (r) yes = Greater (top, half)
        q = If (yes) <then_branch = a () => (float[n, 4, 16, 16] t) { t = Conv (r, v) },
            else_branch = b () => (float[n, 4, 16, 16] e) { o = Neg (r) e = Conv (o, v) }>
        k = Shape (x) three = Gather (k, one) l = Loop (three, true, q) <
            body = c (int64 i, bool ci, float[n, 4, 16, 16] s)
            => (bool co, float[n, 4, 16, 16] so) { co = Identity (ci) so = Conv (s, v) }>
        g = GlobalAveragePool (l) f = Flatten (g) y = Gemm (f, m, b5)""",
    "functions": """c = Conv (x, w) t = my.Two <slope = 0.2> (c, v)
        g = GlobalAveragePool (t) y = Flatten (g)""",
    "sparse": "c = Conv (x, w) a = Add (c, sp) k = Constant () b = Mul (a, k) y = Conv (b, v)",
    "sequences": """c = Conv (x, w) s = SplitToSequence <axis = 1> (c, two)
        t = SequenceAt (s, zero) k = ConcatFromSequence <axis = 1> (s) z = SequenceLength (s)
        r = Relu (k) y = Conv (r, v)""",
    "blocks": """c = Conv <pads = [1, 1, 1, 1]> (x, w)
        b = BatchNormalization (c, one4, zero4, zero4, one4) r = Clip (b, zerof, six)
        p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r)
        d = Conv <group = 4, pads = [1, 1, 1, 1]> (p, dw) h = HardSwish (d) e = Conv (h, v)
        s = Sigmoid (e) m1 = Mul (e, s) k = Concat <axis = 1> (m1, p)
        u = Resize <mode = "nearest"> (k, , up) t = ConvTranspose <strides = [2, 2]> (k, wt)
        a = Add (u, t) i = Pad (a, pads)
        j = AveragePool <kernel_shape = [3, 3], strides = [3, 3]> (i)
        s1, s2 = Split <axis = 1> (j, halves) o = Sub (s1, s2) z = Reshape (o, rows)
        y1 = Gemm <transB = 1> (z, fc) y = Softmax <axis = 1> (y1)""",
    "attention": """p = Conv <strides = [4, 4]> (x, patch) r = Reshape (p, tokens)
        t = Transpose <perm = [0, 2, 1]> (r) n = LayerNormalization <axis = -1> (t, one8, zero8)
        q = MatMul (n, wq) k = MatMul (n, wk) kt = Transpose <perm = [0, 2, 1]> (k)
        s = MatMul (q, kt) d = Div (s, six) a = Softmax <axis = -1> (d) o = MatMul (a, n)
        e = Add (o, t) f = Erf (e) g = Mul (f, e) m1 = ReduceMean <axes = [1], keepdims = 0> (g)
        y = MatMul (m1, wq)""",
    "detector": """c = Conv <strides = [2, 2]> (x, w) p = PRelu (c, slope)
        i = InstanceNormalization (p, one4, zero4) d = DepthToSpace <blocksize = 2> (i)
        s = Slice (p, zero1, two1, one1) e = Exp (s) g = Greater (p, zerof) h = Where (g, p, zerof)
        f = Flatten (h) top, places = TopK (f, three1) boxes = Reshape (f, four)
        b = Tanh (d) y = Identity (e)""",
    "recurrent": """q = ReduceMean <axes = [1], keepdims = 0> (x)
        t = Transpose <perm = [1, 0, 2]> (q)
        l, last = LSTM <hidden_size = 6> (t, lw, lr) z = Squeeze (last, zero1)
        o = MatMul (z, lk) s = Shape (o) n = Gather (s, zero) u = Unsqueeze (n, zero1)
        k = Constant <value_ints = [3]> () a = Concat <axis = 0> (u, k) y = Reshape (o, a)""",
    "half": """h = Cast <to = 10> (x) c = Conv (h, wh) r = Relu (c) d = Conv (r, vh)
        y = Cast <to = 1> (d)""",
    "old": """c = Conv (x, w) l = Clip <min = 0.0, max = 6.0> (c)
        u = Upsample <mode = "nearest"> (l, up) d = Dropout <ratio = 0.5> (u)
        g = GlobalAveragePool (d) f = Flatten (g) y = Gemm (f, m, b5)""",
}
_OUTPUTS = {
    "detector": "float top, int64 places, float b, float y", "sequences": "float y, int64 z",
}  # fmt: skip
_INTEGERS = {
    "one": 1, "two": 2, "zero": 0, "zero1": [0], "one1": [1], "two1": [2], "three1": [3],
    "four": [0, 4, -1], "halves": [4, 4], "rows": [0, -1], "tokens": [0, 8, -1],
    "pads": [0, 0, 1, 1, 0, 0, 1, 1],
}  # fmt: skip
_FLOATS = {
    "half": 0.5, "six": 6, "zerof": 0, "one4": [1] * 4, "zero4": [0] * 4, "one8": [1] * 8,
    "zero8": [0] * 8, "b5": [0] * 5, "up": [1, 1, 2, 2],
}  # fmt: skip
_DRAWN = {
    "w": (4, 3, 3, 3), "v": (4, 4, 1, 1), "m": (4, 5), "dw": (4, 1, 3, 3), "wt": (8, 8, 2, 2),
    "fc": (10, 144), "patch": (8, 3, 4, 4), "wq": (8, 8), "wk": (8, 8), "slope": (4, 1, 1),
    "lw": (1, 24, 16), "lr": (1, 24, 6), "lk": (6, 3), "long": (4, 3, 5), "cube": (4, 3, 2, 3, 3),
    "flat": (768, 5), "left": (6, 16), "line": (16,), "deep": (1, 16, 5), "grouped": (4, 3, 2, 2),
    "both": (2, 16, 16), "back": (2, 16, 4), "table": (300, 8),
}  # fmt: skip
_FUNCTIONS = (
    '<domain: "my", opset_import: ["": 17]> Act <slope: float = 0.1> (a) => (o)'
    " { o = LeakyRelu <alpha: float = @slope> (a) }",
    '<domain: "my", opset_import: ["": 17, "my": 1]> Two <slope> (a, w) => (o)'
    " { b = my.Act (a) c = Conv (b, w) o = my.Act <slope: float = @slope> (c) }",
)


def forms(folder: Path) -> list[bytes]:
    """The models as bytes; one of them has its weights in `w.bin` of the folder."""
    made = {n: model_of(text, _OUTPUTS.get(n, "float y"), name=n) for n, text in _FORMS.items()}
    made["functions"].functions.extend(parser.parse_function(text) for text in _FUNCTIONS)
    made["functions"].opset_import.append(helper.make_opsetid("my", 1))
    values = numpy_helper.from_array(np.array([3, 7], np.float32), "sp")
    places = numpy_helper.from_array(np.array([0, 3]), "places")
    sparse = helper.make_sparse_tensor(values, places, [4, 1, 1])
    made["sparse"].graph.sparse_initializer.append(sparse)
    constant = made["sparse"].graph.node[2]
    constant.attribute.append(helper.make_attribute("sparse_value", sparse))
    made["old"].ir_version, made["old"].opset_import[0].version = 3, 9
    for held in made["old"].graph.initializer:
        kind, shape = held.data_type, list(held.dims)
        made["old"].graph.input.append(helper.make_tensor_value_info(held.name, kind, shape))
    typed = [infer_shapes(model) for model in made.values()]
    beside = infer_shapes(made["blocks"])
    convert_model_to_external_data(beside, location="w.bin", size_threshold=0)
    beside = write_external_data_tensors(beside, str(folder))
    return [one.SerializeToString() for one in (*typed, beside)]


def model_of(
    text: str,
    outputs: str = "float y",
    *,
    inputs: str = "float[n, 3, 16, 16] x",
    constants: str = "",
    name: str = "net",
    opset: int = 17,
    ir: int = 8,
    domains: Sequence[str] = (),
) -> onnx.ModelProto:
    """A model of ONNX's text; weights are known by name, outputs have no shape."""
    held = f"<{constants}> " if constants else ""
    graph = parser.parse_graph(f"{name} ({inputs}) => ({outputs}) {held}{{ {text} }}")
    for number, node in enumerate(graph.node):
        node.name = f"{node.op_type}_{number}"
    for output in (one for one in graph.output if one.type.HasField("tensor_type")):
        output.type.tensor_type.ClearField("shape")
    own = {held.name for held in graph.initializer} | {value.name for value in graph.input}
    graph.initializer.extend(_weights(set(re.findall(r"\w+", text + outputs)) - own))
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
    return helper.make_model(graph, opset_imports=imports, ir_version=ir)


def _weights(names: set[str]) -> Iterator[TensorProto]:
    rng = np.random.default_rng(0)
    for name, shape in _DRAWN.items():
        values = rng.normal(0, 0.3, shape)
        yield from (
            numpy_helper.from_array(values.astype(kind), own)
            for own, kind in ((name, np.float32), (f"{name}h", np.float16))
            if own in names
        )
    for table, kind in ((_INTEGERS, np.int64), (_FLOATS, np.float32), ({"true": True}, np.bool_)):
        for name, value in table.items():
            if name in names:
                yield numpy_helper.from_array(np.array(value, kind), name)
