"""What a calibration was made from, compared; and who made it, told."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from deploy.calibration import store
from deploy.calibration.fingerprint import TENSORRT, Fingerprint
from deploy.calibration.reuse import CachePolicy
from deploy.errors import CacheError
from deploy.frontends import load
from deploy.pipeline import calibrate

GOLDEN = Path(__file__).parent / "golden" / "formats" / "0.1.0" / "m.cache.json"
DECODER = {"decoding": 1, "library": "OpenCV 5.0.0", "jpeg": "ab", "resize": "cd"}
MADE = Fingerprint(
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


def external(path: Path, target: Path) -> Path:
    """The model with its weights beside it."""
    model = onnx.load(path)
    onnx.save(model, target, save_as_external_data=True, location="w.bin", size_threshold=0)
    return target


def test_both_halves_come_back_as_they_were():
    held = json.loads(json.dumps(MADE.to_json()))
    assert set(held) == {"made_from", "made_by"} and held["made_by"]["method"] == "mse"
    assert Fingerprint.from_json(held) == MADE
    for half, parts in held.items():
        for part in parts:
            broken = {**held, half: {key: parts[key] for key in parts if key != part}}
            with pytest.raises(CacheError, match="a fingerprint needs the parts model, images"):
                Fingerprint.from_json(broken)


def test_the_form_of_schema_4_is_read():
    made = Fingerprint.from_json(json.loads(GOLDEN.read_bytes())["fingerprint"])
    assert set(made.model) == {"graph"} and made.by == "calib8 by mse"
    assert made.decoder == {"decoding": 1, "library": "OpenCV 5.0.0"}
    assert made.numbers == {"frontend": 1, "searches": 1, "statistics": 2}
    now = replace(made, decoder=DECODER)
    assert not now.changes_since(made)
    assert "decoder" in replace(made, decoder={**DECODER, "library": "x"}).changes_since(made)


@pytest.mark.parametrize(
    ("part", "other", "said"),
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
def test_what_it_was_made_from_is_compared_and_who_made_it_is_not(part, other, said):
    changed = replace(MADE, **{part: other}).changes_since(MADE)
    if said is None:
        assert not changed
    else:
        assert list(changed) == [part] and said in changed[part]


def test_a_digest_that_changed_is_not_shown():
    now, old = replace(MADE, rule="a" * 64), replace(MADE, rule="b" * 64, preprocess=None)
    assert [said.rpartition(" ")[2] for said in now.changes_since(old).values()] == ["changed"] * 2


def test_a_model_is_known_by_its_graph_and_by_its_files(small_cnn, tmp_path):
    whole = load(small_cnn).identities
    apart = load(external(small_cnn, tmp_path / "m.onnx"))
    assert set(whole) == {"graph", "file"} and set(apart.identities) == {"graph", "file", "weights"}
    assert whole["graph"] == apart.identities["graph"] and whole["file"] != apart.identities["file"]
    data = bytearray((tmp_path / "w.bin").read_bytes())
    data[5] ^= 1
    (tmp_path / "w.bin").write_bytes(data)
    other = load(tmp_path / "m.onnx").identities
    assert other["file"] == apart.identities["file"]
    assert other["weights"] != apart.identities["weights"] and other["graph"] != whole["graph"]


def test_the_cache_of_a_repaired_model_is_not_that_of_its_file(small_cnn, pictures, tmp_path, run):
    words = ("build", small_cnn, "--images", pictures, "--size", "16x16", "--limit", 4)
    words += ("--effort", 0, "--duration", 0, "--accept", "--out", tmp_path)
    assert run(*words, "--repair", "smooth")[0] == 0
    plain = load(small_cnn).identities
    (kept,) = tmp_path.glob("*.cache.json")
    known = json.loads(kept.read_bytes())["fingerprint"]["made_from"]["model"]
    assert known["graph"] == plain["graph"] or "file" not in known


def test_another_runtime_is_told_and_takes_nothing_anew(small_cnn, pictures, tmp_path):
    cache = tmp_path / "c"
    calibrate(small_cnn, pictures, preprocess={"size": (16, 16)}, cache=cache)
    side = store.sidecars(cache)[0]
    document = json.loads(side.read_bytes())
    document["fingerprint"]["made_by"]["versions"]["onnxruntime"] = "1.2.3"
    side.write_bytes(store.sealed(document))
    before = side.read_bytes()
    again = calibrate(small_cnn, pictures, preprocess={"size": (16, 16)}, cache=cache)
    assert again.reused and again.reason.endswith("; it was made with onnxruntime 1.2.3")
    assert side.read_bytes() == before  # what made it is kept


def test_a_cache_of_tensorrt_is_named_and_taken_where_it_is_trusted(small_cnn, pictures, tmp_path):
    cache = Path(shutil.copy(GOLDEN.parent / "m.cache", tmp_path / "m.cache"))
    made = replace(
        MADE, program=TENSORRT, method="EntropyCalibration2", versions={"tensorrt": "8.6.1"}
    )
    store.sidecars(cache)[0].write_bytes(store.without_statistics(cache.read_bytes(), made))
    assert store.text_of(cache) == (cache.read_bytes(), made)
    with pytest.raises(CacheError, match=r"was made by TensorRT 8\.6\.1 by Entropy"):
        store.load(cache)
    policy = CachePolicy(path=cache, trust=True)
    found = calibrate(small_cnn, pictures, preprocess={"size": (16, 16)}, cache=policy)
    assert "trusted as it is" in found.reason
    assert store.text_of(cache)[1] == made


def test_the_command_says_whose_a_cache_is(small_cnn, pictures, tmp_path, run):
    words = ("calibrate", small_cnn, "--images", pictures, "--size", "16x16", "--limit", 4)
    assert run(*words, "-o", tmp_path / "c")[0] == 0
    code, out, _ = run("inspect", tmp_path / "c")
    assert code == 0 and "calib8 0.1.0 by mse" in out
