"""A calibration on a dask cluster of real processes: the bytes of one run, come what may."""

import json
import os
import re
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

from calib8 import Cluster, calibrate
from deploy.calibration import cluster as clusters
from deploy.calibration import cluster_jobs
from deploy.calibration.observation import ObservedStatistics
from deploy.calibration.sample_checks import Peaks
from deploy.calibration.shards import make_shard
from deploy.calibration.store import cache_files
from deploy.errors import BackendError, ConfigError, SdkMissingError
from deploy.feed.feed import open_feed
from deploy.frontends import load

missing = "dask.distributed is not installed (extra [dask])"
distributed = pytest.importorskip("distributed", reason=missing)

ROOT = Path(__file__).parent.parent
ELSEWHERE = "tcp://127.0.0.1:1"  # nobody listens there
NOWHERE = ("--scheduler", ELSEWHERE)


@contextmanager
def started(folder, *words):
    """A process of dask's command line, in a folder of its own."""
    told = {**os.environ, "PYTHONPATH": f"{ROOT}", "CALIB8_TEST": f"{folder}"}
    with (folder / f"{words[0]}.log").open("a") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "dask", *map(str, words)],
            cwd=folder,
            env=told,
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(300)


@contextmanager
def worker(folder, address, name):
    """One with one thread, without a nanny that would start it again."""
    preload = ROOT / "tests" / "cluster_worker.py"
    words = ("--name", name, "--nthreads", 1, "--no-nanny", "--no-dashboard", "--preload", preload)
    with started(folder, "worker", address, *words, "--local-directory", folder) as process:
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


@contextmanager
def scheduling(folder):
    """The process of a scheduler, and the scheduler."""
    file = folder / "scheduler.json"
    words = ("--host", "127.0.0.1", "--port", 0, "--no-dashboard", "--scheduler-file", file)
    with started(folder, "scheduler", *words) as process:
        until(lambda: file.exists() and file.stat().st_size, "the scheduler")
        yield process, Scheduler(folder)


def until(true, what):
    """Wait for something of another process."""
    end = time.monotonic() + 300
    while not true():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    with (
        scheduling(folder) as (_, found),
        worker(folder, found.address, "alice"),
        worker(folder, found.address, "bob"),
    ):
        yield found


@pytest.fixture
def cluster(scheduler, monkeypatch):
    """The same, with nothing told yet; a busy machine may answer as late as it likes."""
    monkeypatch.setattr(clusters, "CONNECT_S", 300)
    monkeypatch.setattr(clusters, "ANSWER_S", 300)
    for name in ("samples", "slow", "fail", "die"):
        (scheduler.folder / name).unlink(missing_ok=True)
    return scheduler


@pytest.fixture
def refused(cluster, run, small_cnn, pictures, tmp_path):
    """(*words) -> the sentence with which a calibration on the cluster is refused."""

    def call(*words, images=pictures, address=cluster.address):
        path = tmp_path / "x.cache"
        words = ("--images", images, "-o", path, "--scheduler", address, *words)
        err = run.fails("calibrate", small_cnn, *words)
        assert not path.exists()
        return err

    return call


def contents(cache):
    return [path.read_bytes() for path in cache_files(cache)]


@pytest.fixture
def equal(cluster, run, small_cnn, pictures, tmp_path):
    """(words, words of the cluster) -> stdout of a calibration on it: the bytes of one run."""

    def call(words=(), there=(), images=pictures):
        words = ("calibrate", small_cnn, "--images", images, *words, "-o")
        run.ok(*words, tmp_path / "one.cache")
        out = run.ok(*words, tmp_path / "all.cache", "--scheduler", cluster.address, *there)
        assert contents(tmp_path / "all.cache") == contents(tmp_path / "one.cache")
        return out

    return call


@pytest.mark.parametrize("send", ["nothing", "all"])
def test_a_cluster_writes_the_bytes_of_one_run(send, cluster, equal):
    words = ("--target", "onnxruntime,tensorrt", "--trt-version", "8.6.1")
    out = equal(words, ("--send", send))
    assert "of 20 images" in out
    assert "observed in" in out
    assert cluster.address in out
    assert len(cluster.samples()) == 20


@pytest.mark.slow
def test_a_worker_that_is_killed_in_the_middle_changes_nothing(cluster, equal):
    with worker(cluster.folder, cluster.address, "carol"):
        with distributed.Client(cluster.address, set_as_default=False) as client:
            client.wait_for_workers(3, timeout=300)
        cluster.tell("die")
        out = equal(there=("--pieces", 6))
    assert len(cluster.samples()) == 22  # two were run for nothing
    assert "lost on the way" in out


def test_a_piece_that_the_system_failed_is_tried_again(cluster, equal, refused):
    cluster.tell("fail")
    equal(there=("--pieces", 2))
    assert len(cluster.samples()) == 21
    cluster.tell("fail")
    err = refused("--pieces", 2, "--retries", 0)
    assert re.search(r"the worker \w+: OSError: the share does not answer", err)


PATIENT = """
from deploy import cli
from deploy.calibration import cluster
cluster.CONNECT_S = cluster.ANSWER_S = cluster.STOP_S = 300
cli.main()
"""


@pytest.mark.slow
def test_an_interrupt_ends_the_pieces_on_the_workers(cluster, small_cnn, pictures, tmp_path):
    cluster.tell("slow")
    listed = tmp_path / "list.txt"
    listed.write_text("".join(f"{path}\n" for path in sorted(pictures.iterdir())) * 100)
    words = [sys.executable, "-c", PATIENT, "calibrate", small_cnn, "--images", listed]
    words += ["--pieces", "2", "--scheduler", cluster.address, "-o", tmp_path / "x.cache"]
    process = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    until(lambda: len(cluster.samples()) > 4, "the first samples")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 130, said
    assert "Traceback" not in said, said
    assert said.splitlines()[-1].startswith("calib8: interrupted")
    assert [path.name for path in tmp_path.iterdir()] == ["list.txt"]
    with distributed.Client(cluster.address, set_as_default=False) as client:
        until(lambda: not any(client.processing().values()), "no task")
        until(lambda: not any(client.call_stack().values()), "no running piece")
    assert len(cluster.samples()) < 2000  # of which each takes 250 ms


@pytest.mark.slow
def test_a_scheduler_that_is_lost_is_a_sentence(refused, tmp_path):
    with scheduling(tmp_path) as (lost, found):
        found.tell("slow")

        def kill():
            until(found.samples, "the first sample")
            lost.kill()

        killer = threading.Thread(target=kill)
        with worker(tmp_path, found.address, "dan"):
            killer.start()
            err = refused("--pieces", 1, address=found.address)
            killer.join()
    assert f"the scheduler {found.address} must" in err


@pytest.mark.slow
def test_build_observes_there_too(cluster, run, small_cnn, pictures, tmp_path):
    words = ("build", small_cnn, "--images", pictures, "--effort", 0, "--duration", 0, "--out")
    run.ok(*words, tmp_path / "one")
    run.ok(*words, tmp_path / "all", "--scheduler", cluster.address)
    assert len(cluster.samples()) == 20
    for name in ("calib8/small_cnn.cache", "calib8/small_cnn.cache.npz", "small_cnn.int8.onnx"):
        assert (tmp_path / "all" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
    assert "scheduler" not in (tmp_path / "all" / "calib8.toml").read_text()


@pytest.mark.parametrize("send", ["nothing", "images"])
def test_what_is_bad_is_skipped_as_here(send, equal, pictures, tmp_path):
    folder = shutil.copytree(pictures, tmp_path / "bad")
    (folder / "04.png").write_bytes(b"no picture")
    (folder / "07.png").write_bytes(b"")
    cv2.imwrite(str(folder / "09.png"), np.full((18, 20, 3), 255, np.uint8))
    there = ("--send", send, "--pieces", 20)  # two pieces hold bad ones alone
    assert "2 skipped: image 04.png" in equal(["--skip-bad"], there, images=folder)


def test_arrays_in_memory_are_sent_and_files_read_there(cluster, equal, small_cnn, tmp_path, rng):
    arrays = rng.normal(size=(9, 3, 16, 16)).astype(np.float32)
    np.save(tmp_path / "rows.npy", arrays)
    equal(images=tmp_path / "rows.npy")
    calibrate(small_cnn, arrays, cache=tmp_path / "one.cache")
    sent = Cluster(address=cluster.address, send="images", pieces=4)
    found = calibrate(small_cnn, arrays, cache=tmp_path / "sent.cache", scheduler=sent)
    assert contents(tmp_path / "sent.cache") == contents(tmp_path / "one.cache")
    assert found.runs == {"folded": 9}
    assert "in 4 pieces" in found.notes[0]


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("nowhere", "does not exist"),
        ("fewer", "got 19 here and 20 at the client"),
        ("other", "got another file"),
    ],
)
def test_a_worker_of_other_images_is_named(where, said, refused, pictures, tmp_path, monkeypatch):
    there = tmp_path / where
    if where != "nowhere":
        shutil.copytree(pictures, there)
    if where == "fewer":
        (there / "03.png").unlink()
    if where == "other":
        shutil.copy(pictures / "01.png", there / "00.png")
    monkeypatch.setattr(cluster_jobs, "shared_paths", lambda images: str(there))
    err = refused("--pieces", 2)
    assert said in err
    assert "the worker " in err
    assert "--send images" in err
    assert "alice" in err or "bob" in err


def test_a_worker_with_another_model_is_named(refused, detector, monkeypatch):
    for there, said in ((detector, "got another one"), ("/nowhere.onnx", "got nothing there")):
        monkeypatch.setattr(cluster_jobs, "_shared_model_path", lambda *_, there=there: str(there))
        err = refused()
        assert said in err
        assert "the worker " in err
        assert "--send model" in err


def test_a_worker_of_other_version_is_named(refused, monkeypatch):
    here = cluster_jobs.collect_versions("images")
    other = here | {"onnxruntime": "1.0"}
    monkeypatch.setattr(cluster_jobs, "collect_versions", lambda kind: other)
    err = refused()
    assert "the worker tcp://" in err
    assert f"onnxruntime {here['onnxruntime']} (1.0 at" in err
    monkeypatch.setattr(cluster_jobs, "collect_versions", lambda kind: here | {"calib8": "9.9"})
    err = refused()
    assert "the scheduler has calib8" in err
    assert "9.9 at the client" in err


def test_a_damaged_picture_and_too_many_pieces_are_told(cluster, refused, pictures, tmp_path):
    folder = shutil.copytree(pictures, tmp_path / "bad")
    (folder / "14.png").write_bytes(b"no picture")
    err = refused(images=folder)
    assert "the worker " in err
    assert "14.png" in err
    assert not [line for line in cluster.samples() if "14.png" in line]
    assert "got 21 shards of 20" in refused("--pieces", 21)


@pytest.mark.parametrize("words", [b"", b"HTTP/1.0 400 Bad Request\r\n\r\n"])
def test_somebody_else_there_is_a_sentence(words, monkeypatch, small_cnn, pictures, wording):
    monkeypatch.setattr(clusters, "CONNECT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            with server.accept()[0] as other:
                other.sendall(words)
                other.recv(1)
                time.sleep(0.4)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(BackendError) as refusal:
            calibrate(small_cnn, pictures, scheduler=f"127.0.0.1:{server.getsockname()[1]}")
        wording.check(refusal.value)


@pytest.mark.slow
def test_noise_there_is_one_line_until_the_process_ends(small_cnn, pictures):
    with socket.create_server(("127.0.0.1", 0)) as server:
        said = []

        def answer():
            said.append(server.accept()[0])  # stays open until the process has ended
            said[0].sendall(b"\xff" * 4096)

        threading.Thread(target=answer, daemon=True).start()
        words = ["calibrate", small_cnn, "--images", pictures, "-q", "--scheduler"]
        words.append(f"127.0.0.1:{server.getsockname()[1]}")
        done = subprocess.run([sys.executable, "-m", "deploy", *words], capture_output=True)
        said[0].close()
    assert done.returncode == 1
    assert done.stderr.count(b"\n") == 1
    assert b"a dask scheduler must answer at" in done.stderr


def test_dask_missing_is_a_sentence(small_cnn, pictures, monkeypatch):
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
def fake(monkeypatch):
    monkeypatch.setattr(clusters, "TICK_S", 0.0)
    monkeypatch.setattr(clusters, "WORKERS_S", 0.05)
    return lambda *there: clusters.ClusterRun(Fake(*there), None, Cluster(address=ELSEWHERE), None)


def test_no_worker_or_all_of_them_lost_is_a_sentence(fake, wording):
    with pytest.raises(BackendError) as refusal:
        fake({}).wait_for_workers()
    wording.check(refusal.value)
    run = fake({"tcp://a": 1}, {})
    assert run._poll_workers()
    run._threads_by_worker = {"tcp://a": 1}
    with pytest.raises(BackendError) as refusal:
        for _ in range(100):
            run._poll_workers()
            time.sleep(0.01)
    wording.check(refusal.value)
    assert run.lost_workers == ["tcp://a"]


@pytest.mark.parametrize("address", ["host:8786", "tls://10.0.0.1:1", "tcp://[::1]:8786"])
def test_an_address_is_taken(address):
    assert cluster_jobs.as_cluster(address).address == address
    assert cluster_jobs.as_cluster(None) is None


@pytest.mark.parametrize("given", [{"pieces": 0}, {"retries": -1}, {"threads": 0}, {"send": "x"}])
def test_options_are_checked(given):
    with pytest.raises(ConfigError):
        Cluster(address=ELSEWHERE, **given)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *(
            (("--scheduler", address), "a scheduler's address is host:port")
            for address in (
                "",
                "nonsense",
                "http://host:80",
                "tcp://host",
                "host:port",
                "a b:1",
                "ucx://a:1",
            )
        ),
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
)
def test_useless_options_are_refused_first(words, said, run, small_cnn, pictures, tmp_path):
    feed = ("--images", pictures, *words)
    assert said in run.fails("calibrate", small_cnn, *feed, "-o", tmp_path / "x")
    if "goes with" in said:
        assert said in run.fails("build", small_cnn, *feed, "--out", tmp_path / "x")


def test_images_without_a_path_must_be_sent_and_a_video_is_of_one_machine(small_cnn, tmp_path):
    code = "import numpy\ndef feed():\n    return numpy.zeros((2, 3, 16, 16), 'float32')\n"
    (tmp_path / "loader.py").write_text(code)
    for images in (f"{tmp_path}/loader.py:feed", [np.zeros((1, 3, 16, 16), np.float32)]):
        with pytest.raises(ConfigError, match="send them"):
            calibrate(small_cnn, images, scheduler=ELSEWHERE)
    film = cv2.VideoWriter(str(tmp_path / "v.avi"), cv2.VideoWriter_fourcc(*"MJPG"), 2.0, (16, 16))
    for _ in range(4):
        film.write(np.zeros((16, 16, 3), np.uint8))
    film.release()
    with pytest.raises(ConfigError, match="as images"):
        calibrate(small_cnn, tmp_path / "v.avi", scheduler=ELSEWHERE)


def test_a_cache_that_fits_needs_no_scheduler(small_cnn, pictures, tmp_path):
    calibrate(small_cnn, pictures, cache=tmp_path / "x.cache")
    assert calibrate(small_cnn, pictures, cache=tmp_path / "x.cache", scheduler=ELSEWHERE).reused


@pytest.mark.slow
def test_a_piece_of_another_calibration_is_refused(small_cnn, pictures, wording):
    loaded = load(small_cnn)
    nothing = ObservedStatistics({})
    feed = open_feed(str(pictures), loaded.inputs)
    share = feed.get_share((1, 2))
    part = feed.open_share(share)
    part.manifest()
    gathering = clusters.ShardMerger((), feed, loaded.identities)
    with pytest.raises(BackendError) as refusal:
        gathering.add(share, "bob", make_shard(part, {"graph": "x"}, Peaks(), nothing))
    wording.check(refusal.value)
    data = make_shard(part, loaded.identities, Peaks(), nothing)
    with pytest.raises(BackendError) as refusal:
        gathering.add(feed.get_share((2, 2)), "bob", data)
    wording.check(refusal.value)
    gathering.add(share, "bob", data)
    assert feed.decodes == 10
