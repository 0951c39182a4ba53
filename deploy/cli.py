"""The `calib8` command: a table of subcommands, each imported only when it is called.

Commands hold arguments and printing, no logic. `--help` must answer in under half a second, so
nothing heavy (onnx, onnxruntime, cv2, torch) is imported at the top of a command module.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import NoReturn

import click

from calibrators.errors import shortened
from deploy.errors import Calib8Error
from deploy.files.reading import guarded
from deploy.terminal import say
from deploy.version import __version__

_OURS = ("calib8", "calibrators", "deploy")  # whose modules are never a package that is missing
_ONE_MORE = re.compile(r"Got unexpected extra arguments? \((\S+?)[\s)]")

# name: (module:attribute, one line for `calib8 --help`)
COMMANDS: dict[str, tuple[str, str]] = {
    "build": (
        "deploy.commands.build:build",
        "Calibrate (or reuse a calibration), build int8, measure, report.",
    ),
    "calibrate": (
        "deploy.commands.calibrate:calibrate",
        "Calibrate only, and write the calibration cache.",
    ),
    "merge": ("deploy.commands.calibrate:merge", "Put the shards of a calibration together."),
    "bench": ("deploy.commands.bench:bench", "Latency of one or two models, side by side."),
    "compare": (
        "deploy.commands.diagnose:compare",
        "Where two models part, or one model in two runtimes, tensor by tensor.",
    ),
    "explain": (
        "deploy.commands.diagnose:explain",
        "What a build loses where, why it does, and what was tried.",
    ),
    "report": (
        "deploy.commands.diagnose:report",
        "Builds side by side; or the screen of one again.",
    ),
    "verify": (
        "deploy.commands.diagnose:verify",
        "Whether a build is whole and as it was written.",
    ),
    "inspect": (
        "deploy.commands.diagnose:inspect",
        "What would be quantized in a model and why not; what a cache holds.",
    ),
    "doctor": ("deploy.commands.diagnose:doctor", "What is here, and what to install for more."),
    "trace": (
        "deploy.commands.torch_graph:trace",
        "The graph of a PyTorch model, as table or code.",
    ),
    "profile": (
        "deploy.commands.torch_graph:profile",
        "Time, FLOPs and parameters of a PyTorch model, node by node.",
    ),
    "fuse": (
        "deploy.commands.torch_graph:fuse",
        "Fold BatchNorm and join ReLU in a PyTorch model.",
    ),
    "ascend": (
        "deploy.commands.ascend:ascend",
        "Ascend's configurations and records: made, checked, searched.",
    ),
    "qat": (
        "deploy.commands.export:qat",
        "Train a PyTorch model for int8, and export it with Q/DQ.",
    ),
    "export": ("deploy.commands.export:export", "A PyTorch model as ONNX, float or with Q/DQ."),
    "quantize": (
        "deploy.commands.quantize:quantize",
        "Values to integers: scale, zero point, int_repr and error.",
    ),
    "cache": (
        "deploy.commands.cache:cache",
        "Show, check and convert TensorRT calibration caches.",
    ),
}


class Terminated(BaseException):
    """SIGTERM came; ends a run as the user's interrupt does."""


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end what runs here in order; only a main thread can hear it."""

    def end(number: int, frame: object) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except Exception as error:
        if (cancelled := _cancelled(error)) is not None:
            raise cancelled from error
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _cancelled(error: BaseException) -> KeyboardInterrupt | Terminated | None:
    """The signal behind an error: a library that is being imported makes an ImportError of it."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, KeyboardInterrupt | Terminated):
            return type(seen)(*seen.args)  # which say how to go on
        seen = seen.__cause__ or seen.__context__
    return None


class LazyGroup(click.Group):
    """A click group that imports a command's module only when that command runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the table's order, which is the order of a user's work."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import and return one command, or None where the table has no such name."""
        if name not in COMMANDS:
            return None
        module, attribute = COMMANDS[name][0].split(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands from the table, importing none of them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


def _tell_version(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    """The version, and what counts values here, since that is built where there is a compiler."""
    from calibrators.kernel import told

    if wanted and not ctx.resilient_parsing:
        say(f"calib8, version {__version__}")
        say(f"counting: {told()}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_tell_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """Calibrate a trained CNN once, on any machine, and deploy it in int8 anywhere."""


def main(argv: list[str] | None = None) -> None:
    """Run the command line; a failure is one sentence on stderr, and exit code 1 (usage: 2)."""
    try:
        with guarded(), _terminable():
            code = cli.main(args=argv, prog_name="calib8", standalone_mode=False)
        if isinstance(code, int) and code:  # click gives the code of `Context.exit` back
            sys.exit(code)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        say(f"calib8: error: {_sentence(error, sys.argv if argv is None else argv)}", err=True)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt) as stop:
        _say_ended("interrupted", stop)
        sys.exit(130)
    except Terminated as stop:
        _say_ended("terminated", stop)
        sys.exit(143)
    except Calib8Error as error:
        say(f"calib8: error: {error}", err=True)
        sys.exit(1)
    except MemoryError as error:
        said = f" ({error})" if str(error) else ""
        _end(f"memory did not suffice{said}; use fewer --threads, smaller inputs, or more memory")
    except BrokenPipeError:  # `| head` has read enough
        _forget_output()
        sys.exit(1)
    except OSError as error:  # a folder that may not be read, a screen or a disk that is full
        where = f" {error.filename}" if error.filename else ""
        _end(f"the system refused{where}: {error.strerror or error}; see to it and run again")
    except Exception as error:
        if (package := _lacking(error)) is not None:
            _end(
                f"calib8 needs the package {package}, which is not installed here; install calib8"
                " with pip, or activate the environment that has it"
            )
        if os.environ.get("CALIB8_TRACEBACK"):
            raise
        say(
            f"calib8: a fault of calib8 itself ({type(error).__name__}: {error}); please report it"
            " with what CALIB8_TRACEBACK=1 shows",
            err=True,
        )
        sys.exit(70)


def _lacking(error: Exception) -> str | None:
    """The package of others that is not installed; None where that is not what was wrong."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    package = (name or "").partition(".")[0]
    return package if package and package not in _OURS else None


def _say_ended(how: str, stop: BaseException) -> None:
    """What is left after a signal, and how to go on where that is possible."""
    signalled = _cancelled(stop)
    left = [] if signalled is None else [str(one) for one in signalled.args]
    say("; ".join((f"calib8: {how}; nothing half-written was left behind", *left)), err=True)


def _end(sentence: str) -> NoReturn:
    """End with a sentence and exit code 1, where stderr takes it."""
    if os.environ.get("CALIB8_TRACEBACK"):
        raise
    with suppress(OSError):
        say(f"calib8: error: {sentence}", err=True)
    _forget_output()
    sys.exit(1)


def _forget_output() -> None:
    """Let Python not try again at its end to write what stdout did not take."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _sentence(error: click.ClickException, asked: Sequence[str]) -> str:
    """What click says of a wrong command line, on one line, and where help is."""
    said = shortened(" ".join(error.format_message().split()).rstrip("."))
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is None:
        return said
    if one_more := _ONE_MORE.match(said):
        said += _instead(context.command, one_more[1], asked)
    return f"{said} (`{context.command_path} --help` tells more)"


def _instead(command: click.Command, word: str, asked: Sequence[str]) -> str:
    """Where the argument goes that a command has no place for; "" where nobody can tell."""
    from deploy.targets import TARGETS

    known = {flag for option in command.params for flag in option.opts}
    if word in TARGETS and "--target" in known:
        return "; several targets are separated by commas"
    if "--against" in known:
        return "; a second model goes behind --against"
    if "--images" not in known:
        return ""
    if "--images" not in asked:
        return "; images go behind --images"
    pattern = os.path.splitext(word)[1] and os.path.exists(word)
    return "; a pattern of images is quoted: 'photos/*.jpg'" if pattern else ""


if __name__ == "__main__":
    main()
