"""What a calibration keeps, uses again and needs."""

import gc
import io
import json
import shutil
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, numpy_helper

from calib8 import calibrate
from calibrators.grids import affine_params
from calibrators.statistics import HistogramOf
from deploy import frontends, machine, pipeline
from deploy.calibration import one_pass, reference_outputs, store, taps
from deploy.calibration.fingerprint import TENSORRT, Fingerprint
from deploy.calibration.observation import FOLDED, Observation, Variant
from deploy.calibration.one_pass import observe
from deploy.calibration.reuse import CachePolicy
from deploy.calibration.taps import BufferedSession
from deploy.errors import BackendError, CacheError, CalibrationError, FeedError, ModelError
from deploy.feed.array_files import read_arrays
from deploy.feed.evaluation import EvaluationSubset
from deploy.feed.feed import open_feed
from deploy.feed.sample_reader import SampleCache
from deploy.feed.temporary_arrays import TemporaryArrays
from deploy.files import manifest
from deploy.files.archives import read_array
from deploy.frontends import load
from deploy.machine import trim_memory
from deploy.runtimes.ort import OrtSession
from deploy.targets.onnxruntime.uint8_gates import fit_input_shift, fit_output_offset
from deploy.tensors import TensorSpec
from deploy.tuning import search_options
from tests.models import as_float32, make_model, make_node, make_value, save_net

IMAGES = {"x": ["n", 3, "h", "w"]}
MEAN = [("Relu", "x", "relu"), ("GlobalAveragePool", "relu", "mean"), ("Sub", "relu mean", "y")]
PLAIN = make_model(MEAN, IMAGES, {"y": None, "mean": None}, opset=17, ir=9)
PLACES = [make_value("places", None, TensorProto.INT64)]
BY_VALUE = make_model([("NonZero", "x", "places")], IMAGES, PLACES, opset=17, ir=9)


def samples(*sides, batch=1):
    rng = np.random.default_rng(4)
    return [{"x": rng.standard_normal((batch, 3, s, s)).astype(np.float32)} for s in sides]


def opened(model):
    return OrtSession.open(model, threads=1, spin=False)


def same(found, wanted):
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


def test_samples_of_one_shape_lie_in_the_same_memory_from_the_second_on():
    session = opened(PLAIN)
    places = []
    lasting = []
    runs = BufferedSession(session)
    for sample in samples(4, 4, 4, 5, 5, 5, 4, 4):
        values = runs.run(sample)
        same(values, session.run(sample))
        lasting.append(runs.reuses_buffers)
        if runs.reuses_buffers:
            assert all(x.ctypes.data % 64 == 0 for x in values.values())
            places.append(values["y"].ctypes.data)
    assert lasting == [False, True, True, False, True, True, False, True]
    assert places[0] == places[1]
    assert places[2] == places[3]


def test_an_output_whose_shape_follows_from_values_is_given_all_the_same():
    session = opened(BY_VALUE)
    runs = BufferedSession(session)
    for positive in (5, 5, 7, 2, 0, 27):
        sample = {"x": np.zeros((1, 3, 3, 3), np.float32)}
        sample["x"].reshape(-1)[:positive] = 1
        same(runs.run(sample), session.run(sample))
    assert not runs.reuses_buffers


def test_larger_outputs_are_let_go(monkeypatch):
    monkeypatch.setattr(taps, "MOST_BYTES", 100)
    runs = BufferedSession(opened(PLAIN))
    lasting = []
    for sample in samples(2, 2, 9, 9, 9):
        runs.run(sample)
        lasting.append(runs.reuses_buffers)
    assert lasting == [False, True, False, False, False]


def test_a_bad_sample_is_told_as_by_an_ordinary_run_and_the_next_is_run():
    session = opened(PLAIN)
    runs = BufferedSession(session)
    (first, second), (other,) = samples(4, 4), samples(4, batch=2)
    for sample in (first, second):
        runs.run(sample)
    for bad in ({}, {"z": first["x"]}, {"x": first["x"][0]}, {"x": first["x"].astype(int)}):
        with pytest.raises(BackendError) as wanted:
            session.run(bad)
        with pytest.raises(BackendError) as found:
            runs.run(bad)
        assert str(found.value) == str(wanted.value)
    for sample in (first, other, second):
        same(runs.run(sample), session.run(sample))


def test_of_the_samples_at_most_the_last_is_held():
    runs = BufferedSession(opened(PLAIN))
    held = []
    for _ in range(5):
        (sample,) = samples(4)
        held.append(weakref.ref(sample["x"]))
        runs.run(sample)
    del sample
    gc.collect()
    assert runs.reuses_buffers
    assert [one() for one in held[:4]] == [None] * 4


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("model", [PLAIN, BY_VALUE], ids=["plain", "by value"])
def test_a_pass_gives_the_same_with_and_without(model, threads, monkeypatch):
    names = ["x", *(o.name for o in model.graph.output)]
    variant = Variant(FOLDED, lambda _: model)
    wanted = [Observation(variant, name, HistogramOf()) for name in names]
    feed = samples(4, 4, 4, 6, 4, 6, 6, 6, 6)

    def seen():
        kept = {}

        def keep(number, values):
            kept[number] = {o.name: values[o.name].tobytes() for o in model.graph.output}

        found = observe(wanted, feed, threads=threads, on_outputs=keep)
        assert len(kept) == len(feed)
        arrays = [found.recorder(o).to_arrays() for o in wanted]
        return kept, [{k: v.tobytes() for k, v in one.items()} for one in arrays]

    with_memory = seen()
    monkeypatch.setattr(taps, "MOST_BYTES", -1)
    assert seen() == with_memory


def test_memory_of_the_first_run_is_given_back_once(monkeypatch):
    given = []
    monkeypatch.setattr(taps, "trim_memory", lambda: given.append(1))
    runs = BufferedSession(opened(PLAIN))
    for sample in samples(4, 4, 5, 5, 4, 4):
        runs.run(sample)
    assert len(given) == 1
    trim_memory()
    monkeypatch.setattr(machine.ctypes, "CDLL", Mock(side_effect=OSError))
    trim_memory()  # where the allocator cannot be told, nothing is given back


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.arange(6, dtype=">i4").reshape(2, 3).T,
        np.empty((0, 3), np.float16),
        np.array(2.5),
        np.array([True, False]),
        np.array(["a", "word"]),
    ],
    ids=["float", "big endian, turned", "empty", "one number", "flags", "text"],
)
def test_an_array_comes_back_as_it_was(array):
    scratch = TemporaryArrays("test-")
    scratch.add(np.ones(5))
    place = scratch.add(array)
    scratch.add(np.zeros(7))
    found = scratch.get(place)
    assert found.dtype == array.dtype
    assert found.shape == array.shape
    assert found.tolist() == array.tolist()
    found[...] = found  # it may be written to


def test_python_objects_are_not_written():
    with pytest.raises(ValueError, match="Python objects"):
        TemporaryArrays("test-").add(np.array([{}], object))


class _Garbage:
    """What is collected runs Python, in which a thread gives way to another."""

    def __init__(self):
        self.me = self

    def __del__(self):
        for _ in range(200):
            pass


@pytest.fixture
def restless():
    """Garbage is collected wherever a few objects are made, and threads change all the time."""
    thresholds = gc.get_threshold()
    interval = sys.getswitchinterval()
    gc.set_threshold(20)
    sys.setswitchinterval(1e-6)
    yield
    gc.set_threshold(*thresholds)
    sys.setswitchinterval(interval)


def readers(folder):
    """Ways to read an array that threads use at once."""
    row = np.zeros((1, 10), np.float32)
    file = io.BytesIO()
    spool = SampleCache(range(1))
    np.save(file, row)
    np.save(folder / "x.npy", row)
    spool.add(0, {"x": row})
    return {
        "sample cache": lambda: spool.get(0),
        "archive": lambda: read_array(io.BytesIO(file.getvalue()), 1 << 10),
        "file": lambda: read_arrays(folder / "x.npy", (TensorSpec("x", "float32", (1, 10)),)),
    }


@pytest.mark.slow
@pytest.mark.parametrize("way", ["sample cache", "archive", "file"])
def test_threads_that_read_at_once_do_not_disturb_each_other(way, tmp_path, restless):
    """Python 3.11 ended some builds by "AST constructor recursion depth mismatch"."""

    def work(read):
        for _ in range(800):
            _Garbage()
            read()

    reads = [readers(tmp_path)[way] for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, reads)) == [None] * 4


RANGES = st.tuples(st.floats(0.01, 50), st.floats(0.01, 50))


@settings(max_examples=300)
@given(RANGES, st.floats(-10, 10))
def test_integers_of_a_shifted_tensor_are_its_own_from_a_lower_zero_point(ends, shift):
    low, high = ends
    scale, zero = affine_params(-low, high)
    got = fit_input_shift(scale, zero, shift)
    if not got.steps:
        assert (got.scale, got.zero) == (scale, zero)
        # a range that reaches to the shift has steps
        assert shift <= 0 or low < shift or (low + high) / 255 >= shift / 4
        return
    assert shift > 0  # nothing is shifted downwards
    assert np.isclose(got.steps * float(got.scale), shift, rtol=1e-6)
    assert got.zero - got.steps >= 0  # the other zero point is one that uint8 holds
    half = float(scale) / 2 + 1e-6
    assert got.zero * float(got.scale) >= min(low, zero * float(scale)) - 2 * half
    assert (255 - got.zero) * float(got.scale) >= high - 3 * half
    assert scale <= got.scale * (1 + 1e-6)
    assert got.scale <= scale * 4 / 3 * (1 + 1e-6)


@given(RANGES, st.floats(-10, 10))
def test_an_offset_is_a_whole_number_of_steps(ends, offset):
    scale, zero = affine_params(-ends[0], ends[1])
    got = fit_output_offset(scale, zero, offset)
    assert not got.steps or np.isclose(got.steps * float(got.scale), offset, rtol=1e-5)
    assert 0 <= got.zero + got.steps <= 255


@pytest.fixture
def fed(small_cnn, pictures):
    """The words of a model and its pictures."""
    return (small_cnn, "--images", pictures, "--size", "16x16")


@pytest.fixture
def calibrate_small(small_cnn, pictures):
    return partial(calibrate, small_cnn, pictures, preprocess={"size": (16, 16)})


@pytest.fixture
def memory(monkeypatch):
    def hold(count):
        for module in ("deploy.calibration.one_pass", "deploy.metrics.bench_inputs"):
            monkeypatch.setattr(f"{module}.memory_bytes", lambda: count)

    return hold


def test_tensors_that_no_memory_holds_are_refused_first(memory, run, fed, tmp_path):
    memory(20_000)
    err = run.fails("build", *fed, "--out", tmp_path / "o")
    assert "memory, got" in err
    assert "19.5 KiB" in err
    assert "with 2,048 values" in err
    assert not (tmp_path / "o").exists() or not list((tmp_path / "o").iterdir())
    memory(1 << 30)
    assert run("calibrate", *fed, "-o", tmp_path / "c")[0] == 0
    memory(20_000)  # what is there needs no memory
    assert run("calibrate", *fed, "-o", tmp_path / "c")[0] == 0


def test_fewer_threads_where_memory_is_short_change_nothing(memory, run, fed, tmp_path):
    kept = []
    for number, count in enumerate((1 << 30, 700_000)):
        memory(count)
        out = run.ok("calibrate", *fed, "--threads", 4, "-o", tmp_path / f"{number}")
        assert ("1 of 4 threads" in out) == bool(number)
        kept.append([(tmp_path / f"{number}{end}").read_bytes() for end in ("", ".npz")])
    assert kept[0] == kept[1]


def test_a_tensor_of_774_million_values_is_counted_by_its_shape(memory):
    nodes = [("Expand", "x shape", "y"), ("Relu", "y", "z")]
    shape = {"shape": np.array([258, 1000, 3000])}
    model = make_model(nodes, {"x": [1, 1, 1]}, {"z": None}, shape)
    memory(2 << 30)
    with pytest.raises(CalibrationError, match="with 774,000,000 values"):
        calibrate(model, [np.ones((1, 1, 1), np.float32)], targets=["tensorrt"])


def test_a_machine_that_tells_no_memory_and_shapes_that_are_open_refuse_nothing(memory, small_cnn):
    model = onnx.load(small_cnn)
    memory(None)
    for wanted in ([], [SimpleNamespace()]):
        assert one_pass.count_workers(wanted, model, 3) == 3


def test_a_disk_too_small_for_the_engines_is_told_first(monkeypatch, run, fed, tmp_path):
    free = SimpleNamespace(free=3000)
    monkeypatch.setattr(one_pass.shutil, "disk_usage", lambda path: free)
    assert "1 int8 models" in run.fails("build", *fed, "--out", tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()


def test_the_memory_of_a_container_counts(monkeypatch, tmp_path):
    whole = machine.memory_bytes()
    assert whole is None or whole > 1 << 20
    (tmp_path / "max").write_text("max\n")
    (tmp_path / "limit").write_text("12345\n")
    monkeypatch.setattr(machine, "_MEMORY_LIMITS", [str(tmp_path / n) for n in ("max", "none")])
    assert machine.memory_bytes() != 12345
    monkeypatch.setattr(machine, "_MEMORY_LIMITS", [str(tmp_path / "limit")])
    assert machine.memory_bytes() == 12345


def test_an_archive_is_unpacked_into_a_file_and_only_where_there_is_room(
    monkeypatch, tmp_path, wording
):
    values = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    np.savez_compressed(tmp_path / "x.npz", x=values)
    spec = TensorSpec("x", "float32", (None, 4))
    feed = open_feed(tmp_path / "x.npz", [spec])
    assert isinstance(feed._source.items[0]["x"], np.memmap)
    with feed.samples() as samples:
        assert np.array_equal(np.concatenate([sample["x"] for sample in samples]), values)
    free = SimpleNamespace(free=90)
    monkeypatch.setattr("deploy.feed.array_files.shutil.disk_usage", lambda path: free)
    with pytest.raises(FeedError) as refusal:
        open_feed(tmp_path / "x.npz", [spec])
    wording.check(refusal.value)


@pytest.mark.parametrize(
    "words",
    [
        ("build", "--max-loss", "nan"),
        ("build", "--min-speedup", "nan"),
        ("bench", "--warm-up", "inf"),
        ("build", "--duration", "nan"),
        ("compare", "m", "--min-sqnr", "nan"),
        ("build", "--threads", 10**9),
        ("bench", "--threads", 10**9),
        ("bench", "--seed", -1),
    ],
)
def test_what_is_no_number_is_a_usage_error(words, run, small_cnn):
    command, *options = words
    code, _, error = run(command, small_cnn, *options)
    assert code == 2
    assert "no finite number" in error or "is not in the range" in error


@pytest.mark.parametrize("batch", [10**20, 10**9])
def test_inputs_that_no_memory_holds_are_not_made_up(batch, run, small_cnn, memory, wording):
    memory(8 << 30)
    words = ("--shape", f"x:{batch}x3x16x16", "--duration", 0)
    wording.check(run.fails("bench", small_cnn, *words))


MADE_FROM = {"model": "a", "batch": 8, "shape": (1, 3)}


def test_the_note_holds_what_the_file_was_made_from_and_its_digest(tmp_path):
    path = tmp_path / "m.engine"
    manifest.write_with_note(path, b"plan", MADE_FROM)
    note = json.loads((tmp_path / "m.engine.json").read_text())
    digest = {"engine_sha256": manifest.sha256(b"plan")}
    assert note == {"model": "a", "batch": 8, "shape": [1, 3], **digest}


@pytest.mark.parametrize("change", [{"model": "b"}, {"batch": 4}, {"more": 1}])
def test_a_file_made_from_something_else_does_not_fit(tmp_path, change):
    path = manifest.write_with_note(tmp_path / "m", b"data", MADE_FROM)
    assert manifest.read_if_made_from(path, MADE_FROM) == b"data"
    assert manifest.read_if_made_from(path, MADE_FROM | change) is None
    assert manifest.read_with_note(path) == (b"data", {"model": "a", "batch": 8, "shape": [1, 3]})


def test_what_was_changed_or_parted_since_is_not_believed(tmp_path, wording):
    path = tmp_path / "m"
    assert manifest.read_if_made_from(path, MADE_FROM) is None
    manifest.write_with_note(path, b"data", MADE_FROM)
    path.write_bytes(b"more data")
    with pytest.raises(CacheError) as refusal:
        manifest.read_with_note(path)
    wording.check(refusal.value)
    for note in ("{", "[]", "{}", "\udcff"):
        manifest.note_path(path).write_bytes(note.encode("utf-8", "surrogateescape"))
        assert manifest.read_if_made_from(path, MADE_FROM) is None
    manifest.write_with_note(path, b"data", MADE_FROM)
    manifest.note_path(path).unlink()
    with pytest.raises(CacheError) as refusal:
        manifest.read_with_note(path)
    wording.check(refusal.value)


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


def test_both_halves_come_back_as_they_were(wording):
    held = json.loads(json.dumps(MADE.to_json()))
    assert set(held) == {"made_from", "made_by"}
    assert held["made_by"]["method"] == "mse"
    assert Fingerprint.from_json(held) == MADE
    for half, parts in held.items():
        for part in parts:
            broken = {**held, half: {key: parts[key] for key in parts if key != part}}
            with pytest.raises(CacheError) as refusal:
                Fingerprint.from_json(broken)
            wording.check(refusal.value)


def test_the_form_of_schema_4_is_read():
    made = Fingerprint.from_json(json.loads(GOLDEN.read_bytes())["fingerprint"])
    assert set(made.model) == {"graph"}
    assert made.by == "calib8 by mse"
    assert made.decoder == {"decoding": 1, "library": "OpenCV 5.0.0"}
    assert made.numbers == {"frontend": 1, "searches": 1, "statistics": 2}
    assert not replace(made, decoder=DECODER).changes_since(made)
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
        assert list(changed) == [part]
        assert said in changed[part]


def test_a_digest_that_changed_is_not_shown():
    now, old = replace(MADE, rule="a" * 64), replace(MADE, rule="b" * 64, preprocess=None)
    assert [said.rpartition(" ")[2] for said in now.changes_since(old).values()] == ["changed"] * 2


def test_a_model_is_known_by_its_graph_and_by_its_files(small_cnn, tmp_path):
    path = tmp_path / "m.onnx"
    beside = {"location": "w.bin", "size_threshold": 0}
    onnx.save(onnx.load(small_cnn), path, save_as_external_data=True, **beside)
    whole = load(small_cnn).identities
    apart = load(path).identities
    assert set(whole) == {"graph", "file"}
    assert set(apart) == {"graph", "file", "weights"}
    assert whole["graph"] == apart["graph"]
    assert whole["file"] != apart["file"]
    data = bytearray((tmp_path / "w.bin").read_bytes())
    data[5] ^= 1
    (tmp_path / "w.bin").write_bytes(data)
    other = load(path).identities
    assert other["file"] == apart["file"]
    assert other["weights"] != apart["weights"]
    assert other["graph"] != whole["graph"]


def test_the_cache_of_a_repaired_model_is_not_that_of_its_file(fed, small_cnn, tmp_path, run):
    words = ("--limit", 4, "--effort", 0, "--duration", 0, "--accept", "--out", tmp_path)
    assert run("build", *fed, *words, "--repair", "equalize")[0] == 0
    (kept,) = tmp_path.glob("calib8/*.cache.json")
    known = json.loads(kept.read_bytes())["fingerprint"]["made_from"]["model"]
    assert known["graph"] == load(small_cnn).identities["graph"] or "file" not in known


def test_another_runtime_is_told_and_takes_nothing_anew(calibrate_small, tmp_path):
    cache = tmp_path / "c"
    calibrate_small(cache=cache)
    side = store.sidecars(cache)[0]
    document = json.loads(side.read_bytes())
    document["fingerprint"]["made_by"]["versions"]["onnxruntime"] = "1.2.3"
    side.write_bytes(store.seal_json(document))
    before = side.read_bytes()
    again = calibrate_small(cache=cache)
    assert again.reused
    assert again.reason.endswith("; it was made with onnxruntime 1.2.3")
    assert side.read_bytes() == before  # what made it is kept


def test_a_cache_of_tensorrt_is_named_and_taken_where_it_is_trusted(
    calibrate_small, tmp_path, wording
):
    cache = shutil.copy(GOLDEN.parent / "m.cache", tmp_path / "m.cache")
    by = {"method": "EntropyCalibration2", "versions": {"tensorrt": "8.6.1"}}
    made = replace(MADE, program=TENSORRT, **by)
    store.sidecars(cache)[0].write_bytes(store.make_text_only_json(cache.read_bytes(), made))
    assert store.read_cache_text(cache) == (cache.read_bytes(), made)
    with pytest.raises(CacheError) as refusal:
        store.load_calibration(cache)
    wording.check(refusal.value)
    found = calibrate_small(cache=CachePolicy(path=cache, trust=True))
    assert "trusted as it is" in found.reason
    assert store.read_cache_text(cache)[1] == made


def test_the_command_says_whose_a_cache_is(fed, tmp_path, run):
    assert run("calibrate", *fed, "--limit", 4, "-o", tmp_path / "c")[0] == 0
    assert "calib8 0.1.0 by mse" in run.ok("inspect", tmp_path / "c")


@pytest.fixture
def model(tmp_path):
    """Conv, BatchNormalization, Relu, Conv: what is observed is another graph than the file's."""
    rng = np.random.default_rng(0)
    arrays = {"w1": rng.normal(0, 0.3, (4, 3, 3, 3)), "w2": rng.normal(0, 0.3, (4, 4, 3, 3))}
    arrays |= {name: rng.uniform(0.5, 1.5, 4) for name in ("scale", "var")}
    arrays |= {name: rng.normal(0, 0.1, 4) for name in ("shift", "mean")}
    nodes = [
        ("Conv", "x w1", "c"),
        ("BatchNormalization", "c scale shift mean var", "b"),
        ("Relu", "b", "r"),
        ("Conv", "r w2", "y"),
    ]
    ends = {"x": ["batch", 3, 8, 8]}, {"y": ["batch", 4, 4, 4]}
    return save_net(make_model(nodes, *ends, as_float32(arrays), opset=17), tmp_path / "net.onnx")


def images(count):
    return np.random.default_rng(1).normal(size=(count, 3, 8, 8)).astype(np.float32)


def built(model, x, out, **words):
    """What a build without a search counted and noted: (work, notes, int8 engine's samples)."""
    words = {"tuning": search_options.Tuning(effort=0), "duration_s": 0.0, "threads": 2, **words}
    pipeline.build(model, x, out=out, **words)
    report = json.loads((out / "report.json").read_text())
    engine = next(e for e in report["engines"] if not e.get("reference"))
    return report["work"], report["notes"], engine["accuracy"]


def test_a_build_runs_each_model_once_over_each_image_and_says_how_many_judged(model, tmp_path):
    work, notes, accuracy = built(model, images(140), tmp_path / "o")
    assert sum(work["calibration_runs"].values()) == 140
    assert work["reference_runs"] == 1 + 4  # the file itself once, inner tensors of four
    assert work["engine_runs"] == {"onnxruntime": 100}
    assert accuracy["samples"] == 100
    (note,) = (n for n in notes if "accuracy was measured" in n)
    assert "inner tensors on 4 of these" in note


def test_a_second_build_runs_the_users_file_with_the_same_figures(model, tmp_path):
    x = images(30)
    first, _, figures = built(model, x, tmp_path / "o")
    again, _, same = built(model, x, tmp_path / "o")
    assert first["reference_runs"] == 5
    assert again["reference_runs"] == 30
    assert "calibration_runs" not in again
    (one,), (other,) = figures["outputs"], same["outputs"]
    assert other["sqnr_db"] == pytest.approx(one["sqnr_db"], abs=1e-3)


def test_a_model_that_is_not_the_users_file_is_refused(model, tmp_path, wording):
    loaded = frontends.load(model)
    for tensor in loaded.model.graph.initializer:  # as if folding had gone wrong
        tensor.CopyFrom(numpy_helper.from_array(1.5 * numpy_helper.to_array(tensor), tensor.name))
    with pytest.raises(ModelError) as refusal:
        built(loaded, images(20), tmp_path / "o")
    wording.check(refusal.value)


class Counting:
    """A session of y = 2 x that counts."""

    def __init__(self):
        self.runs = 0
        self.outputs = OrtSession.open(_doubling(), threads=1).outputs

    def run(self, sample):
        self.runs += 1
        return {"y": 2 * sample["x"], "inner": sample["x"]}


def _doubling():
    return make_model([make_node("Add", "x x", "y")], {"x": ["n", 4]}, {"y": ["n", 4]}, opset=17)


def test_a_sample_is_run_once_and_only_its_outputs_are_kept():
    session = Counting()
    x = {"x": np.ones((1, 4), np.float32)}
    outputs = reference_outputs.ReferenceOutputs(lambda: session, ["y"], {3, 5})
    outputs.add(3, {"y": x["x"], "inner": x["x"]})
    assert list(outputs.get(3, x)) == ["y"]
    assert session.runs == outputs.runs == 0
    assert [list(outputs.get(5, x)["y"][0]) for _ in range(2)] == [[2] * 4] * 2
    assert session.runs == outputs.runs == 1
    assert 5 in outputs
    for _ in range(2):
        outputs.get(7, x)  # of no sample that is to be kept
    assert session.runs == 3
    assert 7 not in outputs


def test_outputs_too_large_to_be_kept_are_made_again(monkeypatch):
    monkeypatch.setattr(reference_outputs, "MOST_BYTES", 100)
    session = Counting()
    x = {"x": np.ones((4, 4), np.float32)}
    outputs = reference_outputs.ReferenceOutputs(lambda: session, ["y"], range(9))
    for key in range(9):
        outputs.get(key, x)
    assert [key in outputs for key in range(9)] == [True] + 8 * [False]  # 64 bytes each
    assert np.array_equal(outputs.get(8, x)["y"], 2 * x["x"])
    assert session.runs == 10


def test_models_are_alike_but_for_what_float_rounds():
    one = {"y": np.linspace(-1, 1, 50, dtype=np.float32), "n": np.array([3])}
    others = [np.float32(1.0001) * one["y"], np.float32(1.01) * one["y"], one["y"][:9]]
    alike = [reference_outputs.outputs_match(one, {**one, "y": other}) for other in others]
    assert alike == [True, False, False]
    assert not reference_outputs.outputs_match(one, {"n": one["n"]})


def test_the_samples_that_judge_are_spread_over_the_feed_and_keep_their_keys():
    loaded = load(_doubling())
    rows = [np.full((1, 4), at, np.float32) for at in range(250)]
    part = EvaluationSubset(open_feed(rows, loaded.inputs), 100)
    seen = [int(sample["x"][0, 0]) for sample in part.samples()]
    assert len(seen) == len(part) == part.count == 100
    assert seen[0] < 5
    assert seen[-1] >= 245
    assert [part.sample_key(number) for number in range(1, 101)] == list(part.keys) == seen
    few = [(key, int(sample["x"][0, 0])) for key, sample in part.spread_with_keys(7)]
    assert [key for key, _ in few] == [at for _, at in few]
    assert {at for _, at in few} <= set(seen)


def test_of_bad_samples_none_judges_and_the_others_keep_what_was_said(tmp_path):
    loaded = load(_doubling())
    for at in range(12):
        np.save(tmp_path / f"{at:02d}.npy", np.full((1, 4), np.float32(at)))
    (tmp_path / "03.npy").write_bytes(b"no array")
    feed = open_feed(tmp_path, loaded.inputs, skip_bad=True)
    judges = reference_outputs.make_evaluation_set(feed, loaded.model, 12)
    with feed.samples() as samples:
        for number, sample in enumerate(samples, 1):
            judges.outputs.add(feed.sample_key(number), {"y": 2 * sample["x"]})
    heard = [
        (sample["x"][0, 0], said["y"][0, 0]) for sample, said in judges.samples_with_outputs(12)
    ]
    assert heard == [(at, 2 * at) for at in range(12) if at != 3]
    assert judges.outputs.runs == 0
    assert len(judges.subset.names) == 11
