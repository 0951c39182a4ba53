"""Large models of memory that ONNX Runtime maps from a file."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from deploy.errors import BackendError
from deploy.runtimes import ort
from deploy.runtimes.mapped_model import mapped_tensors, write_mapped
from tests.models import make_model

RNG = np.random.default_rng(0)


@pytest.fixture
def model() -> onnx.ModelProto:
    """A product with two large weights, and a small bias."""
    weights = {
        "w": RNG.normal(size=(512, 700)).astype(np.float32),
        "v": RNG.normal(size=(700, 600)).astype(np.float32),
        "b": RNG.normal(size=600).astype(np.float32),
    }
    nodes = [("MatMul", "x w", "h"), ("MatMul", "h v", "i"), ("Add", "i b", "y")]
    return make_model(nodes, {"x": [2, 512]}, {"y": [2, 600]}, weights)


def run(model: onnx.ModelProto) -> bytes:
    x = RNG.normal(size=(2, 512)).astype(np.float32)
    x[:] = np.linspace(-1, 1, 512, dtype=np.float32)
    return ort.OrtSession.open(model, threads=1).run({"x": x})["y"].tobytes()


def test_mapped_model_is_the_same_model(model, tmp_path):
    names = mapped_tensors(model)
    assert set(names) == {"w", "v"}
    path = write_mapped(model, names, tmp_path)
    assert path.stat().st_size < 10_000
    loaded = onnx.load(path)
    for tensor, original in zip(loaded.graph.initializer, model.graph.initializer, strict=True):
        assert tensor.name == original.name
        assert (numpy_helper.to_array(tensor) == numpy_helper.to_array(original)).all()


def test_mapped_session_gives_the_same_bits(model, monkeypatch):
    expected = run(model)
    monkeypatch.setattr(ort, "_LARGE_MODEL_VALUES", 1)
    written = []
    monkeypatch.setattr(
        ort, "write_mapped", lambda *arguments: written.append(1) or write_mapped(*arguments)
    )
    assert run(model) == expected
    assert written


def test_full_disk_loads_from_memory(model, monkeypatch):
    expected = run(model)
    monkeypatch.setattr(ort, "_LARGE_MODEL_VALUES", 1)

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ort, "write_mapped", fail)
    assert run(model) == expected


def test_refusal_of_a_large_model_names_no_temporary_file(model, monkeypatch):
    model.graph.node[-1].op_type = "Unheard"
    sentences = []
    for large_model_values in (1 << 30, 1):
        monkeypatch.setattr(ort, "_LARGE_MODEL_VALUES", large_model_values)
        with pytest.raises(BackendError, match="Unheard") as refusal:
            ort.OrtSession.open(model, threads=1)
        sentences.append(str(refusal.value))
    assert sentences[0] == sentences[1]
