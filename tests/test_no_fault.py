"""No file, folder, path or value makes a fault of calib8 itself."""

import io
import json
import os
import random
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest

from calibrators.errors import CalibrationError
from calibrators.grids import affine_params
from deploy.analysis.experiment import MAX_ROWS, quantize, read_values
from deploy.calibration import store
from deploy.errors import BackendError, ConfigError, FeedError
from deploy.files.manifest import sha256
from deploy.report.profile_page import Area, Tile, squarify, tree_map
from deploy.runtimes.ort import OrtSession
from scripts import house
from scripts.attacks.mutate import mutated
from tests.models import save_net

ROOT = Path(__file__).parent.parent


@pytest.fixture
def stored_calibration(run, small_cnn, pictures, tmp_path):
    """A calibration, and how to make it again."""
    arguments = ("calibrate", small_cnn, "--images", pictures, "--size", "16x16", "--limit", 4)
    run.ok(*arguments, "-o", tmp_path / "c")
    return tmp_path / "c", (*arguments, "-o", tmp_path / "c")


def fitting(cache, statistics, **changes):
    """Write statistics and changes of the JSON with all digests as they should be."""
    note, packed = store.sidecars(cache)
    packed.write_bytes(statistics)
    document = {**json.loads(note.read_text()), **changes}
    document["sha256"] = {**document["sha256"], "statistics": sha256(statistics)}
    note.write_bytes(store.seal_json(document))


def stored(*members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return buffer.getvalue()


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


@pytest.mark.slow
@pytest.mark.release
def test_forged_statistics_are_made_again(stored_calibration, run):
    cache, arguments = stored_calibration
    files = (cache, *store.sidecars(cache))
    original_bytes = [path.read_bytes() for path in files]
    inf = npy(np.array([np.inf, np.nan, -np.inf, 1e308]))
    huge = npy(np.array([2**63 - 1, -(2**63)]))
    fields = [
        ("0.counts.npy", npy(np.zeros(4097, np.int64))),
        ("0.reals.npy", inf),
        ("0.wholes.npy", huge),
    ]
    forgeries = [
        b"",
        b"PK\5\6" + bytes(18),
        stored(),
        stored(*fields),
        stored(("0.npy", b"")),
        stored(("0.counts.npy", npy(np.array(["a"])))),
        stored(*fields[:2]),
        stored(*((name, inf) for name, _ in fields)),
        stored(("0.reals.npy", bytes(1 << 20))),
    ]
    for data in [
        *forgeries,
        *(mutated(random.Random(n), *original_bytes[2:0:-1]) for n in range(40)),
    ]:
        fitting(cache, data)
        out = run.ok(*arguments)
        assert [path.read_bytes() for path in files] == original_bytes or "reused" in out


@pytest.mark.parametrize(
    "changes",
    [
        {"observations": [["a", "b", ["c"]]]},
        {"observations": [[3, {}, None]] * 9},
        {"observations": []},
        {"fingerprint": []},
        {"fingerprint": {"model": {}}},
        {"schema": [[]]},
        {"more": [[[[]]]]},
    ],
)
def test_forged_fingerprint_is_no_fault(changes, stored_calibration, run):
    cache, arguments = stored_calibration
    fitting(cache, store.sidecars(cache)[1].read_bytes(), **changes)
    run.ok(*arguments)
    run("cache", "show", cache)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "3",
        '{"sha256": ["cache", "statistics", "this"]}',
        "[" * 10**6,
        "\xff",
        "",
        '{"fingerprint": 1, "schema": 3, "sha256": ["cache", "statistics", "this"],'
        ' "observations": []}',
        '{"fingerprint":' * 500,
        "1" * 5000,
    ],
)
def test_forged_sidecar_is_no_fault(text, stored_calibration, run):
    cache, arguments = stored_calibration
    store.sidecars(cache)[0].write_text(text, encoding="latin-1")
    run("cache", "show", cache)
    run.ok(*arguments)


@pytest.mark.parametrize("name", ["c", "c.json", "c.npz"])
@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_pipe_as_cache_is_refused(name, kind, stored_calibration, run, wording):
    cache, arguments = stored_calibration
    path = cache.parent / name
    path.unlink()
    os.mkfifo(path) if kind == "pipe" else path.mkdir()
    wording.check(run.fails(*arguments))
    assert run("cache", "show", cache)[0] == (0 if name != "c" else 1)
    run.fails(*arguments, "--require-cache")


# What is imported late is imported before the process is nobody's, who may read no library.
CLOSED_FOLDER_PROGRAM = """
import importlib, os, sys
import deploy.terminal
deploy.terminal.TICK_S = 1e6
from deploy.cli import main
def call(words):
    try: main(words)
    except SystemExit as stop: return stop.code
for name in eval(sys.argv[3]): importlib.import_module(name)
good, *tries = eval(sys.argv[2])
assert not call(good)
os.chmod(sys.argv[1], 0)
try: os.geteuid() or os.seteuid(65534)
except PermissionError: sys.exit(77)
for words in tries: print('code', call(words), words[0], flush=True)
"""


@pytest.mark.slow
def test_closed_folder_is_refused(small_cnn, pictures, tmp_path, tmp_path_factory):
    base = tmp_path_factory.getbasetemp()
    closed = tmp_path / "closed"
    closed.mkdir()
    (closed / "m.onnx").write_bytes(small_cnn.read_bytes())
    feed = ["--images", pictures, "--size", "16x16"]
    quick = ["--out", tmp_path / "o", "--duration", 0, "--effort", 0, "--accept"]
    tries = [
        ["build", small_cnn, *feed, *quick],  # which works
        ["build", closed / "m.onnx", *feed],
        ["build", small_cnn, *feed, "--out", closed / "o"],
        ["calibrate", small_cnn, *feed, "-o", closed / "c"],
        ["build", small_cnn, "--images", closed],
        ["build", small_cnn, "--images", closed / "list.txt"],
        ["build", small_cnn, *feed, "--eval-images", pictures, "--labels", closed / "l.json"],
        ["build", small_cnn, *feed, "--plan", closed / "p.toml"],
        ["build", small_cnn, *feed, "--metric", f"{closed}/f.py:f"],
        ["explain", closed],
        ["verify", closed / "o"],
        ["cache", "show", closed / "c"],
        ["ascend", "check", closed / "r"],
    ]
    need_torch = ("deploy.fx", "deploy.standins.torch_on_cpu", "deploy.__", "calib8.__")
    modules = [name for name in house.modules(ROOT) if not name.startswith(need_torch)]
    tries = [[*map(str, arguments)] for arguments in tries]
    for folder in (tmp_path, *tmp_path.parents, pictures, pictures.parent, small_cnn.parent):
        if folder.is_relative_to(base) or folder.name.startswith("pytest-"):
            folder.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", CLOSED_FOLDER_PROGRAM, str(closed), repr(tries), repr(modules)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    closed.chmod(0o700)
    if done.returncode == 77:
        pytest.skip("root may not become another user here (CAP_SETUID), and may look anywhere")
    codes = [line for line in done.stdout.splitlines() if line.startswith("code")]
    errors, output = done.stderr.splitlines(), done.stdout + done.stderr
    assert len(codes) == len(errors) == len(tries) - 1, output
    assert all(line.startswith("code 1 ") for line in codes), output
    assert sum("ermission" in line for line in errors) >= len(errors) - 1, output  # explain


def test_very_long_names_are_no_fault(small_cnn, run, tmp_path):
    model = onnx.load(small_cnn)
    for node in model.graph.node:
        node.name = node.name + "n" * 100_000
    run.ok("inspect", save_net(model, tmp_path / "m.onnx"), "--all")


QUICK = ("--duration", 0.02, "--effort", 0, "--accept")


@pytest.fixture
def folder(tmp_path):
    """A folder whose name is no UTF-8."""
    path = tmp_path / os.fsdecode(b"n\xff")
    try:
        path.mkdir()
    except OSError:
        pytest.skip("file names are UTF-8 here")
    return path


@pytest.fixture
def x(tmp_path):
    values = np.random.default_rng(0).normal(size=(4, 3, 16, 16)).astype(np.float32)
    np.save(tmp_path / "x.npy", values)
    return tmp_path / "x.npy"


def beside(model, path):
    """The model with its weights in a file beside it."""
    target_folder = path.parent.parent / "near"
    target_folder.mkdir()
    onnx.save(
        onnx.load(model),
        target_folder / path.name,
        save_as_external_data=True,
        location="w.bin",
        size_threshold=0,
    )
    for file in target_folder.iterdir():
        shutil.copy(file, path.parent / file.name)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["inside", "beside"])
def test_non_utf8_paths_build_every_target(weights, small_cnn, x, folder, run):
    model = folder / os.fsdecode(b"m\xe9.onnx" if weights == "inside" else b"m.onnx")
    shutil.copy(small_cnn, model) if weights == "inside" else beside(small_cnn, model)
    shutil.copy(x, folder / "x.npy")
    feed, out = ("--images", folder / "x.npy"), folder / "out"
    targets = ("--target", "onnxruntime,tensorrt,ascend")
    arguments = ("build", model, *feed, *QUICK, "--out", out, *targets)
    run.ok(*arguments)
    assert os.fsencode(f"={model.stem}_deploy") in next(out.glob("*_atc.sh")).read_bytes()
    json.loads((out / "report.json").read_text("utf-8"))
    engine = next(out.glob("*.int8.onnx"))
    run.ok(*arguments, "--require-cache")
    run.ok("explain", out, *feed)
    run.ok("inspect", model)
    run.ok("cache", "show", out / "calib8" / f"{model.stem}.cache")
    run.ok("bench", engine, "--duration", 0, "--warm-up", 0)
    run.ok("compare", model, engine, *feed)


def test_non_utf8_external_weights_are_refused(small_cnn, folder, tmp_path, monkeypatch, wording):
    model = beside(small_cnn, folder / "m.onnx")
    monkeypatch.chdir(tmp_path / "near")  # which has a file of the same name
    with pytest.raises(BackendError) as refusal:
        OrtSession.open(model)
    wording.check(refusal.value)


@pytest.mark.slow
def test_shared_node_names_are_renamed(small_cnn, x, tmp_path, run):
    model = onnx.load(small_cnn)
    for node in model.graph.node[1:]:
        node.name = "same"
    path = save_net(model, tmp_path / "m.onnx")
    with pytest.raises(BackendError, match="same node name"):
        OrtSession.open(path)
    arguments = ("--images", x, "--out", tmp_path / "o", *QUICK)
    run.ok("build", path, *arguments, "--target", "onnxruntime,tensorrt,ascend")
    report = json.loads((tmp_path / "o" / "report.json").read_text())
    names = [node["name"] for node in report["targets"][0]["nodes"]]
    assert len(set(names)) == len(names)
    note = "Renamed 8 nodes whose name another node has."
    assert note in json.dumps(report)
    assert note in run.ok("inspect", path)


VALUES = "[-1, 0, 1, 2]"


def quantize_json(run, *arguments):
    """Return the JSON of the command."""
    return json.loads(run("quantize", *arguments, "--json", "-")[1])


def test_given_scale_and_zero_point(run):
    options = ("--scale", "0.1", "--zero-point", "10")
    shown = run.ok("quantize", VALUES, *options)
    assert "scale 0.100000001, zero point 10, quint8 " in shown
    assert "-1 to 24.5" in shown
    assert "SQNR exact, 0 of 4 " in shown
    result = quantize_json(run, VALUES, *options)
    assert result["int_repr"] == [0, 10, 20, 30]
    assert result["dequantized"] == [-1, 0, 1, 2]
    result = quantize_json(run, "[-1000, 100]", *options)
    assert result["int_repr"] == [0, 255]
    assert result["clipped"] == 2
    assert result["error"] == pytest.approx([999, -75.5])
    assert quantize_json(run, "[100]", "--scale", "0.1", "--dtype", "qint32")["int_repr"] == [1000]


def test_channels_have_separate_scales(run):
    arguments = ("--scale", "0.1,0.01", "--zero-point", "10,0", "--axis", "0")
    result = quantize_json(run, "[[-1, 0], [1, 2]]", *arguments)
    assert result["int_repr"] == [[0, 10], [100, 200]]
    assert result["axis"] == 0
    by_column = quantize_json(
        run, "[[-1, 0], [1, 2]]", "--axis", "-1", "--method", "minmax", "--dtype", "qint8"
    )
    assert by_column["scale"] == pytest.approx([1 / 127, 2 / 127])
    assert by_column["zero_point"] == [0, 0]
    shown = run("quantize", str([[0.5]] * (MAX_ROWS + 2)), "--axis", "0")[1]
    assert "and 2 channels more" in shown
    assert "and 2 values more" in shown


def test_ranges_equal_the_searches(run, tmp_path):
    values = np.random.default_rng(0).normal(size=500).astype(np.float32)
    path = tmp_path / "v.npy"
    np.save(path, values)
    widest = quantize_json(run, path, "--method", "minmax")
    scale, zero = affine_params(float(values.min()), float(values.max()))
    assert (widest["scale"], widest["zero_point"]) == ([scale], [zero])
    percentile = quantize_json(run, path, "--method", "percentile", "--percent", "95")
    assert percentile["found"] == "percentile 95"
    assert percentile["clipped"] > 10
    assert percentile["sqnr_db"] < widest["sqnr_db"] < 60
    assert quantize_json(run, path, "--method", "entropy-tensorrt")["clipped"] >= 0
    zeros = quantize(np.zeros(3, np.float32), dtype="qint8")
    assert zeros.quantized.stored.tolist() == [0, 0, 0]
    assert zeros.quantized.scale.tolist() == [1.0]


def test_bad_experiments_are_refused(run, tmp_path):
    np.save(tmp_path / "c.npy", np.array(["text"]))
    one_way = "given or searched, got --scale and --method"
    for arguments, message in (
        ((VALUES, "--zero-point", "3"), "--zero-point goes with --scale"),
        ((VALUES, "--scale", "1", "--method", "mse"), one_way),
        ((VALUES, "--scale", "a"), "must be numbers with commas"),
        ((VALUES, "--scale", "1", "--zero-point", "1.5"), "must be whole numbers"),
        ((VALUES, "--scale", "0"), "a scale must be finite and positive"),
        ((VALUES, "--dtype", "qint32"), "a search finds the scale of quint8 or qint8"),
        ((VALUES, "--scale", "1,2"), "give --axis, or one of each"),
        ((VALUES, "--axis", "4"), "one of 1 dimensions, got 4"),
        *(
            ((text,), "values are a JSON array of numbers")
            for text in ("[1, [2]]", "[]", '["a"]', f"[1{'0' * 400}]")
        ),
        (("3.5",), "write it as '[3.5]'"),
        (("-1x",), "No such option"),
        (("[1e39, 1]",), "1 of 2 values infinite in float32"),
        (("[1, -Infinity]",), "1 of 2 values infinite in float32"),
        (("absent.npy",), "absent.npy must be an .npy file"),
        ((tmp_path / "c.npy",), "must be a sound .npy file"),
        ((VALUES, "-q"), "--quiet goes with --json"),
    ):
        code, _, err = run("quantize", *arguments)
        assert code in (1, 2), (arguments, err)
        assert message in err, (arguments, err)
    with pytest.raises(CalibrationError, match="NaN"):
        quantize(np.array([np.nan], np.float32), scales=[1.0])
    with pytest.raises(FeedError):
        read_values(str(tmp_path))
    with pytest.raises(ConfigError, match="brackets"):
        read_values("[" * 70)


def test_tree_map_areas_are_shares():
    values = [6, 6, 4, 3, 2, 2, 1]  # the example of its source: 6 x 4
    areas = squarify(values, Area(0, 0, 6, 4))
    assert [area.width * area.height for area in areas] == pytest.approx(values)
    assert areas[0] == Area(0, 0, 3, 2)
    assert areas[1] == Area(0, 2, 3, 2)
    assert areas[2].width == pytest.approx(12 / 7)
    assert areas[2].height == pytest.approx(7 / 3)
    assert squarify([], Area(0, 0, 1, 1)) == []


def test_tree_map_nests_and_escapes_parts():
    inner = (Tile("a<b", 3, "said & done", 1), Tile("tiny", 1e-9, "unseen"))
    text = tree_map([Tile("whole", 3, "all", parts=inner), Tile("none", 0, "nothing")], "Title")
    assert text.count("<rect") == 2
    assert "a&lt;b" in text
    assert "said &amp; done" in text
    assert 'class="whole"' in text
    assert 'class="c1"' in text
    assert "none" not in text
    assert tree_map([], "Title") == ""
