"""The TensorRT target: cache contents and names, cache tools without a GPU, engines."""
