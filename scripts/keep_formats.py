"""Keep small files as this version writes them, for the tests of the versions to come.

    python scripts/keep_formats.py          writes tests/golden/formats/<version>/

Run once for a release, and before it where a format changes. What is kept is a whole build of the
tests' small network (its calibration, plan, report, manifest, and the models with Q/DQ): the files
that people have on their disks when they upgrade. `tests/test_formats.py` reads them.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

_WORDS = "build m.onnx --images pictures --out out --target onnxruntime,tensorrt --accept"


def main() -> None:
    """Build in a folder of its own, with paths relative to it."""
    from deploy.cli import main as calib8
    from deploy.version import __version__
    from tests.conftest import save_pictures, save_small_cnn

    kept = ROOT / "tests" / "golden" / "formats" / __version__
    with tempfile.TemporaryDirectory() as work:
        os.chdir(work)
        save_small_cnn(Path("m.onnx"))
        os.mkdir("pictures")
        save_pictures(Path("pictures"))
        calib8([*_WORDS.split(), "--duration", "0"])
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree("out", kept)
    for path in sorted(p for p in kept.rglob("*") if p.is_file()):
        print(f"{path.stat().st_size:9,} {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
