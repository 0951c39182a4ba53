"""What only Ascend needs: AMCT's configuration, layers, what they want observed, executor."""
