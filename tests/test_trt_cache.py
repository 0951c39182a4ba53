"""The TensorRT cache text: byte-exact round trips, real files, hostile files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.calibration import trt_cache
from deploy.calibration.trt_cache import (
    ENTROPY2,
    LEGACY,
    MINMAX,
    dump,
    from_scales,
    label_to_version,
    parse,
    relabel,
    version_label,
)
from deploy.errors import CacheError

SHARED = Path(__file__).parents[1].parent / "shared" / "golden" / "tensorrt"
CACHES = sorted((SHARED / "caches").glob("*.cache"))
REAL = [path for path in CACHES if not path.name.startswith("NOT_TRT")]
SMALL = b"TRT-8503-EntropyCalibration2\ndata: 3c008912\nconv/Conv2D:0: 3c60dd38\nzero: 0\n"
NEEDS_SHARED = pytest.mark.skipif(not REAL, reason=f"no real caches at {SHARED / 'caches'}")

names = st.text(
    st.characters(blacklist_characters="\n\r", blacklist_categories=("Cs",)), min_size=1
)
scale_bits = st.integers(0, 0x7F800000)


@NEEDS_SHARED
@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_real_cache_round_trips_byte_for_byte(path: Path) -> None:
    data = path.read_bytes()
    cache = parse(data, origin=path.name)
    assert dump(cache) == data
    assert len(cache.entries) == len(data.splitlines()) - 1
    if cache.header.label is not None:
        same = relabel(cache, version=str(cache.header.version))
        assert dump(same) == data


@NEEDS_SHARED
def test_every_real_cache_is_written_anew_from_its_scales() -> None:
    for path in REAL:
        cache = parse(path.read_bytes(), origin=path.name)
        again = from_scales(
            cache.scales(),
            version=cache.header.version or "6.0.1",
            algorithm=cache.header.algorithm,
        )
        assert dump(again) == path.read_bytes(), path.name


@NEEDS_SHARED
def test_onnxruntime_table_of_the_same_name_is_told_apart() -> None:
    path = SHARED / "caches" / "NOT_TRT_ort_resnet50.cache"
    with pytest.raises(CacheError, match="onnxruntime's own calibration table"):
        parse(path.read_bytes(), origin=path.name)


def test_onnxruntime_writes_each_of_its_tables_and_all_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onnxruntime.quantization import write_calibration_table
    from onnxruntime.quantization.calibrate import CalibrationMethod, TensorsData

    # arrays, since onnxruntime 1.23 (the last for Python 3.10) cannot write numpy scalars
    limits = {"data": (-1.5, 2.0), "w": (0, 3.25)}
    ranges = TensorsData(
        CalibrationMethod.MinMax,
        {name: tuple(np.array(v, np.float32) for v in ends) for name, ends in limits.items()},
    )
    monkeypatch.chdir(tmp_path)
    write_calibration_table(ranges)
    told = {"calibration.cache": "own calibration table", "calibration.json": "is JSON"}
    told["calibration.flatbuffers"] = "calibration.flatbuffers"
    for name, clause in told.items():
        with pytest.raises(CacheError, match=clause):
            parse((tmp_path / name).read_bytes(), origin="x")


@settings(max_examples=60)
@given(
    st.dictionaries(names, scale_bits, min_size=1, max_size=8),
    st.sampled_from(["5.1.0", "7.2.2", "8.5.3", "10.3.0", "10.14.1"]),
    st.sampled_from([ENTROPY2, MINMAX, LEGACY]),
)
def test_scales_survive_the_text(entries: dict[str, int], version: str, algorithm: str) -> None:
    scales = {name: np.uint32(bits).view(np.float32) for name, bits in entries.items()}
    cache = from_scales(scales, version=version, algorithm=algorithm)
    again = parse(dump(cache), origin="memory")
    assert again == cache
    assert [(entry.name, entry.bits) for entry in again.entries] == list(entries.items())
    assert again.header.version == (None if algorithm == LEGACY else version)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(names, st.integers(0, 2**32 - 1)), min_size=1, max_size=6),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
    st.booleans(),
)
def test_odd_but_readable_text_round_trips(
    entries: list[tuple[str, int]], end: str, final: bool, upper: bool
) -> None:
    lines = [f"{name}: {bits:{'08X' if upper else '08x'}}" for name, bits in entries]
    text = end.join(["TRT-8503-EntropyCalibration2", *lines]) + (end if final else "")
    data = text.encode("utf-8")
    cache = parse(data, origin="memory")
    assert dump(cache) == data
    assert [(entry.name, entry.bits) for entry in cache.entries] == entries


@settings(max_examples=150)
@given(st.binary(max_size=200) | st.binary(max_size=60).map(lambda tail: SMALL + tail))
def test_any_bytes_are_read_exactly_or_refused(data: bytes) -> None:
    try:
        cache = parse(data, origin="bytes")
    except CacheError as error:
        assert "bytes" in str(error)
    else:
        assert dump(cache) == data


def test_every_truncation_is_refused_or_ends_at_a_whole_entry() -> None:
    whole = [(e.name, e.bits) for e in parse(SMALL, origin="whole").entries]
    for cut in range(len(SMALL)):
        try:
            cache = parse(SMALL[:cut], origin="cut.cache")
        except CacheError as error:
            assert "cut.cache" in str(error)
        else:
            found = [(e.name, e.bits) for e in cache.entries]
            assert found == whole[: len(found)], cut


@pytest.mark.parametrize(
    ("data", "told"),
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
        (b"\x80\x04\x95\x00\x00", "pickle"),
        (b"\x93NUMPY\x01\x00", "numpy"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b'record {\n  key: "conv1"\n', "AMCT"),
        (b"ptrt\x00\x00\x00\x00", "engine"),
        (b"\x00" * 300, "binary"),
        (b"conv1 1.5\n", "onnxruntime"),
        (b"hello\n", "no known calibration tool"),
    ],
)
def test_what_is_no_cache_is_refused_with_its_likely_origin(data: bytes, told: str) -> None:
    with pytest.raises(CacheError, match=told) as caught:
        parse(data, origin="some.cache")
    assert "some.cache" in str(caught.value)


def test_an_onnx_model_in_place_of_the_cache_is_named() -> None:
    from onnx import TensorProto, helper

    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [value], [value])
    with pytest.raises(CacheError, match="ONNX model"):
        parse(helper.make_model(graph).SerializeToString(), origin="m.onnx")


def test_flaws_and_duplicates_are_kept_and_flagged() -> None:
    text = b"TRT-8503-EntropyCalibration2\na: 0\nb: 7f800000\nc: ffc00000\nd: bf800000\na: 0\n"
    cache = parse(text, origin="memory")
    assert cache.flaws() == {"a": "zero", "b": "inf", "c": "NaN", "d": "negative"}
    assert cache.duplicates() == ["a"]
    assert dump(cache) == text
    assert cache.scales()["b"] == np.inf


def test_two_different_scales_of_one_tensor_are_refused() -> None:
    cache = parse(b"TRT-8503-EntropyCalibration2\na: 1\na: 2\n", origin="memory")
    with pytest.raises(CacheError, match="one tensor has one scale"):
        cache.scales()


def test_legacy_header_holds_cutoff_and_quantile() -> None:
    cache = parse(b"03ff00000000000003feffffde7210be9\ndata: 3c008102\n", origin="memory")
    assert (cache.header.cutoff, cache.header.quantile) == (1.0, 0.999999)
    assert cache.header.label is None
    assert cache.header.algorithm == LEGACY
    assert relabel(cache, version="8.5.3") == cache
    moved = relabel(cache, version="8.5.3", algorithm=ENTROPY2)
    assert dump(moved).startswith(b"TRT-8503-EntropyCalibration2\n")


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
def test_version_labels(version: str, label: int) -> None:
    assert version_label(version) == label
    assert label_to_version(label) == ".".join(version.split(".")[:3])


@pytest.mark.parametrize("version", ["", "8", "8.5", "eight", "8.5.x", "8.10.0", "-8.5.3"])
def test_what_is_no_version_is_refused(version: str) -> None:
    with pytest.raises(CacheError):
        version_label(version)


@pytest.mark.parametrize(
    ("scales", "told"),
    [
        ({}, "at least one"),
        ({"a": np.float32("nan")}, "zero or more"),
        ({"a\nb": np.float32(1)}, "line break"),
        ({"a": np.float32(-1)}, "zero or more"),
        ({"": np.float32(1)}, "not empty"),
    ],
)
def test_scales_that_no_cache_can_hold_are_refused(
    scales: dict[str, np.float32], told: str
) -> None:
    with pytest.raises(CacheError, match=told):
        from_scales(scales, version="8.5.3")


def test_an_algorithm_is_one_word() -> None:
    with pytest.raises(CacheError, match="algorithm"):
        from_scales({"a": np.float32(1)}, version="8.5.3", algorithm="two words")
    assert trt_cache.from_scales({"a": np.float32(-0.0)}, version="8.5.3").entries[0].digits == "0"
