import json
import shutil
from pathlib import Path

import pytest

from deploy.analysis.builds import read_build
from deploy.report import to_json

SCHEMA = "calib8-report/2"


@pytest.fixture(scope="module")
def built(small_cnn, pictures, tmp_path_factory):
    """Two builds of one model by two methods, through the command; folder -> its screen."""
    from click.testing import CliRunner

    from deploy.cli import cli

    screens = {}
    for name, method in (("a", "minmax"), ("b", "mse")):
        folder = tmp_path_factory.mktemp("builds") / name
        words = ["build", str(small_cnn), "--images", str(pictures), "--out", str(folder)]
        words += ["--method", method, "--effort", "0", "--duration", "0", "--accept"]
        done = CliRunner().invoke(cli, words, catch_exceptions=False)
        screens[folder] = done.stdout
    return screens


@pytest.fixture
def changed(built, tmp_path):
    """(key, ..., value) -> a folder with the report of a build in which one value is another."""

    def call(*place):
        folder = tmp_path / "changed"
        shutil.copytree(next(iter(built)), folder, dirs_exist_ok=True)
        path = folder / "report.json"
        held = json.loads(path.read_text())
        *keys, last, value = place
        at = held
        for key in keys:
            at = at[key]
        at[last] = value
        path.write_text(json.dumps(held))
        return folder

    return call


def timing(p50):
    names = ("min", "max", "mean", "median", "p50", "p90", "p95", "p99")
    return {name: p50 for name in names} | {"cv_percent": 1.0}


def latency(p50):
    each = {"latency": timing(p50), "host": timing(p50)}
    return {"queries": 9, "warmup_queries": 1, "total_host_walltime_s": 1.0,
            "throughput_qps": 9.0, **each}  # fmt: skip


def timed(folder, *p50):
    """The same build with latencies."""
    path = folder / "report.json"
    held = json.loads(path.read_text())
    for engine, ms in zip(held["engines"], p50, strict=True):
        engine["latency"] = latency(ms)
    path.write_text(json.dumps(held))
    return folder


def test_one_build_shows_its_screen_again(run, built):
    for folder, screen in built.items():
        assert run("report", folder) == (0, screen, "")
        assert run("report", folder / "report.json")[1] == screen


def test_what_is_read_back_is_what_was_written(built):
    for folder in built:
        held = json.loads((folder / "report.json").read_text())
        assert to_json(read_build(folder).report) == held


def test_builds_stand_side_by_side(run, built, changed):
    a, b = built
    fast = timed(changed("title", "x"), 3.0, 1.5)
    code, out, err = run("report", a, b, fast)
    assert code == 0, err
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line.startswith("/")}
    assert lines[str(a)][1:3] == ["onnxruntime", "doubtful"]
    assert lines[str(a)][-2:] == ["minmax", "0"] and lines[str(b)][-2:] == ["mse", "0"]
    assert lines[str(b)][-5:-2] == ["10", "of", "10"]
    assert lines[str(fast)][3:6] == ["2.00x", "1.50", "ms"]
    assert f"{b}, onnxruntime: doubtful: " in " ".join(out.split())
    assert "3 builds compared" in out and "They differ" not in out.replace(
        "They differ   repair", ""
    )


def test_what_builds_differ_in_is_told(run, built, changed):
    a, _ = built
    other = changed("machine", "cpu", "Z80")
    settings = (other / "calib8.toml").read_text().replace("accept", "skip-bad")
    (other / "calib8.toml").write_text(settings + 'mean = "0.5"\n')
    code, out, _ = run("report", a, other)
    said = " ".join(out.split())
    assert code == 0 and f"mean: - ({a}); 0.5 ({other})" in said
    assert f"accept: True ({a}); - ({other})" in said and "method:" not in said
    assert f"machine: {read_build(a).report.machine.cpu}" in said and "Z80, " in said
    assert "measured on different machines: compare speed-ups, not milliseconds" in said
    (other / "calib8.toml").unlink()  # as of a build from Python
    assert f"accept: True ({a}); - ({other})" in " ".join(run("report", a, other)[1].split())


def test_a_comparison_is_a_page_and_json_too(run, built, tmp_path):
    a, b = built
    page, file = tmp_path / "both.html", tmp_path / "both.json"
    code, out, err = run("report", a, b, "--html", page, "--json", file)
    assert code == 0, err
    text, held = page.read_text(), json.loads(file.read_text())
    assert text.count('class="verdict doubtful"') == 2 and text.count("<script>") == 1
    assert str(a) in text.replace("<wbr>", "")
    assert held["schema"] == "calib8-builds/1" and held["names"] == [str(a), str(b)]
    assert [one["method"] for one in held["engines"]] == ["minmax", "mse"]
    assert (
        held["engines"][0]["verdict"]["level"] == "doubtful" and held["engines"][0]["effort"] == "0"
    )
    code, out, _ = run("report", a, b, "--json", "-")
    assert code == 0 and json.loads(out) == held


def test_a_target_that_failed_is_a_line(run, built, changed):
    a, _ = built
    other = changed("targets", 0, "error", "a chip must be there, got none")
    code, out, _ = run("report", a, other)
    assert code == 0 and "failed" in out
    assert "a chip must be there, got none" in " ".join(out.split())
    held = json.loads((other / "report.json").read_text())
    held["engines"] = held["engines"][:1]
    (other / "report.json").write_text(json.dumps(held))
    said = " ".join(run("report", a, other)[1].split())
    assert f"{other}, onnxruntime: a chip must be there, got none" in said


def test_a_page_of_one_build_is_there_already(run, built, tmp_path):
    a, _ = built
    code, _, err = run("report", a, "--html", tmp_path / "x.html")
    assert code == 1 and "--html goes with a second folder, which was not given" in err


WRONG = [
    (("schema", "calib8-report/1"), f"a report must be of schema {SCHEMA}, got 'calib8-report/1'"),
    (("title", 3), "title of a report must be a string, got 3"),
    (("engines", 5), "engines of a report must be a list, got 5"),
    (("engines", 0, None), "engines[0] of a report must be an object, got nothing"),
    (("engines", 1, "reference", "no"), "engines[1].reference of a report must be true or false"),
    (
        ("engines", 1, "size_bytes", 1 << 70),
        "engines[1].size_bytes of a report must be a",
    ),
    (("engines", 1, "verdict", {"level": "x", "reasons": []}), "a verdict must be one of good,"),
    (
        ("engines", 1, "verdict", {"level": "good"}),
        "engines[1].verdict.reasons of a report must",
    ),
    (("engines", 1, "latency", latency(0.0)), "latencies must be over 0, got 0.0"),
    (("engines", 1, "latency", latency("nan")), "latencies must be over 0, got nan"),
    (("engines", 1, "latency", latency("fast")), "engines[1].latency.latency.min of a report must"),
    (("targets", 0, "tensors", 0, "lo", 10**400), "targets[0].tensors[0].lo of a report must be a"),
    (("targets", 0, "layers", 0, "not_finite", [1]), "not_finite of a report must be a list of 2"),
    (("machine", "versions", {"x": 1}), "machine.versions.x of a report must be a string, got 1"),
]


@pytest.mark.parametrize(("place", "said"), WRONG)
def test_a_damaged_report_is_refused_in_a_sentence(run, built, changed, place, said):
    code, out, err = run("report", next(iter(built)), changed(*place))
    assert code == 1 and out == "" and said in err and "build again" in err


def test_what_is_no_build_is_refused(run, built, tmp_path):
    a, _ = built
    code, _, err = run("report", a, tmp_path)
    assert code == 1 and f"got {tmp_path} without a report.json" in err
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    assert "got no sound JSON" in run("report", a, broken)[2]
    broken.write_text("[]")
    assert "got None" in run("report", a, broken)[2]
    shutil.copy(a / "report.json", broken)
    (tmp_path / "calib8.toml").write_text("[")
    code, _, err = run("report", a, broken)
    assert code == 1 and "calib8.toml must be the options of a build" in err
    assert run("report")[0] == 2


def test_names_of_a_report_do_not_steer_the_terminal(run, built, changed, tmp_path):
    bad = "\x1b[31m<script>bad\n"
    folder = changed("targets", 0, "method", bad)
    code, out, _ = run("report", next(iter(built)), folder, "--html", tmp_path / "x.html")
    assert code == 0 and "\x1b" not in out and "\\x1b[31m<script>bad\\n" in out
    assert Path(tmp_path / "x.html").read_text().count("<script>") == 1
