"""OpenVINO for tests: ONNX Runtime under its interface, wrong at Add.

Its source stands as `openvino.py` in a folder on the path.
"""

from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime

__version__ = "0.fake"


def _port(node):
    sizes = [
        SimpleNamespace(is_static=isinstance(size, int), get_length=lambda size=size: size)
        for size in node.shape
    ]
    return SimpleNamespace(
        get_any_name=lambda: node.name,
        get_partial_shape=lambda: sizes,
        get_element_type=lambda: SimpleNamespace(to_dtype=lambda: np.float32),
    )


class _Compiled:
    def __init__(self, model, settings):
        assert settings["INFERENCE_PRECISION_HINT"] == "f32"
        self.session = onnxruntime.InferenceSession(model.SerializeToString())
        self.inputs = [_port(node) for node in self.session.get_inputs()]
        self.outputs = [_port(node) for node in self.session.get_outputs()]

    def __call__(self, feed):
        return dict(enumerate(self.session.run(None, feed)))


class Core:
    def read_model(self, source):
        model = onnx.load_from_string(source) if isinstance(source, bytes) else onnx.load(source)
        for node in model.graph.node:
            if node.op_type == "Cosh":
                raise RuntimeError("Exception from src/x.cpp:1:\nOperation Cosh is not supported\n")
            if node.op_type == "Add":
                node.op_type = "Sub"
        return model

    def compile_model(self, model, device, settings):
        assert device == "CPU"
        return _Compiled(model, settings)
