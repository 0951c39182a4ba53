"""What files are made from: notes beside files, fingerprints of caches, identities of models."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import onnx
import pytest

from calib8 import calibrate
from deploy.calibration import store
from deploy.calibration.fingerprint import TENSORRT, Fingerprint
from deploy.calibration.reuse import CachePolicy
from deploy.errors import CacheError
from deploy.files import manifest
from deploy.frontends import load


@pytest.fixture
def model_and_images(small_cnn, pictures):
    """The arguments of a command for the small model and its pictures."""
    return (small_cnn, "--images", pictures, "--size", "16x16")


@pytest.fixture
def calibrate_small(small_cnn, pictures):
    return partial(calibrate, small_cnn, pictures, preprocess={"size": (16, 16)})


INPUTS_OF_FILE = {"model": "a", "batch": 8, "shape": (1, 3)}


def test_note_holds_inputs_and_digest(tmp_path):
    path = tmp_path / "m.engine"
    manifest.write_made_from(path, b"plan", INPUTS_OF_FILE)
    note = json.loads((tmp_path / "m.engine.json").read_text())
    digest = {"engine_sha256": manifest.sha256(b"plan")}
    assert note == {"model": "a", "batch": 8, "shape": [1, 3], **digest}


@pytest.mark.parametrize("change", [{"model": "b"}, {"batch": 4}, {"more": 1}])
def test_file_of_other_inputs_stays_unread(tmp_path, change):
    path = manifest.write_made_from(tmp_path / "m", b"data", INPUTS_OF_FILE)
    assert manifest.read_if_made_from(path, INPUTS_OF_FILE) == b"data"
    assert manifest.read_if_made_from(path, INPUTS_OF_FILE | change) is None


def test_changed_file_or_note_counts_as_missing(tmp_path):
    path = tmp_path / "m"
    assert manifest.read_if_made_from(path, INPUTS_OF_FILE) is None
    manifest.write_made_from(path, b"data", INPUTS_OF_FILE)
    path.write_bytes(b"more data")
    assert manifest.read_if_made_from(path, INPUTS_OF_FILE) is None
    path.write_bytes(b"data")
    assert manifest.read_if_made_from(path, INPUTS_OF_FILE) == b"data"
    for note in ("{", "[]", "{}", "\udcff"):
        manifest.note_path(path).write_bytes(note.encode("utf-8", "surrogateescape"))
        assert manifest.read_if_made_from(path, INPUTS_OF_FILE) is None
    manifest.note_path(path).unlink()
    assert manifest.read_if_made_from(path, INPUTS_OF_FILE) is None


GOLDEN_CACHE = Path(__file__).parent / "golden" / "formats" / "0.1.0" / "m.cache"


DECODER = {"decoding": 1, "library": "OpenCV 5.0.0", "jpeg": "ab", "resize": "cd"}


FINGERPRINT = Fingerprint(
    model={"graph": "a", "file": "b", "weights": "c"},
    images={"count": 3},
    order="d",
    preprocess={"size": None},
    decoder=DECODER,
    program="calib8",
    rule="histogram",
    method="mse",
    numbers={"frontend": 1},
    versions={"calib8": "0.1.0", "onnxruntime": "1.20.0"},
)


def test_fingerprint_survives_json(wording):
    document = json.loads(json.dumps(FINGERPRINT.to_json()))
    assert set(document) == {"made_from", "made_by"}
    assert document["made_by"]["method"] == "mse"
    assert Fingerprint.from_json(document) == FINGERPRINT
    for half, parts in document.items():
        for part in parts:
            broken = {**document, half: {key: parts[key] for key in parts if key != part}}
            with pytest.raises(CacheError) as refusal:
                Fingerprint.from_json(broken)
            wording.check(refusal.value)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("model", {"graph": "a"}, None),  # any identity suffices
        ("model", {"graph": "x", "file": "b", "weights": "c"}, None),
        ("model", {"file": "b", "weights": "x"}, "(weights or graph) changed (its external data)"),
        ("model", {"file": "b"}, "changed (its external data)"),
        ("model", {"graph": "x", "file": "y"}, "the model (weights or graph) changed"),
        ("model", {}, "the model (weights or graph) changed"),
        ("decoder", {**DECODER, "library": "libjpeg 9"}, None),
        ("decoder", {**DECODER, "jpeg": "x"}, "the decoder changed (jpeg ab -> x)"),
        ("decoder", {"decoding": 1, "library": "libjpeg 9"}, "the decoder changed ("),
        ("decoder", {}, None),
        ("images", {"count": 4}, "the images changed (count 3 -> 4)"),
        ("preprocess", {"size": [1, 2]}, "the preprocessing changed (size None -> [1, 2])"),
        ("rule", "amax", "changed (histogram -> amax)"),
        ("numbers", {"frontend": 2}, "a version changed (frontend 1 -> 2)"),
        ("versions", {"calib8": "9"}, None),
        ("program", TENSORRT, None),
    ],
)
def test_fingerprint_compares_inputs_not_makers(part, value, message):
    changed = replace(FINGERPRINT, **{part: value}).changes_since(FINGERPRINT)
    if message is None:
        assert not changed
    else:
        assert list(changed) == [part]
        assert message in changed[part]


def test_changed_digest_is_not_printed():
    now = replace(FINGERPRINT, rule="a" * 64)
    old = replace(FINGERPRINT, rule="b" * 64, preprocess=None)
    assert [change.rpartition(" ")[2] for change in now.changes_since(old).values()] == [
        "changed"
    ] * 2


def test_model_identities_are_graph_and_files(small_cnn, tmp_path):
    path = tmp_path / "m.onnx"
    external_options = {"location": "w.bin", "size_threshold": 0}
    onnx.save(onnx.load(small_cnn), path, save_as_external_data=True, **external_options)
    single_file = load(small_cnn).identities
    external = load(path).identities
    assert set(single_file) == {"graph", "file"}
    assert set(external) == {"graph", "file", "weights"}
    assert single_file["graph"] == external["graph"]
    assert single_file["file"] != external["file"]
    data = bytearray((tmp_path / "w.bin").read_bytes())
    data[5] ^= 1
    (tmp_path / "w.bin").write_bytes(data)
    damaged = load(path).identities
    assert damaged["file"] == external["file"]
    assert damaged["weights"] != external["weights"]
    assert damaged["graph"] != single_file["graph"]


def test_cache_of_another_runtime_is_reused(calibrate_small, tmp_path):
    cache = tmp_path / "c"
    calibrate_small(cache=cache)
    sidecar = store.sidecars(cache)[0]
    document = json.loads(sidecar.read_bytes())
    document["fingerprint"]["made_by"]["versions"]["onnxruntime"] = "1.2.3"
    sidecar.write_bytes(store.seal_json(document))
    old_bytes = sidecar.read_bytes()
    second = calibrate_small(cache=cache)
    assert second.reused
    assert second.reason.endswith("; it was made with onnxruntime 1.2.3")
    assert sidecar.read_bytes() == old_bytes  # what made it is kept


def test_tensorrt_cache_needs_trust(calibrate_small, tmp_path, wording):
    cache = shutil.copy(GOLDEN_CACHE, tmp_path / "m.cache")
    tensorrt_fields = {"method": "EntropyCalibration2", "versions": {"tensorrt": "8.6.1"}}
    fingerprint = replace(FINGERPRINT, program=TENSORRT, **tensorrt_fields)
    store.write_note_without_statistics(cache, cache.read_bytes(), fingerprint, float32_layers={})
    assert store.read_cache_text(cache) == (cache.read_bytes(), fingerprint)
    with pytest.raises(CacheError) as refusal:
        store.load_calibration(cache)
    wording.check(refusal.value)
    result = calibrate_small(cache=CachePolicy(path=cache, trust=True))
    assert "trusted as it is" in result.reason
    assert store.read_cache_text(cache)[1] == fingerprint


def test_show_names_the_maker_of_cache(model_and_images, tmp_path, run):
    assert run("calibrate", *model_and_images, "--limit", 4, "-o", tmp_path / "c")[0] == 0
    assert "calib8 0.1.0 by mse" in run.ok("cache", "show", tmp_path / "c")
