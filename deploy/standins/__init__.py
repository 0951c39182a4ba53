"""Stand-ins for TensorRT's and CUDA's Python modules on host memory, to run users' calibrators."""
