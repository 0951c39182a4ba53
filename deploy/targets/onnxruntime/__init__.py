"""ONNX Runtime on the CPU: its Q/DQ model, rewrites for its kernels, and its sessions."""
