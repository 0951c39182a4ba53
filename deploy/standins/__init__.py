"""TensorRT's and CUDA's Python modules on host memory, for calibrators written against them."""
