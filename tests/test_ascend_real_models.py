"""Ascend on real models: deploy models are their fake-quant models, streaming IFMR is exact IFMR.

The models are in the cache folder of benchmarks/fetch_models.py, or fetched into it by pip; a
test is skipped, saying why, where neither works.
"""

import importlib.util
from pathlib import Path

import cv2
import numpy as np
import pytest

from deploy.frontends import load
from deploy.targets.ascend.amct_calibration import calibrate
from deploy.targets.ascend.config import default_config
from deploy.targets.ascend.executor import verify
from deploy.targets.ascend.layers import find_layers, name_nodes
from deploy.targets.ascend.quant_layer import quantize_layers

ROOT = Path(__file__).parent.parent
WHEEL = ("rapidocr-onnxruntime", "1.4.4")
FOLDER = "rapidocr_onnxruntime/models"
MODELS = {
    "det": ("ch_PP-OCRv4_det_infer.onnx", (160, 192), 60),
    "rec": ("ch_PP-OCRv4_rec_infer.onnx", (48, 160), 40),
    "cls": ("ch_ppocr_mobile_v2.0_cls_infer.onnx", (48, 192), 50),
}


def text(size, seed):
    """A picture of two words as an input in [-1, 1], [1, 3, H, W]."""
    rng = np.random.default_rng(seed)
    image = np.full((*size, 3), rng.integers(170, 250), np.uint8)
    for line in range(1, 1 + size[0] // 40):
        color = tuple(int(v) for v in rng.integers(0, 90, 3))
        word = f"int8 {rng.integers(1000)}"
        cv2.putText(image, word, (4, 36 * line), cv2.FONT_HERSHEY_SIMPLEX, 1, color, 2)
    return (image.transpose(2, 0, 1)[None].astype(np.float32) - 127.5) / 127.5


@pytest.fixture(scope="module")
def folder():
    spec = importlib.util.spec_from_file_location("fetch", ROOT / "benchmarks/fetch_models.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        return module.fetch(*WHEEL) / FOLDER
    except module.FetchError as error:
        pytest.skip(f"not in the cache and out of reach: {error}")


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_ocr_models(folder, name):
    file, size, least = MODELS[name]
    loaded = load(folder / file)
    model = name_nodes(loaded.model)
    graph = find_layers(model)
    assert len(graph.layers) > least
    (spec,) = loaded.inputs
    batches = [{spec.name: text(size, seed)} for seed in range(4)]
    config = default_config(graph, batch_num=len(batches))
    exact = calibrate(model, graph, batches, config, exact=True)
    streamed = calibrate(model, graph, batches, config)
    assert exact.kept_bytes and not streamed.kept_bytes
    for layer, record in exact.records.items():
        one_step = 0.01 / 0.7  # a candidate is 0.01 of the range, of which 0.7 is the least
        assert streamed.records[layer].scale_d == pytest.approx(float(record.scale_d), rel=one_step)
        assert abs(streamed.records[layer].offset_d - record.offset_d) <= 2
    found = verify(model, quantize_layers(model, graph, exact.records), batches[:2])
    assert found.same_rounding <= 1e-5
    assert found.amct_cosine > 0.9
