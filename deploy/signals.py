"""SIGINT and SIGTERM end a command by an exception, also while C code runs an inference.

::

    signal --> Python's handler, once C code returns: KeyboardInterrupt or `Terminated`
      |                                        ^
      |--> thread: after 2 s inferences return-'
      '--> SIGINT: the next one ends the process, even inside C code that never returns
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from deploy.errors import Terminated

GRACE_S = 2.0  # so that inferences in progress can end, and their samples be counted
_END_SIGNALS = frozenset((signal.SIGINT, signal.SIGTERM))
_ORT = "deploy.runtimes.ort"  # imported only by commands that need it


@contextmanager
def end_on_signals() -> Iterator[None]:
    """In the body, raise KeyboardInterrupt on SIGINT and `Terminated` on SIGTERM.

    An error that such an exception caused becomes that exception again. In another thread than the
    main one nothing is changed, since Python handles signals in the main thread only.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    previous_handler = signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        with _stop_inferences():
            yield
    except Exception as error:
        cause = find_signal(error)
        if cause is not None:
            raise cause from error
        raise
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def find_signal(error: BaseException) -> KeyboardInterrupt | Terminated | None:
    """Return the signal that caused an error: during an import it becomes an ImportError."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, KeyboardInterrupt | Terminated):
            return type(cause)(*cause.args)  # the arguments tell the user how to continue
        cause = cause.__cause__ or cause.__context__
    return None


def _raise_terminated(number: int, frame: object) -> None:
    """Raise `Terminated`; the arguments are those of every signal handler."""
    raise Terminated


@contextmanager
def _stop_inferences() -> Iterator[None]:
    """In the body, stop inferences that outlast a signal, and let a second SIGINT end the process.

    Python writes the number of each signal into a pipe as soon as it arrives, also while C code
    runs. A thread reads the pipe and stops the inferences.
    """
    renew_interrupt = _end_at_second_interrupt()  # makes the next SIGINT a first one again
    pipe_reader, pipe_writer = os.pipe()
    os.set_blocking(pipe_writer, False)
    command_ended = threading.Event()
    watcher = threading.Thread(
        target=_watch_signals,
        args=(pipe_reader, command_ended, renew_interrupt),
        name="calib8 signals",
        daemon=True,
    )
    watcher.start()
    previous_writer = signal.set_wakeup_fd(pipe_writer, warn_on_full_buffer=False)
    _leave_pipe_in_forks(command_ended)

    ended_by_signal = False
    try:
        yield
    except BaseException as error:
        ended_by_signal = find_signal(error) is not None
        raise
    finally:
        signal.set_wakeup_fd(previous_writer)
        command_ended.set()
        # wakes the thread; closing does not, if a process that the user's code forked has the pipe
        os.write(pipe_writer, b"\0")
        watcher.join()
        os.close(pipe_writer)
        os.close(pipe_reader)
        _end_inferences(ended_by_signal=ended_by_signal)
        # `renew_interrupt` had the system install Python's handler for one SIGINT only. Python's
        # own `signal` installs the same handler for good
        handler = signal.getsignal(signal.SIGINT)
        if handler is not None:
            signal.signal(signal.SIGINT, handler)


def _leave_pipe_in_forks(command_ended: threading.Event) -> None:
    """Keep the signals of a process that a user's loader forks out of the pipe of this one."""

    def leave_pipe() -> None:
        """Write the signals of this process, a fork, into no pipe."""
        if not command_ended.is_set():
            signal.set_wakeup_fd(-1)

    os.register_at_fork(after_in_child=leave_pipe)


def _end_inferences(*, ended_by_signal: bool) -> None:
    """Abandon the inferences of a command that a signal ended; allow those after any other one.

    A thread in an inference would keep the process from ending.
    """
    ort = sys.modules.get(_ORT)
    if ort is None:  # nothing ran
        return
    if ended_by_signal:
        ort.abandon_runs()
    else:
        ort.continue_runs()


def _watch_signals(
    reader: int, command_ended: threading.Event, renew_interrupt: Callable[[], object]
) -> None:
    """Stop inferences `GRACE_S` after each signal; return once the command has ended.

    Args:
        reader: pipe in which the number of each signal arrives.
        command_ended: set at the end of the command.
        renew_interrupt: lets the next SIGINT be a first one again.
    """
    while not command_ended.is_set():
        signal_numbers = os.read(reader, 64)  # waits for a signal, or the command's end
        # a signal may have arrived while this thread waited `GRACE_S` after an earlier one
        earliest_arrival = time.monotonic() - GRACE_S
        if _END_SIGNALS.isdisjoint(signal_numbers):
            continue
        if command_ended.wait(GRACE_S):  # within the time that inferences have to end by themselves
            continue
        ort = sys.modules.get(_ORT)
        if ort is not None and not ort.stop_runs(since=earliest_arrival):
            # nothing was stopped: the command has allowed inferences again since the signal
            # (`continue_runs`) and goes on. Then the next SIGINT is a first one
            renew_interrupt()


def _end_at_second_interrupt() -> Callable[[], object]:
    """Let the system end the process at the second SIGINT (Linux only).

    The first SIGINT calls Python's handler and removes it. At the second one the system's own
    handler is left, which ends the process.

    Returns:
        A function that installs Python's handler again, so that the next SIGINT counts as a first
        one.
    """
    import ctypes

    install_for_one_signal = getattr(ctypes.CDLL(None), "sysv_signal", None)
    if install_for_one_signal is None:
        return lambda: None

    install_for_one_signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    install_for_one_signal.restype = ctypes.c_void_p
    # it returns the handler that it replaces
    python_handler = install_for_one_signal(signal.SIGINT, None)
    renew_interrupt = partial(install_for_one_signal, signal.SIGINT, python_handler)
    renew_interrupt()
    return renew_interrupt
