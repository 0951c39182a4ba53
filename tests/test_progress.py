"""What commands print while they run, and where."""

import ast
import fcntl
import io
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest

from calib8 import calibrate
from deploy import terminal
from deploy.calibration.sample_checks import Outlier
from deploy.cli import main
from deploy.errors import Calib8Error
from deploy.terminal import Phase, phase, show_progress
from tests.models import make_node, read_markdown, save_net

ROOT = Path(__file__).parent.parent
LINE = re.compile(r"calib8: .+ (\d+ s|\d+ min \d+ s|\d+ h \d+ min)( left)?")


def ended(*words):
    """Exit code of one command line, whatever it prints."""
    try:
        main([str(word) for word in words])
    except SystemExit as stop:
        return stop.code or 0
    return 0


@pytest.fixture
def fed(small_cnn, pictures):
    """A model and a few of its pictures."""
    return (small_cnn, "--images", pictures, "--size", "16x16", "--limit", 4)


@pytest.fixture
def quick(fed, tmp_path):
    """A build of them in `out`."""
    return ("build", *fed, "--duration", 0, "--effort", 0, "--out", tmp_path / "out")


@pytest.fixture
def at_once(monkeypatch):
    """Every phase is told as it begins, and nothing by the clock."""
    enter = terminal.ProgressReporter.enter

    def told(self, one):
        enter(self, one)
        self.print_due()

    monkeypatch.setattr(terminal.ProgressReporter, "enter", told)
    monkeypatch.setattr(terminal, "FIRST_S", 0)
    monkeypatch.setattr(terminal, "LASTING_S", 0)


@pytest.fixture
def screen(monkeypatch):
    """() -> from now on stderr is a terminal of 60 columns; gives what gives all that it shows."""
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
        monkeypatch.setattr(sys, "stderr", stream)  # of the test: pytest sets it anew before
        return shown

    yield begin
    stream.close()
    os.close(master)


@pytest.fixture
def plain(capsys):
    """(seconds) -> lines of a teller off a terminal at these moments, and the teller."""
    now = [0.0]
    teller = terminal.ProgressReporter(clock=lambda: now[0])

    def at(seconds):
        now[0] = seconds
        teller.print_due()
        return capsys.readouterr().err

    at.teller = teller
    return at


def test_a_phase_gets_a_line_after_two_seconds_and_one_every_ten(plain):
    own = Phase(name="accuracy", total=400, unit="samples", start=0.0)
    plain.teller.numbered = ("search", "accuracy")
    plain.teller.enter(own)
    assert plain(1.9) == ""
    for _ in range(20):
        plain.teller.step(own)
    assert plain(2.0) == "calib8: 2/2 accuracy: 20 of 400 samples, 38 s left\n"
    assert plain(11.9) == ""
    for _ in range(100):
        plain.teller.step(own)
    assert plain(12.0) == "calib8: 2/2 accuracy: 120 of 400 samples, 28 s left\n"


def test_many_quick_phases_are_not_silent(plain):
    said = []
    for number in range(12):
        own = Phase(name=f"part {number}", start=float(number))
        plain.teller.enter(own)
        said.append(plain(number + 0.9))
        plain.teller.leave(own)
    assert [line for line in said if line] == ["calib8: part 10: 1 s\n"]


def test_inner_phases_are_told_in_the_outer_ones_and_cost_them_no_time(plain):
    outer = Phase(name="trials", total=10, start=0.0, about=True)
    plain.teller.enter(outer)
    inner = Phase(name="timing", start=0.0)
    plain.teller.enter(inner)
    assert plain(4.0) == "calib8: trials: timing: 4 s\n"
    plain.teller.leave(inner)
    plain.teller.step(outer)
    assert plain(6.0) == "calib8: trials: 1 of about 10, about 18 s left\n"
    for _ in range(10):
        plain.teller.step(outer)
    assert plain(16.0) == "calib8: trials: 11, 16 s\n"


@pytest.mark.parametrize(
    ("one", "done", "words"),
    [
        (Phase(name="a", start=0), 0, "8 s"),
        (Phase(name="a", total=0, unit="samples", start=0), 0, "8 s"),
        (Phase(name="a", total=4, unit="samples", start=0), 0, "8 s"),
        (Phase(name="a", total=4, unit="samples", start=0), 1, "1 of 4 samples, 24 s left"),
        (Phase(name="a", total=4, start=0), 4, "4 of 4, 8 s"),
        (Phase(name="a", total=10, start=0, timed=True), 0, "2 s left"),
        (Phase(name="a", total=6, start=0, timed=True), 0, "8 s"),
    ],
)
def test_time_left_is_told_where_it_is_known(one, done, words):
    one.done = done
    assert one.describe(8.0) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, "0 s"),
        (31, "31 s"),
        (59.7, "1 min 0 s"),
        (125, "2 min 5 s"),
        (3790, "1 h 3 min"),
    ],
)
def test_times_are_said_as_a_person_says_them(seconds, words):
    assert terminal.format_seconds(seconds) == words


def tellers():
    return [one for one in threading.enumerate() if one.name == "calib8 progress"]


@pytest.fixture
def ticking(monkeypatch):
    """The thread looks all the time."""
    monkeypatch.setattr(terminal, "TICK_S", 0.001)
    monkeypatch.setattr(terminal, "LASTING_S", 0)


def test_a_single_long_call_is_told_of_and_the_thread_ends_with_it(monkeypatch, ticking):
    heard = threading.Event()
    said = []

    def told(line, *, err):
        if not line.startswith("calib8: working: "):  # before the phase began
            said.append(line)
            heard.set()

    monkeypatch.setattr("deploy.terminal.say", told)
    with show_progress(), phase("a call"):
        assert len(tellers()) == 1
        assert heard.wait(300)
    assert not tellers()
    assert LINE.fullmatch(said[0])
    assert said[0].startswith("calib8: a call: ")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_ends_it_and_takes_the_line_away(error, screen, at_once):
    shown = screen()
    with pytest.raises(error), show_progress(), phase("a call"):
        raise error
    assert not tellers()
    assert shown().endswith("a call: 0 s\r\x1b[K")


def test_nobody_reading_stderr_stops_the_telling_alone(monkeypatch, ticking):
    gone = threading.Event()

    def refuse(line, *, err):
        gone.set()
        raise BrokenPipeError

    monkeypatch.setattr("deploy.terminal.say", refuse)
    with show_progress(), phase("a call"):
        thread = terminal._REPORTER.get()._thread  # it may have ended by now
        assert gone.wait(300)
        thread.join(300)
        assert not thread.is_alive()


def test_steps_of_many_threads_are_all_counted():
    with show_progress(), phase("a call", 4000) as step, ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(lambda: [step() for _ in range(1000)]) for _ in range(4)]:
            done.result()
        assert terminal._REPORTER.get().phases[-1].done == 4000


def test_without_a_teller_nothing_is_told(capfd, at_once):
    with terminal.number_phases("a"), phase("a", 1) as step, terminal.timed_phase("b", 1):
        step()
    with show_progress(False), phase("a"):
        assert not tellers()
    assert capfd.readouterr() == ("", "")


def test_python_is_silent_unless_asked(small_cnn, pictures, capfd, at_once):
    images = [str(path) for path in sorted(pictures.glob("*.png"))[:2]]
    calibrate(small_cnn, images)
    assert capfd.readouterr() == ("", "")
    calibrate(small_cnn, images, progress=True)
    out, err = capfd.readouterr()
    assert "calib8: calibration: observing" in err
    assert out == ""
    assert not tellers()


def test_a_terminal_gets_one_line_that_goes_away(fed, tmp_path, screen, at_once, capfd):
    shown = screen()
    assert ended("calibrate", *fed, "-o", tmp_path / "c") == 0
    drawn = shown()
    lines = drawn.split("\r\x1b[K")
    assert lines[0] == lines[-1] == ""
    assert "\n" not in drawn
    assert any(line.startswith("calibration: observing") for line in lines)
    assert all(line.isprintable() and len(line) < 60 for line in lines)
    assert "written in" in capfd.readouterr().out


def test_a_bar_shows_the_share_that_is_done(screen, at_once):
    shown = screen()
    with show_progress(), phase("accuracy", 4, "samples") as step:
        step()
        with phase("inside"):
            pass
        terminal._REPORTER.get().print_due()
    assert re.search(r"accuracy:  25%\|█+\S? +\| 1 of 4 samples, 0 s left\r", shown())


def test_text_takes_the_place_of_what_is_drawn(screen, at_once):
    shown = screen()
    with show_progress(), phase("a call"):
        terminal.say("a line", err=True)
    assert "a call: 0 s\r\x1b[Ka line\r\n" in shown()


def test_a_dumb_terminal_gets_plain_lines(screen, at_once, monkeypatch):
    shown = screen()
    monkeypatch.setenv("TERM", "dumb")
    with show_progress(), phase("a call"):
        pass
    assert shown() == "calib8: a call: 0 s\r\n"


def test_a_pipe_gets_plain_lines(quick, capfd, at_once):
    assert ended(*quick) == 0
    lines = capfd.readouterr().err.splitlines()
    assert lines, lines
    assert all(LINE.fullmatch(line) for line in lines), lines
    assert any(line.startswith("calib8: 3/5 layers: ") for line in lines)


def interrupted(*words, **more):
    raise KeyboardInterrupt


def test_an_interrupt_is_one_sentence(quick, screen, at_once, monkeypatch):
    monkeypatch.setattr("deploy.pipeline.calibration_run.observe", interrupted)
    shown = screen()
    assert ended(*quick) == 130
    last = shown().rpartition("\r\x1b[K")[2]
    assert last.lstrip() == "calib8: interrupted; nothing half-written was left behind\r\n"
    assert not tellers()


def test_an_interrupt_tells_that_the_calibration_is_kept(quick, monkeypatch, capfd):
    with monkeypatch.context() as patched:
        patched.setattr("deploy.pipeline.build.build_targets", interrupted)
        assert ended(*quick) == 130
    last = capfd.readouterr().err.splitlines()[-1]
    kept = f"the calibration is kept for the next build into {quick[-1]}"
    assert last.endswith(f"left behind; {kept}")
    assert ended(*quick) == 0
    assert "cache reused" in capfd.readouterr().out


@pytest.fixture
def seen(monkeypatch):
    """The phases that were begun, with their numbers."""
    found = []
    enter = terminal.ProgressReporter.enter

    def noted(self, one):
        enter(self, one)
        found.append(f"{one.number}{one.name}")

    monkeypatch.setattr(terminal.ProgressReporter, "enter", noted)
    return found


@pytest.mark.slow
def test_other_commands_tell_of_all_that_they_do(fed, quick, tmp_path, seen, capfd):
    small_cnn, *feed = fed
    short = ("--duration", 0.001, "--warm-up", 0)
    copy = shutil.copy(small_cnn, tmp_path / "other.onnx")
    assert ended("bench", copy, "--against", small_cnn, *feed, *short, "--streams", 2) == 0
    assert {"loading", "accuracy", "latency", "streams"} <= set(seen)
    assert ended("bench", copy, *short, "--batch", "1,2", "--profile") == 0
    assert {"batch 1", "batch 2", "kernels"} <= set(seen)
    assert ended("compare", small_cnn, copy, *feed) == 0
    assert "comparing" in seen
    auto = ("ascend", "auto", *fed, "--out", tmp_path / "auto")
    assert ended(*auto, "--strategy", "binary-search") == 0
    assert {"model", "calibration", "ranking the layers", "4 layers in int8"} <= set(seen)
    assert ended(*auto) == 0
    assert {"running the float model", "trying layers"} <= set(seen)
    assert ended(*quick, "--target", "onnxruntime,tensorrt") == 0
    seen.clear()
    assert ended("explain", tmp_path / "out", *feed[:2]) == 0
    assert {"onnxruntime", "tensorrt", "running images"} <= set(seen)


@pytest.mark.slow
def test_a_build_tells_of_all_that_it_does(fed, tmp_path, seen, monkeypatch, capfd):
    monkeypatch.setattr("deploy.tuning.timing._SECONDS", 0)
    words = ("build", *fed[:-1], 6, "--duration", 0.001, "--out", tmp_path / "out", "--accept")
    words = (*words, "--target", "onnxruntime,ascend")
    assert ended(*words) == 0
    parts = [one for one in seen if "/" in one]
    names = ("calibration", "search", "targets", "layers", "accuracy", "latency", "report")
    assert list(dict.fromkeys(parts)) == [f"{i}/7 {name}" for i, name in enumerate(names, 1)]
    assert {
        "model",
        "opening the samples",
        "observing",
        "onnxruntime",
        "ascend",
        "weights",
        "trials",
        "ranges",
        "observing without the judges",
        "timing kernels",
        "loading the engines",
    } <= set(seen)
    seen.clear()
    assert ended(*words) == 0
    assert "hashing" in seen
    assert "observing" not in seen


def test_quiet_builds_in_silence(fed, quick, tmp_path, capfd, at_once):
    assert ended(*quick, "--quiet") == 0
    assert capfd.readouterr() == ("", "")
    assert (tmp_path / "out" / "report.json").exists()
    assert "quiet" not in (tmp_path / "out" / "calib8.toml").read_text("utf-8")
    assert ended("calibrate", *fed, "-o", tmp_path / "c", "-q") == 0
    assert capfd.readouterr() == ("", "")
    assert (tmp_path / "c").exists()
    assert ended("ascend", "auto", *fed, "--out", tmp_path / "auto", "--quiet") == 0
    assert capfd.readouterr() == ("", "")
    assert list((tmp_path / "auto").glob("*.json"))


def test_warnings_are_said_all_the_same(fed, tmp_path, run, monkeypatch):
    said = "a picture stands out"
    run_of = "deploy.pipeline.calibration_run"
    far = lambda peaks, _: [Outlier(*peaks.rows(range(99))[0][:2], (), 9.0)]  # noqa: E731
    monkeypatch.setattr(f"{run_of}.identify_outliers", far)
    monkeypatch.setattr(f"{run_of}.describe_outliers", lambda *_: said)
    assert run("calibrate", *fed, "-o", tmp_path / "c", "-q") == (0, "", f"{said}\n")


def test_what_is_grave_is_said_all_the_same(quick, tmp_path, run):
    words = (*quick, "--duration", 0.001, "--min-speedup", 1e9, "--quiet")
    code, out, err = run(*words)
    assert (code, out) == (3, "")
    assert err.startswith("calib8: int8: unusable: ")
    code, out, err = run(*words, "--images", tmp_path / "none")
    assert (code, out) == (1, "")
    assert err.startswith("calib8: error: ")


@pytest.mark.usefixtures("named_files")
def test_quiet_and_verbose_exclude_each_other(run):
    for command in ("build", "calibrate"):
        code, out, err = run(command, "m.onnx", "--images", "p", "-q", "-v")
        assert (code, out) == (2, "")
        assert "--quiet and --verbose" in err


@pytest.mark.parametrize(
    ("words", "files"),
    [
        (("inspect", "m.onnx"), "--json"),
        (("compare", "m.onnx", "n.onnx", "--images", "p"), "--json"),
        (("explain", "build"), "--json"),
        (("bench", "m.onnx"), "--json or --html"),
    ],
)
@pytest.mark.usefixtures("named_files")
def test_quiet_is_refused_where_nothing_is_left_to_tell(words, files, run):
    assert f"--quiet goes with {files}, which was not given" in run.fails(*words, "--quiet")


def test_json_of_a_build_stands_alone_on_stdout(quick, tmp_path, capfd, at_once):
    assert ended(*quick, "--json", "-") == 0
    out, err = capfd.readouterr()
    assert json.loads(out) == json.loads((tmp_path / "out" / "report.json").read_text("utf-8"))
    assert all(LINE.fullmatch(line) for line in err.splitlines())
    assert "json" not in (tmp_path / "out" / "calib8.toml").read_text("utf-8")
    assert not Path("-").exists()


def test_json_of_a_build_goes_to_a_file_too(quick, tmp_path, run):
    assert run.ok(*quick, "--json", tmp_path / "r.json").startswith("calib8: small_cnn in int8")
    assert (tmp_path / "r.json").read_text() == (tmp_path / "out" / "report.json").read_text()


def test_json_of_other_commands(small_cnn, fed, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = run.ok("bench", small_cnn, "--duration", 0, "--warm-up", 0, "--json", "-")
    assert json.loads(out)["engines"][0]["latency"]["queries"] == 10
    found = json.loads(
        run.ok("inspect", small_cnn, "--target", "onnxruntime,ascend", "--json", "-")
    )
    assert [one["target"] for one in found] == ["onnxruntime", "ascend"]
    assert {"name", "op", "precision", "reason"} <= set(found[0]["nodes"][0])
    assert found[0]["inputs"][0]["name"] == "x"
    assert not list(tmp_path.iterdir())
    code, out, err = run("calibrate", *fed, "-o", tmp_path / "c", "--json", "-")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert found["images"]["count"] == 4
    assert not found["reused"]
    lowest, highest = found["ranges"]["r1"]
    assert lowest == 0 < highest
    assert found["targets"] == {"onnxruntime": len(found["ranges"])}


@pytest.mark.slow
def test_a_reader_that_has_enough_ends_it_quietly(small_cnn):
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "deploy", "inspect", str(small_cnn), "--json", "-"]
    done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, cwd=ROOT)
    os.close(write)
    said = [line for line in done.stderr.splitlines() if not line.startswith(b"calib8: working: ")]
    assert (done.returncode, said) == (1, [])  # on a busy machine it may tell that it works


def test_letters_that_stderr_cannot_show_are_no_fault(monkeypatch):
    held = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    held.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", held)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(terminal, "FIRST_S", 0)
    with show_progress(), phase("accuracy", 2) as step:
        step()
        terminal._REPORTER.get().print_due()
    held.flush()
    assert b"|####" in held.buffer.getvalue()
    assert b"\\u" not in held.buffer.getvalue()


HOSTILE = "a\x1b[31m\x07\x9b1m\u202e\u2066\rb\nVerdict  good\x00\u2028c"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 漢", "plain é 漢"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\nb\r", "a\\nb\\r"),
        ("\u202egnp.x", "\\u202egnp.x"),
        ("\x9b", "\\x9b"),
        ("\U000e0041", "\\U000e0041"),
        (os.fsdecode(b"a\xff"), "a\\xff"),
        ("\ud800", "\\ud800"),
        ("\t", "\\t"),
    ],
)
def test_what_steers_a_terminal_is_written_out(text, shown):
    assert terminal.visible(text) == shown
    assert shown.isprintable()


def test_a_long_message_keeps_its_beginning_and_its_end():
    """The beginning says what is wrong, the end what to do."""
    first = "a" * 3100
    last = "b" * 900
    assert str(Calib8Error(first + last)) == first + last
    assert str(Calib8Error(f"{first}?{last}")) == f"{first} ... {last}"


def test_a_line_is_one_line_and_lines_end_once(capsys):
    terminal.say("a\nb")
    terminal.say("c", err=True)
    terminal.say_lines(terminal.join_visible(["d\ne", "f"]))
    terminal.say_lines("g\x1b\n\nh\n")
    out, err = capsys.readouterr()
    assert out == "a\\nb\nd\\ne\nf\ng\\x1b\n\nh\n"
    assert err == "c\n"


def test_what_an_encoding_cannot_hold_is_written_out(monkeypatch):
    held = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(held, encoding="latin-1"))
    terminal.say("é漢")
    sys.stdout.flush()
    assert held.getvalue() == b"\xe9\\u6f22\n"


def printers(module):
    prints = {"click.echo", "click.secho", "print", "sys.stdout.write", "sys.stderr.write"}
    ends = {words.rpartition(".")[2] for words in prints}
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        name = getattr(node, "attr", None) or getattr(node, "id", None)
        if name in ends and ast.unparse(node) in prints:
            yield f"{name} in line {node.lineno}"


@pytest.mark.slow
def test_everything_is_printed_by_one_module():
    modules = {path.relative_to(ROOT): path for path in (ROOT / "deploy").rglob("*.py")}
    found = {str(name): list(printers(path)) for name, path in modules.items()}
    others = {name: calls for name, calls in found.items() if calls}
    # the second tells its parent process
    assert others.keys() <= {"deploy/terminal.py", "deploy/runtimes/openvino.py"}, others


@pytest.fixture
def said(run):
    """Everything that a command prints, which must be lines of printable characters."""

    def call(*words):
        code, out, err = run(*words)
        assert all(line.isprintable() for line in (out + err).split("\n")), (words, out, err)
        assert not any(line.startswith("Verdict  good") for line in out.split("\n")), words
        return code, out, err

    return call


@pytest.fixture
def hostile(small_cnn, tmp_path):
    """The model with a tensor and nodes of a hostile name, in a file of one."""
    model = onnx.load(small_cnn)
    tensor = HOSTILE.replace("\x00", "")
    for node in model.graph.node:
        node.input[:] = [tensor if name == "r2" else name for name in node.input]
        node.output[:] = [tensor if name == "r2" else name for name in node.output]
        node.name = f"{node.name}{tensor}"
    return save_net(model, tmp_path / f"m{tensor}.onnx")


def test_names_in_a_model_steer_no_command(hostile, fed, said, tmp_path):
    out = tmp_path / f"o{HOSTILE[:5]}"
    feed = fed[1:]
    words = ("--target", "onnxruntime,ascend", "--duration", 0, "--effort", 0, "--accept")
    assert said("build", hostile, *feed, *words, "--out", out, "--verbose")[0] == 0
    engine = next(out.glob("*.int8.onnx"))
    assert said("inspect", hostile, "--all")[0] == 0
    assert said("explain", out, "--all")[0] == 0
    assert said("compare", hostile, engine, *feed)[0] == 0
    assert said("bench", hostile, "--against", engine, "--duration", 0, "--warm-up", 0)[0] == 0
    assert said("ascend", "config", hostile, "-o", out / "q.json")[0] == 0
    for file in out.iterdir():
        said("ascend", "check", file, "--model", hostile)


def test_names_in_a_cache_steer_no_command(small_cnn, said, tmp_path):
    name = HOSTILE.replace("\n", "").replace("\x00", "")
    for number, bits in enumerate(("3c010a14", "3c010a15")):
        text = f"TRT-8503-EntropyCalibration2\n{name}: {bits}\nNaN{name}: 7fc00000\n"
        (tmp_path / f"{number}.cache").write_text(text, newline="")
    a, b = tmp_path / "0.cache", tmp_path / "1.cache"
    assert "\\x1b[31m" in said("cache", "show", a)[1]
    assert "\\x1b[31m" in said("cache", "diff", a, b)[1]
    assert "\\x1b[31m" in said("inspect", a)[1]
    said("cache", "check", a, "--model", small_cnn, "--verbose")
    assert "\\x1b[31m" in said("cache", "merge", a, b, "-o", tmp_path / "c")[2]


def test_labels_and_lists_steer_nothing(small_cnn, pictures, said, tmp_path):
    listing = tmp_path / "l.txt"
    listing.write_bytes(HOSTILE.replace("\x00", "").encode())
    assert said("build", small_cnn, "--images", listing, "--out", tmp_path / "o")[0] == 1
    np.savez(tmp_path / "x.npz", **{f"x{HOSTILE[:5]}": np.zeros(3), "y\x1b": np.zeros(3)})
    assert said("build", small_cnn, "--images", tmp_path / "x.npz", "--out", tmp_path / "o")[0]


def test_pictures_of_kinds_that_are_not_read_are_told(quick, pictures, run, tmp_path, wording):
    """As a phone saves them: the others of the folder are used, and none left are refused."""
    phone = shutil.copytree(pictures, tmp_path / "phone")
    for name in ("a.HEIC", "b.heic", "c.dng"):
        (phone / name).write_bytes(b"\0\0\0\x18ftypheic")
    assert "20 samples" in run.ok(*quick, "--accept", "--images", phone, "--limit", 20)
    said = "in phone are 3 pictures in unsupported formats (.dng, .heic); save them as .jpg or"
    assert said in read_markdown(tmp_path / "out")
    for file in phone.glob("*.png"):
        file.unlink()
    words = (*quick, "--images")
    wording.check(run.fails(*words, phone))
    wording.check(run.fails(*words, phone / "b.heic"))


@pytest.mark.parametrize(
    ("words", "way"),
    [
        (("build", "m.onnx", "photos/"), "(photos/); images go after --images (`"),
        (("bench", "m.int8.onnx", "m.onnx"), "(m.onnx); a second model goes after --against (`"),
        (
            ("build", "m.onnx", "--images", "p", "--target", "onnxruntime", "tensorrt"),
            "(tensorrt); several targets are separated by commas (`",
        ),
        (("build", "m.onnx", "--images", "p", "more"), "(more) (`calib8 build --help` tells more)"),
        (("verify", "a", "b"), "(b) (`calib8 verify --help` tells more)"),
    ],
)
def test_an_argument_too_many_is_told_where_it_goes(words, way, run):
    code, _, err = run(*words)
    assert code == 2
    assert "Got unexpected extra argument" in err
    assert way in err


def test_a_pattern_that_the_shell_has_expanded_is_told_to_be_quoted(pictures, run):
    code, _, err = run("build", "m.onnx", "--images", *sorted(pictures.glob("*.png"))[:3])
    assert code == 2
    assert "'photos/*.jpg'" in err


def test_a_model_for_atc_alone_is_told_what_runs_in_its_place(small_cnn, run, pictures, tmp_path):
    model = onnx.load(small_cnn)
    model.graph.node[0].input[0] = "q"
    model.graph.node.insert(0, make_node("AscendQuant", "x", "q", name="q", scale=1.0, offset=0.0))
    onnx.save(model, path := tmp_path / "net_deploy_model.onnx")
    for command in (("build", path, "--images", pictures), ("inspect", path), ("bench", path)):
        err = run.fails(*command)
        assert "its fake-quant model" in err
        assert "only Ascend's atc reads" in err


def test_the_time_left_only_falls():
    """As of a search that tries more than was estimated, or becomes slow."""
    phase = Phase(name="trials", total=10, start=0.0)
    phase.done = 5
    assert phase.describe(5.0) == "5 of 10, 5 s left"
    assert phase.describe(8.0) == "5 of 10, 2 s left"  # 8 s by the steps so far
    assert phase.describe(12.0) == "5 of 10, 12 s"
