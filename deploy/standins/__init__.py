"""Stand-ins for TensorRT's and CUDA's Python modules on host memory, to run users' calibrators.

`install.StandIns` puts them in place while a user's script runs, and takes them out again; only
`deploy.feed.calibrator` uses it. They implement what calibrators call: memory, copies, streams,
loggers and base classes. Nothing is computed on a device.
"""
