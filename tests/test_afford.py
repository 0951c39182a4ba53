"""What is clearly impossible is told before it is begun, and numbers are numbers."""

from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploy import machine
from deploy.calibration import one_pass
from deploy.errors import CalibrationError, FeedError
from deploy.feed.feed import open_feed
from deploy.pipeline import calibrate
from deploy.tensors import TensorSpec


@pytest.fixture
def memory(monkeypatch):
    def hold(count):
        for module in ("deploy.calibration.one_pass", "deploy.metrics.bench_inputs"):
            monkeypatch.setattr(f"{module}.memory_bytes", lambda: count)

    return hold


def test_tensors_that_no_memory_holds_are_refused_before_anything_is_run(
    memory, run, small_cnn, pictures, tmp_path
):
    words = ("--images", pictures, "--size", "16x16")
    memory(20_000)
    code, _, error = run("build", small_cnn, *words, "--out", tmp_path / "o")
    assert code == 1 and "memory, got" in error and "19.5 KiB" in error
    assert "with 2,048 values" in error
    assert not (tmp_path / "o").exists() or not list((tmp_path / "o").iterdir())
    memory(1 << 30)
    assert run("calibrate", small_cnn, *words, "-o", tmp_path / "c")[0] == 0
    memory(20_000)  # what is there needs no memory
    assert run("calibrate", small_cnn, *words, "-o", tmp_path / "c")[0] == 0


def test_fewer_threads_do_the_work_where_memory_is_short_and_change_nothing(
    memory, run, small_cnn, pictures, tmp_path
):
    kept = []
    for number, count in enumerate((1 << 30, 700_000)):
        memory(count)
        words = ("--images", pictures, "--size", "16x16", "--threads", 4)
        code, out, _ = run("calibrate", small_cnn, *words, "-o", tmp_path / f"{number}")
        assert code == 0
        assert ("1 of 4 threads" in out) == bool(number)
        kept.append([(tmp_path / f"{number}{end}").read_bytes() for end in ("", ".npz")])
    assert kept[0] == kept[1]


def test_a_tensor_of_774_million_values_is_counted_by_its_shape(memory):
    node = helper.make_node("Expand", ["x", "shape"], ["y"])
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node, helper.make_node("Relu", ["y"], ["z"])], "g",
        [value("x", TensorProto.FLOAT, [1, 1, 1])], [value("z", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.array([258, 1000, 3000]), "shape")],
    )  # fmt: skip
    memory(2 << 30)
    with pytest.raises(CalibrationError, match="with 774,000,000 values"):
        calibrate(
            helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8),
            [np.ones((1, 1, 1), np.float32)],
            targets=["tensorrt"],
        )


def test_a_machine_that_tells_no_memory_and_shapes_that_are_open_refuse_nothing(memory, small_cnn):
    model = onnx.load(small_cnn)
    memory(None)
    assert one_pass.workers([], model, 3) == one_pass.workers([SimpleNamespace()], model, 3) == 3


def test_a_disk_that_cannot_hold_the_engines_is_told_first(
    monkeypatch, run, small_cnn, pictures, tmp_path
):
    free = SimpleNamespace(free=3000)
    monkeypatch.setattr(one_pass.shutil, "disk_usage", lambda path: free)
    words = ("--images", pictures, "--size", "16x16", "--out", tmp_path / "a" / "b")
    code, _, error = run("build", small_cnn, *words)
    assert code == 1 and "1 int8 models" in error
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


def test_an_archive_is_unpacked_into_a_file_and_only_where_there_is_room(monkeypatch, tmp_path):
    values = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    np.savez_compressed(tmp_path / "x.npz", x=values)
    spec = TensorSpec("x", "float32", (None, 4))
    feed = open_feed(tmp_path / "x.npz", [spec])
    assert isinstance(feed._source.items[0]["x"], np.memmap)
    with feed.samples() as samples:
        assert np.array_equal(np.concatenate([sample["x"] for sample in samples]), values)
    free = SimpleNamespace(free=90)
    monkeypatch.setattr("deploy.feed.array_files.shutil.disk_usage", lambda path: free)
    with pytest.raises(FeedError, match=r"of room in .* to be unpacked, got 90 B"):
        open_feed(tmp_path / "x.npz", [spec])


@pytest.mark.parametrize(
    "words",
    [("build", "--max-loss", "nan"), ("build", "--min-speedup", "nan"),
     ("bench", "--warmup", "inf"),
     ("build", "--duration", "nan"), ("compare", "m", "--min-sqnr", "nan"),
     ("build", "--threads", 10**9), ("bench", "--threads", 10**9), ("bench", "--seed", -1)],
)  # fmt: skip
def test_what_is_no_number_is_a_usage_error(words, run, small_cnn):
    command, *options = words
    code, _, error = run(command, small_cnn, *options)
    assert code == 2 and ("no finite number" in error or "is not in the range" in error)


@pytest.mark.parametrize("batch", [10**20, 10**9])
def test_inputs_that_no_memory_holds_are_not_made_up(batch, run, small_cnn, memory):
    memory(8 << 30)
    code, _, error = run("bench", small_cnn, "--shape", f"x:{batch}x3x16x16", "--duration", 0)
    assert code == 1 and "must fit into the memory" in error
