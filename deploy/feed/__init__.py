"""Calibration data: images and arrays, preprocessed and read one sample at a time.

From outside, use `feed` (`Dataset`, `open_feed`), `samples.Feed`, `preprocess`, `sampling.Choice`
and `paths.RawFiles`; for latency runs, `bench_inputs`. The other modules read one kind of source or
do one step of the reading. No module here knows a model, only the specs of its inputs.
"""
