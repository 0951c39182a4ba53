"""calib8: calibrate a trained CNN once, on any machine, and deploy it in int8 anywhere."""

__version__ = "0.1.0"
