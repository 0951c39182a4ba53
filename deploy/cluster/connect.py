"""A client of dask's scheduler: opened, asked and closed without a hang, its failures one sentence."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from deploy.errors import BackendError, SdkMissingError, first_line
from deploy.progress import phase

if TYPE_CHECKING:
    from distributed import Client

CONNECT_S = 10.0  # until the scheduler must have answered
_CLOSE_S = 5.0  # for taking leave


@contextmanager
def connected(address: str) -> Iterator[Client]:
    """A client, for as long as this lasts.

    Raises:
        SdkMissingError: dask.distributed is not installed.
        BackendError: no scheduler answers at this address, or it ends meanwhile.
    """
    with _quiet():
        client = _opened(address)
        try:
            with client.as_current():
                yield client
        except (OSError, TimeoutError) as error:  # dask's own, of a connection that is gone
            raise BackendError(
                f"the scheduler {address} must answer until the end, got: {first_line(error)}; see"
                " to it and run again"
            ) from error
        finally:
            with suppress(Exception):
                client.close(timeout=_CLOSE_S)


def _opened(address: str) -> Client:
    try:
        from distributed import Client
    except ImportError as error:
        raise SdkMissingError(
            "a scheduler is spoken to by dask.distributed, which is not installed; pip install"
            " 'calib8[dask]'"
        ) from error
    try:
        with phase("scheduler"):
            return Client(address, timeout=CONNECT_S, set_as_default=False)
    except (OSError, TimeoutError, ValueError, ImportError, RuntimeError) as error:
        raise BackendError(
            f"a dask scheduler must answer at {address} within {CONNECT_S:.0f} s, got:"
            f" {first_line(error)}; start `dask scheduler` there, or correct the address, such as"
            " tcp://host:8786"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Dask's own words of what becomes a sentence here, and of large models, are not shown."""
    loggers = [logging.getLogger(name) for name in ("distributed", "tornado", "asyncio")]
    before: list[Any] = [one.level for one in loggers]
    try:
        for one in loggers:
            one.setLevel(logging.CRITICAL + 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for one, level in zip(loggers, before, strict=True):
            one.setLevel(level)
