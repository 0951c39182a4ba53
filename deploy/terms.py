"""How a model is calibrated, as the user says it, in one value for the rooms along the line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deploy.cluster.options import Cluster
from deploy.feed.choice import Limit
from deploy.feed.preprocess import Asked
from deploy.method import Method


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The options of `deploy.pipeline.calibrate` by their names, nothing of them read yet."""

    method: str | Method | None = None
    preprocess: Asked = None
    skip_bad: bool = False
    limit: Limit = None
    until_stable: float | None = None
    threads: int | None = None
    float_nodes: tuple[str, ...] = ()
    scheduler: str | Cluster | None = None
    resume: bool = False
    checkpoint: Path | None = None
