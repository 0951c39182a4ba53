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
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
RELEASE_WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
PAGE = ROOT / "PYPI.md"


@pytest.fixture(scope="module")
def setup():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def test_version_stands_in_the_changelog():
    assert release.version() == calib8.__version__
    heading, text = release.notes((ROOT / "CHANGELOG.md").read_text("utf-8"), calib8.__version__)
    assert heading.startswith(calib8.__version__)
    assert text


CHANGELOG = (
    "# Changelog\n\n## 1.2.0 (2026-02-03)\n\nnew\n\n### more\n\n## 1.1.0 (unreleased)\n\nold\n"
)


@pytest.mark.parametrize(
    ("tag", "version", "problem"),
    [
        ("v1.2.0", "1.2.0", ""),
        ("1.2.0", "1.2.0", "must be v1.2.0"),
        ("v1.2", "1.2.0", "got v1.2"),
        ("v1.1.0", "1.1.0", "must tell when"),
        ("v1.0.0", "1.0.0", "heading '## 1.0.0'"),
    ],
)
def test_tag_needs_dated_changes(tag, version, problem):
    message = release.unready(tag, version, CHANGELOG)
    assert problem in message
    assert bool(problem) == bool(message)


def test_release_notes_come_from_changelog():
    assert release.notes(CHANGELOG, "1.2.0") == ("1.2.0 (2026-02-03)", "new\n\n### more")
    assert release.notes(CHANGELOG, "1.2") == ("", "")


def test_project_links_name_the_releasing_repository():
    text = (ROOT / "setup.cfg").read_text("utf-8")
    assert "project_urls" not in text  # where it will live is not known here
    parser = configparser.ConfigParser()
    parser.read_string(release.linked(text, "https://host/some/one"))
    rows = dict(line.split(" = ") for line in parser["metadata"]["project_urls"].split("\n")[1:])
    assert rows["Source"] == "https://host/some/one"
    assert len(rows) == 4
    assert all(url.startswith("https://host/some/one") for url in rows.values())
    assert parser["metadata"]["name"] == "calib8"


def test_missing_or_extra_files_are_named():
    tracked = ["setup.cfg", "a.py", "deploy/b.py"]
    wheel = ["deploy/b.py", "calibrators/c.py", "calib8/d.py", "calib8-1.dist-info/METADATA"]
    sdist = [*tracked, "PKG-INFO", "calib8.egg-info/SOURCES.txt"]
    assert release.misfits(sdist, wheel, tracked) == []
    for files, problem in (
        ((sdist[1:], wheel), "source distribution lacks: setup.cfg"),
        (([*sdist, "a.pyc"], wheel), "source distribution holds what git does not: a.pyc"),
        ((sdist, [*wheel, "tests/x.py"]), "wheel installs more than its packages: tests"),
        ((sdist, wheel[1:]), "wheel lacks: deploy"),
    ):
        assert release.misfits(*files, tracked) == [f"the {problem}"]


def test_only_platform_wheels_hold_the_kernel():
    platform_wheel = "calib8-1-py3-none-manylinux_2_5_x86_64.whl"
    generic_wheel = "calib8-1-py3-none-any.whl"
    wheel_files = ["deploy/b.py", "calibrators/_count.so"]
    assert release.unfit_wheels({platform_wheel: wheel_files, generic_wheel: wheel_files[:1]}) == []
    (problem,) = release.unfit_wheels(
        {platform_wheel: wheel_files[:1], generic_wheel: wheel_files[:1]}
    )
    assert problem.startswith(
        f"{platform_wheel} must hold calibrators/_count.so; it is built where"
    )
    (problem,) = release.unfit_wheels({platform_wheel: wheel_files, generic_wheel: wheel_files})
    assert problem == f"{generic_wheel} must hold no calibrators/_count.so"
    for wheels in (
        {platform_wheel: wheel_files},
        {generic_wheel: wheel_files[:1]},
        {platform_wheel: wheel_files, "calib8-2-x.whl": wheel_files},
    ):
        assert release.unfit_wheels(wheels)[-1].startswith("there must be a wheel for every")


def test_source_distribution_takes_all_tracked_files():
    command = ["git", "ls-files", "-z"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if process.returncode:
        pytest.skip("no checkout of git")
    rows = [line.split() for line in (ROOT / "MANIFEST.in").read_text("utf-8").splitlines()]
    folders = {row[1] for row in rows if row[:1] == ["graft"]}
    patterns = [name for row in rows if row[:1] == ["include"] for name in row[1:]]
    for name in filter(None, process.stdout.split("\0")):
        path = Path(name)
        is_included = len(path.parts) == 1 and any(path.match(pattern) for pattern in patterns)
        assert is_included or path.parts[0] in folders, f"MANIFEST.in lacks {name}"


def test_release_script_refuses_another_tag(tmp_path):
    command = ["bash", str(ROOT / "scripts" / "release"), str(tmp_path / "dist")]
    environment = {**os.environ, "GITHUB_REF_NAME": "v99.0.0"}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 1
    assert "the tag must be v" in process.stderr
    assert not (tmp_path / "dist").exists()


def test_every_promised_python_is_checked(setup):
    minor_versions = re.findall(
        r"Python :: 3\.(\d+)$", setup["metadata"]["classifiers"], re.MULTILINE
    )
    assert minor_versions == [str(minor) for minor in range(10, 15)]
    assert setup["options"]["python_requires"] == ">=3.10"
    assert set(
        re.findall(r"^ +3\.(\d+)$", RELEASE_WORKFLOW.read_text("utf-8"), re.MULTILINE)
    ) == set(minor_versions)


def test_package_page_names_existing_options(setup):
    text = PAGE.read_text("utf-8")
    assert setup["metadata"]["long_description"] == f"file: {PAGE.name}"
    assert not re.findall(r"!\[|\]\((?!https://)|<img", text)  # which mean nothing elsewhere
    extras = re.findall(r"calib8\[(\w+)\]", text)
    assert extras
    assert set(extras) <= set(setup["options.extras_require"])
    lines = re.findall(r"^calib8 (\w+)(.*)$", text, re.MULTILINE)
    assert len(lines) >= 4
    for name, arguments in lines:
        command = cli.get_command(click.Context(cli), name)
        flags = {flag for param in command.params for flag in param.opts}
        assert set(re.findall(r"--[\w-]+", arguments)) <= flags, name


def jobs():
    """Job -> its lines."""
    lines_by_job = {}
    name = ""
    for line in RELEASE_WORKFLOW.read_text("utf-8").partition("\njobs:\n")[2].splitlines():
        head = re.fullmatch(r"  (\w+):", line)
        name = head[1] if head else name
        lines_by_job.setdefault(name, []).append(line)
    return {name: "\n".join(lines) for name, lines in lines_by_job.items()}


def test_workflow_is_yaml_of_known_jobs():
    text = RELEASE_WORKFLOW.read_text("utf-8")
    assert "\t" not in text
    assert list(jobs()) == ["check", "build", "attach", "publish"]
    read = pytest.importorskip("yaml", reason="PyYAML is not installed").safe_load(text)
    assert list(read["jobs"]) == list(jobs())
    assert read[True] == {"push": {"tags": ["v*"]}}


def test_workflows_call_existing_scripts():
    text = "".join(flow.read_text("utf-8") for flow in WORKFLOWS)
    called = re.findall(r"(?:scripts|\.ci)/[\w.]+", text)
    assert {".ci/run", "scripts/release", "scripts/release_check"} <= set(called)
    for name in called:
        path = ROOT / name
        assert path.is_file(), name
        assert path.suffix == ".py" or os.access(path, os.X_OK), name
    for flow in WORKFLOWS:  # every action is pinned to a major version
        used = re.findall(r"uses: (\S+)", flow.read_text("utf-8"))
        assert used, flow
        assert all(re.search(r"@(release/)?v\d+$", action) for action in used), flow


def test_jobs_have_least_permissions():
    text = RELEASE_WORKFLOW.read_text("utf-8")
    assert "\npermissions:\n  contents: read\n" in text
    writes = re.compile(r"^      ([\w-]+): write$", re.MULTILINE)
    rights = {name: writes.findall(body) for name, body in jobs().items()}
    assert rights == {"check": [], "build": [], "attach": ["contents"], "publish": ["id-token"]}
    assert "environment: pypi" in jobs()["publish"]
    assert "secrets." not in text
    needs = [re.findall(r"needs: (\w+)", body) for body in jobs().values()]
    assert needs == [[], ["check"], ["build"], ["attach"]]  # each waits for the one before it
