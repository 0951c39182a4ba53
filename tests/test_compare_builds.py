"""The command report: stored builds shown again and side by side."""

import json
import shutil

import pytest

from deploy.analysis.build_reader import read_stored_build
from deploy.report import to_json
from tests.models import run_command


def build(model, images, out, *arguments):
    arguments = ("--images", images, "--out", out, "--duration", 0, "--accept", *arguments)
    return run_command("build", model, *arguments)


def report_of(folder):
    return json.loads((folder / "report.json").read_text())


def store_report(folder, report):
    (folder / "report.json").write_text(json.dumps(report))
    return folder


SCHEMA = "calib8-report/2"


@pytest.fixture(scope="module")
def two_builds(small_cnn, pictures, tmp_path_factory):
    """Two builds of one model by two methods, through the command; folder -> its screen."""
    folder = tmp_path_factory.mktemp("builds")
    return {
        folder / name: build(small_cnn, pictures, folder / name, "--method", method, "--effort", 0)
        for name, method in (("a", "minmax"), ("b", "mse"))
    }


@pytest.fixture
def changed_report(two_builds, tmp_path):
    """(*keys, value) -> a copy of a build in whose report the value at these keys is another."""

    def call(*path):
        folder = tmp_path / "changed"
        shutil.copytree(next(iter(two_builds)), folder, dirs_exist_ok=True)
        report = parent = report_of(folder)
        *keys, last_key, value = path
        for key in keys:
            parent = parent[key]
        parent[last_key] = value
        return store_report(folder, report)

    return call


def latency(p50):
    names = ("min", "max", "mean", "median", "p50", "p90", "p95", "p99")
    timing = {name: p50 for name in names} | {"cv_percent": 1.0}
    return {
        "queries": 9,
        "warmup_queries": 1,
        "total_host_walltime_s": 1.0,
        "throughput_qps": 9.0,
        "latency": timing,
        "host": timing,
    }


def test_stored_build_shows_its_screen_again(run, two_builds):
    for folder, screen in two_builds.items():
        assert run("report", folder) == (0, screen, "")
        assert run("report", folder / "report.json")[1] == screen
        assert to_json(read_stored_build(folder).report) == report_of(folder)


def test_builds_are_compared_side_by_side(run, two_builds, changed_report):
    build_a, build_b = two_builds
    report = report_of(fast_build := changed_report("title", "x"))
    for engine, ms in zip(report["engines"], (3.0, 1.5), strict=True):
        engine["latency"] = latency(ms)
    store_report(fast_build, report)
    out = run.ok("report", build_a, build_b, fast_build)
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line.startswith("/")}
    assert lines[str(build_a)][1:3] == ["onnxruntime", "doubtful"]
    assert lines[str(build_a)][-2:] == ["minmax", "0"]
    assert lines[str(build_b)][-2:] == ["mse", "0"]
    assert lines[str(build_b)][-5:-2] == ["10", "of", "10"]
    assert lines[str(fast_build)][3:6] == ["2.00x", "1.50", "ms"]
    assert f"{build_b}, onnxruntime: doubtful: " in " ".join(out.split())
    assert "3 builds compared" in out
    assert "They differ" not in out.replace("They differ   repair", "")


def test_differing_settings_of_builds_are_named(run, two_builds, changed_report):
    build_a, _ = two_builds
    other_build = changed_report("machine", "cpu", "Z80")
    settings = (other_build / "calib8.toml").read_text().replace("accept", "skip-bad")
    (other_build / "calib8.toml").write_text(settings + 'mean = "0.5"\n')
    code, out, _ = run("report", build_a, other_build)
    screen = " ".join(out.split())
    assert code == 0
    assert f"mean: - ({build_a}); 0.5 ({other_build})" in screen
    assert f"accept: True ({build_a}); - ({other_build})" in screen
    assert "method:" not in screen
    assert f"machine: {read_stored_build(build_a).report.machine.cpu}" in screen
    assert "Z80, " in screen
    assert "different machines" in screen
    (other_build / "calib8.toml").unlink()  # as of a build from Python
    assert f"accept: True ({build_a}); - ({other_build})" in " ".join(
        run("report", build_a, other_build)[1].split()
    )


def test_build_comparison_has_json(run, two_builds, tmp_path):
    build_a, build_b = two_builds
    file = tmp_path / "both.json"
    run.ok("report", build_a, build_b, "--json", file)
    document = json.loads(file.read_text())
    assert document["schema"] == "calib8-builds/1"
    assert document["names"] == [str(build_a), str(build_b)]
    assert [engine["method"] for engine in document["engines"]] == ["minmax", "mse"]
    first_engine = document["engines"][0]
    assert first_engine["verdict"]["level"] == "doubtful"
    assert first_engine["effort"] == "0"
    assert json.loads(run.ok("report", build_a, build_b, "--json", "-")) == document
    assert "--json" in run.fails("report", build_a, "--json", file)


def test_target_error_is_a_line(run, two_builds, changed_report):
    build_a, _ = two_builds
    other_build = changed_report("targets", 0, "error", "a chip must be there, got none")
    out = run.ok("report", build_a, other_build)
    assert "failed" in out
    assert "a chip must be there, got none" in " ".join(out.split())
    report = report_of(other_build)
    report["engines"] = report["engines"][:1]
    screen = " ".join(run.ok("report", build_a, store_report(other_build, report)).split())
    assert f"{other_build}, onnxruntime: a chip must be there, got none" in screen


WRONG = [
    (("schema", "calib8-report/1"), f"a report must be of schema {SCHEMA}, got 'calib8-report/1'"),
    (("title", 3), "Expected `str`, got `int` - at `$.title`"),
    (("engines", 5), "Expected `array`, got `int` - at `$.engines`"),
    (("engines", 0, None), "Expected `object`, got `null` - at `$.engines[0]`"),
    (("engines", 1, "reference", "no"), "Expected `bool`, got `str` - at `$.engines[1].reference`"),
    (("engines", 1, "size_bytes", 1 << 70), "size_bytes of a report must be a number of 64 bits"),
    (("targets", 0, "files", 0, "size_bytes", -(10**400)), "of 64 bits, got -1000"),
    (("engines", 1, "verdict", {"level": "x", "reasons": []}), "a verdict must be one of good,"),
    (("engines", 1, "verdict", {"level": "good"}), "required field `reasons` - at `$.engines[1].v"),
    (("engines", 1, "latency", latency(0.0)), "latencies must be over 0, got 0.0"),
    (("engines", 1, "latency", latency("nan")), "latencies must be over 0, got nan"),
    (("engines", 1, "latency", latency("fast")), "`str` - at `$.engines[1].latency.latency.min`"),
    (("engines", 1, "latency", latency("\ud800")), "surrogates not allowed"),
    (("targets", 0, "tensors", 0, "lo", 10**400), "out of range - at `$.targets[0].tensors[0].lo`"),
    (("targets", 0, "layers", 0, "not_finite", [1]), "got 1 - at `$.targets[0].layers[0].n"),
    (("machine", "versions", {"x": 1}), "Expected `str`, got `int` - at `$.machine.versions[...]`"),
]


@pytest.mark.parametrize(("path", "message"), WRONG)
def test_damaged_report_names_the_field(run, two_builds, changed_report, path, message):
    code, out, err = run("report", next(iter(two_builds)), changed_report(*path))
    assert code == 1
    assert out == ""
    assert message in err
    assert "build again" in err


def test_comparison_refuses_what_is_no_build(run, two_builds, tmp_path, wording):
    build_a, _ = two_builds
    assert f"got {tmp_path} without a report.json" in run.fails("report", build_a, tmp_path)
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    assert "got invalid JSON" in run("report", build_a, broken)[2]
    broken.write_text("[]")
    assert "got None" in run("report", build_a, broken)[2]
    shutil.copy(build_a / "report.json", broken)
    (tmp_path / "calib8.toml").write_text("[")
    wording.check(run.fails("report", build_a, broken))
    assert run("report")[0] == 2


def test_report_names_are_escaped_in_terminal(run, two_builds, changed_report):
    folder = changed_report("targets", 0, "method", "\x1b[31m<script>bad\n")
    out = run.ok("report", next(iter(two_builds)), folder)
    assert "\x1b" not in out
    assert "\\x1b[31m<script>bad\\n" in out
