"""`benchmarks/gpu_placement.py`: models that differ, and the table of their times."""

from __future__ import annotations

from types import SimpleNamespace

import onnx
import pytest

from benchmarks import gpu_placement
from deploy.errors import BackendError
from deploy.runtimes.ort import OrtSession


@pytest.mark.slow
@pytest.mark.release
def test_each_option_makes_another_model(tmp_path):
    questions = {**gpu_placement.QUESTIONS}
    del questions["gemm"]  # its weights take seconds
    for name, question in questions.items():
        paths = gpu_placement.make_models(name, question, tmp_path)
        pairs = []
        for path in paths.values():
            nodes = onnx.load(path).graph.node
            pairs.append(sum(node.op_type == "QuantizeLinear" for node in nodes))
        assert len({*pairs}) == len(paths) > 1, name


@pytest.mark.slow
@pytest.mark.release
def test_table_has_a_row_for_each_engine(tmp_path, monkeypatch, capsys):
    class Engine:
        def __init__(self, plan):
            self.plan = plan

    def build(path, settings):
        batch = settings.profiles["x"].opt_shape[0]
        if batch == 32:
            raise BackendError("no memory\nfor it")
        return Engine(path.read_bytes())

    monkeypatch.setattr(gpu_placement, "sdk", SimpleNamespace(find_sdk=lambda: None))
    monkeypatch.setattr(gpu_placement, "open_gpu", lambda index: None)
    device = SimpleNamespace(description="a fake")
    monkeypatch.setattr(gpu_placement, "describe_device", lambda sdk, gpu: device)
    monkeypatch.setattr(gpu_placement, "build_engine", build)
    monkeypatch.setattr(gpu_placement.TensorrtSession, "open", OrtSession.open)
    assert gpu_placement.main(["--out", str(tmp_path), "--only", "deconv", "--duration", "0"]) == 0
    text = capsys.readouterr().out
    assert text.count("| deconv | ") == 6
    assert "| deconv | calib8 | 8 | " in text and "| --pair-behind-deconv | 32 | no memory" in text
    assert "a fake; int8 and fp16" in (tmp_path / "gpu_placement.md").read_text()
