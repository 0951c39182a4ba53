"""The ONNX Runtime CPU target: its Q/DQ model, and rewrites for its kernels.

`target.OnnxRuntime` is what other rooms use; `qdq` writes the pairs, also for TensorRT's stand-in,
and `rewrites` is the table of rewrites. Sessions come from `deploy.runtimes.ort`.
"""
