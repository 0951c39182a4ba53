"""Calibrate, build and measure a model: the complete line.

::

    model -> frontends -> graph (what each target needs) -> feed
          -> observe (one pass, every statistic that some target declares)
          -> calibrators (search) -> Scales -> tuning (what stays float)
          -> targets (files, build, session) -> metrics -> report

`calibrate` observes, searches the ranges and stores them in a cache (`calibration_setup.py`);
`build` goes all the way (`build.py`, read this first). `calibrate_with`, `merge_with` and
`build_with` take the same options as one value each; the command line uses these.
"""
