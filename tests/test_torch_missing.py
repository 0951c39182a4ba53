"""Without torch, everything else works and a torch command says which extra is missing."""

import subprocess
import sys
from pathlib import Path

from deploy.errors import extra_hint

ROOT = Path(__file__).parent.parent
NO_TORCH = "import sys; sys.modules['torch'] = None; "
NO_PROGRESS = (
    "import deploy.terminal; deploy.terminal.TICK_S = 1e6; "  # however slow the machine is
)


def run(code, without=NO_TORCH):
    command = [sys.executable, "-c", without + code]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


COMMANDS = """
from deploy.cli import main
for command in ("trace", "profile", "fuse", "inspect", "build"):
    images = ["--images", "."] if command == "build" else []
    try: main([command, "net.py:make", "--input", "1x3x8x8", *images])
    except SystemExit as stop: assert stop.code == 1
"""


def test_a_torch_command_names_the_extra():
    done = run(NO_PROGRESS + COMMANDS)
    assert done.returncode == 0
    assert done.stdout == ""
    error = "calib8: error: PyTorch models need torch, which is not installed:"
    assert done.stderr == f"{error} {extra_hint('torch')}\n" * 5


def test_help_needs_no_torch():
    assert run("from deploy.cli import main; main(['--help'])").returncode == 0
    loaded = "import sys; from deploy.cli import cli; cli.get_command(None, 'trace');"
    assert run(loaded + "print('torch' in sys.modules)", without="").stdout == "False\n"


def test_torch_ao_is_never_imported():
    for source in [*(ROOT / "deploy").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        text = source.read_text()
        assert "torch.ao" not in text, source
        assert "torch.quantization" not in text, source


def test_torch_interface_exists_without_torch():
    code = """
import calib8, pydoc
assert "trace" in dir(calib8.torch) and "qat" in pydoc.render_doc(calib8)
try: calib8.torch.trace
except calib8.SdkMissingError as error: print(error)
"""
    done = run(code)
    assert extra_hint("torch") in done.stdout
    assert done.stderr == ""
