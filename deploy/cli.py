"""The `calib8` command: a table of subcommands; a command's module is imported when it runs.

Command modules hold arguments and printing, no logic. `--help` must answer in under half a second,
so no command module imports anything heavy (onnx, onnxruntime, cv2, torch) at its top.
"""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from typing import NoReturn

import click

from calibrators.errors import shortened
from deploy.errors import Calib8Error, Terminated, did_you_mean
from deploy.files.guard import guard_inputs
from deploy.terminal import say
from deploy.version import __version__

_OURS = ("calib8", "calibrators", "deploy")  # never reported as missing packages
_NO_COMMAND = re.compile(r"No such command '([^']*)'")
_ONE_MORE = re.compile(r"Got unexpected extra arguments? \((\S+?)[\s)]")

_ENDING = frozenset((signal.SIGINT, signal.SIGTERM))
_GRACE_S = 2.0  # so that inferences in progress can end, and their samples be counted
_ORT = "deploy.runtimes.ort"  # imported only by commands that need it

# (module:name, one line for `calib8 --help`)
_COMMANDS = (
    ("build:build", "Calibrate (or reuse a calibration), build int8, measure, report."),
    ("calibrate:calibrate", "Calibrate only, and write the calibration cache."),
    ("calibrate:merge", "Merge the shards of a calibration."),
    ("bench:bench", "Latency of one or two models, side by side."),
    ("diagnose:compare", "Find the tensors where two models, or two runtimes, differ."),
    ("diagnose:explain", "Which layers of a build lose accuracy, why, and what was tried."),
    ("diagnose:report", "Compare builds, or print the report of one again."),
    ("diagnose:verify", "Check that a build is complete and unchanged."),
    (
        "diagnose:inspect",
        "Which layers of a model would be quantized, and why not others; contents of a cache.",
    ),
    ("diagnose:doctor", "What is installed here, and what is missing."),
    ("torch_graph:trace", "Print the graph of a PyTorch model, as table or code."),
    ("torch_graph:profile", "Measure time, FLOPs and parameters of a PyTorch model, node by node."),
    ("torch_graph:fuse", "Fold BatchNorm and fuse ReLU in a PyTorch model."),
    ("ascend:ascend", "Create, check and search Ascend's configurations and records."),
    ("torch_export:qat", "Train a PyTorch model for int8, and export it with Q/DQ."),
    ("torch_export:export", "Export a PyTorch model to ONNX, float or Q/DQ."),
    ("quantize:quantize", "Quantize values to integers: scale, zero point, int_repr and error."),
    ("cache:cache", "Show, check and convert TensorRT calibration caches."),
)
COMMANDS = {at.partition(":")[2]: (f"deploy.commands.{at}", line) for at, line in _COMMANDS}


@contextmanager
def _terminable() -> Iterator[None]:
    """End a command on SIGINT and SIGTERM; only a main thread receives signals.

    ::

        signal --> Python's handler, once C code returns: KeyboardInterrupt or `Terminated`
          |                                        ^
          |--> thread: after 2 s inferences return-'
          '--> SIGINT: the next one ends the process, even inside C code that never returns
    """

    def end(number: int, frame: object) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        with _stop_inferences():
            yield
    except Exception as error:
        if (stop_signal := _signal_behind(error)) is not None:
            raise stop_signal from error
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _stop_inferences() -> Iterator[None]:
    """Stop inferences that last on after a signal, and let a second SIGINT end the process."""
    if os.name != "posix":
        yield
        return
    allow_one = _one_interrupt()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            numbers = os.read(reader, 64)
            since = time.monotonic() - _GRACE_S
            if _ENDING.isdisjoint(numbers) or over.wait(_GRACE_S) or _ORT not in sys.modules:
                continue
            if not sys.modules[_ORT].stop_runs(since):
                allow_one()  # the command goes on, so the next interrupt is a first one again

    watcher = threading.Thread(target=watch, name="calib8 signals", daemon=True)
    watcher.start()
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # a signal to a process that a user's loader forks is not one to this process
    os.register_at_fork(after_in_child=lambda: over.is_set() or signal.set_wakeup_fd(-1))
    is_signalled = False
    try:
        yield
    except BaseException as error:
        is_signalled = _signal_behind(error) is not None
        raise
    finally:
        signal.set_wakeup_fd(before)
        over.set()
        os.write(writer, b"\0")  # a process that the user's code forked may hold the pipe open
        watcher.join()
        os.close(writer)
        os.close(reader)
        if (ort := sys.modules.get(_ORT)) is not None:  # or threads keep the process from ending
            ort.abandon_runs() if is_signalled else ort.continue_runs()
        if (handler := signal.getsignal(signal.SIGINT)) is not None:
            signal.signal(signal.SIGINT, handler)  # for more than one


def _one_interrupt() -> Callable[[], object]:
    """Let the system end the process at the second SIGINT; return what renews this (Linux only)."""
    import ctypes

    install = getattr(ctypes.CDLL(None), "sysv_signal", None)
    if install is None:
        return lambda: None
    install.argtypes, install.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    allow_one = partial(install, signal.SIGINT, install(signal.SIGINT, None))
    allow_one()
    return allow_one


def _signal_behind(error: BaseException) -> KeyboardInterrupt | Terminated | None:
    """Return the signal that caused an error: during an import it becomes an ImportError."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, KeyboardInterrupt | Terminated):
            return type(cause)(*cause.args)  # the arguments tell the user how to continue
        cause = cause.__cause__ or cause.__context__
    return None


class LazyGroup(click.Group):
    """A click group that imports a command's module only when that command runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the table's order, the order of a user's work."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import and return one command; None if the table has no such name."""
        if name not in COMMANDS:
            return None
        module, attribute = COMMANDS[name][0].split(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands of the table without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


def _print_version(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    """Print the version, and the implementation that counts values: C needs a compiler here."""
    from calibrators.kernel import describe_kernel

    if wanted and not ctx.resilient_parsing:
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
    try:
        with guard_inputs(), _terminable():
            code = cli.main(args=argv, prog_name="calib8", standalone_mode=False)
        if isinstance(code, int) and code:  # click returns the code of `Context.exit`
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
        _print_ended("interrupted", stop)
        sys.exit(130)
    except Terminated as stop:
        _print_ended("terminated", stop)
        sys.exit(143)
    except Calib8Error as error:
        say(f"calib8: error: {error}", err=True)
        sys.exit(1)
    except MemoryError as error:
        said = f" ({error})" if str(error) else ""
        _end(f"memory did not suffice{said}; use fewer --threads, smaller inputs, or more memory")
    except BrokenPipeError:  # such as `| head`
        _forget_output()
        sys.exit(1)
    except OSError as error:  # an unreadable folder, a full disk, a closed screen
        where = f" {error.filename}" if error.filename else ""
        _end(f"the system refused{where}: {error.strerror or error}; fix that and run again")
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        package = (missing or "").partition(".")[0]
        if package and package not in _OURS:
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


def _print_ended(how: str, stop: BaseException) -> None:
    """Print what a signal left behind, and how to continue if that is possible."""
    signalled = _signal_behind(stop)
    left = [] if signalled is None else [str(one) for one in signalled.args]
    say("; ".join((f"calib8: {how}; nothing half-written was left behind", *left)), err=True)


def _end(sentence: str) -> NoReturn:
    """Print a sentence to stderr if possible, and exit with code 1."""
    if os.environ.get("CALIB8_TRACEBACK"):
        raise
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


def _sentence(error: click.ClickException, argv: Sequence[str]) -> str:
    """Return click's message on one line, with a hint and where to find help."""
    message = shortened(" ".join(error.format_message().split()).rstrip("."))
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is None:
        return message
    if (unknown := _NO_COMMAND.match(message)) and isinstance(context.command, click.Group):
        near = did_you_mean(unknown[1], context.command.list_commands(context))
        message = f"{unknown[0]}{near and '; '}{near}"
    elif one_more := _ONE_MORE.match(message):
        message += _hint(context.command, one_more[1], argv)
    return f"{message} (`{context.command_path} --help` tells more)"


def _hint(command: click.Command, word: str, argv: Sequence[str]) -> str:
    """Return a hint on where an extra argument belongs; "" if unknown."""
    from deploy.targets import TARGETS

    flags = {flag for option in command.params for flag in option.opts}
    if word in TARGETS and "--target" in flags:
        return "; several targets are separated by commas"
    if "--against" in flags:
        return "; a second model goes after --against"
    if "--images" not in flags:
        return ""
    if "--images" not in argv:
        return "; images go after --images"
    pattern = os.path.splitext(word)[1] and os.path.exists(word)
    return "; a pattern of images must be quoted: 'photos/*.jpg'" if pattern else ""


if __name__ == "__main__":
    main()
