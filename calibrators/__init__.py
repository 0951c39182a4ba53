"""Calibration numerics: from tensors to scales with numpy, and OpenCV or a C kernel for counting.

This package knows no graphs and no files.
"""
