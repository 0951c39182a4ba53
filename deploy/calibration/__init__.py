"""Calibration: observe tensor statistics in one pass, store them, search clip ranges in them."""

DEFAULT_TRT_VERSION = "10.3.0"  # in a cache's first line, unless another version is known
