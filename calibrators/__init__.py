"""Tensors in, scales out: numpy only, no graph, no files."""

from calibrators.scales import Scale, Scales

__all__ = ["Scale", "Scales"]
