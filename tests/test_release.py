"""What a release needs: tag, changelog, links, what the files hold, the page, the workflow."""

import configparser
import os
import re
import subprocess
from pathlib import Path

import click
import pytest

import calib8
from deploy.cli import cli
from scripts import release

ROOT = Path(__file__).parent.parent
FLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FLOW = ROOT / ".github" / "workflows" / "release.yml"
PAGE = ROOT / "PYPI.md"


@pytest.fixture(scope="module")
def setup():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def test_the_version_is_the_packages_and_stands_in_the_changelog():
    assert release.version() == calib8.__version__
    heading, text = release.notes((ROOT / "CHANGELOG.md").read_text("utf-8"), calib8.__version__)
    assert heading.startswith(calib8.__version__)
    assert text


CHANGES = (
    "# Changelog\n\n## 1.2.0 (2026-02-03)\n\nnew\n\n### more\n\n## 1.1.0 (unreleased)\n\nold\n"
)


@pytest.mark.parametrize(
    ("tag", "version", "why"),
    [
        ("v1.2.0", "1.2.0", ""),
        ("1.2.0", "1.2.0", "must be v1.2.0"),
        ("v1.2", "1.2.0", "got v1.2"),
        ("v1.1.0", "1.1.0", "must tell when"),
        ("v1.0.0", "1.0.0", "heading '## 1.0.0'"),
    ],
)
def test_a_tag_is_that_of_a_version_whose_changes_are_written(tag, version, why):
    said = release.unready(tag, version, CHANGES)
    assert why in said
    assert bool(why) == bool(said)


def test_the_notes_of_a_release_are_its_part_of_the_changelog():
    assert release.notes(CHANGES, "1.2.0") == ("1.2.0 (2026-02-03)", "new\n\n### more")
    assert release.notes(CHANGES, "1.2") == ("", "")


def test_the_links_of_the_page_are_those_of_the_repository_that_releases():
    text = (ROOT / "setup.cfg").read_text("utf-8")
    assert "project_urls" not in text  # where it will live is not known here
    parser = configparser.ConfigParser()
    parser.read_string(release.linked(text, "https://host/some/one"))
    rows = dict(line.split(" = ") for line in parser["metadata"]["project_urls"].split("\n")[1:])
    assert rows["Source"] == "https://host/some/one"
    assert len(rows) == 4
    assert all(url.startswith("https://host/some/one") for url in rows.values())
    assert parser["metadata"]["name"] == "calib8"


def test_files_that_lack_something_or_hold_more_are_told():
    tracked = ["setup.cfg", "a.py", "deploy/b.py"]
    wheel = ["deploy/b.py", "calibrators/c.py", "calib8/d.py", "calib8-1.dist-info/METADATA"]
    sdist = [*tracked, "PKG-INFO", "calib8.egg-info/SOURCES.txt"]
    assert release.misfits(sdist, wheel, tracked) == []
    for given, said in (
        ((sdist[1:], wheel), "source distribution lacks: setup.cfg"),
        (([*sdist, "a.pyc"], wheel), "source distribution holds what git does not: a.pyc"),
        ((sdist, [*wheel, "tests/x.py"]), "wheel installs more than its packages: tests"),
        ((sdist, wheel[1:]), "wheel lacks: deploy"),
    ):
        assert release.misfits(*given, tracked) == [f"the {said}"]


def test_the_wheel_of_a_platform_has_the_kernel_and_that_of_every_platform_has_none():
    own, every = "calib8-1-py3-none-manylinux_2_5_x86_64.whl", "calib8-1-py3-none-any.whl"
    held = ["deploy/b.py", "calibrators/_count.so"]
    assert release.unfit_wheels({own: held, every: held[:1]}) == []
    (said,) = release.unfit_wheels({own: held[:1], every: held[:1]})
    assert said.startswith(f"{own} must hold calibrators/_count.so; it is built where")
    (said,) = release.unfit_wheels({own: held, every: held})
    assert said == f"{every} must hold no calibrators/_count.so"
    for wheels in ({own: held}, {every: held[:1]}, {own: held, "calib8-2-x.whl": held}):
        assert release.unfit_wheels(wheels)[-1].startswith("there must be a wheel for every")


def test_the_source_distribution_takes_all_that_git_holds():
    listed = ["git", "ls-files", "-z"]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("no checkout of git")
    rows = [line.split() for line in (ROOT / "MANIFEST.in").read_text("utf-8").splitlines()]
    folders = {row[1] for row in rows if row[:1] == ["graft"]}
    patterns = [name for row in rows if row[:1] == ["include"] for name in row[1:]]
    for name in filter(None, done.stdout.split("\0")):
        path = Path(name)
        alone = len(path.parts) == 1 and any(path.match(pattern) for pattern in patterns)
        assert alone or path.parts[0] in folders, f"MANIFEST.in lacks {name}"


def test_the_scripts_refuse_a_tag_of_another_version(tmp_path):
    words = ["bash", str(ROOT / "scripts" / "release"), str(tmp_path / "dist")]
    told = {**os.environ, "GITHUB_REF_NAME": "v99.0.0"}
    done = subprocess.run(words, env=told, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "the tag must be v" in done.stderr
    assert not (tmp_path / "dist").exists()


def test_every_python_that_is_promised_is_checked(setup):
    told = re.findall(r"Python :: 3\.(\d+)$", setup["metadata"]["classifiers"], re.MULTILINE)
    assert told == [str(minor) for minor in range(10, 15)]
    assert setup["options"]["python_requires"] == ">=3.10"
    assert set(re.findall(r"^ +3\.(\d+)$", FLOW.read_text("utf-8"), re.MULTILINE)) == set(told)


def test_the_page_names_extras_commands_and_options_that_there_are(setup):
    text = PAGE.read_text("utf-8")
    assert setup["metadata"]["long_description"] == f"file: {PAGE.name}"
    assert not re.findall(r"!\[|\]\((?!https://)|<img", text)  # which mean nothing elsewhere
    extras = re.findall(r"calib8\[(\w+)\]", text)
    assert extras
    assert set(extras) <= set(setup["options.extras_require"])
    lines = re.findall(r"^calib8 (\w+)(.*)$", text, re.MULTILINE)
    assert len(lines) >= 4
    for name, words in lines:
        command = cli.get_command(click.Context(cli), name)
        flags = {flag for param in command.params for flag in param.opts}
        assert set(re.findall(r"--[\w-]+", words)) <= flags, name


def jobs():
    """Job -> its lines."""
    found = {}
    name = ""
    for line in FLOW.read_text("utf-8").partition("\njobs:\n")[2].splitlines():
        head = re.fullmatch(r"  (\w+):", line)
        name = head[1] if head else name
        found.setdefault(name, []).append(line)
    return {name: "\n".join(lines) for name, lines in found.items()}


def test_the_workflow_is_yaml_of_known_jobs():
    text = FLOW.read_text("utf-8")
    assert "\t" not in text
    assert list(jobs()) == ["check", "build", "attach", "publish"]
    read = pytest.importorskip("yaml", reason="PyYAML is not installed").safe_load(text)
    assert list(read["jobs"]) == list(jobs())
    assert read[True] == {"push": {"tags": ["v*"]}}


def test_the_workflow_calls_what_there_is():
    text = "".join(flow.read_text("utf-8") for flow in FLOWS)
    called = re.findall(r"(?:scripts|\.ci)/[\w.]+", text)
    assert {".ci/run", "scripts/release", "scripts/release_check"} <= set(called)
    for name in called:
        path = ROOT / name
        assert path.is_file(), name
        assert path.suffix == ".py" or os.access(path, os.X_OK), name
    for flow in FLOWS:  # every action is pinned to a major version
        used = re.findall(r"uses: (\S+)", flow.read_text("utf-8"))
        assert used, flow
        assert all(re.search(r"@(release/)?v\d+$", action) for action in used), flow


def test_a_job_may_do_what_it_needs_and_no_more():
    text = FLOW.read_text("utf-8")
    assert "\npermissions:\n  contents: read\n" in text
    writes = re.compile(r"^      ([\w-]+): write$", re.MULTILINE)
    rights = {name: writes.findall(body) for name, body in jobs().items()}
    assert rights == {"check": [], "build": [], "attach": ["contents"], "publish": ["id-token"]}
    assert "environment: pypi" in jobs()["publish"]
    assert "secrets." not in text
    needs = [re.findall(r"needs: (\w+)", body) for body in jobs().values()]
    assert needs == [[], ["check"], ["build"], ["attach"]]  # each waits for the one before it
