"""Progress of commands on and off a terminal, --quiet and --json."""

import fcntl
import io
import json
import os
import pty
import re
import shutil
import struct
import sys
import termios
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from calib8 import calibrate
from deploy import terminal
from deploy.calibration.sample_checks import Outlier, Peaks
from deploy.cli import main
from deploy.terminal import Phase, phase, show_progress
from tests.models import read_markdown

ROOT = Path(__file__).parent.parent
LINE = re.compile(r"calib8: .+ (\d+ s|\d+ min \d+ s|\d+ h \d+ min)( left)?")


def exit_code_of(*arguments):
    """Exit code of one command line, whatever it prints."""
    try:
        main([str(word) for word in arguments])
    except SystemExit as stop:
        return stop.code or 0
    return 0


@pytest.fixture
def model_and_images(small_cnn, pictures):
    """A model and a few of its pictures."""
    return (small_cnn, "--images", pictures, "--size", "16x16", "--limit", 4)


@pytest.fixture
def quick_build(model_and_images, tmp_path):
    """Return the command line of a build of them into `out`."""
    options = ("--duration", 0, "--effort", 0, "--task", "none")  # four classes are too few
    return ("build", *model_and_images, *options, "--out", tmp_path / "out")


@pytest.fixture
def immediate_progress(monkeypatch):
    """Every phase is printed as it begins, whatever the clock says."""
    enter = terminal.ProgressReporter.enter

    def enter_and_print(self, new_phase):
        enter(self, new_phase)
        self.print_due()

    monkeypatch.setattr(terminal.ProgressReporter, "enter", enter_and_print)
    monkeypatch.setattr(terminal, "FIRST_S", 0)
    monkeypatch.setattr(terminal, "LASTING_S", 0)


@pytest.fixture
def screen(monkeypatch):
    """() -> from now on stderr is a terminal of 60 columns; returns a function: all it shows."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    monkeypatch.setenv("TERM", "xterm")
    stream = os.fdopen(slave, "w", encoding="utf-8")

    def shown():
        stream.write("\0")  # so that there is an end to read to
        stream.flush()
        data = b""
        while not data.endswith(b"\0"):
            data += os.read(master, 65536)
        return data[:-1].decode()

    def begin():
        monkeypatch.setattr(sys, "stderr", stream)  # of the test: pytest sets it again before
        return shown

    yield begin
    stream.close()
    os.close(master)


@pytest.fixture
def plain_lines(capsys):
    """(seconds) -> what a reporter that writes to no terminal prints at that moment."""
    now = [0.0]
    reporter = terminal.ProgressReporter(clock=lambda: now[0])

    def print_at(seconds):
        now[0] = seconds
        reporter.print_due()
        return capsys.readouterr().err

    print_at.reporter = reporter
    return print_at


def test_phase_line_repeats_every_10_s(plain_lines):
    current_phase = Phase(name="accuracy", total=400, unit="samples", start=0.0)
    plain_lines.reporter.enter(current_phase)
    assert plain_lines(1.9) == ""
    for _ in range(20):
        plain_lines.reporter.step(current_phase)
    assert plain_lines(2.0) == "calib8: accuracy: 20 of 400 samples, 38 s left\n"
    assert plain_lines(11.9) == ""
    for _ in range(100):
        plain_lines.reporter.step(current_phase)
    assert plain_lines(12.0) == "calib8: accuracy: 120 of 400 samples, 28 s left\n"


def test_outer_phase_shows_until_the_next(plain_lines):
    reporter = plain_lines.reporter
    targets = Phase(name="targets")
    assert plain_lines(10.0) == "calib8: loading: 10 s\n"
    reporter.enter(targets)
    reporter.leave(targets)
    assert plain_lines(20.0) == "calib8: targets: 20 s\n"


def test_quick_phases_print_after_10_s(plain_lines):
    printed = []
    for number in range(12):
        current_phase = Phase(name=f"part {number}", start=float(number))
        plain_lines.reporter.enter(current_phase)
        printed.append(plain_lines(number + 0.9))
        plain_lines.reporter.leave(current_phase)
    assert [line for line in printed if line] == ["calib8: part 10: 1 s\n"]


def test_inner_phase_is_shown_within_outer(plain_lines):
    outer = Phase(name="trials", total=10, start=0.0)
    plain_lines.reporter.enter(outer)
    inner = Phase(name="timing", start=0.0)
    plain_lines.reporter.enter(inner)
    assert plain_lines(4.0) == "calib8: trials: timing: 4 s\n"
    plain_lines.reporter.leave(inner)
    plain_lines.reporter.step(outer)
    assert plain_lines(6.0) == "calib8: trials: 1 of 10, 18 s left\n"
    for _ in range(10):
        plain_lines.reporter.step(outer)
    assert plain_lines(16.0) == "calib8: trials: 11, 16 s\n"


@pytest.mark.parametrize(
    ("phase_row", "done", "text"),
    [
        (Phase(name="a", start=0), 0, "8 s"),
        (Phase(name="a", total=0, unit="samples", start=0), 0, "8 s"),
        (Phase(name="a", total=4, unit="samples", start=0), 0, "8 s"),
        (Phase(name="a", total=4, unit="samples", start=0), 1, "1 of 4 samples, 24 s left"),
        (Phase(name="a", total=4, start=0), 4, "4 of 4, 8 s"),
        (Phase(name="a", total=10, start=0, counts_seconds=True), 0, "2 s left"),
        (Phase(name="a", total=6, start=0, counts_seconds=True), 0, "8 s"),
    ],
)
def test_remaining_time_is_shown_when_known(phase_row, done, text):
    phase_row.done = done
    assert phase_row.describe(8.0) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (31, "31 s"),
        (59.7, "1 min 0 s"),
        (125, "2 min 5 s"),
        (3790, "1 h 3 min"),
    ],
)
def test_seconds_are_formatted_for_people(seconds, text):
    assert terminal.format_seconds(seconds) == text


def progress_threads():
    return [thread for thread in threading.enumerate() if thread.name == "calib8 progress"]


@pytest.fixture
def ticking(monkeypatch):
    """The progress thread looks for what is due all the time."""
    monkeypatch.setattr(terminal, "TICK_S", 0.001)
    monkeypatch.setattr(terminal, "LASTING_S", 0)


def test_progress_thread_ends_with_the_call(monkeypatch, ticking):
    was_printed = threading.Event()
    lines = []

    def record(line, *, err):
        if not line.startswith("calib8: working: "):  # before the phase began
            lines.append(line)
            was_printed.set()

    monkeypatch.setattr("deploy.terminal.say", record)
    with show_progress(), phase("a call"):
        assert len(progress_threads()) == 1
        assert was_printed.wait(300)
    assert not progress_threads()
    assert LINE.fullmatch(lines[0])
    assert lines[0].startswith("calib8: a call: ")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_error_clears_the_progress_line(error, screen, immediate_progress):
    shown = screen()
    with pytest.raises(error), show_progress(), phase("a call"):
        raise error
    assert not progress_threads()
    assert shown().endswith("a call: 0 s\r\x1b[K")


def test_closed_stderr_ends_only_the_progress(monkeypatch, ticking):
    was_refused = threading.Event()

    def refuse(line, *, err):
        was_refused.set()
        raise BrokenPipeError

    monkeypatch.setattr("deploy.terminal.say", refuse)
    with show_progress(), phase("a call"):
        thread = terminal._REPORTER.get()._thread  # it may have ended by now
        assert was_refused.wait(300)
        thread.join(300)
        assert not thread.is_alive()


def test_steps_of_threads_are_all_counted():
    with show_progress(), phase("a call", 4000) as step, ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            pool.submit(lambda: [step() for _ in range(1000)])
        pool.shutdown()
        assert terminal._REPORTER.get().phases[-1].done == 4000


def test_progress_is_silent_unless_shown(capfd, immediate_progress):
    with phase("a", 1) as step, terminal.timed_phase("b", 1):
        step()
    with show_progress(False), phase("a"):
        assert not progress_threads()
    assert capfd.readouterr() == ("", "")


def test_python_calls_are_silent_by_default(small_cnn, pictures, capfd, immediate_progress):
    images = [str(path) for path in sorted(pictures.glob("*.png"))[:2]]
    calibrate(small_cnn, images)
    assert capfd.readouterr() == ("", "")
    calibrate(small_cnn, images, progress=True)
    out, err = capfd.readouterr()
    assert "calib8: calibration: observing" in err
    assert out == ""
    assert not progress_threads()


def test_terminal_gets_one_line_then_cleared(
    model_and_images, tmp_path, screen, immediate_progress, capfd
):
    shown = screen()
    assert exit_code_of("calibrate", *model_and_images, "-o", tmp_path / "c") == 0
    drawn = shown()
    lines = drawn.split("\r\x1b[K")
    assert lines[0] == lines[-1] == ""
    assert "\n" not in drawn
    assert any(line.startswith("calibration: observing") for line in lines)
    assert all(line.isprintable() and len(line) < 60 for line in lines)
    assert "written in" in capfd.readouterr().out


def test_bar_shows_the_completed_share(screen, immediate_progress):
    shown = screen()
    with show_progress(), phase("accuracy", 4, "samples") as step:
        step()
        with phase("inside"):
            pass
        terminal._REPORTER.get().print_due()
    assert re.search(r"accuracy:  25%\|█+\S? +\| 1 of 4 samples, 0 s left\r", shown())


def test_printed_text_replaces_the_bar(screen, immediate_progress):
    shown = screen()
    with show_progress(), phase("a call"):
        terminal.say("a line", err=True)
    assert "a call: 0 s\r\x1b[Ka line\r\n" in shown()


def test_dumb_terminal_gets_plain_lines(screen, immediate_progress, monkeypatch):
    shown = screen()
    monkeypatch.setenv("TERM", "dumb")
    with show_progress(), phase("a call"):
        pass
    assert shown() == "calib8: a call: 0 s\r\n"


def test_pipe_gets_plain_lines(quick_build, capfd, immediate_progress):
    assert exit_code_of(*quick_build) == 0
    lines = capfd.readouterr().err.splitlines()
    assert lines, lines
    assert all(LINE.fullmatch(line) for line in lines), lines
    assert any(line.startswith("calib8: layers: ") for line in lines)


def raise_interrupt(*args, **options):
    raise KeyboardInterrupt


def test_interrupt_prints_one_line(quick_build, screen, immediate_progress, monkeypatch, wording):
    monkeypatch.setattr("deploy.pipeline.calibration_run.observe", raise_interrupt)
    shown = screen()
    assert exit_code_of(*quick_build) == 130
    last_line = shown().rpartition("\r\x1b[K")[2]
    assert last_line.endswith("\r\n")
    wording.check(last_line)
    assert not progress_threads()


def test_interrupt_keeps_the_finished_calibration(quick_build, monkeypatch, capfd):
    with monkeypatch.context() as patched:
        patched.setattr("deploy.pipeline.build.build_targets", raise_interrupt)
        assert exit_code_of(*quick_build) == 130
    last_line = capfd.readouterr().err.splitlines()[-1]
    note = f"the calibration is kept for the next build into {quick_build[-1]}"
    assert last_line.endswith(f"left behind; {note}")
    assert exit_code_of(*quick_build) == 0
    assert "cache reused" in capfd.readouterr().out


@pytest.fixture
def started_phases(monkeypatch):
    """Names of the phases that began."""
    names = []
    enter = terminal.ProgressReporter.enter

    def enter_and_record(self, new_phase):
        enter(self, new_phase)
        names.append(new_phase.name)

    monkeypatch.setattr(terminal.ProgressReporter, "enter", enter_and_record)
    return names


@pytest.mark.slow
def test_commands_show_all_their_phases(
    model_and_images, quick_build, tmp_path, started_phases, capfd
):
    small_cnn, *feed = model_and_images
    short = ("--duration", 0.001, "--warm-up", 0)
    copy = shutil.copy(small_cnn, tmp_path / "other.onnx")
    assert exit_code_of("bench", copy, "--against", small_cnn, *feed, *short) == 0
    assert {"loading", "accuracy", "latency"} <= set(started_phases)
    assert exit_code_of("bench", copy, *short, "--batch", "1,2", "--profile") == 0
    assert {"batch 1", "batch 2", "kernels"} <= set(started_phases)
    assert exit_code_of("compare", small_cnn, copy, *feed) == 0
    assert "comparing" in started_phases
    auto = ("ascend", "auto", *model_and_images, "--out", tmp_path / "auto")
    assert exit_code_of(*auto, "--strategy", "binary-search") == 0
    assert {"model", "calibration", "ranking the layers", "4 layers in int8"} <= set(started_phases)
    assert exit_code_of(*auto) == 0
    assert {"running the float model", "trying layers"} <= set(started_phases)
    assert exit_code_of(*quick_build, "--target", "onnxruntime,tensorrt") == 0
    started_phases.clear()
    assert exit_code_of("explain", tmp_path / "out", *feed[:2]) == 0
    assert {"onnxruntime", "tensorrt", "running images"} <= set(started_phases)


@pytest.mark.slow
def test_build_shows_all_its_phases(model_and_images, tmp_path, started_phases, monkeypatch, capfd):
    monkeypatch.setattr("deploy.tuning.timing._SPLIT_S", 0.01)
    options = ("--target", "ascend,onnxruntime", "--duration", 0.001, "--accept")
    arguments = ("build", *model_and_images[:-1], 6, *options, "--out", tmp_path / "out")
    assert exit_code_of(*arguments) == 0
    names = ["calibration", "search", "targets", "layers", "accuracy", "latency", "report"]
    assert [name for name in dict.fromkeys(started_phases) if name in names] == names
    assert {
        "model",
        "opening the samples",
        "observing",
        "onnxruntime",
        "ascend",
        "weights",
        "trials",
        "ranges",
        "observing the other samples",
        "loading the engines",
    } <= set(started_phases)
    started_phases.clear()
    assert exit_code_of(*arguments) == 0
    assert "hashing" in started_phases
    assert "observing" not in started_phases


@pytest.mark.slow
def test_quiet_prints_nothing(model_and_images, quick_build, tmp_path, capfd, immediate_progress):
    assert exit_code_of(*quick_build, "--quiet") == 0
    assert capfd.readouterr() == ("", "")
    assert (tmp_path / "out" / "report.json").exists()
    assert "quiet" not in (tmp_path / "out" / "calib8.toml").read_text("utf-8")
    assert exit_code_of("calibrate", *model_and_images, "-o", tmp_path / "c", "-q") == 0
    assert capfd.readouterr() == ("", "")
    assert (tmp_path / "c").exists()
    assert (
        exit_code_of("ascend", "auto", *model_and_images, "--out", tmp_path / "auto", "--quiet")
        == 0
    )
    assert capfd.readouterr() == ("", "")
    assert list((tmp_path / "auto").glob("*.json"))


def test_quiet_prints_warnings(model_and_images, tmp_path, run, monkeypatch):
    warning = "a picture stands out"
    run_of = "deploy.pipeline.calibration_run"
    find_outlier = lambda peaks, _: [Outlier(*peaks.rows(range(99))[0][:2], (), 9.0)]  # noqa: E731
    monkeypatch.setattr(Peaks, "outliers", find_outlier)
    monkeypatch.setattr(f"{run_of}.describe_outliers", lambda *_: warning)
    assert run("calibrate", *model_and_images, "-o", tmp_path / "c", "-q") == (
        0,
        "",
        f"{warning}\n",
    )


def test_quiet_prints_errors_and_verdicts(quick_build, tmp_path, run):
    arguments = (*quick_build, "--duration", 0.001, "--min-speedup", 1e9, "--quiet")
    code, out, err = run(*arguments)
    assert (code, out) == (3, "")
    assert err.startswith("calib8: int8: unusable: ")
    code, out, err = run(*arguments, "--eval-images", tmp_path / "none")
    assert (code, out) == (1, "")
    assert err.startswith("calib8: error: ")


def test_quiet_check_prints_warnings(quick_build, tmp_path, run):
    assert run(*quick_build)[0] == 0
    (tmp_path / "out" / "report.md").write_text("changed")
    images = quick_build[quick_build.index("--images") + 1]
    code, out, err = run("check", tmp_path / "out", "--images", images, "--duration", 0, "-q")
    assert (code, out) == (0, "")
    assert err.startswith("calib8: warning: ")
    assert "report.md" in err


@pytest.mark.usefixtures("named_files")
def test_quiet_and_verbose_exclude_each_other(run):
    for command in ("build", "calibrate"):
        code, out, err = run(command, "m.onnx", "--images", "p", "-q", "-v")
        assert (code, out) == (2, "")
        assert "--quiet and --verbose" in err


@pytest.mark.parametrize(
    ("arguments", "files"),
    [
        (("inspect", "m.onnx"), "--json"),
        (("compare", "m.onnx", "n.onnx", "--images", "p"), "--json"),
        (("explain", "build"), "--json"),
        (("bench", "m.onnx"), "--json or --html"),
    ],
)
@pytest.mark.usefixtures("named_files")
def test_quiet_without_output_file_is_refused(arguments, files, run):
    assert f"--quiet goes with {files}" in run.fails(*arguments, "--quiet")


def test_build_json_stands_alone_on_stdout(quick_build, tmp_path, capfd, immediate_progress):
    assert exit_code_of(*quick_build, "--json", "-") == 0
    out, err = capfd.readouterr()
    assert json.loads(out) == json.loads((tmp_path / "out" / "report.json").read_text("utf-8"))
    assert all(LINE.fullmatch(line) for line in err.splitlines())
    assert "json" not in (tmp_path / "out" / "calib8.toml").read_text("utf-8")
    assert not Path("-").exists()


def test_build_json_goes_to_a_file(quick_build, tmp_path, run):
    assert run.ok(*quick_build, "--json", tmp_path / "r.json").startswith(
        "calib8: small_cnn in int8"
    )
    assert (tmp_path / "r.json").read_text() == (tmp_path / "out" / "report.json").read_text()


def test_bench_inspect_and_calibrate_write_json(
    small_cnn, model_and_images, run, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    out = run.ok("bench", small_cnn, "--duration", 0, "--warm-up", 0, "--json", "-")
    assert json.loads(out)["engines"][0]["latency"]["queries"] == 10
    document = json.loads(
        run.ok("inspect", small_cnn, "--target", "onnxruntime,ascend", "--json", "-")
    )
    assert [row["target"] for row in document] == ["onnxruntime", "ascend"]
    assert {"name", "op", "precision", "reason"} <= set(document[0]["nodes"][0])
    assert document[0]["inputs"][0]["name"] == "x"
    assert not list(tmp_path.iterdir())
    code, out, err = run("calibrate", *model_and_images, "-o", tmp_path / "c", "--json", "-")
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert document["images"]["count"] == 4
    assert not document["reused"]
    lowest, highest = document["ranges"]["r1"]
    assert lowest == 0 < highest
    assert document["targets"] == {"onnxruntime": len(document["ranges"])}


def test_ascii_stderr_gets_an_ascii_bar(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    stream.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(terminal, "FIRST_S", 0)
    with show_progress(), phase("accuracy", 2) as step:
        step()
        terminal._REPORTER.get().print_due()
    stream.flush()
    assert b"|####" in stream.buffer.getvalue()
    assert b"\\u" not in stream.buffer.getvalue()


def test_unsupported_picture_formats_are_named(quick_build, pictures, run, tmp_path, wording):
    """A phone's HEIC, e.g.: the rest of the folder is used, and a folder of them alone refused."""
    phone = shutil.copytree(pictures, tmp_path / "phone")
    for name in ("a.HEIC", "b.heic", "c.dng"):
        (phone / name).write_bytes(b"\0\0\0\x18ftypheic")
    place = quick_build.index("--images") + 1
    options = quick_build[place + 1 :]
    arguments = quick_build[:place]
    assert "20 samples" in run.ok(*arguments, phone, *options, "--accept", "--limit", 20)
    note = "in phone are 3 pictures in unsupported formats (.dng, .heic); save them as .jpg or"
    assert note in read_markdown(tmp_path / "out")
    for file in phone.glob("*.png"):
        file.unlink()
    wording.check(run.fails(*arguments, phone, *options))
    wording.check(run.fails(*arguments, phone / "b.heic", *options))


def test_remaining_time_never_rises():
    """Even when a search tries more than was estimated, or becomes slow."""
    phase = Phase(name="trials", total=10, start=0.0)
    phase.done = 5
    assert phase.describe(5.0) == "5 of 10, 5 s left"
    assert phase.describe(8.0) == "5 of 10, 2 s left"  # 8 s by the steps so far
    assert phase.describe(12.0) == "5 of 10, 12 s"
