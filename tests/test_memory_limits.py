"""Inputs too large for the memory or the disk are refused before anything runs."""

from types import SimpleNamespace

import numpy as np
import onnx
import pytest

from calib8 import calibrate
from deploy import machine
from deploy.calibration import one_pass
from deploy.errors import CalibrationError
from deploy.feed.feed import open_feed
from deploy.tensors import TensorSpec
from tests.models import make_model


@pytest.fixture
def model_and_images(small_cnn, pictures):
    """The arguments of a command for the small model and its pictures."""
    return (small_cnn, "--images", pictures, "--size", "16x16")


@pytest.fixture
def set_memory(monkeypatch):
    def hold(count):
        for module in ("deploy.calibration.one_pass", "deploy.feed.bench_inputs"):
            monkeypatch.setattr(f"{module}.memory_bytes", lambda: count)

    return hold


def test_too_large_tensors_are_refused_first(set_memory, run, model_and_images, tmp_path):
    set_memory(20_000)
    err = run.fails("build", *model_and_images, "--out", tmp_path / "o")
    assert "memory, got" in err
    assert "19.5 KiB" in err
    assert "with 2,048 values" in err
    assert not (tmp_path / "o").exists() or not list((tmp_path / "o").iterdir())
    set_memory(1 << 30)
    assert run("calibrate", *model_and_images, "-o", tmp_path / "c")[0] == 0
    set_memory(20_000)  # what is there needs no memory
    assert run("calibrate", *model_and_images, "-o", tmp_path / "c")[0] == 0


def test_short_memory_only_lowers_the_threads(set_memory, run, model_and_images, tmp_path):
    files_by_run = []
    for number, count in enumerate((1 << 30, 700_000)):
        set_memory(count)
        out = run.ok("calibrate", *model_and_images, "--threads", 4, "-o", tmp_path / f"{number}")
        assert ("1 of 4 threads" in out) == bool(number)
        files_by_run.append([(tmp_path / f"{number}{end}").read_bytes() for end in ("", ".npz")])
    assert files_by_run[0] == files_by_run[1]


def test_merging_shards_needs_no_memory(set_memory, run, model_and_images, tmp_path):
    shards = [tmp_path / "a.shard", tmp_path / "b.shard"]
    for number, shard in enumerate(shards, start=1):
        run.ok("calibrate", *model_and_images, "--shard", f"{number}/2", "-o", shard)
    set_memory(20_000)
    run.ok("merge", model_and_images[0], *shards, "-o", tmp_path / "c")


def test_huge_tensor_is_counted_by_shape(set_memory):
    nodes = [("Expand", "x shape", "y"), ("Relu", "y", "z")]
    shape = {"shape": np.array([258, 1000, 3000])}
    model = make_model(nodes, {"x": [1, 1, 1]}, {"z": None}, shape)
    set_memory(2 << 30)
    with pytest.raises(CalibrationError, match="with 774,000,000 values"):
        calibrate(model, [np.ones((1, 1, 1), np.float32)], targets=["tensorrt"])


def test_unknown_memory_limits_no_workers(set_memory, small_cnn):
    model = onnx.load(small_cnn)
    set_memory(None)
    for observations in ([], [SimpleNamespace()]):
        assert one_pass.count_workers(observations, model, 3) == 3


def test_too_small_disk_is_refused_first(monkeypatch, run, model_and_images, tmp_path):
    free = SimpleNamespace(free=3000)
    monkeypatch.setattr(one_pass.shutil, "disk_usage", lambda path: free)
    assert "1 int8 model " in run.fails("build", *model_and_images, "--out", tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()


def test_container_memory_limit_counts(monkeypatch, tmp_path):
    machine_memory = machine.memory_bytes()
    assert machine_memory is None or machine_memory > 1 << 20
    (tmp_path / "max").write_text("max\n")
    (tmp_path / "limit").write_text("12345\n")
    monkeypatch.setattr(machine, "_MEMORY_LIMITS", [str(tmp_path / n) for n in ("max", "none")])
    assert machine.memory_bytes() != 12345
    monkeypatch.setattr(machine, "_MEMORY_LIMITS", [str(tmp_path / "limit")])
    assert machine.memory_bytes() == 12345


def test_compressed_archive_is_unpacked_outside_memory(tmp_path):
    values = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    np.savez_compressed(tmp_path / "x.npz", x=values)
    spec = TensorSpec("x", "float32", (None, 4))
    feed = open_feed(tmp_path / "x.npz", [spec])
    assert isinstance(feed._source.items[0]["x"], np.memmap)
    with feed.samples() as samples:
        assert np.array_equal(np.concatenate([sample["x"] for sample in samples]), values)


@pytest.mark.parametrize(
    "arguments",
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
def test_wrong_number_is_a_usage_error(arguments, run, small_cnn):
    command, *options = arguments
    code, _, error = run(command, small_cnn, *options)
    assert code == 2
    assert "no finite number" in error or "is not in the range" in error


@pytest.mark.parametrize("batch", [10**20, 10**9])
def test_too_large_random_inputs_are_refused(batch, run, small_cnn, set_memory, wording):
    set_memory(8 << 30)
    arguments = ("--shape", f"x:{batch}x3x16x16", "--duration", 0)
    wording.check(run.fails("bench", small_cnn, *arguments))
