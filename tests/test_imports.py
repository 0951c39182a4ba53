"""Every module can be the first one that a user imports: no circle among the packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What needs a package that is not here (torch) may say so, and only that.
PROGRAM = """
import importlib, pathlib, sys
failed = []
for path in sorted(p for top in ("deploy", "calibrators") for p in pathlib.Path(top).rglob("*.py")):
    name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    if name.endswith("__main__"):
        continue
    for loaded in [m for m in sys.modules if m.split(".")[0] in ("deploy", "calibrators")]:
        del sys.modules[loaded]
    try:
        importlib.import_module(name)
    except Exception as error:
        package = (getattr(error, "name", None) or "deploy").split(".")[0]
        if type(error).__name__ != "SdkMissingError" and package in ("deploy", "calibrators"):
            failed.append(f"{name}: {error}")
print("\\n".join(failed))
sys.exit(bool(failed))
"""


def test_every_module_imports_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
