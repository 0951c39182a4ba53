"""Calibration data: images and arrays, preprocessed and read one sample at a time."""
