"""A calibration on a dask cluster of real processes: the bytes of one run, come what may."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import cv2
import numpy as np
import pytest

from deploy.calibration.store import cache_files
from deploy.errors import BackendError, ConfigError, SdkMissingError

pytest.importorskip("distributed", reason="dask.distributed is not installed (extra [dask])")

ROOT = Path(__file__).parent.parent
ELSEWHERE = "tcp://127.0.0.1:1"  # nobody listens there


@contextmanager
def started(folder, *words):
    """A process of dask's command line, in a folder of its own."""
    told = {**os.environ, "PYTHONPATH": f"{ROOT}", "CALIB8_TEST": f"{folder}"}
    with (folder / f"{words[0]}.log").open("a") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "dask", *map(str, words)],
            cwd=folder, env=told, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait(300)


@contextmanager
def worker(folder, address, name):
    """One with one thread, without a nanny that would start it again."""
    preload = ROOT / "tests" / "cluster_worker.py"
    with started(
        folder, "worker", address, "--name", name, "--nthreads", 1, "--no-nanny",
        "--no-dashboard", "--preload", preload, "--local-directory", folder,
    ) as process:  # fmt: skip
        yield process


class Scheduler:
    """A scheduler with workers, and the folder in which a test tells them what to do."""

    def __init__(self, folder):
        self.folder = folder
        self.address = json.loads((folder / "scheduler.json").read_text())["address"]

    def tell(self, name):
        (self.folder / name).touch()

    def samples(self):
        path = self.folder / "samples"
        return path.read_text().splitlines() if path.exists() else []


def until(true, what):
    """Wait for something of another process."""
    end = time.monotonic() + 300
    while not true():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    file = folder / "scheduler.json"
    with started(
        folder, "scheduler", "--host", "127.0.0.1", "--port", 0, "--no-dashboard",
        "--scheduler-file", file,
    ):  # fmt: skip
        until(lambda: file.exists() and file.stat().st_size, "the scheduler")
        found = Scheduler(folder)
        with worker(folder, found.address, "alice"), worker(folder, found.address, "bob"):
            yield found


@pytest.fixture
def cluster(scheduler, monkeypatch):
    """The same, with nothing told yet; a busy machine may answer as late as it likes."""
    monkeypatch.setattr("deploy.calibration.cluster.CONNECT_S", 300)
    monkeypatch.setattr("deploy.calibration.cluster.ANSWER_S", 300)
    for path in scheduler.folder.glob("*"):
        if path.name in ("samples", "slow", "fail", "die"):
            path.unlink()
    return scheduler


@pytest.fixture
def calibrated(run, small_cnn, pictures, tmp_path):
    """(cache, *words) -> what `calib8 calibrate` says."""

    def done(name, *words, images=pictures, model=small_cnn):
        return run.ok("calibrate", model, "--images", images, "-o", tmp_path / name, *words)

    return done


def refused(run, model, images, cluster, path, *words):
    code, _, err = run(
        "calibrate", model, "--images", images, "-o", path, "--scheduler", cluster.address, *words
    )
    assert code == 1 and not path.exists()
    return err


def contents(cache):
    return [path.read_bytes() for path in cache_files(cache)]


@pytest.mark.parametrize("send", ["nothing", "model", "images", "all"])
def test_a_cluster_writes_the_bytes_of_one_run(send, cluster, calibrated, tmp_path):
    words = ("--target", "onnxruntime,tensorrt", "--trt-version", "8.6.1")
    calibrated("one.cache", *words)
    out = calibrated("all.cache", *words, "--scheduler", cluster.address, "--send", send)
    assert contents(tmp_path / "all.cache") == contents(tmp_path / "one.cache")
    assert "of 20 images" in out and "observed in" in out and cluster.address in out
    assert len(cluster.samples()) == 20


@pytest.mark.slow
def test_a_worker_that_is_killed_in_the_middle_changes_nothing(cluster, calibrated, tmp_path):
    calibrated("one.cache")
    with worker(cluster.folder, cluster.address, "carol"):
        from distributed import Client

        with Client(cluster.address, set_as_default=False) as client:
            client.wait_for_workers(3, timeout=300)
        cluster.tell("die")
        out = calibrated("all.cache", "--scheduler", cluster.address, "--pieces", 6)
    assert len(cluster.samples()) == 22  # two were run for nothing
    assert "lost on the way" in out
    assert contents(tmp_path / "all.cache") == contents(tmp_path / "one.cache")


def test_a_piece_that_the_system_failed_is_tried_again(cluster, calibrated, run, tmp_path):
    calibrated("one.cache")
    cluster.tell("fail")
    calibrated("all.cache", "--scheduler", cluster.address, "--pieces", 2)
    assert len(cluster.samples()) == 21
    assert contents(tmp_path / "all.cache") == contents(tmp_path / "one.cache")
    cluster.tell("fail")
    with pytest.raises(AssertionError, match=r"the worker \w+: OSError: the share does not answer"):
        calibrated("x.cache", "--scheduler", cluster.address, "--pieces", 2, "--retries", 0)
    assert not (tmp_path / "x.cache").exists()


PATIENT = """
from deploy import cli
from deploy.calibration import cluster
cluster.CONNECT_S = cluster.ANSWER_S = cluster._STOP_S = 300
cli.main()
"""


@pytest.mark.slow
def test_an_interrupt_ends_the_pieces_on_the_workers(cluster, small_cnn, pictures, tmp_path):
    cluster.tell("slow")
    listed = tmp_path / "list.txt"
    listed.write_text("".join(f"{path}\n" for path in sorted(pictures.iterdir())) * 100)
    process = subprocess.Popen(
        [sys.executable, "-c", PATIENT, "calibrate", small_cnn, "--images", listed,
         "--pieces", "2", "--scheduler", cluster.address, "-o", tmp_path / "x.cache"],
        cwd=ROOT, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until(lambda: len(cluster.samples()) > 4, "the first samples")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 130 and "Traceback" not in said, said
    assert said.splitlines()[-1].startswith("calib8: interrupted")
    assert [path.name for path in tmp_path.iterdir()] == ["list.txt"]
    from distributed import Client

    with Client(cluster.address, set_as_default=False) as client:
        until(lambda: not any(client.processing().values()), "no task")
        until(lambda: not any(client.call_stack().values()), "no running piece")
    assert len(cluster.samples()) < 2000  # of which each takes 250 ms


@pytest.mark.slow
def test_a_scheduler_that_is_lost_is_a_sentence(run, small_cnn, pictures, tmp_path):
    file = tmp_path / "scheduler.json"
    words = ("--host", "127.0.0.1", "--port", 0, "--no-dashboard", "--scheduler-file", file)
    with started(tmp_path, "scheduler", *words) as lost:
        until(lambda: file.exists() and file.stat().st_size, "the scheduler")
        found = Scheduler(tmp_path)
        found.tell("slow")

        def kill():
            until(found.samples, "the first sample")
            lost.kill()

        killer = threading.Thread(target=kill)
        with worker(tmp_path, found.address, "dan"):
            killer.start()
            err = refused(run, small_cnn, pictures, found, tmp_path / "x.cache", "--pieces", 1)
            killer.join()
    assert f"the scheduler {found.address} must" in err


def test_build_observes_there_too(cluster, run, small_cnn, pictures, tmp_path):
    words = ("--images", pictures, "--effort", 0, "--duration", 0)
    assert run("build", small_cnn, *words, "--out", tmp_path / "one")[0] == 0
    more = ("--scheduler", cluster.address, "--out", tmp_path / "all")
    run.ok("build", small_cnn, *words, *more)
    assert len(cluster.samples()) == 20
    for name in ("small_cnn.cache", "small_cnn.cache.npz", "small_cnn.int8.onnx"):
        assert (tmp_path / "all" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
    assert "scheduler" not in (tmp_path / "all" / "calib8.toml").read_text()


@pytest.mark.parametrize("send", ["nothing", "images"])
def test_what_is_bad_is_skipped_as_here(send, cluster, calibrated, pictures, tmp_path):
    folder = shutil.copytree(pictures, tmp_path / "bad")
    (folder / "04.png").write_bytes(b"no picture")
    (folder / "07.png").write_bytes(b"")
    cv2.imwrite(str(folder / "09.png"), np.full((18, 20, 3), 255, np.uint8))
    calibrated("one.cache", "--skip-bad", images=folder)
    words = ("--scheduler", cluster.address, "--send", send, "--pieces", 20, "--skip-bad")
    out = calibrated("all.cache", *words, images=folder)  # two pieces hold bad ones alone
    assert contents(tmp_path / "all.cache") == contents(tmp_path / "one.cache")
    assert "2 skipped: image 04.png" in out


def test_arrays_in_memory_are_sent(cluster, small_cnn, tmp_path):
    from deploy import Cluster, calibrate

    arrays = np.random.default_rng(3).normal(size=(9, 3, 16, 16)).astype(np.float32)
    calibrate(small_cnn, arrays, cache=tmp_path / "one.cache")
    sent = Cluster(address=cluster.address, send="images", pieces=4)
    found = calibrate(small_cnn, arrays, cache=tmp_path / "all.cache", scheduler=sent)
    assert contents(tmp_path / "all.cache") == contents(tmp_path / "one.cache")
    assert found.runs == {"folded": 9} and "in 4 pieces" in found.notes[0]


def test_files_of_arrays_are_read_by_their_path(cluster, calibrated, tmp_path):
    arrays = np.random.default_rng(3).normal(size=(9, 3, 16, 16)).astype(np.float32)
    np.save(tmp_path / "rows.npy", arrays)
    calibrated("one.cache", images=tmp_path / "rows.npy")
    calibrated("all.cache", "--scheduler", cluster.address, images=tmp_path / "rows.npy")
    assert contents(tmp_path / "all.cache") == contents(tmp_path / "one.cache")


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("nowhere", "does not exist"),
        ("fewer", "got 19 here and 20 at the client"),
        ("other", "got another file"),
    ],
)
def test_a_worker_that_sees_other_images_is_named(
    where, said, cluster, run, small_cnn, pictures, tmp_path, monkeypatch
):
    if where != "nowhere":
        shutil.copytree(pictures, tmp_path / where)
    if where == "fewer":
        (tmp_path / where / "03.png").unlink()
    if where == "other":
        shutil.copy(pictures / "01.png", tmp_path / where / "00.png")
    monkeypatch.setattr(
        "deploy.calibration.cluster_jobs.shared_paths", lambda images: str(tmp_path / where)
    )
    err = refused(run, small_cnn, pictures, cluster, tmp_path / "x.cache", "--pieces", 2)
    assert said in err and "the worker " in err and "--send images" in err
    assert "alice" in err or "bob" in err


def test_a_worker_with_another_model_is_named(
    cluster, run, small_cnn, detector, pictures, tmp_path, monkeypatch
):
    for there, said in ((detector, "got another one"), ("/nowhere.onnx", "got nothing there")):
        monkeypatch.setattr(
            "deploy.calibration.cluster_jobs._path_of", lambda *_, there=there: str(there)
        )
        err = refused(run, small_cnn, pictures, cluster, tmp_path / "x.cache")
        assert said in err and "the worker " in err and "--send model" in err


def test_a_worker_of_other_version_is_named(
    cluster, run, small_cnn, pictures, tmp_path, monkeypatch
):
    from deploy.calibration import cluster_jobs

    here = cluster_jobs.collect_versions("images")
    monkeypatch.setattr(
        cluster_jobs, "collect_versions", lambda kind: {**here, "onnxruntime": "1.0"}
    )
    err = refused(run, small_cnn, pictures, cluster, tmp_path / "x.cache")
    assert "the worker tcp://" in err and f"onnxruntime {here['onnxruntime']} (1.0 at" in err
    monkeypatch.setattr(cluster_jobs, "collect_versions", lambda kind: {**here, "calib8": "9.9"})
    err = refused(run, small_cnn, pictures, cluster, tmp_path / "x.cache")
    assert "the scheduler has calib8" in err and "9.9 at the client" in err


def test_a_damaged_picture_is_told_with_its_worker(cluster, run, small_cnn, pictures, tmp_path):
    folder = shutil.copytree(pictures, tmp_path / "bad")
    (folder / "14.png").write_bytes(b"no picture")
    err = refused(run, small_cnn, folder, cluster, tmp_path / "x.cache")
    assert "the worker " in err and "14.png" in err
    assert len([line for line in cluster.samples() if "14.png" in line]) == 0


def test_more_pieces_than_images_are_refused(cluster, run, small_cnn, pictures, tmp_path):
    err = refused(run, small_cnn, pictures, cluster, tmp_path / "x.cache", "--pieces", 21)
    assert "got 21 shards of 20" in err


# ---- what needs no cluster -------------------------------------------------------------------
@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr("deploy.calibration.cluster.CONNECT_S", 0.3)


@pytest.mark.parametrize("words", [b"", b"HTTP/1.0 400 Bad Request\r\n\r\n"])
def test_somebody_else_there_is_a_sentence(words, hasty, small_cnn, pictures):
    from deploy import calibrate

    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            with server.accept()[0] as other:
                other.sendall(words)
                other.recv(1)
                time.sleep(0.4)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(BackendError, match=r"must answer at 127\.0\.0\.1:\d+ within"):
            calibrate(small_cnn, pictures, scheduler=f"127.0.0.1:{server.getsockname()[1]}")


def test_dask_missing_is_a_sentence(small_cnn, pictures, monkeypatch):
    from deploy import calibrate

    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(SdkMissingError, match=r"pip install 'calib8\[dask\]'"):
        calibrate(small_cnn, pictures, scheduler=ELSEWHERE)


class Fake:
    """A client of a scheduler whose workers come and go as they are told."""

    def __init__(self, *there):
        self.there = list(there)

    def nthreads(self):
        return self.there.pop(0) if len(self.there) > 1 else self.there[0]


@pytest.fixture
def fake(small_cnn, pictures, monkeypatch):
    from deploy.calibration import cluster as module
    from deploy.calibration.cluster_jobs import Cluster

    monkeypatch.setattr(module, "TICK_S", 0.0)
    monkeypatch.setattr(module, "WORKERS_S", 0.05)

    return lambda *there: module.ClusterRun(Fake(*there), None, Cluster(address=ELSEWHERE), None)


def test_no_worker_is_a_sentence(fake):
    with pytest.raises(BackendError, match=r"must have a worker, got none.*dask worker tcp"):
        fake({}).muster()


def test_all_workers_lost_is_a_sentence(fake):
    run = fake({"tcp://a": 1}, {})
    assert run._look()
    run._there = {"tcp://a": 1}
    with pytest.raises(BackendError, match="must have a worker"):
        for _ in range(100):
            run._look()
            time.sleep(0.01)
    assert run.lost == ["tcp://a"]


@pytest.mark.parametrize("address", ["host:8786", "tls://10.0.0.1:1", "tcp://[::1]:8786"])
def test_an_address_is_taken(address):
    from deploy.calibration.cluster_jobs import as_cluster

    assert as_cluster(address).address == address and as_cluster(None) is None


@pytest.mark.parametrize("given", [{"pieces": 0}, {"retries": -1}, {"threads": 0}, {"send": "x"}])
def test_options_are_checked(given):
    from deploy import Cluster

    with pytest.raises(ConfigError):
        Cluster(address=ELSEWHERE, **given)


NOWHERE = ("--scheduler", ELSEWHERE)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *((("--scheduler", address), "a scheduler's address is host:port") for address in (
            "", "nonsense", "http://host:80", "tcp://host", "host:port", "a b:1", "ucx://a:1")),
        (("--send", "all"), "--send goes with --scheduler"),
        (("--pieces", 3), "--pieces goes with --scheduler"),
        (("--retries", 1), "--retries goes with --scheduler"),
        (("--shard", "1/2", *NOWHERE), "got --shard"),
        (("--require-cache", *NOWHERE), "got --require-cache"),
        (("--trust-cache", *NOWHERE), "got --trust-cache"),
        (("--target", "ascend", *NOWHERE), "got --scheduler"),
        (("--until-stable", *NOWHERE), "--until-stable"),
        (("--resume", *NOWHERE), "--resume goes on"),
    ],
)  # fmt: skip
def test_useless_options_are_refused_first(words, said, run, small_cnn, pictures, tmp_path):
    feed = ("--images", pictures, *words)
    assert said in run.fails("calibrate", small_cnn, *feed, "-o", tmp_path / "x")
    if "goes with" in said:
        assert said in run.fails("build", small_cnn, *feed, "--out", tmp_path / "x")


def test_images_without_a_path_must_be_sent(small_cnn, tmp_path):
    from deploy import calibrate

    loader = tmp_path / "loader.py"
    loader.write_text(
        "import numpy\ndef feed():\n    return numpy.zeros((2, 3, 16, 16), 'float32')\n"
    )
    for images in (f"{loader}:feed", [np.zeros((1, 3, 16, 16), np.float32)]):
        with pytest.raises(ConfigError, match="send them"):
            calibrate(small_cnn, images, scheduler=ELSEWHERE)


def test_a_video_is_of_one_machine(small_cnn, tmp_path):
    from deploy import calibrate

    film = cv2.VideoWriter(str(tmp_path / "v.avi"), cv2.VideoWriter_fourcc(*"MJPG"), 2.0, (16, 16))
    for _ in range(4):
        film.write(np.zeros((16, 16, 3), np.uint8))
    film.release()
    with pytest.raises(ConfigError, match="as images"):
        calibrate(small_cnn, tmp_path / "v.avi", scheduler=ELSEWHERE)


def test_a_cache_that_fits_needs_no_scheduler(small_cnn, pictures, tmp_path):
    from deploy import calibrate

    calibrate(small_cnn, pictures, cache=tmp_path / "x.cache")
    assert calibrate(small_cnn, pictures, cache=tmp_path / "x.cache", scheduler=ELSEWHERE).reused


@pytest.mark.slow
def test_a_piece_of_another_calibration_is_refused(small_cnn, pictures):
    from deploy.calibration.cluster import ShardMerger
    from deploy.calibration.observation import ObservedStatistics
    from deploy.calibration.sample_checks import Peaks
    from deploy.calibration.shards import make_shard
    from deploy.feed.feed import open_feed
    from deploy.frontends import load

    loaded = load(small_cnn)
    feed = open_feed(str(pictures), loaded.inputs)
    share = feed.share_of((1, 2))
    part = feed.part(share)
    part.manifest()
    gathering = ShardMerger((), feed, loaded.identities)
    with pytest.raises(BackendError, match=r"worker bob .*the model"):
        gathering.add(
            share, "bob", make_shard(part, {"graph": "x"}, Peaks(), ObservedStatistics({}))
        )
    data = make_shard(part, loaded.identities, Peaks(), ObservedStatistics({}))
    with pytest.raises(BackendError, match=r"worker bob .*another piece than 2/2"):
        gathering.add(feed.share_of((2, 2)), "bob", data)
    gathering.add(share, "bob", data)
    assert feed.decodes == 10
