"""Latency of model files that are there: side by side, by batch, by kernel."""

from deploy.benchmark.inputs import random_feeds
from deploy.benchmark.measured import bench

__all__ = ["bench", "random_feeds"]
