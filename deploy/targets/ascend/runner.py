"""A model in ONNX Runtime with inner tensors among its outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from deploy.errors import FeedError

if TYPE_CHECKING:
    import onnx

Array = NDArray[Any]
Batch = Mapping[str, Array]


class Runner:
    """ONNX Runtime on a model with the wanted tensors among its outputs."""

    def __init__(self, model: onnx.ModelProto, tensors: list[str]) -> None:
        import onnx
        import onnxruntime as ort

        tapped = onnx.ModelProto()
        tapped.CopyFrom(model)
        inputs = {value.name for value in tapped.graph.input}
        outputs = {value.name for value in tapped.graph.output}
        for name in tensors:
            if name not in inputs | outputs:
                tapped.graph.output.append(onnx.ValueInfoProto(name=name))
        options = ort.SessionOptions()
        options.log_severity_level = 3
        self.session = ort.InferenceSession(
            tapped.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self.tensors = [name for name in tensors if name not in inputs]
        self.fed = [name for name in tensors if name in inputs]

    def run(self, batch: Batch) -> dict[str, Array]:
        """Input arrays -> the wanted tensors.

        Raises:
            FeedError: ONNX Runtime refused the batch.
        """
        try:
            values = self.session.run(self.tensors or None, dict(batch))
        except Exception as error:  # ONNX Runtime raises classes of its own, and RuntimeError
            raise FeedError(
                f"the model must take the batch, got: {' '.join(str(error).split())[:300]}"
            ) from None
        found = dict(zip(self.tensors, values, strict=False))
        return found | {name: np.asarray(batch[name]) for name in self.fed}
