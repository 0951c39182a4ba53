"""The Ascend target: AMCT's configuration, calibration, record and models; AIPP and atc.

`target.Ascend` is what other rooms use, with `existing_files` and `recipe` for files made from
scales that are there already. The rest follows AMCT's own formats and arithmetic. CANN's `atc` is
only called, never imported; without it all files are written but the .om.
"""
