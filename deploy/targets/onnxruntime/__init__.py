"""The ONNX Runtime CPU target: its Q/DQ model, and rewrites for its kernels.

`target.OnnxRuntime` is what other rooms use; `qdq` writes the pairs, TensorRT's Q/DQ model too,
and `rewrites` is the table of rewrites. Sessions come from `deploy.runtimes.ort`.
"""
