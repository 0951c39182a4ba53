"""The ONNX Runtime CPU target: its Q/DQ model, and rewrites for its kernels."""
