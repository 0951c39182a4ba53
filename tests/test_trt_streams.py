"""Several sessions at once; the sessions here are ONNX Runtime's."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from deploy.errors import BackendError, ConfigError
from deploy.runtimes.ort import OrtSession
from deploy.targets.tensorrt.inspector import throughput


def session() -> OrtSession:
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 8]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", ends[:1], ends[1:])
    opset = [helper.make_opsetid("", 13)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=8)
    return OrtSession.open(model.SerializeToString(), threads=1)


def test_every_session_runs_and_all_are_counted() -> None:
    feeds = [{"x": np.ones((1, 8), np.float32)}]
    sessions = [session(), session()]
    assert throughput(sessions, feeds, warmup_ms=0, duration_s=0.05) > 0
    assert throughput(sessions, feeds, warmup_ms=0, duration_s=0) > 0


def test_an_error_in_a_thread_reaches_the_caller() -> None:
    with pytest.raises(BackendError):
        throughput([session()], [{"z": np.ones(3, np.float32)}], duration_s=0)
    with pytest.raises(ConfigError):
        throughput([], [], duration_s=0)
