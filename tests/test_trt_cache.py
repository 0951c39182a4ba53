"""The TensorRT cache: its text, byte for byte, and `calib8 cache`."""

import json
import shlex
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.calibration import trt_cache
from deploy.calibration.trt_cache import ENTROPY2, LEGACY, MINMAX, dump, from_scales, parse
from deploy.errors import CacheError
from tests.models import as_float32, build_net, make_model

SHARED = Path(__file__).parents[1].parent / "shared" / "golden" / "tensorrt"
CACHES = sorted((SHARED / "caches").glob("*.cache"))
REAL = [path for path in CACHES if not path.name.startswith("NOT_TRT")]
NEEDS_SHARED = pytest.mark.skipif(not REAL, reason=f"no real caches at {SHARED / 'caches'}")
SMALL = b"TRT-8503-EntropyCalibration2\ndata: 3c008912\nconv/Conv2D:0: 3c60dd38\nzero: 0\n"
letters = st.characters(blacklist_characters="\n\r", blacklist_categories=("Cs",))
names = st.text(letters, min_size=1)
scale_bits = st.integers(0, 0x7F800000)


@NEEDS_SHARED
@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_real_caches_round_trip(path):
    data = path.read_bytes()
    cache = parse(data, origin=path.name)
    assert dump(cache) == data
    assert len(cache.entries) == len(data.splitlines()) - 1
    header = cache.header
    if header.label is not None:
        assert dump(trt_cache.relabel(cache, version=str(header.version))) == data
    version = header.version or "6.0.1"
    rebuilt = from_scales(cache.scales(), version=version, algorithm=header.algorithm)
    assert dump(rebuilt) == data


def test_onnxruntime_tables_are_recognised(tmp_path, monkeypatch):
    from onnxruntime.quantization import write_calibration_table
    from onnxruntime.quantization.calibrate import CalibrationMethod, TensorsData

    # arrays, since onnxruntime 1.23 (the last for Python 3.10) cannot write numpy scalars
    data_range = np.array(-1.5, np.float32), np.array(2, np.float32)
    weight_range = np.array(0, np.float32), np.array(3.25, np.float32)
    ranges = TensorsData(CalibrationMethod.MinMax, {"data": data_range, "w": weight_range})
    monkeypatch.chdir(tmp_path)
    write_calibration_table(ranges)
    clauses = {"calibration.cache": "own calibration table", "calibration.json": "is JSON"}
    clauses["calibration.flatbuffers"] = "binary file"
    for name, clause in clauses.items():
        with pytest.raises(CacheError, match=clause):
            parse((tmp_path / name).read_bytes(), origin="x")


@settings(max_examples=60)
@given(
    st.dictionaries(names, scale_bits, min_size=1, max_size=8),
    st.sampled_from(["5.1.0", "7.2.2", "8.5.3", "10.3.0", "10.14.1"]),
    st.sampled_from([ENTROPY2, MINMAX, LEGACY]),
)
def test_scales_survive_writing_and_reading(entries, version, algorithm):
    scales = {name: np.uint32(bits).view(np.float32) for name, bits in entries.items()}
    cache = from_scales(scales, version=version, algorithm=algorithm)
    second_cache = parse(dump(cache), origin="memory")
    assert second_cache == cache
    assert [(entry.name, entry.bits) for entry in second_cache.entries] == list(entries.items())
    assert second_cache.header.version == (None if algorithm == LEGACY else version)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(names, st.integers(0, 2**32 - 1)), min_size=1, max_size=6),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
    st.booleans(),
)
def test_odd_but_readable_text_round_trips(entries, end, final, upper):
    hexadecimal = "08X" if upper else "08x"
    lines = [f"{name}: {bits:{hexadecimal}}" for name, bits in entries]
    text = end.join(["TRT-8503-EntropyCalibration2", *lines]) + (end if final else "")
    data = text.encode("utf-8")
    cache = parse(data, origin="memory")
    assert dump(cache) == data
    assert [(entry.name, entry.bits) for entry in cache.entries] == entries


@settings(max_examples=150)
@given(st.binary(max_size=200) | st.binary(max_size=60).map(lambda tail: SMALL + tail))
def test_arbitrary_bytes_round_trip_or_fail(data):
    try:
        cache = parse(data, origin="bytes")
    except CacheError as error:
        assert "bytes" in str(error)
    else:
        assert dump(cache) == data


def test_truncation_is_refused_within_an_entry():
    full_entries = [(e.name, e.bits) for e in parse(SMALL, origin="whole").entries]
    for cut in range(len(SMALL)):
        try:
            cache = parse(SMALL[:cut], origin="cut.cache")
        except CacheError as error:
            assert "cut.cache" in str(error)
        else:
            cut_entries = [(e.name, e.bits) for e in cache.entries]
            assert cut_entries == full_entries[: len(cut_entries)], cut


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is empty"),
        (b"TRT-8503-EntropyCalibration2\n", "cut off"),
        (b"TRT-8503-Ent", "damaged first line|cut off|starts with a line"),
        (b"data: 3c008912\n", "no header"),
        (b"TRT-8503-EntropyCalibration2\ndata 3c008912\n", "line 2"),
        (b"TRT-8503-EntropyCalibration2\ndata: 3c0089123\n", "line 2"),
        (b"TRT-8503-EntropyCalibration2\ndata: 0.0079\n", "line 2"),
        (b"TRT-8503-EntropyCalibration2\ndata: 3c008912\n\n", "line 3"),
        (b"TRT-8503-EntropyCalibration2\n: 3c008912\n", "line 2"),
        (b"\xef\xbb\xbf" + SMALL, "byte order mark"),
        (SMALL.decode().encode("utf-16"), "UTF-16"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        (b'record {\n  key: "conv1"\n', "AMCT"),
        (b"ptrt\x00\x00\x00\x00", "engine"),
        (b"\x00" * 300, "binary"),
        (b"conv1 1.5\n", "onnxruntime"),
        (b"hello\n", "no known calibration tool"),
    ],
)
def test_other_files_are_refused(data, reason):
    with pytest.raises(CacheError, match=reason) as caught:
        parse(data, origin="some.cache")
    assert "some.cache" in str(caught.value)


def test_flaws_and_duplicates_are_listed():
    text = b"TRT-8503-EntropyCalibration2\na: 0\nb: 7f800000\nc: ffc00000\nd: bf800000\na: 0\n"
    cache = parse(text, origin="memory")
    assert cache.flaws() == {"a": "zero", "b": "inf", "c": "NaN", "d": "negative"}
    assert cache.duplicates() == ["a"]
    assert dump(cache) == text
    assert cache.scales()["b"] == np.inf


def test_conflicting_duplicates_have_no_scales(wording):
    cache = parse(b"TRT-8503-EntropyCalibration2\na: 1\na: 2\n", origin="memory")
    with pytest.raises(CacheError) as refusal:
        cache.scales()
    wording.check(refusal.value)


def test_legacy_header_has_no_label():
    cache = parse(b"03ff00000000000003feffffde7210be9\ndata: 3c008102\n", origin="memory")
    assert (cache.header.cutoff, cache.header.quantile) == (1.0, 0.999999)
    assert cache.header.label is None
    assert cache.header.algorithm == LEGACY
    assert trt_cache.relabel(cache, version="8.5.3") == cache
    relabelled = trt_cache.relabel(cache, version="8.5.3", algorithm=ENTROPY2)
    assert dump(relabelled).startswith(b"TRT-8503-EntropyCalibration2\n")


def test_models_and_odd_algorithms_fail():
    model = make_model([("Relu", "x", "y")], {"x": [1]}, {"y": [1]})
    with pytest.raises(CacheError, match="binary file"):
        parse(model.SerializeToString(), origin="m.onnx")
    with pytest.raises(CacheError, match="algorithm"):
        from_scales({"a": np.float32(1)}, version="8.5.3", algorithm="two words")


def test_negative_zero_is_written_as_zero():
    assert trt_cache.from_scales({"a": np.float32(-0.0)}, version="8.5.3").entries[0].digits == "0"


@pytest.mark.parametrize(
    ("version", "label"),
    [
        ("5.1.0", 5100),
        ("7.2.2", 7202),
        ("8.5.3", 8503),
        ("8.5.3.1", 8503),
        ("8.5.10", 8510),
        ("9.2.0", 9200),
        ("10.0.1", 100001),
        ("10.3.0", 100300),
        ("10.14.1", 101401),
    ],
)
def test_version_labels(version, label):
    assert trt_cache.version_label(version) == label
    assert trt_cache.label_to_version(label) == ".".join(version.split(".")[:3])


@pytest.mark.parametrize("version", ["", "8", "8.5", "eight", "8.5.x", "8.10.0", "-8.5.3"])
def test_invalid_version_is_refused(version):
    with pytest.raises(CacheError):
        trt_cache.version_label(version)


@pytest.mark.parametrize(
    ("scales", "reason"),
    [
        ({}, "at least one"),
        ({"a": np.float32("nan")}, "zero or more"),
        ({"a\nb": np.float32(1)}, "line break"),
        ({"a": np.float32(-1)}, "zero or more"),
        ({"": np.float32(1)}, "not empty"),
    ],
)
def test_unstorable_scales_are_refused(scales, reason):
    with pytest.raises(CacheError, match=reason):
        from_scales(scales, version="8.5.3")


@pytest.fixture
def calibrate(run, small_cnn, pictures, tmp_path):
    """(options) -> output of `calib8 calibrate` of the small CNN into m.cache."""
    arguments = ("calibrate", small_cnn, "--images", pictures, "--size", "16x16")
    out = ("--target", "tensorrt", "-o", tmp_path / "m.cache")
    return lambda *options: run.ok(*arguments, *out, *options)


@pytest.fixture
def cache(calibrate, tmp_path):
    """A cache of the small CNN."""
    calibrate()
    return tmp_path / "m.cache"


@NEEDS_SHARED
@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_commands_accept_real_caches(path, run, tmp_path):
    assert len(run.ok("cache", "show", path).splitlines()) == len(path.read_bytes().splitlines())
    json.loads(run.ok("cache", "show", "--json", path))
    run.ok("cache", "check", path)
    there, back = tmp_path / "there", tmp_path / "back"
    run.ok("cache", "relabel", path, "--trt-version", "10.3.0", "-o", there)
    run.ok("cache", "check", there, "--trt-version", "10.3.0")
    version = parse(path.read_bytes(), origin=path.name).header.version or "6.0.1"
    run.ok("cache", "relabel", there, "--trt-version", version, "-o", back)
    assert back.read_bytes() == path.read_bytes()


def test_only_a_matching_cache_is_reused(calibrate, tmp_path):
    cache, rule = tmp_path / "m.cache", ("--method", "entropy-tensorrt")
    assert "written" in calibrate(*rule)
    first_bytes = cache.read_bytes()
    assert "reused" in calibrate(*rule)
    assert cache.read_bytes() == first_bytes
    assert "first batch of 4" in calibrate(*rule, "--batch-size", 4)
    cache.write_bytes(cache.read_bytes().replace(b"logits: ", b"z: "))
    assert "was changed after" in calibrate(*rule, "--batch-size", 4)


@pytest.mark.parametrize(
    ("method", "header"),
    [
        ("entropy-tensorrt", "TRT-100300-EntropyCalibration2"),
        ("entropy", "TRT-100300-EntropyCalibration2"),
        ("minmax", "TRT-100300-MinMaxCalibration"),
        ("legacy", "03ff00000000000003feffffde7210be9"),
    ],
)
def test_cache_header_names_the_calibrator(calibrate, tmp_path, method, header):
    calibrate("--method", method)
    assert (tmp_path / "m.cache").read_text().splitlines()[0] == header


def test_cache_with_unknown_tensors_is_refused(run, small_cnn, cache, tmp_path):
    known_count = len(parse(cache.read_bytes(), origin="").scales())
    arguments = ("cache", "to-qdq", small_cnn, cache, "-o", tmp_path / "q.onnx")
    lines = [f"elsewhere{number}: 3c008912\n" for number in range(known_count + 1)]
    plain = cache.read_text()
    cache.write_text("".join([plain, *lines[:known_count]]))
    run.ok(*arguments)
    cache.write_text("".join([plain, *lines]))
    assert f"{known_count + 1} of {2 * known_count + 1} entries" in run.fails(*arguments)


def test_to_qdq_and_from_qdq(run, small_cnn, cache, tmp_path):
    qdq, plain, second_path = (tmp_path / name for name in ("q.onnx", "p.onnx", "p.cache"))
    run.ok("cache", "to-qdq", small_cnn, cache, "-o", qdq)
    run.ok("cache", "to-qdq", small_cnn, cache, "-o", plain, "--keep-batchnorm")
    assert plain.read_bytes() == qdq.read_bytes()  # it has no BatchNormalization
    run.ok("cache", "from-qdq", qdq, "-o", plain, second_path)
    scales = parse(cache.read_bytes(), origin="").scales()
    back = parse(second_path.read_bytes(), origin="").scales()
    assert set(back) == {"x", "r1", "r2", "r3", "f"}
    assert all(scales[name] == scale for name, scale in back.items())
    run.fails("cache", "diff", cache, second_path)
    run.ok("cache", "diff", cache, cache)


@pytest.mark.parametrize(("float_type", "kind"), [("fp16", 10), ("bf16", 16), ("fp32", 1)])
def test_rest_option_sets_float_types(float_type, kind, run, small_cnn, cache, tmp_path):
    out = tmp_path / "q.onnx"
    run.ok("cache", "to-qdq", small_cnn, cache, "-o", out, "--rest", float_type)
    inferred = onnx.shape_inference.infer_shapes(onnx.load(out), check_type=True, strict_mode=True)
    types = {v.name: v.type.tensor_type.elem_type for v in inferred.graph.value_info}
    convs = [node for node in inferred.graph.node if node.op_type in ("Conv", "Gemm")]
    assert convs
    assert {types[name] for node in convs for name in node.input[:1]} == {kind}
    assert {v.type.tensor_type.elem_type for v in inferred.graph.output} == {1}


def test_check_reports_wrong_version_and_model(run, small_cnn, cache, tmp_path):
    run.ok("cache", "check", cache, "--model", small_cnn, "--trt-version", "10.3.0")
    foreign = tmp_path / "foreign.cache"
    foreign.write_bytes(b"TRT-8503-EntropyCalibration2\nelsewhere: 3c008912\n")
    extreme = tmp_path / "extreme.cache"  # a subnormal scale, and one whose range overflows
    extreme.write_bytes(b"TRT-8503-EntropyCalibration2\na: 3\nb: 3c008912\nc: 7f00003c\n")
    for arguments, reason in (
        ((cache, "--trt-version", "8.5.3"), "relabel"),
        ((cache, "--algorithm", "MinMaxCalibration"), "MinMaxCalibration"),
        ((extreme,), "2 scales (a, c)"),
        ((foreign, "--model", small_cnn, "--verbose"), "another model"),
    ):
        code, out, _ = run("cache", "check", *arguments)
        assert code == 1
        assert reason in out


@pytest.mark.parametrize("version", ["0.9.1", "11.0.0"])
def test_versions_without_caches_are_refused(version, run, cache, small_cnn, tmp_path):
    model, out = tmp_path / "q.onnx", tmp_path / "o"
    run.ok("cache", "to-qdq", small_cnn, cache, "-o", model)
    for arguments in (
        ("check", cache),
        ("relabel", cache, "-o", out),
        ("from-qdq", model, "-o", out, f"{out}.cache"),
    ):
        code, _, err = run("cache", *arguments, "--trt-version", version)
        assert code == 1
        assert version in err
        assert not out.exists()


def test_check_reports_a_cache_changed_afterwards(run, small_cnn, cache, tmp_path):
    head, *lines = cache.read_text().splitlines()
    equal = [line.rpartition(": ")[0] + ": 3a000000" for line in lines]
    cache.write_text("\n".join([head, *equal, ""]))
    code, out, _ = run("cache", "check", cache)
    assert code == 1
    assert "m.cache.json" in out
    for arguments in (
        ("to-qdq", small_cnn, cache),
        ("relabel", cache, "--trt-version", "8.5.3"),
    ):
        assert "m.cache.json" in run.ok("cache", *arguments, "-o", tmp_path / arguments[0])
    Path(f"{cache}.json").unlink()  # without its fingerprint, no one knows
    run.ok("cache", "check", cache)


def printed_command(output):
    """Return the arguments of the `calib8` command that an output advises to run."""
    return shlex.split(output.split("run: calib8 ")[1].splitlines()[0])


def test_check_prints_a_command_that_works(run, small_cnn, cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = tmp_path / "my model.cache"
    cache.rename(plain)
    wanted = ("--trt-version", "8.5.3", "--algorithm", "MinMaxCalibration")
    for options in (wanted[:2], wanted[2:], wanted):
        _, out, _ = run("cache", "check", plain, *options)
        arguments = printed_command(out)
        run.ok(*arguments)
        run.ok("cache", "check", arguments[arguments.index("-o") + 1], *options)


@pytest.mark.slow
def test_calibration_replaces_no_file_of_a_build(run, small_cnn, tmp_path):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(4, 3, 16, 16)).astype("f4"))
    options = ("--images", tmp_path / "x.npy", "--target", "tensorrt")
    out = tmp_path / "o"
    run.ok("build", small_cnn, *options, "--out", out, "--effort", 0, "--duration", 0)
    shipped = out / f"{small_cnn.stem}.tensorrt.cache"
    assert "a file of a build" in run.fails("calibrate", small_cnn, *options, "-o", shipped)
    run.ok("verify", out)
    run.ok("calibrate", small_cnn, *options, "-o", shipped, "--force")
    run.ok("calibrate", small_cnn, *options, "-o", out / "calib8" / f"{small_cnn.stem}.cache")


@pytest.mark.slow
def test_calibration_reuses_the_builds_cache(run, small_cnn, tmp_path):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(4, 3, 16, 16)).astype("f4"))
    out = tmp_path / "o"
    options = ("--images", tmp_path / "x.npy")
    for _ in range(2):  # as a script does that is run again
        run.ok("calibrate", small_cnn, *options, "-o", out / "c.cache")
        cache_options = ("--cache", out / "c.cache", "--out", out, "--effort", 0, "--duration", 0)
        run.ok("build", small_cnn, *options, *cache_options)


@pytest.mark.slow
def test_check_of_builds_cache_advises_a_build(run, small_cnn, tmp_path):
    samples = np.random.default_rng(0).normal(size=(4, 3, 16, 16))
    out = build_net(onnx.load(small_cnn), samples, tmp_path, "--target", "tensorrt", "--effort", 0)
    cache = out / "net.tensorrt.cache"
    _, output, _ = run("cache", "check", cache, "--trt-version", "8.5.3")
    arguments = printed_command(output)
    assert "reused" in run.ok(*arguments)
    run.ok("cache", "check", cache, "--trt-version", "8.5.3")


def test_caches_of_dead_branch_pass_check(run, tmp_path):
    """A branch that is 0 in every sample has no scale, and its node stays in float."""
    rng = np.random.default_rng(0)
    shapes = {"w": (8, 3, 3, 3), "v": (8, 8, 1, 1), "u": (8, 8, 1, 1)}
    weights = as_float32({name: rng.normal(size=shape) for name, shape in shapes.items()})
    weights["dead"] = np.full(8, -99, np.float32)
    nodes = "c = Conv(x, w) d = Conv(c, v, dead) r = Relu(d) e = Conv(r, u) y = Add(c, e)"
    model = make_model(nodes, {"x": ["n", 3, 6, 6]}, {"y": None}, weights)
    samples = rng.normal(size=(4, 3, 6, 6))
    out = build_net(model, samples, tmp_path, "--target", "tensorrt", "--effort", 0)
    paths = list(out.rglob("*.cache"))
    assert len(paths) == 2
    for path in paths:
        run.ok("cache", "check", path, "--model", out / "net.tensorrt.onnx")
    scales = parse((out / "net.tensorrt.cache").read_bytes(), origin="").scales()
    assert all(scales.values())
    assert set(scales) == {"x", "c", "y"}


@pytest.mark.parametrize("data", [b"", b"\x00" * 64, b"TRT-8503-EntropyCalibration2\nx: 3c0"])
def test_broken_cache_raises_a_clear_error(data, run, small_cnn, tmp_path):
    broken, out = tmp_path / "broken.cache", tmp_path / "out"
    broken.write_bytes(data)
    for arguments in (
        ("show", broken),
        ("check", broken),
        ("diff", broken, broken),
        ("relabel", broken, "--trt-version", "8.5.3", "-o", out),
        ("to-qdq", small_cnn, broken, "-o", out),
        ("show", tmp_path / "missing"),
        ("show", tmp_path),
        ("from-qdq", broken, "-o", out, out),
        ("from-qdq", small_cnn, "-o", out, out),
    ):
        error = run.fails("cache", *arguments)
        assert error.startswith("calib8: error: ")
        assert error.count("\n") == 1
        assert not out.exists()
