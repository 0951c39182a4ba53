"""The Ascend target: AMCT's configuration, calibration, record and models; AIPP and atc."""
