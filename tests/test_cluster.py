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

MISSING_DASK = "dask.distributed is not installed (extra [dask])"
distributed = pytest.importorskip("distributed", reason=MISSING_DASK)

ROOT = Path(__file__).parent.parent
UNUSED_ADDRESS = "tcp://127.0.0.1:1"  # nobody listens there
UNUSED_SCHEDULER = ("--scheduler", UNUSED_ADDRESS)


@contextmanager
def start_dask(folder, *arguments):
    """A process of dask's command line, in a folder of its own."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}", "CALIB8_TEST": f"{folder}"}
    with (folder / f"{arguments[0]}.log").open("a") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "dask", *map(str, arguments)],
            cwd=folder,
            env=environment,
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
    """A worker of one thread, without a nanny that would start it again."""
    preload = ROOT / "tests" / "cluster_worker.py"
    options = ("--name", name, "--nthreads", 1, "--no-nanny", "--no-dashboard")
    files = ("--preload", preload, "--local-directory", folder)
    with start_dask(folder, "worker", address, *options, *files) as process:
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
    options = ("--host", "127.0.0.1", "--port", 0, "--no-dashboard", "--scheduler-file", file)
    with start_dask(folder, "scheduler", *options) as process:
        wait_until(lambda: file.exists() and file.stat().st_size, "the scheduler")
        yield process, Scheduler(folder)


def wait_until(is_met, awaited):
    """Wait until another process has done what is awaited."""
    end = time.monotonic() + 300
    while not is_met():
        assert time.monotonic() < end, f"waited in vain for {awaited}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    with (
        scheduling(folder) as (_, cluster_scheduler),
        worker(folder, cluster_scheduler.address, "alice"),
        worker(folder, cluster_scheduler.address, "bob"),
    ):
        yield cluster_scheduler


@pytest.fixture
def cluster(scheduler, monkeypatch):
    """The scheduler with no orders for its workers; a busy machine may answer late."""
    monkeypatch.setattr(clusters, "CONNECT_S", 300)
    monkeypatch.setattr(clusters, "ANSWER_S", 300)
    for name in ("samples", "slow", "fail", "die"):
        (scheduler.folder / name).unlink(missing_ok=True)
    return scheduler


@pytest.fixture
def refusal_of(cluster, run, small_cnn, pictures, tmp_path):
    """(*options) -> the message with which a calibration on the cluster is refused."""

    def call(*options, images=pictures, address=cluster.address):
        path = tmp_path / "x.cache"
        options = ("--images", images, "-o", path, "--scheduler", address, *options)
        err = run.fails("calibrate", small_cnn, *options)
        assert not path.exists()
        return err

    return call


def contents(cache):
    return [path.read_bytes() for path in cache_files(cache)]


@pytest.fixture
def compare_with_one_run(cluster, run, small_cnn, pictures, tmp_path):
    """(options, options of the cluster) -> stdout of a calibration there, equal to a run here."""

    def call(options=(), cluster_options=(), images=pictures):
        options = ("calibrate", small_cnn, "--images", images, *options, "-o")
        run.ok(*options, tmp_path / "one.cache")
        out = run.ok(
            *options, tmp_path / "all.cache", "--scheduler", cluster.address, *cluster_options
        )
        assert contents(tmp_path / "all.cache") == contents(tmp_path / "one.cache")
        return out

    return call


@pytest.mark.slow
@pytest.mark.parametrize("send", ["nothing", "all"])
def test_cluster_writes_the_same_bytes(send, cluster, compare_with_one_run):
    options = ("--target", "onnxruntime,tensorrt", "--trt-version", "8.6.1")
    out = compare_with_one_run(options, ("--send", send))
    assert "20 images" in out
    assert "observed in" in out
    assert cluster.address in out
    assert len(cluster.samples()) == 20


@pytest.mark.slow
def test_killed_worker_changes_no_byte(cluster, compare_with_one_run):
    with worker(cluster.folder, cluster.address, "carol"):
        with distributed.Client(cluster.address, set_as_default=False) as client:
            client.wait_for_workers(3, timeout=300)
        cluster.tell("die")
        out = compare_with_one_run(cluster_options=("--pieces", 6))
    assert len(cluster.samples()) == 22  # two were run for nothing
    assert "lost on the way" in out


@pytest.mark.slow
def test_piece_is_retried_after_system_error(cluster, compare_with_one_run, refusal_of):
    cluster.tell("fail")
    compare_with_one_run(cluster_options=("--pieces", 2))
    assert len(cluster.samples()) == 21
    cluster.tell("fail")
    err = refusal_of("--pieces", 2, "--retries", 0)
    assert re.search(r"the worker \w+: OSError: the share does not answer", err)


RUN_WITH_LONG_TIMEOUTS = """
from deploy import cli
from deploy.calibration import cluster
cluster.CONNECT_S = cluster.ANSWER_S = cluster.STOP_S = 300
cli.main()
"""


@pytest.mark.slow
def test_interrupt_ends_pieces_on_workers(cluster, small_cnn, pictures, tmp_path):
    cluster.tell("slow")
    listing = tmp_path / "list.txt"
    listing.write_text("".join(f"{path}\n" for path in sorted(pictures.iterdir())) * 100)
    command = [sys.executable, "-c", RUN_WITH_LONG_TIMEOUTS]
    command += ["calibrate", small_cnn, "--images", listing]
    command += ["--pieces", "2", "--scheduler", cluster.address, "-o", tmp_path / "x.cache"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: len(cluster.samples()) > 4, "the first samples")
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr, stderr
    assert stderr.splitlines()[-1].startswith("calib8: interrupted")
    assert [path.name for path in tmp_path.iterdir()] == ["list.txt"]
    with distributed.Client(cluster.address, set_as_default=False) as client:
        wait_until(lambda: not any(client.processing().values()), "no task")
        wait_until(lambda: not any(client.call_stack().values()), "no running piece")
    assert len(cluster.samples()) < 2000  # of which each takes 250 ms


@pytest.mark.slow
@pytest.mark.release
def test_lost_scheduler_is_named(refusal_of, tmp_path):
    with scheduling(tmp_path) as (process, lost_scheduler):
        lost_scheduler.tell("slow")

        def kill_scheduler():
            wait_until(lost_scheduler.samples, "the first sample")
            process.kill()

        killer = threading.Thread(target=kill_scheduler)
        with worker(tmp_path, lost_scheduler.address, "dan"):
            killer.start()
            err = refusal_of("--pieces", 1, address=lost_scheduler.address)
            killer.join()
    assert f"the scheduler {lost_scheduler.address} must" in err


@pytest.mark.slow
def test_build_observes_on_the_cluster(cluster, run, small_cnn, pictures, tmp_path):
    arguments = ("build", small_cnn, "--images", pictures, "--effort", 0, "--duration", 0, "--out")
    run.ok(*arguments, tmp_path / "one")
    run.ok(*arguments, tmp_path / "all", "--scheduler", cluster.address)
    assert len(cluster.samples()) == 20
    for name in ("calib8/small_cnn.cache", "calib8/small_cnn.cache.npz", "small_cnn.int8.onnx"):
        assert (tmp_path / "all" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
    assert "scheduler" not in (tmp_path / "all" / "calib8.toml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("send", ["nothing", "images"])
def test_bad_pictures_are_skipped_on_workers(send, compare_with_one_run, pictures, tmp_path):
    folder = shutil.copytree(pictures, tmp_path / "bad")
    (folder / "04.png").write_bytes(b"no picture")
    (folder / "07.png").write_bytes(b"")
    cv2.imwrite(str(folder / "09.png"), np.full((18, 20, 3), 255, np.uint8))
    cluster_options = ("--send", send, "--pieces", 20)  # two pieces hold bad ones alone
    assert "2 skipped: image 04.png" in compare_with_one_run(
        ["--skip-bad"], cluster_options, images=folder
    )


@pytest.mark.slow
def test_arrays_are_sent_and_files_read(cluster, compare_with_one_run, small_cnn, tmp_path, rng):
    arrays = rng.normal(size=(9, 3, 16, 16)).astype(np.float32)
    np.save(tmp_path / "rows.npy", arrays)
    compare_with_one_run(images=tmp_path / "rows.npy")
    calibrate(small_cnn, arrays, cache=tmp_path / "one.cache")
    sent = Cluster(address=cluster.address, send="images", pieces=4)
    result = calibrate(small_cnn, arrays, cache=tmp_path / "sent.cache", scheduler=sent)
    assert contents(tmp_path / "sent.cache") == contents(tmp_path / "one.cache")
    assert result.runs == {"folded": 9}
    assert "in 4 pieces" in result.notes[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("nowhere", "does not exist"),
        ("fewer", "got 19 here and 20 at the client"),
        ("other", "got another file"),
    ],
)
def test_worker_with_other_images_is_named(
    case, message, refusal_of, pictures, tmp_path, monkeypatch
):
    worker_images = tmp_path / case
    if case != "nowhere":
        shutil.copytree(pictures, worker_images)
    if case == "fewer":
        (worker_images / "03.png").unlink()
    if case == "other":
        shutil.copy(pictures / "01.png", worker_images / "00.png")
    monkeypatch.setattr(cluster_jobs, "shared_paths", lambda images: str(worker_images))
    err = refusal_of("--pieces", 2)
    assert message in err
    assert "the worker " in err
    assert "--send images" in err
    assert "alice" in err or "bob" in err


@pytest.mark.slow
def test_worker_with_another_model_is_named(refusal_of, detector, monkeypatch):
    for worker_model, message in (
        (detector, "got another one"),
        ("/nowhere.onnx", "got nothing there"),
    ):
        monkeypatch.setattr(
            cluster_jobs,
            "_shared_model_path",
            lambda *_, worker_model=worker_model: str(worker_model),
        )
        err = refusal_of()
        assert message in err
        assert "the worker " in err
        assert "--send model" in err


@pytest.mark.slow
def test_worker_of_other_version_is_named(refusal_of, monkeypatch):
    client_versions = cluster_jobs.collect_versions("images")
    worker_versions = client_versions | {"onnxruntime": "1.0"}
    monkeypatch.setattr(cluster_jobs, "collect_versions", lambda kind: worker_versions)
    err = refusal_of()
    assert "the worker tcp://" in err
    assert f"onnxruntime {client_versions['onnxruntime']} (1.0 at" in err
    monkeypatch.setattr(
        cluster_jobs, "collect_versions", lambda kind: client_versions | {"calib8": "9.9"}
    )
    err = refusal_of()
    assert "the scheduler has calib8" in err
    assert "9.9 at the client" in err
    # no worker is there yet when the client asks
    monkeypatch.setattr(clusters.ClusterRun, "_collect_versions", lambda self: {})
    err = refusal_of()
    assert "a worker that came late has calib8" in err
    assert "9.9 at the client" in err


@pytest.mark.slow
def test_damaged_picture_names_its_worker(cluster, refusal_of, pictures, tmp_path):
    folder = shutil.copytree(pictures, tmp_path / "bad")
    (folder / "14.png").write_bytes(b"no picture")
    err = refusal_of(images=folder)
    assert "the worker " in err
    assert "14.png" in err
    assert not [line for line in cluster.samples() if "14.png" in line]
    assert "got 21 shards of 20" in refusal_of("--pieces", 21)


@pytest.mark.parametrize("reply", [b"", b"HTTP/1.0 400 Bad Request\r\n\r\n"])
def test_foreign_server_is_refused(reply, monkeypatch, small_cnn, pictures):
    monkeypatch.setattr(clusters, "CONNECT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            with server.accept()[0] as connection:
                connection.sendall(reply)
                connection.recv(1)
                time.sleep(0.4)

        threading.Thread(target=answer, daemon=True).start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(BackendError, match=f"{address}.*tcp://host:8786"):
            calibrate(small_cnn, pictures, scheduler=address)


@pytest.mark.slow
def test_noisy_server_is_refused_once(small_cnn, pictures):
    with socket.create_server(("127.0.0.1", 0)) as server:
        connections = []

        def answer():
            connections.append(server.accept()[0])  # stays open until the process has ended
            connections[0].sendall(b"\xff" * 4096)

        threading.Thread(target=answer, daemon=True).start()
        arguments = ["calibrate", small_cnn, "--images", pictures, "-q", "--scheduler"]
        arguments.append(f"127.0.0.1:{server.getsockname()[1]}")
        process = subprocess.run([sys.executable, "-m", "deploy", *arguments], capture_output=True)
        connections[0].close()
    assert process.returncode == 1
    assert process.stderr.count(b"\n") == 1
    assert b"a dask scheduler must answer at" in process.stderr


def test_missing_dask_names_its_extra(small_cnn, pictures, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(SdkMissingError, match=r"pip install '\.\[dask\]'"):
        calibrate(small_cnn, pictures, scheduler=UNUSED_ADDRESS)


class FakeClient:
    """A client of a scheduler; each poll of its workers gets the next of the given answers."""

    def __init__(self, *worker_polls):
        self.worker_polls = list(worker_polls)

    def nthreads(self):
        return self.worker_polls.pop(0) if len(self.worker_polls) > 1 else self.worker_polls[0]


@pytest.fixture
def make_fake_run(monkeypatch):
    monkeypatch.setattr(clusters, "TICK_S", 0.0)
    monkeypatch.setattr(clusters, "WORKERS_S", 0.05)
    return lambda *worker_polls: clusters.ClusterRun(
        FakeClient(*worker_polls), None, Cluster(address=UNUSED_ADDRESS), None
    )


def test_no_worker_left_is_refused(make_fake_run, wording):
    with pytest.raises(BackendError) as refusal:
        make_fake_run({}).wait_for_workers()
    wording.check(refusal.value)
    run = make_fake_run({"tcp://a": 1}, {})
    assert run._poll_workers()
    run._threads_by_worker = {"tcp://a": 1}
    with pytest.raises(BackendError) as refusal:
        for _ in range(100):
            run._poll_workers()
            time.sleep(0.01)
    wording.check(refusal.value)
    assert run.lost_workers == ["tcp://a"]


@pytest.mark.parametrize("address", ["host:8786", "tls://10.0.0.1:1", "tcp://[::1]:8786"])
def test_addresses_are_accepted(address):
    assert cluster_jobs.as_cluster(address).address == address
    assert cluster_jobs.as_cluster(None) is None


@pytest.mark.parametrize("options", [{"pieces": 0}, {"retries": -1}, {"threads": 0}, {"send": "x"}])
def test_wrong_cluster_values_are_refused(options):
    with pytest.raises(ConfigError):
        Cluster(address=UNUSED_ADDRESS, **options)


@pytest.mark.parametrize(
    ("options", "message"),
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
        (("--shard", "1/2", *UNUSED_SCHEDULER), "cannot be given with --shard"),
        (("--require-cache", *UNUSED_SCHEDULER), "cannot be given with --require-cache"),
        (("--trust-cache", *UNUSED_SCHEDULER), "cannot be given with --trust-cache"),
        (("--target", "ascend", *UNUSED_SCHEDULER), "got --scheduler"),
        (("--until-stable", *UNUSED_SCHEDULER), "--until-stable"),
        (("--resume", *UNUSED_SCHEDULER), "--resume is for a run"),
    ],
)
def test_useless_options_are_refused_first(options, message, run, small_cnn, pictures, tmp_path):
    feed = ("--images", pictures, *options)
    assert message in run.fails("calibrate", small_cnn, *feed, "-o", tmp_path / "x")
    if "goes with" in message:
        assert message in run.fails("build", small_cnn, *feed, "--out", tmp_path / "x")


def test_pathless_images_must_be_sent(small_cnn, tmp_path):
    program = "import numpy\ndef feed():\n    return numpy.zeros((2, 3, 16, 16), 'float32')\n"
    (tmp_path / "loader.py").write_text(program)
    for images in (f"{tmp_path}/loader.py:feed", [np.zeros((1, 3, 16, 16), np.float32)]):
        with pytest.raises(ConfigError, match="send them"):
            calibrate(small_cnn, images, scheduler=UNUSED_ADDRESS)
    video = cv2.VideoWriter(str(tmp_path / "v.avi"), cv2.VideoWriter_fourcc(*"MJPG"), 2.0, (16, 16))
    for _ in range(4):
        video.write(np.zeros((16, 16, 3), np.uint8))
    video.release()
    with pytest.raises(ConfigError, match="as images"):
        calibrate(small_cnn, tmp_path / "v.avi", scheduler=UNUSED_ADDRESS)


def test_matching_cache_needs_no_scheduler(small_cnn, pictures, tmp_path):
    calibrate(small_cnn, pictures, cache=tmp_path / "x.cache")
    assert calibrate(
        small_cnn, pictures, cache=tmp_path / "x.cache", scheduler=UNUSED_ADDRESS
    ).reused


@pytest.mark.slow
def test_piece_of_another_calibration_is_refused(small_cnn, pictures, wording):
    loaded = load(small_cnn)
    no_statistics = ObservedStatistics({})
    feed = open_feed(str(pictures), loaded.inputs)
    share = feed.get_share((1, 2))
    part = feed.open_share(share)
    part.manifest()
    merger = clusters.ShardMerger((), feed, loaded.identities)
    with pytest.raises(BackendError) as refusal:
        merger.add(share, "bob", make_shard(part, {"graph": "x"}, Peaks(), no_statistics))
    wording.check(refusal.value)
    merger.add(share, "bob", make_shard(part, loaded.identities, Peaks(), no_statistics))
    assert feed.decodes == 10
