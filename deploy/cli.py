"""The `calib8` command: a table of subcommands; a command's module is imported when it runs.

Command modules hold arguments and printing, no logic. `--help` must answer in under half a second,
so no command module imports anything heavy (onnx, onnxruntime, cv2, torch) at its top.
"""

import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import NoReturn

import click

from calibrators.errors import shortened
from deploy.errors import Calib8Error, Terminated, did_you_mean
from deploy.files.guard import guard_inputs
from deploy.signals import end_on_signals, find_signal
from deploy.terminal import say
from deploy.version import __version__

_OURS = ("calib8", "calibrators", "deploy")  # never reported as missing packages
_NO_COMMAND = re.compile(r"No such command '([^']*)'")
_EXTRA_ARGUMENT = re.compile(r"Got unexpected extra arguments? \((\S+?)[\s)]")

# name -> (module in `deploy.commands`, one line for `calib8 --help`), in the order of a user's work
COMMANDS = {
    "build": ("build", "Calibrate (or reuse a calibration), build int8, measure, report."),
    "calibrate": ("calibrate", "Calibrate only, and write the calibration cache."),
    "merge": ("calibrate", "Merge the shards of a calibration."),
    "check": ("bench", "Check the files of a build as they are, on new images: the verdict."),
    "bench": ("bench", "Latency of one or two models, side by side."),
    "compare": ("diagnose", "Find the tensors where two models, or two runtimes, differ."),
    "explain": ("diagnose", "Which layers of a build lose accuracy, why, and what was tried."),
    "report": ("diagnose", "Compare builds, or print the report of one again."),
    "verify": ("diagnose", "Check that a build is complete and unchanged."),
    "inspect": ("diagnose", "Which layers of a model would be quantized, and why not others."),
    "doctor": ("diagnose", "What is installed here, and what is missing."),
    "trace": ("torch_graph", "Print the graph of a PyTorch model, as table or code."),
    "profile": (
        "torch_graph",
        "Measure time, FLOPs and parameters of a PyTorch model, node by node.",
    ),
    "fuse": ("torch_graph", "Fold BatchNorm and fuse ReLU in a PyTorch model."),
    "ascend": ("ascend", "Create, check and search Ascend's configurations and records."),
    "qat": ("torch_export", "Train a PyTorch model for int8, and export it with Q/DQ."),
    "export": ("torch_export", "Export a PyTorch model to ONNX, float or Q/DQ."),
    "quantize": ("quantize", "Quantize values to integers: scale, zero point, int_repr and error."),
    "cache": ("cache", "Show, check and convert TensorRT calibration caches."),
}


class LazyGroup(click.Group):
    """A click group that imports a command's module only when that command runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the table's order."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import and return one command; None if the table has no such name."""
        if name not in COMMANDS:
            return None
        module, _ = COMMANDS[name]
        command = getattr(import_module(f"deploy.commands.{module}"), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands of the table without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


def _print_version(ctx: click.Context, param: click.Parameter, is_given: bool) -> None:
    """Print the version, and the implementation that counts values: C needs a compiler here."""
    from calibrators.kernel import describe_kernel

    if is_given and not ctx.resilient_parsing:
        say(f"calib8, version {__version__}")
        say(f"counting: {describe_kernel()}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """Calibrate a trained CNN once, on any machine, and deploy it in int8 anywhere."""


def main(argv: list[str] | None = None) -> None:
    """Run the command line; print a failure as one sentence on stderr, exit 1 (usage: 2)."""
    if argv is None:
        argv = sys.argv[1:]
        del sys.argv[1:]  # a user's script must not parse them as its own arguments
    try:
        with guard_inputs(), end_on_signals():
            code = cli.main(args=argv, prog_name="calib8", standalone_mode=False)
        if isinstance(code, int) and code:  # click returns the code of `Context.exit`
            sys.exit(code)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        say(f"calib8: error: {_describe_click_error(error, argv)}", err=True)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt) as stop:
        _print_ended("interrupted", stop)
        sys.exit(130)
    except Terminated as stop:
        _print_ended("terminated", stop)
        sys.exit(143)
    except Calib8Error as error:
        say(f"calib8: error: {error}", err=True)
        sys.exit(1)
    except MemoryError as error:
        detail = f" ({error})" if str(error) else ""
        _end(f"memory did not suffice{detail}; use fewer --threads, smaller inputs, or more memory")
    except BrokenPipeError:  # such as `| head`
        _forget_output()
        sys.exit(1)
    except OSError as error:  # an unreadable folder, a full disk, a closed screen
        path = f" {error.filename}" if error.filename else ""
        _end(f"the system refused{path}: {error.strerror or error}; fix that and run again")
    except Exception as error:
        _end_unexpected(error)


def _end_unexpected(error: Exception) -> NoReturn:
    """End with a missing package's name, or with a request to report a fault of calib8."""
    missing_module = error.name if isinstance(error, ModuleNotFoundError) else None
    package = (missing_module or "").partition(".")[0]
    if package and package not in _OURS:
        _end(
            f"calib8 needs the package {package}, which is not installed here; install calib8"
            " with pip, or activate the environment that has it"
        )
    if os.environ.get("CALIB8_TRACEBACK"):
        raise error
    say(
        f"calib8: a fault of calib8 itself ({type(error).__name__}: {error}); please report it"
        " with what CALIB8_TRACEBACK=1 shows",
        err=True,
    )
    sys.exit(70)


def _print_ended(ending: str, stop: BaseException) -> None:
    """Print what a signal left behind, and how to continue if that is possible."""
    stop_signal = find_signal(stop)
    hints = () if stop_signal is None else map(str, stop_signal.args)
    say("; ".join((f"calib8: {ending}; nothing half-written was left behind", *hints)), err=True)


def _end(sentence: str) -> NoReturn:
    """Print a sentence to stderr if possible, and exit with code 1."""
    if os.environ.get("CALIB8_TRACEBACK"):
        raise  # the exception that this function is called for
    with suppress(OSError):
        say(f"calib8: error: {sentence}", err=True)
    _forget_output()
    sys.exit(1)


def _forget_output() -> None:
    """Keep Python from flushing stdout again at exit after that failed."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _describe_click_error(error: click.ClickException, argv: Sequence[str]) -> str:
    """Return click's message on one line, with a hint and where to find help."""
    one_line = " ".join(error.format_message().split())
    message = shortened(one_line.rstrip("."))
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is None:
        return message

    unknown_command = _NO_COMMAND.match(message)
    extra_argument = _EXTRA_ARGUMENT.match(message)
    if unknown_command and isinstance(context.command, click.Group):
        message = unknown_command[0]
        hint = did_you_mean(unknown_command[1], context.command.list_commands(context))
        if hint:
            message += f"; {hint}"
    elif extra_argument:
        message += _extra_argument_hint(context.command, extra_argument[1], argv)
    return f"{message} (`{context.command_path} --help` tells more)"


def _extra_argument_hint(command: click.Command, argument: str, argv: Sequence[str]) -> str:
    """Return a hint on where an extra argument belongs; "" if unknown."""
    from deploy.targets import TARGETS

    flags = {flag for option in command.params for flag in option.opts}
    if argument in TARGETS and "--target" in flags:
        return "; several targets are separated by commas"
    if "--against" in flags:
        return "; a second model goes after --against"
    if "--images" not in flags:
        return ""
    if "--images" not in argv:
        return "; images go after --images"
    if os.path.splitext(argument)[1] and os.path.exists(argument):  # the shell expanded a pattern
        return "; a pattern of images must be quoted: 'photos/*.jpg'"
    if "--mean" in flags and argument.replace(".", "").isdecimal():
        return "; several numbers are separated by commas"
    if argument in argv:
        previous = argv[argv.index(argument) - 1]  # the first part of a path with blanks?
        if not previous.startswith("-") and not os.path.exists(previous):
            return "; a path with blanks must be quoted"
    return ""


if __name__ == "__main__":
    main()
