"""What a release has to agree on: tag, version, changelog, links, and what its files hold.

python scripts/release.py tag v1.2.3            fails unless version and changelog are ready for it
python scripts/release.py notes                 this version's part of CHANGELOG.md
python scripts/release.py links SETUP_CFG URL   writes the links of the project's page
python scripts/release.py contents FOLDER       fails unless sdist and wheels hold what they should
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
MADE = ("PKG-INFO", "setup.cfg", "calib8.egg-info/")  # by setuptools, or rewritten by it
PACKAGES = {"calib8", "calibrators", "deploy"}  # all that a wheel may install
KERNEL = "calibrators/_count.so"  # what tells the wheel of a platform from that of every platform


def version(root: Path = ROOT) -> str:
    """The version of the sources."""
    text = (root / "deploy" / "version.py").read_text("utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    assert found, "deploy/version.py holds a plain literal"
    return found[1]


def notes(changelog: str, wanted: str) -> tuple[str, str]:
    """(heading, text) of a version's part of the changelog; two empty words where there is none."""
    parts = re.split(r"^## (.+)$", changelog, flags=re.MULTILINE)
    for heading, text in zip(parts[1::2], parts[2::2], strict=True):
        if heading.split()[0] == wanted:
            return heading, text.strip()
    return "", ""


def unready(tag: str, wanted: str, changelog: str) -> str:
    """Why a tag is no release of this version; "" where it is."""
    if tag != f"v{wanted}":
        return f"the tag must be v{wanted}, as deploy/version.py has it, got {tag}"
    heading, _ = notes(changelog, wanted)
    if not heading:
        return f"CHANGELOG.md must have a heading '## {wanted}', got none"
    if "unreleased" in heading:
        return f"CHANGELOG.md must tell when {wanted} was released, got '## {heading}'"
    return ""


def linked(setup: str, address: str) -> str:
    """setup.cfg with the links of a project whose repository has this address."""
    rows = {
        "Source": address,
        "Documentation": f"{address}/tree/HEAD/docs",
        "Changelog": f"{address}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }
    lines = "".join(f"    {name} = {url}\n" for name, url in rows.items())
    return setup.replace("[metadata]\n", f"[metadata]\nproject_urls =\n{lines}", 1)


def misfits(sdist: Collection[str], wheel: Collection[str], tracked: Collection[str]) -> list[str]:
    """What is wrong with the names in the two files, in sentences.

    Args:
        sdist: names in the source distribution, without its folder.
        wheel: names in the wheel.
        tracked: names that git holds.
    """
    made = {name for name in sdist if name.startswith(MADE)}
    lacking, more = sorted(set(tracked) - set(sdist)), sorted(set(sdist) - set(tracked) - made)
    tops = {name.split("/")[0] for name in wheel}
    strange = sorted(top for top in tops - PACKAGES if not top.endswith(".dist-info"))
    found = [
        (lacking, "the source distribution lacks"),
        (more, "the source distribution holds what git does not"),
        (strange, "the wheel installs more than its packages"),
        (sorted(PACKAGES - tops), "the wheel lacks"),
    ]
    return [f"{what}: {', '.join(names[:5])}" for names, what in found if names]


def unfit_wheels(wheels: Mapping[str, Collection[str]]) -> list[str]:
    """What is wrong with the wheels, in sentences.

    Args:
        wheels: file name -> names in it. There are two: one for every platform, and one for this
            one, which holds the counting kernel.
    """
    pure = [name for name in wheels if name.endswith("-py3-none-any.whl")]
    found = [f"{name} must hold no {KERNEL}" for name in pure if KERNEL in wheels[name]]
    for name in sorted(set(wheels) - set(pure)):
        if KERNEL not in wheels[name]:
            found.append(f"{name} must hold {KERNEL}; it is built where there is a C compiler")
    if (len(wheels), len(pure)) != (2, 1):
        found.append(f"there must be a wheel for every platform and one more, got {len(wheels)}")
    return found


def _contents(folder: Path) -> list[str]:
    (sdist,), wheels = folder.glob("*.tar.gz"), {}
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as packed:
            wheels[wheel.name] = packed.namelist()
    with tarfile.open(sdist) as held:
        names = [m.name.partition("/")[2] for m in held.getmembers() if m.isfile()]
    listed = ["git", "ls-files", "-coz", "--exclude-standard"]
    tracked = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    there = {name for name in tracked.split("\0") if name and (ROOT / name).is_file()}
    print(f"{sdist.name}: {len(names)} files")
    found = unfit_wheels(wheels)
    for name, inside in wheels.items():
        print(f"{name}: {len(inside)} files")
        found += misfits(names, inside, there)
    return list(dict.fromkeys(found))


def main(words: list[str]) -> str:
    """Do what the words say; gives why it failed."""
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    match words:
        case ["tag", tag]:
            return unready(tag, version(), changelog)
        case ["notes"]:
            print(notes(changelog, version())[1])
            return ""
        case ["links", path, address]:
            setup = Path(path)
            setup.write_text(linked(setup.read_text("utf-8"), address), "utf-8")
            return ""
        case ["contents", folder]:
            return "; ".join(_contents(Path(folder)))
    return (__doc__ or "").strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) or 0)
