"""Latency and accuracy of sessions: values and arithmetic, no files."""
