"""`Cluster`: which scheduler observes, and how models and images reach its workers."""

from __future__ import annotations

import re
from dataclasses import dataclass

from deploy.errors import ConfigError, did_you_mean

_ADDRESS = re.compile(r"((tcp|tls|ws|wss)://)?([^\s/:\[\]]+|\[[0-9a-fA-F:.%\w]+\]):[0-9]{1,5}")
SENDS = ("nothing", "model", "images", "all")
RETRIES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A scheduler of dask.distributed, and how the work is given to it.

    Attributes:
        address: of the scheduler, such as "tcp://host:8786".
        send: what is sent to the workers as bytes: "nothing" where they see the same paths as this
            machine, "model", "images" or "all". A model that no ONNX file holds is always sent.
        pieces: how many the images are split into; None for some for each thread of the workers.
        retries: how often a piece is tried again where the system failed it.
        threads: of one piece, on its worker.

    Raises:
        ConfigError: what is no address, a number out of its range, or another word.
    """

    address: str
    send: str = "nothing"
    pieces: int | None = None
    retries: int = RETRIES
    threads: int = 1

    def __post_init__(self) -> None:
        if not _ADDRESS.fullmatch(self.address):
            raise ConfigError(
                "a scheduler's address is host:port, or tcp://host:port (tls, ws, wss), got"
                f" {self.address!r}; `dask scheduler` says its own when it starts"
            )
        if self.send not in SENDS:
            way_out = did_you_mean(self.send, SENDS, f"give one of {', '.join(SENDS)}")
            raise ConfigError(
                f"--send takes what the workers are sent, got {self.send!r}; {way_out}"
            )
        for name, value, least in (
            ("pieces", self.pieces, 1),
            ("retries", self.retries, 0),
            ("threads", self.threads, 1),
        ):
            if value is not None and value < least:
                raise ConfigError(f"{name} must be {least} or more, got {value}")

    @property
    def sends_model(self) -> bool:
        """Whether the model is sent in any case."""
        return self.send in ("model", "all")

    @property
    def sends_images(self) -> bool:
        """Whether the images are sent."""
        return self.send in ("images", "all")


def cluster_of(scheduler: str | Cluster | None) -> Cluster | None:
    """A scheduler by its address, or with options."""
    return Cluster(address=scheduler) if isinstance(scheduler, str) else scheduler
