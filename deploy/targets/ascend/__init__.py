"""What only Ascend needs: AMCT's configuration, layers, calibration pass, executor."""
